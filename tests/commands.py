"""The commands that a person gives, and the buffers that they are tried on."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import httpx


def run(*arguments: str) -> tuple[int, str, str]:
    """The status and output of the command, which runs in a process of its own, beside the server's."""
    done = subprocess.run([sys.executable, "-m", "service", *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def put(client: httpx.Client, name: str, **spec: Any) -> None:
    assert client.put(f"/v1/buffers/{name}", json=spec).status_code == 201


def add(client: httpx.Client, name: str, gradient: object, **query: float) -> None:
    answer = client.post(f"/v1/buffers/{name}/accumulate", json={"gradient": gradient}, params=query)
    assert answer.status_code == 200, answer.text
