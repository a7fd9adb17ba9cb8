"""A request's answer is the same whether the loop or the pool computes, alone or beside other requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest

from service.api.http.costs import json_cost, safetensors_cost
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
    sizes = [16 * MEGABYTE, 4 * MEGABYTE, 1024, 9 * MEGABYTE] * 4
    with ThreadPoolExecutor(8) as clients:
        for _ in clients.map(lambda size: relu_grad(client, size), sizes):
            pass


def test_slow_to_parse_bodies_are_decoded_in_the_pool() -> None:
    """Many lists or members, and a long safetensors header, cost more than their bytes."""
    assert json_cost(memoryview(b"[1, 2, 3]" * 100)) < INLINE_TEXT_BYTES < json_cost(memoryview(b"[1]" * 2000))
    assert json_cost(memoryview(b'"a": 1' * 10)) < INLINE_TEXT_BYTES < json_cost(memoryview(b'"a": 1' * 200))
    assert json_cost(memoryview(bytes(INLINE_TEXT_BYTES + 1))) > INLINE_TEXT_BYTES
    few, many = ({str(k): np.zeros(0, np.float32) for k in range(count)} for count in (10, 1000))
    assert safetensors_cost(memoryview(saved(few))) < INLINE_TEXT_BYTES < safetensors_cost(memoryview(saved(many)))
