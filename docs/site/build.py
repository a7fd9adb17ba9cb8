"""The pages of `make site` from outside docs/, and its first page: the first screen of the README."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

ADDED = {
    "README.md": "overview.md",
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
    "examples/train.py": "train.py",
    "service/api/dashboard/page/icon.svg": "icon.svg",
}
"""Files from outside docs/, and their places on the site. Every document that is linked to is here or in docs/."""

FRONT = "---\nhide: [toc]\n---\n\n"

BUTTONS = """
[Start](overview.md#train){ .md-button .md-button--primary }
[Why not something else?](overview.md#why-not-something-else){ .md-button }
"""
"""They stand above the picture of the first page."""

_LINK = re.compile(r"\]\(([^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the first page, and the pages from outside docs/."""
    screen = (ROOT / "README.md").read_text().partition("\n## Start\n")[0]
    screen = screen.replace("](#", "](overview.md#").replace("\n![", f"{BUTTONS}\n![", 1)
    files.append(File.generated(config, "index.md", content=FRONT + screen))
    for path, place in ADDED.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links between files to where these files are on the site."""
    folder = Path(page.file.abs_src_path).parent if page.file.abs_src_path else ROOT

    def moved(match: re.Match[str]) -> str:
        path = os.path.relpath(folder / match[1], ROOT)
        return f"]({ADDED.get(path, path.removeprefix('docs/'))}" if (ROOT / path).is_file() else match[0]

    return _LINK.sub(moved, markdown)
