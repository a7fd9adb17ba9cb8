"""What a release says of itself is the same in every place."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

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


def test_each_python_has_its_classifier() -> None:
    wanted = {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)}
    for project in (SERVER, CLIENT):
        assert {text for text in project["classifiers"] if re.search(r":: 3\.\d+$", text)} == wanted


def test_the_image_says_where_it_comes_from() -> None:
    labels = re.findall(r"org\.opencontainers\.image\.(\w+)=", (ROOT / "Dockerfile").read_text())
    assert {"source", "version", "revision", "licenses"} <= set(labels)


def load(path: Path) -> Any:
    return yaml.load(path.read_text(), yaml.BaseLoader)  # else YAML reads the key `on` as true


def test_the_workflow_runs_ci_on_the_oldest_and_a_new_python() -> None:
    jobs = load(ROOT / ".github/workflows/ci.yml")["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.13"]
    assert [step["run"] for step in jobs["test"]["steps"] if "run" in step] == [".ci/run"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert {need for job in jobs.values() for need in [job.get("needs")] if need} <= jobs.keys()


def test_issue_forms_have_what_github_needs() -> None:
    forms = [load(path) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert forms
    for form in forms:
        assert {"name", "description", "body"} <= form.keys()
        identifiers = [part["id"] for part in form["body"]]
        assert len(set(identifiers)) == len(identifiers)
