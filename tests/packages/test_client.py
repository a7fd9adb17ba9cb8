"""The client alone, in the environment of a user whose project has a package `service` of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serving import serving

FIRST_WHEELS = {"numpy": [((3, 13), "2.1"), ((3, 14), "2.3.2")], "ml_dtypes": [((3, 14), "0.5.4")]}
"""The first versions with wheels for newer Pythons."""

PROGRAM = """
import asyncio, importlib.util
import service
from gradserve_client import AsyncClient, Client

for absent in ("fastapi", "uvicorn", "starlette", "pydantic", "torch", "rich", "typer"):
    assert importlib.util.find_spec(absent) is None, absent
with Client("URL") as server:
    print(server.ops.relu_grad([1, 2], [0.5, -1]).tolist())
    buffer = server.buffers["w"]
    buffer.create((2,), dtype="bfloat16")
    print(buffer.accumulate([1, 2], weight=3).count, buffer.take(reduce="mean").value.tolist())

async def main():
    async with AsyncClient("URL") as server:
        print((await server.ops.relu_grad([1, 2], [0.5, -1])).tolist())

asyncio.run(main())
"""

PRINTED = "the service of another\n[1.0, 0.0]\n1 [1.0, 2.0]\n[1.0, 0.0]\n"


def oldest(wheel: Path) -> list[str]:
    """Return the requirements of the oldest allowed versions that have wheels for this Python."""
    files = zipfile.ZipFile(wheel)
    metadata = files.read(next(name for name in files.namelist() if name.endswith("METADATA"))).decode()
    allowed = dict(re.findall(r"^Requires-Dist: (\w+)>=([0-9.]+)$", metadata, re.MULTILINE))
    assert {"numpy", "httpx"} <= allowed.keys()
    for name, versions in FIRST_WHEELS.items():
        for python, version in versions:
            if sys.version_info >= python:
                allowed[name] = version
    return [f"{name}=={version}" for name, version in allowed.items()]


@pytest.mark.parametrize("age", ["oldest", "newest"])
def test_it_works_beside_another_service(
    age: str, client_wheel: Path, install: Callable[..., str], project: Path
) -> None:
    python = install(str(client_wheel), *(oldest(client_wheel) if age == "oldest" else ()))
    with serving() as url:
        done = subprocess.run(
            [python, "-W", "error", "-c", PROGRAM.replace("URL", url)],
            cwd=project,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.stdout, done.stderr) == (PRINTED, "")
