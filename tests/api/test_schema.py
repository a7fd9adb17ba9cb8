"""Requests that schemathesis makes from the OpenAPI schema, right and wrong ones: no answer is a failure of the
server, and every one is as the schema says. `make fuzz` makes more (GRADSERVE_FUZZ: how many of each kind)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx

from tests.serving import serving

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
TOOL = Path(sys.executable).with_name("schemathesis")
MANY = os.environ.get("GRADSERVE_FUZZ", "2")


def run(schema: str, work: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Make requests from the schema."""
    command: list[str | Path] = [TOOL, "--no-color", "run", schema, "--checks", CHECKS, f"-n{MANY}"]
    command.append("--suppress-health-check=all")
    return subprocess.run([*command, *options], capture_output=True, text=True, cwd=work)


def test_answers_are_as_the_schema_says(tmp_path: Path) -> None:
    with serving() as url:
        done = run(f"{url}/openapi.json", tmp_path, "--phases=examples,coverage,fuzzing")
    assert done.returncode == 0, done.stdout[-5000:]


def test_an_answer_that_is_not_is_found(tmp_path: Path) -> None:
    """That the tool looks at all: against a schema that promises another answer."""
    with serving() as url:
        schema = httpx.get(f"{url}/openapi.json").json()
        live = schema["paths"]["/v2/health/live"]
        live["get"]["responses"] = {"204": {"description": "nothing"}}
        schema["paths"] = {"/v2/health/live": live}
        (tmp_path / "schema.json").write_text(json.dumps(schema))
        done = run("schema.json", tmp_path, "--url", url)
    assert done.returncode == 1
    assert "Undocumented" in done.stdout
