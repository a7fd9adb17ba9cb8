"""Parts of `make site` besides MkDocs: pages from outside docs/, and a check that the site works offline."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
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

_FOREIGN = re.compile(r"(?:url\(|@import)[\s'\"]*((?:https?:)?//[^)\s]+)")
"""What a style sheet takes from another host."""

_NO_RESOURCES = frozenset({"alternate", "canonical", "next", "prev"})
"""Values of `rel` with which a browser loads nothing."""


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


class _Page(HTMLParser):
    """The anchors of a page, what it links to, and what a browser loads for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.resources = {""}, set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif tag == "link" and not _NO_RESOURCES & set(given.get("rel", "").split()):
            self.resources.add(given["href"])
        self.resources |= {given[name] for name in ("src", "srcset", "data", "poster") if name in given}


def on_post_build(config: MkDocsConfig) -> None:
    """Raise `PluginError` for a link that leads nowhere, and for anything that comes from another host."""
    site = Path(config.site_dir)
    pages = {path: _Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    wrong = [
        f"{path.name} has {url}"
        for path, page in pages.items()
        for url in [*page.resources, *page.links]
        if not (_is_there(path, url, pages) or url in page.links and urlsplit(url).scheme)
    ]
    for path in site.rglob("*.css"):
        wrong += [f"{path.name} has {url}" for url in _FOREIGN.findall(path.read_text())]
    if wrong:
        raise PluginError("Not on this site: " + ", ".join(sorted(wrong)))


def _is_there(path: Path, url: str, pages: dict[Path, _Page]) -> bool:
    parts = urlsplit(url)
    if parts.scheme == "data":
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if parts.scheme or parts.netloc or not target.is_file():
        return False
    return target not in pages or unquote(parts.fragment) in pages[target].anchors
