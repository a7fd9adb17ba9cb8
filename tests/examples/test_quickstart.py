"""The notebook, run as a user runs it: its outputs are those that are committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.examples.notebook import NOTEBOOK, executed, read
from tests.examples.running import shared

MAX_BYTES = 30_000
"""The limit of the notebook's size, with a plot of 10 KB: each change of an output stays in the history."""


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: Any) -> list[Any]:
    """Return the outputs of each cell. Pictures count by their type, since another matplotlib draws another one."""
    return [_shown(cell.outputs) for cell in code(notebook)]


def _shown(outputs: Any) -> list[Any]:
    """Return outputs, with a stream whole: a slow kernel sends it in several parts."""
    shown: list[Any] = []
    for output in outputs:
        if output.output_type != "stream":
            shown.append(output.data | {"image/png": "..."} if "image/png" in output.data else {**output.data})
        elif shown and isinstance(shown[-1], tuple) and shown[-1][0] == output.name:
            shown[-1] = output.name, shown[-1][1] + output.text
        else:
            shown.append((output.name, output.text))
    return shown


def test_it_prints_what_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    with shared("weight") as url:
        assert outputs(executed(GRADSERVE_URL=url)) == outputs(read())


def test_it_shows_a_kernel_a_buffer_an_all_reduce_and_a_plot() -> None:
    shown = outputs(read())
    assert shown[4] == [("stdout", "different results among the threads: 1\ncorrect: 100%\n")]
    assert [["image/png" in output for output in cell] for cell in shown].count([True]) == 1


def test_it_is_small_and_has_no_trace_of_a_machine() -> None:
    notebook = read()
    assert NOTEBOOK.stat().st_size < MAX_BYTES
    assert notebook.metadata.keys() == {"kernelspec", "language_info"}
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, 8))
    assert not any(cell.metadata for cell in notebook.cells)
    text = NOTEBOOK.read_text()
    assert not [word for word in ("127.0.0.1", "/home", "/tmp", "stderr", "Traceback") if word in text]
