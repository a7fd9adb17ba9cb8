"""The service as a client sees it, through nginx or, with GRADSERVE_URL, directly."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save

from service.dtypes import Array
from service.kernels import OPERATORS
from service.settings import Settings
from tests.integration.conftest import client
from tests.serving import assert_problem

SAFETENSORS = {"Content-Type": "application/vnd.safetensors", "Accept": "application/vnd.safetensors"}
LARGE = (25, 1_000_000)
"""The shape of 100 MB in float32."""


@pytest.fixture
def name(server: httpx.Client) -> Iterator[str]:
    """Yield the name of a buffer, and delete the buffer at the end."""
    name = f"integration.{uuid4().hex}"
    yield name
    server.delete(f"/v1/buffers/{name}")


@pytest.fixture(scope="module")
def large() -> Array:
    return np.random.default_rng(0).integers(-1000, 1000, LARGE).astype(np.float32)


def create(server: httpx.Client, name: str, **body: object) -> None:
    server.put(f"/v1/buffers/{name}", json=body).raise_for_status()


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_answers_its_example(server: httpx.Client, op: str) -> None:
    example = server.get(f"/v1/ops/{op}").raise_for_status().json()["example"]
    answer = server.post(f"/v1/ops/{op}", json=example["request"], params=example["attributes"])
    assert answer.raise_for_status().json() == example["answer"]


def test_a_gradient_counts_once_per_key(server: httpx.Client, name: str) -> None:
    create(server, name, shape=[2])
    for key, replayed in (("a", None), ("b", None), ("b", "true")):
        headers = {"Idempotency-Key": f"{name} {key}"}
        answer = server.post(f"/v1/buffers/{name}/accumulate", json={"gradient": [1, 2]}, headers=headers)
        assert answer.raise_for_status().headers.get("idempotency-replayed") == replayed
    taken = server.post(f"/v1/buffers/{name}/take").raise_for_status().json()
    assert (taken["count"], taken["value"]["data"]) == (2, [2.0, 4.0])


@pytest.mark.parametrize("chunked", [False, True])
def test_100_MB_travel_in_both_directions(server: httpx.Client, name: str, large: Array, chunked: bool) -> None:
    create(server, name, shape=LARGE)
    body = save({"gradient": large})
    content = (body[start : start + (1 << 20)] for start in range(0, len(body), 1 << 20)) if chunked else body
    answer = server.post(
        f"/v1/buffers/{name}/accumulate", params={"return": "value"}, content=content, headers=SAFETENSORS
    )
    assert np.array_equal(load(answer.raise_for_status().content)["value"], large)
    value = server.get(f"/v1/buffers/{name}/value", headers={"Accept": SAFETENSORS["Accept"]})
    assert np.array_equal(load(value.raise_for_status().content)["value"], large)


def test_an_operator_runs_on_100_MB(server: httpx.Client, large: Array) -> None:
    dY, X = large[:12], -large[:12]
    answer = server.post("/v1/ops/ReluGrad", content=save({"dY": dY, "X": X}), headers=SAFETENSORS)
    assert np.array_equal(load(answer.raise_for_status().content)["dX"], np.where(X > 0, dY, 0))


@pytest.mark.parametrize("size", [10, 100_000_000])
@pytest.mark.parametrize("wrong", [None, "gs_wrong", "gs_" + "0" * 12 + "_" + "A" * 43])
def test_a_request_without_a_valid_key_is_unauthorized(
    url: str, secret: str | None, wrong: str | None, size: int
) -> None:
    if secret is None:
        pytest.skip("the server asks for no key")
    with client(url, wrong) as stranger:
        assert_problem(stranger.post("/v1/ops/ReluGrad", content=bytes(size)), 401, "unauthorized")
        assert_problem(stranger.get("/v1/buffers"), 401, "unauthorized")
        assert_problem(stranger.get("/metrics"), 401, "unauthorized")


def test_probes_need_no_key(url: str) -> None:
    with client(url, None) as stranger:
        for probe in ("live", "ready"):
            assert stranger.get(f"/v2/health/{probe}").raise_for_status().json() == {probe: True}


@pytest.mark.parametrize("path", ["/v1/ops/ReluGrad", "/v2/models/ReluGrad/infer"])
def test_a_body_over_the_limit_is_refused_before_it_arrives(url: str, secret: str | None, path: str) -> None:
    connection = http.client.HTTPConnection(httpx.URL(url).host, httpx.URL(url).port, timeout=30)
    connection.putrequest("POST", path)
    connection.putheader("Content-Length", str(Settings().max_body_bytes + 1))
    connection.putheader("Authorization", f"Bearer {secret}")
    connection.endheaders()
    answer = connection.getresponse()
    said, kind = json.loads(answer.read()), answer.headers["content-type"]
    connection.close()
    assert answer.status == 413
    if path.startswith("/v2"):
        assert (kind, list(said)) == ("application/json", ["error"])
    else:
        assert (kind, said["code"], said["status"]) == ("application/problem+json", "body_too_large", 413)
    assert str(Settings().max_body_bytes) in said.get("detail", said.get("error"))


def test_a_poll_waits_for_the_quorum(server: httpx.Client, name: str) -> None:
    create(server, name, shape=[1], quorum=2)
    wanted = {"step": 0, "timeout": 50}
    with ThreadPoolExecutor(1) as pool:
        value = pool.submit(server.get, f"/v1/buffers/{name}/value", params=wanted)
        for _ in range(2):
            assert not threading.Event().wait(1.5)  # the poll waits
            assert not value.done()
            server.post(f"/v1/buffers/{name}/accumulate", json={"gradient": [3]}).raise_for_status()
        assert value.result(timeout=30).raise_for_status().json()["value"]["data"] == [6.0]


def test_a_poll_ends_at_its_timeout(server: httpx.Client, name: str) -> None:
    create(server, name, shape=[1], quorum=2)
    answer = server.get(f"/v1/buffers/{name}/value", params={"step": 0, "timeout": 1})
    assert_problem(answer, 409, "step_open")
