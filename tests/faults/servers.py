"""Server processes that tests kill, with a store on the disk, and clients that retry until the server answers."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import httpx
import numpy as np
from safetensors.numpy import load, save

from service.codecs import safetensors
from service.dtypes import Array
from tests.ports import free_port
from tests.serving import HOSTS
from tests.zygote import ROOT, Forked

LONG = os.environ.get("GRADSERVE_FAULTS") == "long"
PATIENCE = 60.0
"""Seconds after which a wait makes a test fail instead of hang."""

SAFETENSORS = safetensors.MEDIA_TYPE

Process: TypeAlias = "subprocess.Popen[bytes] | Forked"


class Server:
    """`python -m service serve` on a port of its own, started, killed and started again on one store.

    It and its workers are forked from one that has imported the service, unless a test of the start says `fork=False`.
    """

    def __init__(
        self,
        store: Path,
        /,
        *,
        workers: int = 1,
        module: str = "service",
        log: Path | None = None,
        fork: bool = True,
        descriptors: tuple[int, int] | None = None,
        **settings: object,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log or store.with_name(f"{store.name}.log")
        given = {"store": f"lmdb:{store}", "workers": workers, "port": self.port, "host_names": HOSTS, **settings}
        self._module, self._command = module, None if fork else [sys.executable, "-m", module, "serve"]
        self._environment = {
            **os.environ,
            "TMPDIR": str(self.log.parent),  # killed processes leave their files here
            **{f"GRADSERVE_{name.upper()}": str(one) for name, one in given.items()},
        }
        self._process: Process | None = None
        self._descriptors = descriptors

    def __enter__(self) -> Server:
        return self if self._process else self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def process(self) -> Process:
        assert self._process is not None
        return self._process

    def launch(self) -> None:
        """Start the process without waiting for an answer."""
        if self._command is None:
            self._process = Forked(self._module, self._environment, self.log, descriptors=self._descriptors)
            return
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=subprocess.DEVNULL, stderr=log
            )

    def start(self) -> Server:
        """Start the server and wait until it answers."""
        assert self.starts(), f"the server does not get ready:\n{self.log.read_text()}"
        return self

    def starts(self) -> bool:
        """Start the server and wait until it answers or ends; return whether it answers."""
        self.launch()
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            if self.is_ready():
                return True
            time.sleep(0.02)
        self.kill()
        return False

    def is_ready(self) -> bool:
        """Return whether the server takes requests."""
        try:
            return httpx.get(f"{self.url}/v2/health/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """Kill -9 all processes of the server and wait for their end."""
        if self._process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)  # keeps the parent from starting more workers
            children = _children_of(self.process.pid)
            self.process.kill()
            for pid in children:
                kill(pid)
        self.process.wait(PATIENCE)
        _until_closed(self.port)
        self._process = None

    def restart(self) -> None:
        """Kill the server, and start it again."""
        self.kill()
        self.start()

    def kill_a_worker(self, chance: random.Random) -> None:
        """Kill -9 one of the worker processes; the parent starts another."""
        if workers := self.workers():
            kill(chance.choice(workers))

    def workers(self) -> list[int]:
        """Return the ids of the worker processes."""
        own = b"tests.zygote" if self._command is None else b"spawn_main"
        return [pid for pid in _children_of(self.process.pid) if own in _command_of(pid)]

    def ended(self) -> tuple[int, str]:
        """Wait for the server's end; return exit status and log."""
        try:
            return self.process.wait(PATIENCE / 2), self.log.read_text()
        finally:
            self.kill()


