"""The pages of `make site` from outside docs/."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

ADDED = {
    "README.md": "index.md",
    "clients/python/README.md": "client.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "SECURITY.md": "security.md",
    "LICENSE": "LICENSE.txt",
    "deploy/alerts.yml": "alerts.yml",
    "deploy/grafana.json": "grafana.json",
    "examples/quickstart.ipynb": "quickstart.ipynb",
}
"""Files from outside docs/, and their places on the site. Every document that is linked to is here or in docs/."""

_LINK = re.compile(r"\]\(([^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/."""
    for path, place in ADDED.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links between files to where these files are on the site."""
    folder = Path(str(page.file.abs_src_path)).parent

    def moved(match: re.Match[str]) -> str:
        path = os.path.relpath(folder / match[1], ROOT)
        return f"]({ADDED.get(path, path.removeprefix('docs/'))}" if (ROOT / path).is_file() else match[0]

    return _LINK.sub(moved, markdown)
