"""A busy server refuses large requests at once, and goes on with its work and with small requests."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from tests.serving import assert_problem, delete_buffers, in_flight, serving, wait_until

SAFETENSORS = "application/vnd.safetensors"


def relu(size: int) -> bytes:
    return safetensors.numpy.save({name: np.ones(size, np.float32) for name in ("dY", "X")})


def post(url: str, body: bytes, **headers: str) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/ops/ReluGrad", content=body, headers={"Content-Type": SAFETENSORS, **headers}, timeout=30
    )


@pytest.fixture(scope="module")
def narrow() -> Iterator[str]:
    with serving(max_bytes_in_flight=1 << 20, max_body_bytes=1 << 22, threads=1) as url:
        yield url


@pytest.fixture
def url(narrow: str) -> str:
    """Return the URL of a server that admits a megabyte at a time and holds no bytes of other tests."""
    wait_until(lambda: in_flight(narrow, "_bytes") == 0)
    with httpx.Client(base_url=narrow) as client:
        delete_buffers(client)
    return narrow


REST_BYTES = 100
"""The end of a body that an unfinished request has not sent: the server holds what has come."""


@contextmanager
def unfinished(url: str, body: bytes, *, chunked: bool = False) -> Iterator[socket.socket]:
    """Send all but the end of a request, and yield its connection once the server holds what has come."""
    host, port = url.removeprefix("http://").split(":")
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = f"POST /v1/ops/ReluGrad HTTP/1.1\r\nHost: x\r\nContent-Type: {SAFETENSORS}\r\n{length}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        part = body[:-REST_BYTES]
        connection.sendall(head.encode() + (b"%x\r\n%b\r\n" % (len(part), part) if chunked else part))
        wait_until(lambda: in_flight(url, "_bytes") > len(part) - (1 << 16))
        yield connection


def is_refused(url: str, body: bytes) -> bool:
    answer = post(url, body)
    if answer.status_code == 200:
        return False
    assert_problem(answer, 429, "busy", "GRADSERVE_MAX_BYTES_IN_FLIGHT", str(len(body)))
    assert answer.headers["retry-after"] == "1"
    return True


def test_large_requests_beyond_the_bytes_in_flight_are_refused(url: str) -> None:
    large, small = relu(100_000), relu(1000)
    with unfinished(url, large) as connection:
        with socket.create_connection(
            connection.getpeername(), timeout=30
        ) as other:  # answered before its body arrives
            head = f"POST /v1/buffers/a/accumulate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(large)}\r\n\r\n"
            other.sendall(head.encode())
            assert other.recv(1000).startswith(b"HTTP/1.1 429 ")
        assert post(url, small).status_code == 200
        assert_problem(post(url, relu(1_000_000)), 413, "body_too_large")
        assert httpx.get(f"{url}/v2/health/ready").status_code == 200
        connection.sendall(large[-REST_BYTES:])
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    assert not is_refused(url, large)


def test_refusing_an_expected_body_closes_the_connection(url: str) -> None:
    """The server cannot know whether the next bytes are the body or another request."""
    large = relu(100_000)
    with unfinished(url, large) as connection:
        for length, status in ((len(large), b"429"), (1 << 30, b"413")):
            with socket.create_connection(connection.getpeername(), timeout=30) as other:
                head = f"POST /v1/ops/ReluGrad HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n"
                other.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
                answer = b"".join(iter(lambda: other.recv(10_000), b""))
                assert answer.startswith(b"HTTP/1.1 " + status)
                assert b"\r\nconnection: close\r\n" in answer
                assert b"100 Continue" not in answer


def test_v2_reports_busy_in_its_own_form(url: str) -> None:
    with unfinished(url, relu(100_000)):
        answer = httpx.post(f"{url}/v2/models/ReluGrad/infer", content=relu(100_000))
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert "GRADSERVE_MAX_BYTES_IN_FLIGHT" in answer.json()["error"]


def test_a_client_that_left_holds_no_bytes_in_flight(url: str) -> None:
    for _ in range(3):
        with unfinished(url, relu(100_000)):
            pass
    for _ in range(1000):
        if not is_refused(url, relu(100_000)):
            return
    raise AssertionError("the bytes of a client that left stay held")


def test_a_chunked_body_counts_as_it_arrives(url: str) -> None:
    with unfinished(url, relu(100_000), chunked=True):
        assert not is_refused(url, relu(20_000))


def test_a_single_request_may_exceed_the_bytes_in_flight(url: str) -> None:
    assert post(url, relu(400_000)).status_code == 200


def test_a_refused_request_can_be_retried_on_its_connection(url: str) -> None:
    large = relu(100_000)
    with httpx.Client(base_url=url, timeout=30) as client, unfinished(url, large):
        for _ in range(3):
            answer = client.post("/v1/ops/ReluGrad", content=large, headers={"Content-Type": SAFETENSORS})
            assert answer.status_code == 429
        assert client.get("/v1/ops").status_code == 200


def test_values_to_read_count_as_bytes_in_flight(url: str) -> None:
    httpx.put(f"{url}/v1/buffers/v", json={"shape": [200_000]})
    with unfinished(url, relu(100_000)):
        assert_problem(httpx.get(f"{url}/v1/buffers/v/value"), 429, "busy")
        assert_problem(httpx.post(f"{url}/v1/buffers/value", json={"names": ["v"]}), 429, "busy")
        assert httpx.get(f"{url}/v1/buffers/v").status_code == 200
    wait_until(lambda: in_flight(url, "_bytes") == 0)
    assert httpx.get(f"{url}/v1/buffers/v/value", headers={"Accept": SAFETENSORS}).status_code == 200


def gru() -> bytes:
    """Return the body of a slow request."""
    steps, hidden = 3000, 96
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "X": np.ones((steps, 8, hidden), np.float32),
        "W": np.ones((1, 3 * hidden, hidden), np.float32) / hidden,
        "R": np.ones((1, 3 * hidden, hidden), np.float32) / hidden,
    }
    return safetensors.numpy.save(tensors)


def test_a_request_past_its_timeout_is_not_started() -> None:
    body, path = gru(), "/v1/ops/GRUTraining?outputs=HFinal"
    with serving(threads=1) as url, httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(3) as pool:

        def ask(**headers: str) -> httpx.Response:
            return client.post(path, content=body, headers={"Content-Type": SAFETENSORS, **headers})

        long = [pool.submit(ask) for _ in range(3)]
        while "gradserve_waiting 2.0" not in client.get("/metrics").text:
            assert not all(one.done() for one in long), "the requests ended before the metrics showed them"
        expired = ask(**{"Request-Timeout": "0.001"})
        assert_problem(expired, 503, "expired", "0.001 seconds", "not started")
        assert expired.headers["retry-after"] == "1"
        assert [one.result().status_code for one in long] == [200, 200, 200]
        begun = client.get("/v2/models/GRUTraining/stats").json()["model_stats"][0]["inference_count"]
        assert begun == 3
        for given in ("soon", "0", "-1", "nan", "inf"):
            assert_problem(ask(**{"Request-Timeout": given}), 422, "invalid_parameter", "Request-Timeout")
            listed = httpx.get(f"{url}/v1/buffers", headers={"Request-Timeout": given})
            assert_problem(listed, 422, "invalid_parameter", "Request-Timeout")


def test_a_take_that_was_made_never_answers_expired() -> None:
    """The answer waits for a thread. A client that sent the take again would take the next step."""
    size, path = 1 << 20, "/v1/ops/GRUTraining?outputs=HFinal"
    with serving(threads=1) as url, httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(3) as pool:
        assert client.put("/v1/buffers/a", json={"shape": [size]}).status_code == 201
        assert client.post("/v1/buffers/a/accumulate", json={"gradient": 1}).status_code == 200
        given: dict[str, Any] = {"content": gru(), "headers": {"Content-Type": SAFETENSORS}}
        long = [pool.submit(client.post, path, **given) for _ in range(2)]
        while "gradserve_waiting 1.0" not in client.get("/metrics").text:
            assert not all(one.done() for one in long), "the requests ended before the metrics showed them"
        headers = {"Request-Timeout": "0.001", "Accept": SAFETENSORS}
        taken = client.post("/v1/buffers/a/take", headers=headers)
        assert taken.status_code == 200, taken.text
        assert safetensors.numpy.load(taken.content)["value"].sum() == size
        assert [one.result().status_code for one in long] == [200, 200]


def test_large_requests_beyond_the_queue_are_refused() -> None:
    body = gru()
    refused = threading.Event()
    with serving(threads=1, max_waiting=1) as url, ThreadPoolExecutor(6) as pool:

        def ask(_: int) -> int:
            answer = httpx.post(
                f"{url}/v1/ops/GRUTraining?outputs=HFinal",
                content=body,
                headers={"Content-Type": SAFETENSORS},
                timeout=60,
            )
            if answer.status_code == 429:
                assert_problem(answer, 429, "busy", "GRADSERVE_MAX_WAITING")
                refused.set()
            return answer.status_code

        for _ in range(5):
            statuses = list(pool.map(ask, range(6)))
            assert set(statuses) <= {200, 429}
            assert 200 in statuses
            if refused.is_set():
                break
        assert refused.is_set()
        assert ask(0) == 200


def test_limits_are_listed_and_kept() -> None:
    with serving(max_tensors=3, max_inflated_bytes=1000, max_body_bytes=5000) as url:
        limits = httpx.get(f"{url}/v1/limits").json()
        assert (limits["max_tensors"], limits["max_inflated_bytes"], limits["max_body_bytes"]) == (3, 1000, 5000)
        assert (limits["max_dimensions"], limits["max_name_length"]) == (64, 200)
        many = {f"b{number}": np.ones(1, np.float32) for number in range(4)}
        headers = {"Content-Type": SAFETENSORS}
        answer = httpx.post(f"{url}/v1/buffers/accumulate", content=safetensors.numpy.save(many), headers=headers)
        assert_problem(answer, 413, "too_many_tensors", "4 tensors", "GRADSERVE_MAX_TENSORS")
        answer = httpx.post(f"{url}/v1/buffers/accumulate", json=dict.fromkeys(many, [1]))
        assert_problem(answer, 413, "too_many_tensors", "4 tensors")
        inputs = [{"name": name, "shape": [1], "datatype": "FP32", "data": [1]} for name in many]
        answer = httpx.post(f"{url}/v2/models/ReluGrad/infer", json={"inputs": inputs})
        assert answer.status_code == 413
        assert "GRADSERVE_MAX_TENSORS" in answer.json()["error"]
        body = gzip.compress(b'{"dY": [' + b" " * 2000 + b'1], "X": [1]}')
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        answer = httpx.post(f"{url}/v1/ops/ReluGrad", content=body, headers=headers)
        assert_problem(answer, 413, "body_too_large", "GRADSERVE_MAX_INFLATED_BYTES")
        assert httpx.post(f"{url}/v1/ops/ReluGrad", json={"dY": [1], "X": [1]}).status_code == 200


def test_values_to_take_count_as_bytes_in_flight(url: str) -> None:
    """A take of a few bytes may be answered with many."""
    size = 1 << 18
    with httpx.Client(base_url=url, timeout=30) as client:
        assert client.put("/v1/buffers/a", json={"shape": [size]}).status_code == 201
        add: dict[str, Any] = {"json": {"gradient": 1}, "headers": {"Accept": SAFETENSORS}}
        assert client.post("/v1/buffers/a/accumulate", **add).status_code == 200
        with unfinished(url, relu(100_000)):
            cases: list[tuple[str, dict[str, Any]]] = [
                ("a/take?min_count=1", {}),
                ("a/accumulate?return=value", add),
                ("accumulate?return=value", {**add, "json": {"a": 1}}),
                ("take", {"json": {"names": ["a"]}}),
                ("value", {"json": {"names": ["a"]}}),
                ("take?min_count=1&timeout=60", {"json": {"names": ["a"]}}),
            ]
            for path, more in cases:
                refused = client.post(f"/v1/buffers/{path}", **more)
                assert_problem(refused, 429, "busy", "GRADSERVE_MAX_BYTES_IN_FLIGHT", str(4 * size))
            assert client.get("/v1/buffers/a").json()["count"] == 1
            assert client.post("/v1/buffers/accumulate", json={"a": 1}).json()["buffers"]["a"]["count"] == 2
            assert_problem(client.post("/v1/buffers/a/take?min_count=3"), 429, "busy")
    with httpx.Client(base_url=url, timeout=30) as client:
        assert client.post("/v1/buffers/a/take?min_count=2").json()["count"] == 2


def test_values_of_input_buffers_count_as_bytes_in_flight(url: str) -> None:
    size = 1 << 18
    with httpx.Client(base_url=url, timeout=30) as client:
        assert client.put("/v1/buffers/a", json={"shape": [size]}).status_code == 201
        request: dict[str, Any] = {"json": {}, "headers": {"Accept": SAFETENSORS}}
        path = "/v1/ops/ReluGrad?from=dY:a&from=X:a"
        with unfinished(url, relu(100_000)):
            refused = client.post(path, **request)
            assert_problem(refused, 429, "busy", "GRADSERVE_MAX_BYTES_IN_FLIGHT", str(2 * 4 * size))
        wait_until(lambda: in_flight(url, "_bytes") == 0)
        assert client.post(path, **request).status_code == 200  # a single request may use as much as it needs
        wait_until(lambda: in_flight(url, "_bytes") == 0)


def test_inflated_bodies_and_outputs_count_as_bytes_in_flight(url: str) -> None:
    """The limit holds again once the body is inflated and once the outputs are computed."""
    zeros = {"dY": np.zeros(100_000, np.float32), "X": np.zeros(100_000, np.float32)}
    body, headers = gzip.compress(safetensors.numpy.save(zeros)), {"Content-Encoding": "gzip"}
    take = gzip.compress(b'{"names": [' + b" " * (1 << 20) + b'"a"]}')
    gather = safetensors.numpy.save(
        {"shape": np.array([300_000]), "indices": np.array([0]), "grad": np.ones(1, np.float32)}
    )
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "inflated": ("ops/ReluGrad", {"content": body, "headers": {"Content-Type": SAFETENSORS, **headers}}),
        "outputs": ("ops/GatherGrad", {"content": gather, "headers": {"Content-Type": SAFETENSORS}}),
        "names": ("buffers/take", {"content": take, "headers": {"Content-Type": "application/json", **headers}}),
    }
    assert max(len(more["content"]) for _, more in requests.values()) < 1 << 16
    with unfinished(url, relu(100_000)):
        for path, more in requests.values():
            assert_problem(httpx.post(f"{url}/v1/{path}", **more), 429, "busy", "GRADSERVE_MAX_BYTES_IN_FLIGHT")
    wait_until(lambda: in_flight(url, "_bytes") == 0)
    statuses = {name: httpx.post(f"{url}/v1/{path}", **more).status_code for name, (path, more) in requests.items()}
    assert statuses == {"inflated": 200, "outputs": 200, "names": 404}


def test_a_request_answered_busy_has_added_nothing(url: str) -> None:
    """A repeated request answered busy can be repeated once more."""
    steps, sequences, hidden = 3000, 4, 16
    rng = np.random.default_rng(0)
    shapes = {"X": (steps, sequences, 1), "W": (1, 3 * hidden, 1), "R": (1, 3 * hidden, hidden)}
    body = safetensors.numpy.save({name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()})
    assert len(body) < 1 << 16
    path, headers = f"{url}/v1/ops/GRUTraining?into=HFinal:a", {"Content-Type": SAFETENSORS}
    with httpx.Client(timeout=60, headers=headers) as client:
        shape = {"shape": [1, sequences, hidden]}
        assert httpx.put(f"{url}/v1/buffers/a", json=shape).status_code == 201
        for count, key in enumerate(({}, {"Idempotency-Key": "k"})):
            with unfinished(url, relu(100_000)):
                refused = client.post(path, content=body, headers=key)
                assert_problem(refused, 429, "busy", "GRADSERVE_MAX_BYTES_IN_FLIGHT")
                assert client.get(f"{url}/v1/buffers/a").json()["count"] == count
            wait_until(lambda: in_flight(url, "_bytes") == 0)
            assert client.post(path, content=body, headers=key).status_code == 200
        with unfinished(url, relu(100_000)):
            assert_problem(client.post(path, content=body, headers=key), 429, "busy")
        wait_until(lambda: in_flight(url, "_bytes") == 0)
        again = client.post(path, content=body, headers=key)
        assert (again.status_code, again.headers["Idempotency-Replayed"]) == (200, "true")
        assert client.get(f"{url}/v1/buffers/a").json()["count"] == 2


def test_a_single_request_is_never_answered_busy(url: str) -> None:
    """Its body and its answer may together exceed the bytes in flight."""
    size = 1 << 18
    with httpx.Client(base_url=url, timeout=30) as client:
        assert client.put("/v1/buffers/a", json={"shape": [size]}).status_code == 201
        body = safetensors.numpy.save({"gradient": np.ones(size, np.float32)})
        answer = client.post(
            "/v1/buffers/a/accumulate?return=value", content=body, headers={"Content-Type": SAFETENSORS}
        )
        assert answer.status_code == 200, answer.text
        assert safetensors.numpy.load(answer.content)["value"].sum() == size


def test_a_waiting_take_holds_no_bytes_in_flight(url: str) -> None:
    with httpx.Client(base_url=url, timeout=30) as client, ThreadPoolExecutor() as pool:
        assert client.put("/v1/buffers/a", json={"shape": [1 << 18]}).status_code == 201
        waiting = pool.submit(httpx.post, f"{url}/v1/buffers/a/take?min_count=1&timeout=30", timeout=60)
        wait_until(lambda: in_flight(url) == 1)
        assert not is_refused(url, relu(100_000))
        assert client.post("/v1/buffers/a/accumulate", json={"gradient": 1}).status_code == 200
        assert waiting.result().json()["count"] == 1
