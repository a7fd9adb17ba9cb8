"""The unit of systemd: it is valid, and its limits are those of the documents and of compose.yaml."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from service.api.http.descriptors import MAX_DESCRIPTORS
from service.settings import VARIABLES, Settings
from tests.commands import helps

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "deploy" / "gradserve.service").read_text()
VALUES = dict(line.split("=", 1) for line in UNIT.splitlines() if re.match("[A-Z]", line))


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "gradserve.service"
    unit.write_text(UNIT.replace("/opt/gradserve/bin/gradserve", sys.executable))
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True)
    assert (done.returncode, str(unit) in done.stderr) == (0, False), done.stderr


def test_its_limits_are_those_of_the_server_and_of_compose() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["gradserve"]
    assert VALUES["MemoryMax"].lower() == service["mem_limit"]
    assert f"{VALUES['TimeoutStopSec']}s" == service["stop_grace_period"]
    assert int(VALUES["TimeoutStopSec"]) > Settings.model_fields["drain_timeout"].default
    assert int(VALUES["LimitNOFILE"]) == MAX_DESCRIPTORS
    assert "LimitAS" not in VALUES, "LMDB takes 1 TiB of address space"


def test_its_command_and_its_settings_exist() -> None:
    assert f"gradserve {VALUES['ExecStart'].split()[1]}" in [name for name, _ in helps()]
    name, value = VALUES["Environment"].split("=")
    assert name in VARIABLES
    assert value == f"lmdb:/var/lib/{VALUES['StateDirectory']}"