def kill(pid: int) -> None:
    """Kill -9 a process that the caller started, unless it has ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


class Client:
    """A client that retries each request with one key until the server answers."""

    def __init__(self, url: str, *, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._http = httpx.Client(base_url=url, timeout=min(40, patience))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def once(self, method: str, path: str, *, key: str | None = None, **rest: Any) -> httpx.Response:
        """Send a request once. Raise `httpx.TransportError` if no answer comes."""
        headers = {**({} if key is None else {"Idempotency-Key": key}), **rest.pop("headers", {})}
        return self._http.request(method, path, headers=headers, **rest)

    def send(self, method: str, path: str, *, key: str | None = None, **rest: Any) -> httpx.Response:
        """Return the answer, after retries while the server is starting, stopping or gone."""
        end = time.monotonic() + self.patience
        failed: object = None
        while time.monotonic() < end:
            try:
                answer = self.once(method, path, key=key, **rest)
                assert answer.status_code != 500, answer.text
                if answer.status_code != 503:
                    return answer
                failed = answer.text
            except httpx.TransportError as error:
                failed = error
            time.sleep(0.02)
        raise AssertionError(f"{method} {path} was not answered in {self.patience} s: {failed!r}")

    def done(self, method: str, path: str, *, key: str | None = None, **rest: Any) -> Any:
        """Return the JSON of an answer that must be a success."""
        answer = self.send(method, path, key=key, **rest)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def create(self, name: str, shape: Sequence[int], dtype: str = "float64", **rules: Any) -> None:
        self.done("PUT", f"/v1/buffers/{name}", json={"shape": list(shape), "dtype": dtype, **rules})

    def add(self, name: str, gradient: Array, *, key: str | None = None, **query: Any) -> Any:
        """Add a gradient and return the receipt."""
        return self.done("POST", f"/v1/buffers/{name}/accumulate", key=key, params=query, **tensors(gradient=gradient))

    def add_many(self, gradients: Mapping[str, Array], *, key: str | None = None) -> Any:
        """Add to many buffers; return the receipts by buffer name."""
        return self.done("POST", "/v1/buffers/accumulate", key=key, **tensors(**gradients))["buffers"]

    def push(self, gradients: Mapping[str, Array], *, push: str) -> Any:
        """Add to many buffers by a push with a part for each; return the receipts by buffer name."""
        answer, parts = None, dict[str, dict[str, Array]]()
        for name, gradient in gradients.items():
            parts.setdefault(name.partition("/")[0], {})[name] = gradient
        for number, part in enumerate(parts.values(), 1):
            query = {"push": push, "part": number, "parts": len(parts)}
            answer = self.done("POST", "/v1/buffers/accumulate", params=query, **tensors(**part))
        assert answer is not None
        return answer["buffers"]

    def metadata(self, name: str) -> Any:
        return self.done("GET", f"/v1/buffers/{name}")

    def values(self, *names: str) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return receipts and values of many buffers at one moment."""
        answer = self.send("POST", "/v1/buffers/value", json={"names": names}, headers={"Accept": SAFETENSORS})
        return contents(answer)

    def value(self, name: str, **query: Any) -> Array:
        answer = self.send("GET", f"/v1/buffers/{name}/value", params=query, headers={"Accept": SAFETENSORS})
        return contents(answer)[1]["value"]

    def state(self) -> dict[str, tuple[Any, list[float]]]:
        """Return metadata and value of every buffer."""
        found = self.done("GET", "/v1/buffers")["buffers"]
        return {one["name"]: (one, self.value(one["name"]).ravel().tolist()) for one in found}


def new_key() -> str:
    return uuid4().hex


def tensors(**gradients: Array) -> dict[str, Any]:
    """Return request arguments: a safetensors body with a JSON answer."""
    body = save({name: np.ascontiguousarray(one) for name, one in gradients.items()})
    return {"content": body, "headers": {"Content-Type": SAFETENSORS, "Accept": "application/json"}}


def contents(answer: httpx.Response) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return receipts and tensors of a safetensors answer that must be a success."""
    assert answer.status_code == 200, answer.text
    size = int.from_bytes(answer.content[:8], "little")
    head = json.loads(answer.content[8 : 8 + size])
    return json.loads(head["__metadata__"]["receipts"]), load(answer.content)


def pause(chance: random.Random, shortest: float, longest: float) -> None:
    """Wait for random seconds. No condition is waited for: a fault has to come at any moment, and to last any time."""
    time.sleep(chance.uniform(shortest, longest))


def moments(chance: random.Random, count: int, shortest: float, longest: float) -> Iterator[int]:
    """Yield 0, 1, ... `count` - 1, each after a random pause in seconds."""
    for number in range(count):
        pause(chance, shortest, longest)
        yield number


def _children_of(pid: int) -> list[int]:
    found = list[int]()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            found += [int(child) for child in task.read_text().split()]
    return found


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _until_closed(port: int) -> None:
    """Wait until no process listens: orphans may take a moment to end."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except ConnectionRefusedError:
            return
        except OSError:
            pass
        time.sleep(0.01)
    raise AssertionError("the killed server still listens")
