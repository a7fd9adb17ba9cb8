"""Every limit is listed and kept, and the error of a request beyond a limit names the setting."""

from __future__ import annotations

import gzip
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from service.api.dashboard.limits import SETTINGS
from service.buffers.names import MAX_NAME_CHARACTERS
from service.buffers.store import MAX_BUFFERS
from service.engine.engine import Engine
from service.keys import add as add_key
from service.limits import MAX_RANK
from service.settings import Settings
from tests.api.calls import add, as_file, create, fresh, metadata, ok, saved, serving_workers, value
from tests.api.headers import KEY, REPLAYED, SAFE
from tests.api.models import linear
from tests.api.test_admission import relu, unfinished
from tests.api.test_health import GATHER, Gate
from tests.serving import assert_problem, serving

JSON = {"Content-Type": "application/json"}


class Case(NamedTuple):
    """A setting's value, a request beyond this limit, and the error. `more` are other settings that the case needs."""

    value: int | float
    beyond: Callable[[httpx.Client], httpx.Response]
    status: int
    code: str
    more: dict[str, Any] = {}


@contextmanager
def served(**settings: Any) -> Iterator[httpx.Client]:
    """Yield a client of a server with these settings."""
    with serving(**settings) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def put(client: httpx.Client, name: str = "a", **spec: Any) -> httpx.Response:
    return client.put(f"/v1/buffers/{name}", json={"shape": [1], **spec})


