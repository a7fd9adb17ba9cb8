"""What `make` says while it installs, and which files it checks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mypy.main import process_options

ROOT = Path(__file__).parent.parent

PYTHON = f"""#!/bin/sh
case "$1" in
-c) exec {sys.executable} "$@" ;;
-m) mkdir -p "$4/bin" && for tool in python pip gradserve; do
  printf '#!/bin/sh\\necho "$(basename "$0") $1 $2"\\n' >"$4/bin/$tool" && chmod +x "$4/bin/$tool"
done ;;
esac
"""
"""A Python whose environments have commands that print what they are called with."""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(PYTHON)
    path.chmod(0o755)
    return path


def make(target: str, python: Path, **variables: str) -> list[str]:
    given = {"PYTHON": python, "VENV": python.parent / "venv", **variables}
    command = ["make", "--no-print-directory", "--silent", target, *(f"{name}={one}" for name, one in given.items())]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_make_run_says_what_it_installs_before_it_does_and_only_once(python: Path) -> None:
    said = f"installing the server and its packages into {python.parent}/venv, once: about a minute"
    assert make("run", python) == [said, "python -m pip", "gradserve serve "]
    assert make("run", python) == ["gradserve serve "]


@pytest.mark.parametrize(
    ("what", "installed"),
    [("", True), ("-k nan", True), ("tests/codecs tests/clients", True), ("tests/codecs tests/api/test_ops.py", False)],
)
def test_what_tests_need_is_announced_too(python: Path, what: str, installed: bool) -> None:
    """Only tests that train need frameworks."""
    folder = f"{python.parent}/venv, once"
    _, _, said, did, *more, tests = make("test", python, WHAT=what)
    assert (said, did) == (f"installing what lint and most tests need into {folder}: about a minute", "python -m pip")
    frameworks = [f"installing PyTorch, JAX and scikit-learn into {folder}: some minutes, up to 5 GB", "python -m pip"]
    assert (more, tests) == (frameworks * installed, "python -m pytest")


def test_mypy_leaves_build_folders_alone(tmp_path: Path) -> None:
    for name in ("client.py", "build/lib/client.py", "package/build/lib/client.py", "rebuild/client.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    sources, _ = process_options(["--config-file", str(ROOT / "pyproject.toml"), str(tmp_path)])
    assert sorted(source.path or "" for source in sources) == [f"{tmp_path}/client.py", f"{tmp_path}/rebuild/client.py"]
