"""Clients that public tools generate from the OpenAPI document compile, and work with a real server.

Each program in `programs/` calls operators, adds to a buffer, takes its sum, and tells an error by its code.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.documentation import ROOT
from tests.generated_clients.bodies import sent, typescript
from tests.serving import serving

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
NODE = ROOT / "build/node/node_modules"
TOOLS = Path(os.environ["GRADSERVE_CLIENTS"])
"""The virtual environment of the generators."""

JAKARTA = Path("/usr/share/java/jakarta-annotation-api.jar")
"""The annotations in generated Java, from Debian. Other libraries that it needs are in the generator's own archive."""

PRINTED = "relu 1 0\nstep 2\ntake 4 6\nerror shape_mismatch of X\n"
"""The output of each program."""

CODED = "random 3000 12\nties 256 1\nzeros 300 2\ndocuments 4 1\n32 -64 127 6\n"
"""The output of the program that encodes gradients in 8 bits: cases, codes and scales; and the documents' example."""

MIN_BODIES = 15
"""The documentation had 19 requests with a JSON body when this test was written."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture
def document(url: str, tmp_path: Path) -> Path:
    """The server's OpenAPI document."""
    file = tmp_path / "openapi.json"
    file.write_bytes(httpx.get(f"{url}/openapi.json").content)
    return file


def need(tool: str, package: str) -> None:
    """Skip the test if the machine lacks the tool."""
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is missing; on Debian: apt-get install {package}")


def run(work: Path, *command: str | Path, **environment: str) -> str:
    """Run the command in `work`. Return its output."""
    done = subprocess.run(command, cwd=work, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


def generate(work: Path, language: str, tools: Path, *more: str | Path) -> str:
    """Run the command of the language in docs/http.md, with `more` options. Return its output."""
    row = re.search(rf"^\| {language} \|.*`(.*)` \|$", (ROOT / "docs/http.md").read_text(), re.MULTILINE)
    assert row is not None
    tool, *options = shlex.split(row[1].removeprefix("npx "))
    return run(work, tools / tool, *options, *more)


WITHOUT = "--global-property=apiTests=false,modelTests=false,apiDocs=false,modelDocs=false"
"""What openapi-generator leaves out: it is not used here."""


def test_typescript(url: str, document: Path, tmp_path: Path) -> None:
    """The bodies in the documentation have the generated types, too."""
    (tmp_path / "node_modules").symlink_to(NODE)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    generate(tmp_path, "TypeScript", NODE / ".bin")
    bodies = [*sent(httpx.get(f"{url}/openapi.json").json()["paths"])]
    assert len(bodies) >= MIN_BODIES
    (tmp_path / "bodies.ts").write_text(typescript(bodies))
    programs = ["client.ts", "codes.ts"]
    for program in programs:
        shutil.copy(PROGRAMS / program, tmp_path)
    options = ["--strict", "--target", "es2022", "--module", "nodenext", "--types", "node"]
    run(tmp_path, NODE / ".bin/tsc", *options, *programs, "bodies.ts")
    assert run(tmp_path, "node", "client.js", GRADSERVE_URL=url) == PRINTED
    assert run(tmp_path, "node", "codes.js", GRADSERVE_URL=url) == CODED


def test_python(url: str, document: Path, tmp_path: Path) -> None:
    shutil.copy(HERE / "config.yaml", tmp_path)
    more = ("--meta", "none", "--output-path", "gradserve_api", "--fail-on-warning")
    report = generate(tmp_path, "Python", TOOLS / "bin", *more)
    assert "WARNING" not in report
    shutil.copy(PROGRAMS / "client.py", tmp_path)
    assert run(tmp_path, TOOLS / "bin/python", "client.py", GRADSERVE_URL=url) == PRINTED


def test_go(url: str, document: Path, tmp_path: Path) -> None:
    """The client needs Go's standard library alone."""
    need("go", "golang-go")
    need("java", "default-jre-headless")
    properties = "packageName=gradserve,withGoMod=false"
    generate(tmp_path, "Go", TOOLS / "bin", f"--additional-properties={properties}", WITHOUT)
    (tmp_path / "go.mod").write_text("module gradserve.example/client\n\ngo 1.19\n")
    shutil.copy(PROGRAMS / "main.go", tmp_path)
    assert run(tmp_path, "go", "run", ".", GRADSERVE_URL=url, GOPROXY="off") == PRINTED


def test_java(url: str, document: Path, tmp_path: Path) -> None:
    """The generated Java does not compile with lists in `anyOf`, unless they are mapped to `Object`."""
    need("javac", "default-jdk-headless")
    if not JAKARTA.exists():
        pytest.skip("jakarta-annotation-api is missing; on Debian: apt-get install libjakarta-annotation-api-java")
    packages = "invokerPackage=gradserve,apiPackage=gradserve.api,modelPackage=gradserve.model"
    properties = f"openApiNullable=false,useJakartaEe=true,{packages}"
    generate(tmp_path, "Java", TOOLS / "bin", f"--additional-properties={properties}", WITHOUT)
    (archive,) = TOOLS.glob("lib/python*/site-packages/openapi_generator_cli/openapi-generator.jar")
    path = f"classes:{archive}:{JAKARTA}"
    sources = [*(tmp_path / "client/src/main/java").rglob("*.java"), PROGRAMS / "Main.java"]
    run(tmp_path, "javac", "-proc:none", "-nowarn", "-d", "classes", "-cp", path, *sources)
    assert run(tmp_path, "java", "-cp", path, "Main", GRADSERVE_URL=url) == PRINTED
