"""A request's answer is the same whether the loop or the pool computes, alone or beside other requests."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest

from service.api.http.body import header_of, is_quick
from service.api.http.offload import INLINE_TEXT_BYTES
from service.codecs import safetensors
from service.limits import Limits
from tests.api.calls import saved
from tests.serving import serving

SAFETENSORS = {"Content-Type": safetensors.MEDIA_TYPE}
MEGABYTE = 1 << 20
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(threads=2) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def relu_grad(client: httpx.Client, size: int, dtype: Any = np.float32) -> None:
    """Ask for a gradient of `size` bytes and check every bit."""
    dY = np.random.default_rng(size).standard_normal(size // np.dtype(dtype).itemsize, dtype=np.float32).astype(dtype)
    X = dY[::-1].copy()
    answer = client.post("/v1/ops/ReluGrad", content=saved({"dY": dY, "X": X}), headers=SAFETENSORS)
    (dX,) = safetensors.decode(memoryview(answer.raise_for_status().content), Limits(size)).values()
    assert dX.dtype == dY.dtype
    assert dX.tobytes() == np.where(X > 0, dY, dtype(0)).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [MEGABYTE // 8, MEGABYTE, 4 * MEGABYTE, 5 * MEGABYTE])
def test_every_size_and_dtype_has_the_same_answer(client: httpx.Client, size: int, dtype: str) -> None:
    relu_grad(client, size, DTYPES[dtype])


def test_binary_input_may_be_answered_as_json(client: httpx.Client) -> None:
    dY = np.arange(MEGABYTE // 4, dtype=np.float32)
    headers = {**SAFETENSORS, "Accept": "application/json"}
    body = saved({"dY": dY, "X": np.ones_like(dY)})
    answer = client.post("/v1/ops/ReluGrad?encoding=list", content=body, headers=headers).raise_for_status()
    assert answer.json()["dX"]["data"] == dY.tolist()


def test_large_outputs_go_into_a_buffer(client: httpx.Client) -> None:
    dY = np.arange(MEGABYTE, dtype=np.float32)
    client.put("/v1/buffers/large", json={"shape": [MEGABYTE]}).raise_for_status()
    body = saved({"dY": dY, "X": np.ones_like(dY)})
    for _ in range(2):
        client.post("/v1/ops/ReluGrad?into=dX:large", content=body, headers=SAFETENSORS).raise_for_status()
    value = client.get("/v1/buffers/large/value", headers={"Accept": safetensors.MEDIA_TYPE}).raise_for_status()
    (total,) = safetensors.decode(memoryview(value.content), Limits(4 * MEGABYTE)).values()
    assert (total == 2 * dY).all()


def test_small_requests_are_answered_beside_large_ones(client: httpx.Client) -> None:
    """Large answers leave in pieces, with small answers between the pieces."""
    sizes = [9 * MEGABYTE, MEGABYTE, 1024, 9 * MEGABYTE] * 4  # above 8 MiB in pieces
    with ThreadPoolExecutor(4) as clients:
        for _ in clients.map(lambda size: relu_grad(client, size), sizes):
            pass


def test_slow_to_parse_bodies_are_decoded_in_the_pool() -> None:
    """Long texts and many members are slow; in the header of a safetensors file, only its length counts."""
    assert is_quick(memoryview(b"[1, 2, 3]" * 100))
    assert is_quick(memoryview(bytes(INLINE_TEXT_BYTES)))
    assert not is_quick(memoryview(bytes(INLINE_TEXT_BYTES + 1)))
    assert not is_quick(memoryview(b'"a": 1' * 100))
    few, many = ({str(k): np.zeros(0, np.float32) for k in range(count)} for count in (1000, 2000))
    assert is_quick(header_of(memoryview(saved(few))), is_header=True)
    assert not is_quick(header_of(memoryview(saved(many))), is_header=True)


def test_a_small_body_with_many_gradients_leaves_the_event_loop_free() -> None:
    """A gradient takes 20 us to decode, and 440 of them fit into 4 KB."""
    with serving() as url, httpx.Client(base_url=url) as client:
        new = {f"a{k}": {"shape": (1,)} for k in range(440)}
        client.post("/v1/buffers/create", json={"buffers": new}).raise_for_status()
        for count, queued in ((20, 1), (440, 2)):  # once by the creation
            client.post("/v1/buffers/accumulate", json={f"a{k}": 1 for k in range(count)}).raise_for_status()
            assert f'gradserve_phase_seconds_count{{phase="queue"}} {queued}.0' in client.get("/metrics").text


def test_others_are_answered_while_a_thread_writes_the_openapi_document(monkeypatch: pytest.MonkeyPatch) -> None:
    began, others_answered, count = threading.Event(), threading.Event(), list[None]()

    def write(*_: object) -> dict[str, bool]:
        count.append(None)
        began.set()
        return {"beside others": others_answered.wait(30)}

    monkeypatch.setattr("service.api.openapi.document_of", write)
    with serving() as url, ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(httpx.get, f"{url}/openapi.json", timeout=60) for _ in range(2)]
        assert began.wait(30)
        for path in ("/v2/health/live", "/docs"):
            httpx.get(url + path, timeout=60).raise_for_status()
        others_answered.set()
        assert [one.result().json() for one in asked] == [{"beside others": True}] * 2
        assert httpx.get(f"{url}/openapi.json").json() == {"beside others": True}
    assert len(count) == 1


LATE_IMPORTS = """
import sys
import threading

import httpx

from service.kernels import OPERATORS
from tests.serving import serving


class Finder:
    def find_spec(name, *_):
        if name in ("scipy.special", "scipy.sparse"):
            print(op, dtype, name, threading.current_thread().name.partition("_")[0])


sys.meta_path.insert(0, Finder)
with serving() as url, httpx.Client(base_url=url, timeout=60) as client:
    for op in ("ReluGrad", "GeluGrad", "ResizeGrad"):
        for dtype in ("float32", "float64"):
            example = {name: {"dtype": dtype, "data": data} for name, data in OPERATORS[op].example.items()}
            params = dict(OPERATORS[op].example_attributes)
            client.post(f"/v1/ops/{op}", json=example, params=params).raise_for_status()
"""


def test_a_thread_imports_what_most_servers_never_need() -> None:
    """In the event loop an import would hold all requests."""
    done = subprocess.run([sys.executable, "-c", LATE_IMPORTS], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [
        "GeluGrad float32 scipy.special gradserve",
        "ResizeGrad float32 scipy.sparse gradserve",
    ], done.stderr
