"""`deploy/up`, run with stand-ins for the engine of containers and for curl: what it prints, and when."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ENGINE = """#!/bin/sh
case "$*" in
"compose build gradserve") ;;
run*) echo gs_secret && echo "This is the key's secret." >&2 ;;
"compose up --detach --force-recreate") exit "${UP:-0}" ;;
"compose logs") echo "the log" ;;
*) echo "unexpected: $*" >&2 && exit 9 ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with the scripts, and stand-ins for all that they call."""
    (tmp_path / "deploy/containers").mkdir(parents=True)
    (tmp_path / "deploy/secrets").mkdir()
    (tmp_path / "bin").mkdir()
    for script in ("up", "keys"):
        shutil.copy(ROOT / "deploy" / script, tmp_path / "deploy")
    for place, text in {
        "deploy/containers/engine": ENGINE,
        "deploy/containers/prepare": "#!/bin/sh\n",
        "bin/curl": "#!/bin/sh\n",
    }.items():
        (tmp_path / place).write_text(text)
        (tmp_path / place).chmod(0o755)
    return tmp_path


def up(project: Path, **variables: str) -> tuple[int, list[str]]:
    environment = {**os.environ, "PATH": f"{project}/bin:{os.environ['PATH']}", **variables}
    done = subprocess.run([project / "deploy/up"], env=environment, capture_output=True, text=True, timeout=60)
    assert "unexpected" not in done.stderr
    return done.returncode, done.stdout.splitlines()


def test_the_first_key_is_the_last_line(project: Path) -> None:
    status, lines = up(project)
    assert status == 0
    assert lines[0] == "gradserve is ready at http://127.0.0.1:8080. The next steps:"
    assert lines[-2:] == ["The first API key. It is kept nowhere, so keep it:", "gs_secret"]


def test_the_first_key_is_not_lost_if_the_start_fails(project: Path) -> None:
    status, lines = up(project, UP="1")
    assert status == 1
    assert lines == ["the log", "The first API key. It is kept nowhere, so keep it:", "gs_secret"]


def test_no_key_is_made_if_there_is_one(project: Path) -> None:
    (project / "deploy/secrets/gradserve_keys").write_text("[]")
    status, lines = up(project)
    assert status == 0
    assert not [line for line in lines if "gs_secret" in line]
