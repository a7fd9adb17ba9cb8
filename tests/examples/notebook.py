"""The notebook of the examples, executed. `python -m tests.examples.notebook` writes it, without traces of the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def read() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def executed(**variables: str) -> Any:
    """Return the notebook with new outputs. Its kernel has these environment variables besides ours."""
    notebook = read()
    client = NotebookClient(
        notebook, timeout=100, record_timing=False, resources={"metadata": {"path": NOTEBOOK.parent}}
    )
    client.execute(env={**os.environ, **variables})
    notebook.metadata.language_info = {"name": "python"}  # not the version of this Python
    return notebook


if __name__ == "__main__":
    nbformat.write(executed(), NOTEBOOK)
