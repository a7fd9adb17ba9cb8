"""What the wheels and sdists have: the packages, their data and licences, and nothing else."""

from __future__ import annotations

import re
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.packages.conftest import ROOT, built

SOURCES = {"gradserve": ROOT / "service", "gradserve_client": ROOT / "clients" / "python" / "gradserve_client"}

PACKAGES = list(SOURCES)


def files_of(package: str) -> dict[str, bytes]:
    """Return the files of the source, by their names in a wheel."""
    source = SOURCES[package]
    paths = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    paths += [ROOT / "gradserve.py"] if package == "gradserve" else []
    return {path.relative_to(source.parent).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_has_the_package_and_nothing_else(package: str) -> None:
    wheel = zipfile.ZipFile(built(f"{package}-*.whl"))
    contents = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    assert contents == files_of(package)
    assert f"{SOURCES[package].name}/py.typed" in contents


@pytest.mark.parametrize("package", PACKAGES)
def test_an_sdist_has_what_the_wheel_is_built_from(package: str) -> None:
    with tarfile.open(built(f"{package}-*.tar.gz")) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    made = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    others = {"LICENSE", "README.md", "pyproject.toml", *({"MANIFEST.in"} if package == "gradserve" else ())}
    assert names - made == {*files_of(package), *others}


def described(package: str) -> tuple[zipfile.ZipFile, str, Message]:
    """Return the wheel of a package, the name of its metadata in it, and their fields."""
    wheel = zipfile.ZipFile(built(f"{package}-*.whl"))
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return wheel, metadata, Parser().parsestr(wheel.read(metadata).decode())


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_carries_its_licences(package: str) -> None:
    wheel, metadata, fields = described(package)
    assert "Apache-2.0" in fields["License-Expression"]
    folder = f"{Path(metadata).parent.as_posix()}/licenses"
    assert "LICENSE" in fields.get_all("License-File", [])
    assert wheel.read(f"{folder}/LICENSE") == (ROOT / "LICENSE").read_bytes()
    for name in fields.get_all("License-File", []):
        assert wheel.read(f"{folder}/{name}")


@pytest.mark.parametrize("package", PACKAGES)
def test_links_and_pictures_of_the_description_lead_to_the_release(package: str) -> None:
    _, _, fields = described(package)
    text = str(fields.get_payload())
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", text)
    release = rf"https://github\.com/gradserve/gradserve/(blob|raw)/v{re.escape(fields['Version'])}/([^#)]+)"
    assert len(re.findall(release, text)) > 10
    for picture, link in links:
        assert link.startswith("https://"), link
        if leads := re.match(release, link):
            assert (leads[1], (ROOT / leads[2]).is_file()) == ("raw" if picture else "blob", True), link
    assert not re.search(r"<(img|a) [^>]*(src|href)=.(?!https://)", text)


def test_the_client_needs_little() -> None:
    needs = described("gradserve_client")[2].get_all("Requires-Dist", [])
    always = sorted(need for need in needs if "extra ==" not in need)
    assert [need.partition(">=")[0] for need in always] == ["anyio", "h11", "httpx", "ml_dtypes", "numpy"]
    assert not [need for need in needs if "<" in need or "==" in need.partition(";")[0]], "a limit keeps others out"


def test_the_release_lists_what_it_is_made_of() -> None:
    bill = (ROOT / "build/sbom/gradserve.cdx.json").read_text()
    assert '"bomFormat": "CycloneDX"' in bill
    assert '"name": "numpy"' in bill
    assert '"name": "onnx"' in bill, "the container runs graphs"