def body(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/ops/ReluGrad", content=b" " * 2000, headers=JSON)


def inflated(client: httpx.Client) -> httpx.Response:
    content = gzip.compress(b'{"dY": [' + b" " * 2000 + b'1], "X": [1]}')
    return client.post("/v1/ops/ReluGrad", content=content, headers={**JSON, "Content-Encoding": "gzip"})


def tensors(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/buffers/accumulate", **as_file({"a": 1, "b": 1, "c": 1}))


def dimensions(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/ops/ReluGrad", json={"dY": [[[[1]]]], "X": [[[[1]]]]})


def buffers(client: httpx.Client) -> httpx.Response:
    assert [put(client, name).status_code for name in ("a", "b", "a")] == [201, 201, 200]
    return put(client, "c")


def graph(client: httpx.Client, name: str = "g") -> httpx.Response:
    return client.put(f"/v1/graphs/{name}", content=linear())


def graphs(client: httpx.Client) -> httpx.Response:
    assert graph(client).status_code == 201
    return graph(client, "h")


def store(client: httpx.Client) -> httpx.Response:
    for number in range(200):
        answer = put(client, f"b{number}", shape=[2000])
        if answer.status_code == 201:
            answer = add(client, f"b{number}", 1)
        if answer.is_error:
            return answer
    raise AssertionError("it does not get full")


def in_flight(client: httpx.Client) -> httpx.Response:
    url = str(client.base_url)
    with unfinished(url, relu(100_000)):
        return client.post("/v1/ops/ReluGrad", content=relu(40_000), headers=SAFE)


def send(client: httpx.Client, content: bytes, length: int) -> socket.socket:
    connection = socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=30)
    head = f"POST /v1/ops/GatherGrad HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}"
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


def waiting(client: httpx.Client) -> httpx.Response:
    """Return the refusal of one among three requests for one thread."""
    content, gate = GATHER + b" " * 100_000, Gate()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(Engine, "run", gate)
        stack.callback(gate.let_go.set)
        stack.enter_context(send(client, content, len(content)))
        assert gate.started.acquire(timeout=30)
        stack.enter_context(send(client, content, len(content)))
        for _ in range(1000):
            if "gradserve_waiting 1.0" in client.get("/metrics").text:
                break
        return client.post("/v1/ops/GatherGrad", content=content, headers=JSON)


def stalled(client: httpx.Client) -> httpx.Response:
    with send(client, b"{", 100) as connection:
        answer = b"".join(iter(lambda: connection.recv(10_000), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    headers = [line.split(b": ", 1) for line in head.split(b"\r\n")[1:]]
    return httpx.Response(int(head.split()[1]), headers=[(name, text) for name, text in headers], content=content)


CASES = {
    "max_body_bytes": Case(1000, body, 413, "body_too_large"),
    "max_inflated_bytes": Case(1000, inflated, 413, "body_too_large"),
    "max_tensor_bytes": Case(1000, lambda client: put(client, shape=[251]), 413, "tensor_too_large"),
    "max_tensors": Case(2, tensors, 413, "too_many_tensors"),
    "max_dimensions": Case(3, dimensions, 422, "too_many_dimensions"),
    "max_name_length": Case(5, lambda client: put(client, "a.name"), 422, "invalid_parameter"),
    "max_buffers": Case(2, buffers, 409, "too_many_buffers"),
    "max_graphs": Case(1, graphs, 409, "too_many_graphs"),
    "max_graph_nodes": Case(1, graph, 422, "invalid_graph"),
    "max_bytes_in_flight": Case(1 << 20, in_flight, 429, "busy"),
    "max_waiting": Case(1, waiting, 429, "busy", {"threads": 1}),
    "store_bytes": Case(1 << 17, store, 507, "store_full", {"store": "lmdb:"}),
    "request_timeout": Case(0.2, stalled, 408, "request_timeout"),
}


@pytest.mark.parametrize("setting", CASES)
def test_the_error_names_the_setting(setting: str, tmp_path: Path) -> None:
    case = CASES[setting]
    more = {name: f"lmdb:{tmp_path}" if one == "lmdb:" else one for name, one in case.more.items()}
    with served(**{setting: case.value, **more}) as client:
        assert client.get("/v1/limits").json()[setting] == case.value
        problem = assert_problem(case.beyond(client), case.status, case.code, f"GRADSERVE_{setting.upper()}")
        assert problem["limit"] == case.value
        assert client.get("/v2/health/ready").status_code == 200


def test_every_limit_has_a_case() -> None:
    assert {*CASES, "idempotency_seconds", "push_seconds"} == set(SETTINGS)  # no request can exceed these two


def test_limits_are_listed_and_described(http: httpx.Client) -> None:
    limits = http.get("/v1/limits").json()
    assert limits["max_buffers"] == MAX_BUFFERS == Settings().max_buffers
    assert (limits["max_dimensions"], limits["max_name_length"]) == (MAX_RANK, MAX_NAME_CHARACTERS)
    schema = http.get("/openapi.json").json()
    (described,) = schema["paths"]["/v1/limits"]["get"]["responses"]["200"]["content"].values()
    model = schema["components"]["schemas"][described["schema"]["$ref"].rpartition("/")[2]]
    assert model["properties"].keys() == limits.keys() == set(model["required"])
    for name, one in model["properties"].items():
        assert one["type"] == ("integer" if isinstance(limits[name], int) else "number")
        assert (f"GRADSERVE_{name.upper()}" in one["description"]) is (name in SETTINGS)


IMPOSSIBLE = {"max_dimensions": MAX_RANK + 1, "max_name_length": MAX_NAME_CHARACTERS + 1, "max_buffers": -1}


@pytest.mark.parametrize("setting", IMPOSSIBLE)
def test_impossible_limits_are_refused(setting: str) -> None:
    for one in (0, IMPOSSIBLE[setting]):
        with pytest.raises(ValueError, match=setting):
            Settings.model_validate({setting: one})


# ----- dimensions and names -----

DEEP = {"dtype": "float32", "shape": [1] * 4, "data": [[[[1]]]]}


def too_deep() -> dict[str, dict[str, Any]]:
    """Return requests with a tensor of four dimensions in every form, and with shapes of many more."""
    inputs = [{"name": name, "shape": [1] * 4, "datatype": "FP32", "data": [1]} for name in ("dY", "X")]
    gather = {"shape": [1] * 4, "indices": [0], "grad": [[[[1]]]]}
    ops = "/v1/ops/ReluGrad"
    return {
        "list": {"url": ops, "json": {"dY": [[[[1]]]], "X": [1]}},
        "empty list": {"url": ops, "json": {"dY": [[[[]]]], "X": [1]}},
        "data": {"url": ops, "json": {"dY": DEEP, "X": [1]}},
        "shape": {"url": ops, "json": {"dY": {"dtype": "float32", "shape": [0, 1, 1, 1], "data": []}, "X": [1]}},
        "base64": {"url": ops, "json": {"dY": {"dtype": "float32", "shape": [1] * 4, "base64": "AACAPw=="}, "X": 1}},
        "safetensors": {"url": ops, "content": saved({"dY": [[[[1.0]]]], "X": [1.0]}), "headers": SAFE},
        "output": {"url": "/v1/ops/GatherGrad", "json": {**gather, "indices": 0, "grad": [[[1]]]}},
        "buffer": {"method": "PUT", "url": "/v1/buffers/deep", "json": {"shape": [1] * 4}},
        "gradient": {"url": "/v1/buffers/a/accumulate", "json": {"gradient": [[[[1]]]]}},
        "inference": {"url": "/v2/models/ReluGrad/infer", "json": {"inputs": inputs}},
        "sixty-five": {"method": "PUT", "url": "/v1/buffers/deep", "json": {"shape": [1 << 62] * 65}},
        "thousands": {"method": "PUT", "url": "/v1/buffers/deep", "json": {"shape": [1 << 62] * 2500}},
        "thousands in an input": {
            "url": "/v2/models/ReluGrad/infer",
            "json": {"inputs": [{"name": "dY", "shape": [1 << 62] * 4000, "datatype": "FP32", "data": [1]}]},
        },
    }


@pytest.fixture(scope="module")
def shallow() -> Iterator[httpx.Client]:
    """Yield a client of a server that allows three dimensions."""
    with served(max_dimensions=3) as client:
        create(client, "a")
        yield client


@pytest.mark.parametrize("case", too_deep())
def test_every_form_of_a_tensor_keeps_the_limit_of_dimensions(shallow: httpx.Client, case: str) -> None:
    request: dict[str, Any] = {"method": "POST", **too_deep()[case]}
    answer = shallow.request(**request)
    if request["url"].startswith("/v2"):
        assert answer.status_code == 400
        assert "the limit is 3 (GRADSERVE_MAX_DIMENSIONS)" in answer.json()["error"]
    else:
        problem = assert_problem(answer, 422, "too_many_dimensions", "the limit is 3 (GRADSERVE_MAX_DIMENSIONS)")
        assert problem["limit"] == 3


def test_a_tensor_at_the_limit_of_dimensions_is_read(shallow: httpx.Client) -> None:
    assert ok(shallow.post("/v1/ops/ReluGrad", json={"dY": [[[1]]], "X": [[[1]]]}))["dX"]["data"] == [[[1.0]]]
    name = create(shallow, shape=[1, 1, 1])
    assert ok(add(shallow, name, [[[1]]]))["count"] == 1


def test_buffers_created_under_higher_limits_stay_usable(tmp_path: Path) -> None:
    long, deep, large = "long" * 10, [1, 2, 1, 2], [1000]
    old = {"deep": deep, long: [2], "large": large}
    with served(store=f"lmdb:{tmp_path}") as client:
        for name, shape in old.items():
            create(client, name, shape=shape)
            add(client, name, 3)
        gone: dict[str, Any] = {"json": {"shape": deep}, "headers": {KEY: "k"}}
        assert client.put("/v1/buffers/gone", **gone).status_code == 201
        client.delete("/v1/buffers/gone")
    low: dict[str, Any] = {"max_dimensions": 3, "max_name_length": 10, "max_tensor_bytes": 100, "max_buffers": 1}
    with served(store=f"lmdb:{tmp_path}", **low) as client:
        again = client.put("/v1/buffers/gone", **gone)
        assert (again.status_code, again.headers[REPLAYED]) == (201, "true")
        assert_problem(client.put("/v1/buffers/gone", json={"shape": deep}), 422, "too_many_dimensions", "4 dimensions")
        for name, shape in old.items():
            assert client.put(f"/v1/buffers/{name}", json={"shape": shape}).status_code == 200
            assert metadata(client, name)["shape"] == shape
            assert ok(add(client, name, 1))["count"] == 2
            assert set(str(value(client, name))) <= set("[4.0, ]")
            assert client.post(f"/v1/buffers/{name}/take").status_code == 200
        assert len(ok(client.post("/v1/buffers/value", json={"names": [*old]}))["buffers"]) == 3
        assert_problem(put(client, "another"), 409, "too_many_buffers", "3 buffers", "the limit is 1")
        for name, shape in old.items():
            assert client.delete(f"/v1/buffers/{name}").status_code == 204
            assert client.put(f"/v1/buffers/{name}", json={"shape": shape}).is_error
        assert put(client, "another").status_code == 201


@pytest.mark.parametrize("name", ["x" * 11, "x" * 200, "x" * 201, "x" * 1000])
def test_a_long_name_is_refused(name: str) -> None:
    with served(max_name_length=10) as client:
        answer = put(client, name)
        problem = assert_problem(
            answer, 422, "invalid_parameter", f"{len(name)} characters", "GRADSERVE_MAX_NAME_LENGTH"
        )
        assert (problem["limit"], problem["parameter"]) == (10, "name")
        assert put(client, name[:10]).status_code == 201


# ----- buffers -----


def test_each_namespace_has_its_own_limit_of_buffers(tmp_path: Path) -> None:
    everything = ["buffers:read", "buffers:write"]
    secrets = {name: add_key(tmp_path / "keys", name, everything, name) for name in ("ann", "bob")}
    with serving(keys=tmp_path / "keys", store=f"lmdb:{tmp_path}/store", max_buffers=2) as url:
        for name, secret in secrets.items():
            with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secret}"}) as client:
                request: dict[str, Any] = {"json": {"shape": [1]}, "headers": {KEY: f"{name} a"}}
                assert client.put("/v1/buffers/a", **request).status_code == 201
                create(client, "b", ttl_seconds=1000)
                refused = client.put("/v1/buffers/c", json={"shape": [1]}, headers={KEY: "c"})
                problem = assert_problem(refused, 409, "too_many_buffers", "has 2 buffers", "the limit is 2")
                assert (problem["limit"], problem["count"], problem["buffer"]) == (2, 2, "c")
                assert "retry-after" not in refused.headers
                assert client.put("/v1/buffers/a", **request).headers[REPLAYED] == "true"
                assert client.put("/v1/buffers/a", json={"shape": [1]}).status_code == 200
                assert ok(add(client, "a", 1))["count"] == 1
                assert client.delete("/v1/buffers/a").status_code == 204
                assert client.put("/v1/buffers/c", json={"shape": [1]}, headers={KEY: "c"}).status_code == 201
                assert client.put("/v1/buffers/a", **request).headers[REPLAYED] == "true"


@pytest.mark.parametrize("store", ["memory:", "lmdb:{}"])
def test_an_expired_buffer_does_not_count_against_the_limit(store: str, tmp_path: Path) -> None:
    with served(store=store.format(tmp_path), max_buffers=1) as client:
        create(client, "a", ttl_seconds=1)
        assert_problem(put(client, "b"), 409, "too_many_buffers")
        for _ in range(1000):
            if client.get("/v1/buffers/a").status_code == 404:
                break
            time.sleep(0.01)
        assert put(client, "b").status_code == 201


def test_workers_share_the_limit_of_buffers(tmp_path: Path) -> None:
    most, names = 40, [fresh() for _ in range(100)]
    reconnect = httpx.Limits(max_keepalive_connections=0)  # any worker may get each request
    with (
        serving_workers(2, tmp_path, max_buffers=most) as url,
        httpx.Client(base_url=url, timeout=30, limits=reconnect) as client,
        ThreadPoolExecutor(8) as pool,
    ):

        def attempt(name: str) -> int:
            answer = put(client, name)
            if answer.is_error:
                assert_problem(answer, 409, "too_many_buffers", f"has {most} buffers", f"the limit is {most}")
            return answer.status_code

        def there() -> list[str]:
            return [one["name"] for one in client.get("/v1/buffers?limit=100").json()["buffers"]]

        assert Counter(pool.map(attempt, names)) == {201: most, 409: len(names) - most}
        assert len(there()) == most
        deleted = there()[:7]
        assert set(pool.map(lambda name: client.delete(f"/v1/buffers/{name}").status_code, deleted)) == {204}
        assert Counter(pool.map(attempt, [f"again.{name}" for name in names])) == {201: 7, 409: len(names) - 7}
        assert len(there()) == most
