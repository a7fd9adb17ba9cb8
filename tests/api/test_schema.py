"""Valid and invalid requests that schemathesis makes from the OpenAPI schema: every answer conforms to the schema.

`make fuzz` makes random requests, too, for every operator; GRADSERVE_FUZZ is the number of each kind. Other runs make
the examples and the edges of the schema, and leave out operators and inputs whose requests are alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.serving import serving

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
TOOL = Path(sys.executable).with_name("schemathesis")
MANY = os.environ.get("GRADSERVE_FUZZ")
OPERATORS = ["InPlaceAccumulatorV2", "QuickGeluGrad", "GatherGrad", "GRUTraining", "ConcatTraining"]
"""Together they have inputs, groups of inputs, attributes and numbers of outputs of every kind."""


def run(url: str, schema: Any, work: Path) -> subprocess.CompletedProcess[str]:
    """Run schemathesis with the schema against the server at `url`."""
    (work / "schema.json").write_text(json.dumps(schema))
    command: list[str | Path] = [TOOL, "--no-color", "run", "schema.json", "--url", url]
    command += ["--checks", CHECKS, "--suppress-health-check=all"]
    command += [f"-n{MANY}", "--phases=examples,coverage,fuzzing"] if MANY else ["--phases=examples,coverage"]
    return subprocess.run(command, capture_output=True, text=True, cwd=work)


def schema_of(url: str) -> Any:
    """Return the server's schema without the parameter that makes a request wait."""
    schema = httpx.get(f"{url}/openapi.json").json()
    if not MANY:
        shorten(schema)
    for path in schema["paths"].values():
        for operation in path.values():
            given = operation.get("parameters", [])
            operation["parameters"] = [one for one in given if one["name"] != "timeout"]
    return schema


def shorten(schema: Any) -> None:
    """Leave the `OPERATORS` alone, and of the inputs of each operator one of each dtype."""
    for path in [path for path in schema["paths"] if path.startswith("/v1/ops/")]:
        if not path.endswith(("{op}", *OPERATORS)):
            del schema["paths"][path]
    for name in OPERATORS:
        body = schema["components"]["schemas"][f"{name}Request"]
        kinds = {one.get("$ref", "group"): (name, one) for name, one in body["properties"].items()}
        body["properties"] = dict(kinds.values())


def test_answers_conform_to_the_schema(tmp_path: Path) -> None:
    with serving() as url:
        done = run(url, schema_of(url), tmp_path)
    assert done.returncode == 0, done.stdout[-5000:]


def test_schemathesis_finds_an_answer_that_does_not_conform(tmp_path: Path) -> None:
    """The schema here promises another answer than the server gives."""
    with serving() as url:
        schema = schema_of(url)
        live = schema["paths"]["/v2/health/live"]
        live["get"]["responses"] = {"204": {"description": "nothing"}}
        schema["paths"] = {"/v2/health/live": live}
        done = run(url, schema, tmp_path)
    assert done.returncode == 1
    assert "Undocumented" in done.stdout
