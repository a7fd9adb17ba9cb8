"""The README says what is so: its tables are those of the code, and its examples answer as printed."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from service.settings import Settings
from tests.readme import OPERATIONS, README, rendered

ROOT = README.parent
TEXT = README.read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL)
EXAMPLES = [
    (language, code, BLOCKS[number + 1][1])
    for number, (language, code) in enumerate(BLOCKS)
    if language in ("bash", "python")
]


def test_its_tables_are_fresh() -> None:
    assert rendered(TEXT) == TEXT, "run `make docs`"
    assert len(re.findall("make docs -->", TEXT)) == 3


def test_the_tables_of_operations_are_fresh() -> None:
    text = OPERATIONS.read_text()
    assert rendered(text) == text, "run `make docs`"
    assert {"<!-- metrics: make docs -->", "<!-- limits: make docs -->"} <= set(text.splitlines())


@pytest.mark.parametrize(("language", "code", "output"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_its_examples_answer_as_printed(url: str, language: str, code: str, output: str) -> None:
    assert "127.0.0.1:8000" in code
    code = code.replace("127.0.0.1:8000", url.removeprefix("http://"))
    if language == "bash":
        if shutil.which("curl") is None:
            pytest.skip("needs curl")
        printed = subprocess.run(["bash", "-ec", code], capture_output=True, text=True, check=True).stdout
    else:
        captured = io.StringIO()
        with contextlib.redirect_stdout(captured):
            exec(compile(code, "README.md", "exec"), {})
        printed = captured.getvalue()
    assert printed.strip() == output.strip()


def test_every_kind_of_example_is_there() -> None:
    assert [language for language, _, _ in EXAMPLES] == [
        "bash",
        "bash",
        "python",
        "bash",
        "python",
        "python",
        "bash",
        "bash",
        "python",
        "python",
    ]


def test_its_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = TEXT + (ROOT / "CONTRIBUTING.md").read_text()
    for target in set(re.findall(r"`?make ([a-z]+)`?", text)) - {"and"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_setting_is_used() -> None:
    sources = "".join(path.read_text() for path in Path(ROOT / "service").rglob("*.py"))
    for name in Settings.model_fields:
        assert re.search(rf"\bsettings(_of\([\w.]+\))?\.{name}\b", sources), name
