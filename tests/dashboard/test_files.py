"""The page's files, as a server sends them and as a wheel has them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.serving import assert_problem

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "service" / "api" / "dashboard" / "page"
FILES = sorted(path for path in PLACE.rglob("*") if path.is_file())


def test_the_front_page_needs_no_key_and_runs_nothing_from_elsewhere(http: httpx.Client) -> None:
    answer = http.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == ("nosniff", "no-referrer")


@pytest.mark.parametrize("path", ["/", "/docs", "/docs/swagger-ui.css", "/metrics", "/v1/limits", "/v2", "/nothing"])
def test_no_browser_guesses_a_media_type(http: httpx.Client, path: str) -> None:
    assert http.get(path).headers.get_list("x-content-type-options") == ["nosniff"]


def test_the_front_page_names_only_files_of_the_page(http: httpx.Client) -> None:
    answer = http.get("/")
    linked = {path for path in re.findall(r'(?:src|href)="([^"#]+)"', answer.text) if path}
    assert {"page/shell.js", "page/page.css", "docs", "openapi.json"} <= linked
    assert not [path for path in linked if path.startswith("/") or ":" in path]
    assert {path: http.get(f"/{path}").status_code for path in linked} == dict.fromkeys(linked, 200)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_is_served_with_its_tag(http: httpx.Client, path: Path) -> None:
    answer = http.get(f"/page/{path.name}")
    assert answer.content == path.read_bytes()
    types = {".js": "text/javascript", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
    if path.suffix in types:
        assert answer.headers["content-type"] == types[path.suffix]
    again = http.get(f"/page/{path.name}", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2f..%2fpage.py", "vendor", "vendor%2fuPlot.esm.js"])
def test_there_is_no_other_file(http: httpx.Client, name: str) -> None:
    assert_problem(http.get(f"/page/{name}"), 404, "not_found")


@pytest.mark.parametrize("path", [path for path in FILES if path.parent == PLACE], ids=lambda path: path.name)
def test_no_file_makes_html_of_text_or_styles_in_attributes(path: Path) -> None:
    text = path.read_text()
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\bstyle=", text
    )
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg|github\.com/gradserve/gradserve/tree/main/docs\")", text)


def test_a_wheel_has_every_file(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(PLACE.parent, tmp_path / PLACE.parent.relative_to(ROOT))
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "build", "--build-lib", "built"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    built = {path.relative_to(tmp_path / "built") for path in (tmp_path / "built").rglob("*")}
    assert {path.relative_to(ROOT) for path in FILES} <= built
