"""Completion of both commands in shells."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from service.commands.cli import main

COMMANDS = {"serve", "ops", "doctor", "export", "import", "keys-forget", "keys", "settings", "completion"}
CLIENT = Path(sys.executable).parent / "gradserve-client"


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Prints the script for a shell."""

    def printed(shell: str) -> str:
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return printed


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([""], COMMANDS),
        (["ke"], {"keys", "keys-forget"}),
        (["keys", ""], {"add", "ls", "rm"}),
        (["keys", "add", "--s"], {"--scopes"}),
        (["export", "--"], {"--help", "--prefix", "--store"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
        (["import", "buf"], {"buffers.safetensors"}),
    ],
)
def test_bash_completes_commands(
    script: Callable[[str], str], tmp_path: Path, words: list[str], found: set[str]
) -> None:
    (tmp_path / "buffers.safetensors").touch()
    code = [
        script("bash"),
        f"COMP_WORDS=({' '.join(repr(word) for word in ('gradserve', *words))}); COMP_CWORD={len(words)}",
        '_shtab_gradserve gradserve "${COMP_WORDS[COMP_CWORD]}"',
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    done = subprocess.run(["bash", "-c", "\n".join(code)], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert set(done.stdout.split()) == found, done.stderr


@pytest.mark.parametrize(("shell", "begins"), [("zsh", "#compdef gradserve"), ("fish", "#")])
def test_other_shells_know_the_commands(script: Callable[[str], str], shell: str, begins: str) -> None:
    text = script(shell)
    assert text.startswith(begins)
    assert all(command in text for command in COMMANDS)


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["completion", "csh"])
    assert end.value.code == 2
    assert "invalid choice: 'csh'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "found"), [("buf", {"buffers"}), ("buffers s", {"show", "set-rules"}), ("buffers rm --pre", {"--prefix"})]
)
def test_the_client_completes_commands(typed: str, found: set[str]) -> None:
    asked = {"COMP_WORDS": f"gradserve-client {typed}", "COMP_CWORD": str(len(typed.split()))}
    environment = {**os.environ, "_GRADSERVE_CLIENT_COMPLETE": "complete_bash", **asked}
    done = subprocess.run([CLIENT], env=environment, capture_output=True, text=True, timeout=60)
    assert set(done.stdout.split()) == found, done.stderr
