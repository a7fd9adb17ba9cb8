"""Short forms to run commands and to prepare buffers for them."""

from __future__ import annotations

import io
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import httpx

from service.__main__ import main
from tests.zygote import Forked


def run(*arguments: str) -> tuple[int, str, str]:
    """Run a command in its own process; return status, stdout and stderr."""
    with tempfile.TemporaryDirectory() as directory:
        out, log = Path(directory) / "out", Path(directory) / "log"
        status = Forked("service", os.environ, log, arguments=arguments, out=str(out)).wait(60)
        return status, out.read_text(), log.read_text()


def called(*arguments: str) -> tuple[int, str, str]:
    """Run a command in this process, ten times faster, for stores that no server has open."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            status = main([*arguments])
        except SystemExit as stop:  # the parser's answer to wrong arguments
            status = int(stop.code or 0)
    return status, out.getvalue(), err.getvalue()


def helps(*command: str) -> Iterator[tuple[str, str]]:
    """Yield the command and every command below it, each with its help."""
    _, text, _ = called(*command, "--help")
    yield " ".join(["gradserve", *command]), text
    for name in re.findall(r"^    ([a-z-]+)\b", text, re.MULTILINE):
        yield from helps(*command, name)


def put(client: httpx.Client, name: str, **spec: Any) -> None:
    assert client.put(f"/v1/buffers/{name}", json=spec).status_code == 201


def add(client: httpx.Client, name: str, gradient: object, **query: float | str) -> None:
    answer = client.post(f"/v1/buffers/{name}/accumulate", json={"gradient": gradient}, params=query)
    assert answer.status_code == 200, answer.text


@contextmanager
def adding(url: str, names: Iterable[str]) -> Iterator[None]:
    """Send requests that add 1 to all these buffers, one request after the other, until the context is left."""
    done = threading.Event()

    def keep_adding() -> None:
        with httpx.Client(base_url=url) as client:
            while not done.wait(0.005):  # the command needs the processor, too
                assert client.post("/v1/buffers/accumulate", json=dict.fromkeys(names, 1)).status_code == 200

    thread = threading.Thread(target=keep_adding)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
