"""What a release says of itself is the same in every place."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SERVER, CLIENT = (
    tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in (".", "clients/python")
)
VERSION = SERVER["version"]


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("clients/python/pyproject.toml", r'^version = "(.+)"$'),
        ("service/__init__.py", r'^__version__ = "(.+)"$'),
        ("Dockerfile", r"^ARG VERSION=(.+)$"),
        ("deploy/kubernetes/kustomization.yaml", r"^ +newTag: (.+)$"),
    ],
)
def test_the_version_is_the_same_everywhere(file: str, pattern: str) -> None:
    assert re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE) == [VERSION]


def test_the_changelog_has_the_version_and_its_day() -> None:
    releases = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    dated = [release for release in releases if release != "Unreleased"]
    assert re.fullmatch(rf"{re.escape(VERSION)} - \d{{4}}-\d\d-\d\d", dated[0])


@pytest.mark.parametrize("name", ["license", "license-files", "authors", "requires-python"])
def test_both_packages_agree(name: str) -> None:
    assert set(CLIENT[name]) <= set(SERVER[name]) if name == "license-files" else CLIENT[name] == SERVER[name]


def test_each_python_that_was_run_has_its_classifier() -> None:
    wanted = {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 14)}
    for project in (SERVER, CLIENT):
        assert {text for text in project["classifiers"] if re.search(r":: 3\.\d+$", text)} == wanted


def test_issue_forms_have_what_github_needs() -> None:
    forms = [
        yaml.safe_load(path.read_text())
        for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")
        if path.stem != "config"
    ]
    assert forms
    for form in forms:
        assert {"name", "description", "body"} <= form.keys()
        identifiers = [part["id"] for part in form["body"]]
        assert len(set(identifiers)) == len(identifiers)
