"""The client's modules import each other in one direction only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.imports import circles

PACKAGE = Path(__file__).parents[2] / "clients" / "python" / "gradserve_client"


def test_no_circle_in_the_client() -> None:
    assert circles(PACKAGE.rglob("*.py")) == []


def test_what_sends_knows_no_calls_and_no_front_ends() -> None:
    for path in (PACKAGE / "_http").glob("*.py"):
        assert not re.search(r"gradserve_client\._(wire|async|runs|torch|arrays|cli)", path.read_text()), path.name


def test_runs_know_no_framework() -> None:
    for path in (PACKAGE / "_runs").glob("*.py"):
        assert not re.search(r"gradserve_client\._?(torch|arrays)|import (torch|jax)", path.read_text()), path.name


def test_help_needs_neither_numpy_nor_httpx() -> None:
    """They take half of the time that help and the completion of a command line would take."""
    program = (
        "import sys; sys.argv = ['gradserve-client', '--help']\n"
        "from gradserve_client.cli import main\n"
        "try: main()\n"
        "finally: print('loaded', [name for name in ('numpy', 'httpx', 'rich') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "loaded ['rich']"


def test_names_and_modules_of_the_package_are_found() -> None:
    program = (
        "import gradserve_client as package\n"
        "assert {*dir(package)} == {*package.__all__}\n"
        "assert package.errors.NotFound is package.NotFound\n"
        "assert package.buffers.Buffers is package.Buffers\n"
        "assert all(getattr(package, name).__name__ == name for name in package.__all__)\n"
        "assert not hasattr(package, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_circles_are_found(tmp_path: Path) -> None:
    sources = {
        "__init__": "from package.a import A",
        "a": "import package.b",
        "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package import c",
        "c": "def late() -> None:\n    from package.a import A",
        "d": "from package import a\nfrom package.e import E",
        "e": "import package.e",
        "f": "import os",
    }
    folder = tmp_path / "package"
    folder.mkdir()
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    assert circles(folder.iterdir()) == [["package.a", "package.b", "package.c"], ["package.e"]]
