"""Short forms of the requests that the tests of buffers make."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import safetensors.numpy

from service.codecs import safetensors as codec
from service.codecs.safetensors import MEDIA_TYPE
from service.dtypes import Array
from service.limits import Limits
from tests.api.headers import SAFE, TO_SAFETENSORS
from tests.faults.servers import Server

PATIENCE = 60
"""Seconds after which a wait makes the test fail instead of hang."""

_numbers = itertools.count()


def fresh(prefix: str = "b") -> str:
    """Return a buffer name that no other test has."""
    return f"{prefix}{next(_numbers)}"


def create(http: httpx.Client, name: str | None = None, shape: Any = (2,), **rules: Any) -> str:
    """Create a buffer and return its name."""
    name = name or fresh()
    answer = http.put(f"/v1/buffers/{name}", json={"shape": list(shape), **rules})
    assert answer.status_code == 201, answer.text
    return name


def naming(*names: str) -> dict[str, Any]:
    """Return the body of a request for the named buffers."""
    return {"names": list(names)}


def add(http: httpx.Client, name: str, gradient: Any, headers: Any = None, **params: Any) -> httpx.Response:
    return http.post(f"/v1/buffers/{name}/accumulate", json={"gradient": gradient}, headers=headers, params=params)


def post(http: httpx.Client, name: str, what: str, headers: Any = None, **params: Any) -> httpx.Response:
    return http.post(f"/v1/buffers/{name}/{what}", headers=headers, params=params)


def get(http: httpx.Client, name: str, headers: Any = None, **params: Any) -> httpx.Response:
    """Return the answer to a request for the buffer's value."""
    return http.get(f"/v1/buffers/{name}/value", headers=headers, params=params)


def ok(answer: httpx.Response) -> Any:
    """Return the JSON of an answer whose status must be 200."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def value(http: httpx.Client, name: str, **params: Any) -> Any:
    """Return the buffer's value as lists."""
    return ok(get(http, name, **params))["value"]["data"]


def metadata(http: httpx.Client, name: str) -> dict[str, Any]:
    metadata: dict[str, Any] = ok(http.get(f"/v1/buffers/{name}"))
    return metadata


def etag(http: httpx.Client, name: str) -> str:
    """Return the short tag of the buffer's state, with which the tag of its metadata begins."""
    answer = http.get(f"/v1/buffers/{name}")
    short = f'"{answer.json()["step"]}-{answer.json()["version"]}"'
    assert answer.headers["etag"].startswith(f"{short[:-1]}-")
    return short


def state(http: httpx.Client, *names: str) -> list[Any]:
    """Return metadata and value of each buffer: a refused request must not change either."""
    return [(metadata(http, name), get(http, name, headers={"Accept": MEDIA_TYPE}).content) for name in names]


def saved(tensors: Mapping[str, Any]) -> bytes:
    return safetensors.numpy.save({name: np.array(one, order="C") for name, one in tensors.items()})


def as_file(tensors: Mapping[str, Any], **headers: str) -> dict[str, Any]:
    """Return content and headers of a request with the tensors in safetensors."""
    return {"content": saved(tensors), "headers": {**SAFE, **headers}}


def loaded(answer: httpx.Response) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return tensors and receipts of a safetensors answer, once the safetensors library has read the same."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == MEDIA_TYPE
    library = safetensors.deserialize(answer.content)  # type: ignore[no-untyped-call]
    tensors = codec.decode(memoryview(answer.content), Limits(1 << 30))
    assert {name for name, _ in library} == tensors.keys()
    length = int.from_bytes(answer.content[:8], "little")
    header = json.loads(answer.content[8 : 8 + length])
    return tensors, json.loads(header.get("__metadata__", {}).get("receipts", "{}"))


def read(http: httpx.Client, name: str, **params: Any) -> Array:
    """Return the buffer's value, bit for bit."""
    return loaded(get(http, name, TO_SAFETENSORS, **params))[0]["value"]


@contextmanager
def serving_workers(workers: int, store: Path, **settings: Any) -> Iterator[str]:
    """Yield the URL of a server whose worker processes share one store."""
    with Server(store, workers=workers, store_bytes=1 << 28, **settings) as server:
        yield server.url
