"""The containers as an operator sees them: privileges, keys, stops, restarts, HTTPS, metrics and logs."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import pytest
from gradserve_client import Buffer, Client, InvalidInput

from tests.deploy.test_monitoring import ALERTS, TARGETS
from tests.integration.conftest import client
from tests.integration.stack import Stack
from tests.ports import free_port
from tests.serving import assert_problem, wait_until

WEIGHTS = (1, 2, 3, 4)

ANSWERS_ONCE = """
import socket

def read_request(connection):
    text = b""
    while b"\\r\\n\\r\\n" not in text:
        text += connection.recv(4096)
    print("request", flush=True)

with socket.create_server(("0.0.0.0", 8000)) as listener:
    while True:
        connection = listener.accept()[0]
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")
        read_request(connection)
        connection.close()
"""
"""A server that answers the first request on each connection and closes the connection at the second."""


@pytest.fixture(autouse=True)
def _runs(stack: Stack) -> Iterator[None]:
    yield
    stack.engine("start", stack.container("gradserve"))
    stack.wait()


def keyed(stack: Stack) -> Client:
    return Client(stack.url, api_key=stack.secret, timeout=90)


def test_the_service_has_no_privileges_and_writes_only_its_data(stack: Stack) -> None:
    assert stack.exec("gradserve", "id", "-u").strip() == "10001"
    status = dict(line.split(":\t", 1) for line in stack.exec("gradserve", "cat", "/proc/1/status").splitlines())
    assert int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    for path in ("/data", "/tmp"):
        stack.exec("gradserve", "touch", f"{path}/here")
        stack.exec("gradserve", "rm", f"{path}/here")
    for path in ("/", "/venv", "/etc", "/home", "/run/secrets"):
        stack.exec("gradserve", "touch", f"{path}/here", status=1)
    assert stack.inspect("gradserve", "HostConfig.ReadonlyRootfs")
    assert stack.inspect("nginx", "HostConfig.ReadonlyRootfs")
    assert stack.exec("nginx", "id", "-u").strip() != "0"


def test_the_image_has_no_build_tools(stack: Stack) -> None:
    for tool in ("gcc", "cc", "ld", "make", "git", "curl"):
        stack.exec("gradserve", "sh", "-c", f"command -v {tool}", status=127)
    found = stack.exec("gradserve", "ls", "/venv/lib/python3.11/site-packages")
    assert "numpy\n" in found
    assert not {"pip", "setuptools", "pytest", "torch"} & set(found.split())


def test_the_health_check_notices_a_server_that_does_not_answer(stack: Stack) -> None:
    assert (stack.health(), stack.health("nginx")) == (0, 0)
    stack.engine("stop", "--time", "40", stack.container("gradserve"))
    assert stack.health("nginx") == 1
    stack.engine("start", stack.container("gradserve"))
    stack.wait()
    stack.engine("kill", "--signal", "STOP", stack.container("gradserve"))
    try:
        assert stack.health() == 1
    finally:
        stack.engine("kill", "--signal", "CONT", stack.container("gradserve"))
    assert (stack.health(), stack.health("nginx")) == (0, 0)


def test_a_key_works_in_its_namespace_until_it_is_removed(stack: Stack) -> None:
    name = uuid4().hex
    secrets = [stack.keys("add", f"{name}.{who}", "--namespace", who) for who in ("ann", "bob")]
    assert [line for line in stack.keys("ls").splitlines() if line.startswith(f"{name}.ann")]
    with client(stack.url, secrets[0]) as ann, client(stack.url, secrets[1]) as bob:
        ann.put(f"/v1/buffers/{name}", json={"shape": [1]}).raise_for_status()
        ann.post(f"/v1/buffers/{name}/accumulate", json={"gradient": [7]}).raise_for_status()
        assert_problem(bob.get(f"/v1/buffers/{name}/value"), 404, "unknown_buffer")
        assert bob.get("/v1/buffers").raise_for_status().json()["buffers"] == []
        assert ann.get(f"/v1/buffers/{name}/value").raise_for_status().json()["value"]["data"] == [7.0]
        stack.keys("rm", f"{name}.ann")
        assert_problem(ann.get("/v1/buffers"), 401, "unauthorized")
        bob.get("/v1/buffers").raise_for_status()
        stack.keys("rm", f"{name}.bob")


def test_keys_added_concurrently_are_all_kept(stack: Stack) -> None:
    names = [uuid4().hex for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: stack.keys("add", name), names))
    listed = [line.split()[0] for line in stack.keys("ls").splitlines()]
    assert set(names) <= set(listed)
    for name in names:
        stack.keys("rm", name)


def test_sums_stay_exact_across_restarts_and_kills_under_load(stack: Stack) -> None:
    name, over = uuid4().hex, threading.Event()
    gradient = np.arange(50_000, dtype=np.float32)

    def work(weight: int) -> int:
        count = 0
        with keyed(stack) as server:
            while not over.wait(0.02):
                server.buffers[name].accumulate(gradient, weight=weight)
                count += 1
        return count

    with keyed(stack) as server, ThreadPoolExecutor(len(WEIGHTS)) as pool:
        buffer = server.buffers[name]
        buffer.create(gradient.shape, dtype="float64")
        workers = [pool.submit(work, weight) for weight in WEIGHTS]
        try:
            container = stack.container("gradserve")
            for trouble in (("restart", "--time", "40"), ("kill", "--signal", "KILL"), ("restart", "--time", "40")):
                count = reached(buffer, buffer.info().count + 20)
                stack.engine(*trouble, container)
                stack.engine("start", container)
                stack.wait()
                assert buffer.info().count >= count
            reached(buffer, count + 20)
        finally:
            over.set()
        counts = [one.result(timeout=90) for one in workers]
        taken = buffer.take()
    assert taken.count == sum(counts)
    assert np.array_equal(taken.value, np.dot(counts, WEIGHTS) * gradient.astype(np.float64))


def reached(buffer: Buffer, count: int) -> int:
    """Wait until a buffer's count reaches `count`; return the buffer's count."""
    for _ in range(600):
        if (now := buffer.info().count) >= count:
            return now
        time.sleep(0.05)
    raise AssertionError(f"{now} gradients are in, not {count}")


def test_the_tls_compose_file_serves_https(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    files = tmp_path_factory.mktemp("tls")
    port = free_port()
    stack.serve_https(port, files / "certificate.pem", files / "key.pem")
    trust = ssl.create_default_context(cafile=files / "certificate.pem")
    try:
        with httpx.Client(verify=trust, trust_env=False, headers={"Authorization": f"Bearer {stack.secret}"}) as server:
            answer = server.post(f"https://127.0.0.1:{port}/v1/ops/ReluGrad", json={"dY": [1, 2], "X": [1, -1]})
            assert answer.raise_for_status().json()["dX"]["data"] == [1.0, 0.0]
        for path in ("/v1/ops", "/v2/models/ReluGrad"):  # plain HTTP on the port of HTTPS
            assert_error_of_a_proxy(raw(port, [f"GET {path} HTTP/1.1", "Host: x"]), path, 400)
    finally:
        stack.engine("compose", "down")
        stack.up()


def test_prometheus_reads_the_metrics_and_the_alerts(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    port = free_port()
    stack.watch(port, tmp_path_factory.mktemp("metrics") / "gradserve_metrics_key")
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False) as prometheus:
            target = scraped(prometheus)
            assert (target["labels"]["job"], target["lastError"], target["health"]) == ("gradserve", "", "up")
            (found,) = asked(prometheus, "/query", query="gradserve_workers")["result"]
            assert found["value"][1] == "1"
            (group,) = asked(prometheus, "/rules")["groups"]
            assert_it_draws_the_dashboard(prometheus, stack)
        assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in ALERTS]
        stack.exec("prometheus", "promtool", "check", "rules", "/etc/prometheus/alerts.yml")
    finally:
        stack.engine("rm", "--force", "--volumes", stack.container("prometheus"))
        stack.keys("rm", "prometheus")


def assert_it_draws_the_dashboard(prometheus: httpx.Client, stack: Stack) -> None:
    """Check that every expression of the dashboard has values, but those of a database. Rates need two scrapes."""
    expressions = [target["expr"] for target in TARGETS if "_database_" not in target["expr"]]
    with keyed(stack) as server:
        server.buffers[uuid4().hex].create((1,))
        server.ops.relu_grad(dY=[1.0], X=[1.0])
        with pytest.raises(InvalidInput):
            server.ops.relu_grad(dY=[1.0], X=[1.0, 2.0])
    end = time.monotonic() + 60
    while missing := [one for one in expressions if not asked(prometheus, "/query", query=one)["result"]]:
        assert time.monotonic() < end, missing
        time.sleep(0.5)
        with keyed(stack) as server:
            server.ops.relu_grad(dY=[1.0], X=[1.0])  # else a kernel that ran once has the rate 0


def asked(prometheus: httpx.Client, path: str, **query: str) -> Any:
    return prometheus.get(path, params=query).raise_for_status().json()["data"]


def scraped(prometheus: httpx.Client) -> Any:
    """Return Prometheus's view of its target after the first scrape."""
    for _ in range(600):
        try:
            targets = asked(prometheus, "/targets")["activeTargets"]
            if targets and targets[0]["health"] != "unknown":
                return targets[0]
        except httpx.HTTPError:
            pass  # Prometheus is starting
        time.sleep(0.1)
    raise AssertionError("Prometheus does not ask")


def test_buffers_survive_down_and_up(stack: Stack) -> None:
    name = uuid4().hex
    with keyed(stack) as server:
        server.buffers[name].create((3,))
        server.buffers[name].accumulate([1, 2, 3])
    before = stack.container("gradserve")
    stack.engine("compose", "down")
    with pytest.raises(httpx.ConnectError):
        httpx.get(stack.url, trust_env=False)
    stack.up()
    assert stack.container("gradserve") != before
    with keyed(stack) as server:
        assert server.buffers[name].value().tolist() == [1, 2, 3]


def test_stopping_the_service_finishes_requests_in_flight(stack: Stack) -> None:
    name = uuid4().hex
    body = b'{"gradient": [5]}'
    with client(stack.url, stack.secret) as server, ThreadPoolExecutor(2) as pool:
        server.put(f"/v1/buffers/{name}", json={"shape": [1], "quorum": 2}).raise_for_status()
        wanted = {"step": 0, "timeout": 600}
        poll = pool.submit(server.get, f"/v1/buffers/{name}/value", params=wanted)
        upload = http.client.HTTPConnection("127.0.0.1", httpx.URL(stack.url).port, timeout=60)
        upload.putrequest("POST", f"/v1/buffers/{name}/accumulate")
        for header in (("Content-Type", "application/json"), ("Content-Length", len(body))):
            upload.putheader(header[0], str(header[1]))
        upload.putheader("Authorization", f"Bearer {stack.secret}")
        upload.endheaders(body[:5])
        with client(stack.url, stack.keys("add", uuid4().hex, "--scopes", "admin")) as admin:  # counts itself, too
            wait_until(lambda: "gradserve_in_flight 3.0" in admin.get("/metrics").text.splitlines())
        stop = pool.submit(stack.engine, "stop", "--time", "40", stack.container("gradserve"))
        polled = poll.result(timeout=40)
        # The service answers, not nginx.
        assert_problem(polled, 503, "not_ready", "stopping; send the request again")
        assert polled.headers["retry-after"] == "1"
        upload.send(body[5:])
        answer = upload.getresponse()
        assert answer.status == 200, answer.read()
        stop.result(timeout=40)
        upload.close()
    assert stack.inspect("gradserve", "State.ExitCode") == 0
    with client(stack.url, stack.secret) as server:
        refused = server.get(f"/v1/buffers/{name}")
        assert refused.status_code in (502, 504)
        assert_problem(refused, refused.status_code, "not_ready", "Try again soon")
        assert refused.headers["retry-after"] == "1"
        stack.engine("start", stack.container("gradserve"))
        stack.wait()
        assert server.get(f"/v1/buffers/{name}/value").raise_for_status().json()["value"]["data"] == [5.0]


def test_nginx_retries_no_request(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    stub = tmp_path_factory.mktemp("stub") / "compose.yaml"
    stub.write_text(json.dumps({"services": {"gradserve": {"entrypoint": ["python", "-c", ANSWERS_ONCE]}}}))
    try:
        stack.up_with(stub)
        with client(stack.url, None) as server:
            for _ in range(100):
                if server.post("/v1/buffers/b/take").status_code == 200:
                    break
                time.sleep(0.1)  # the stub does not listen yet
            methods = ("POST", "POST", "POST", "GET", "GET", "GET")
            paths = {"POST": "/v1/buffers/b/take", "GET": "/v2/models/b"}
            answers = [server.request(method, paths[method]) for method in methods]
        assert [one.status_code for one in answers] == [502, 200, 502, 200, 502, 200]
        for answer in answers[:3:2]:
            assert_problem(answer, 502, "not_ready", "broke off")
        assert answers[4].headers["content-type"] == "application/json"
        assert "broke off" in answers[4].json()["error"]
        assert {answer.headers["retry-after"] for answer in answers[::2]} == {"1"}
        assert stack.logs("gradserve").count("request") == 1 + len(methods)
    finally:
        stack.engine("compose", "down")
        stack.up()


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["GET /v1/ops HTTP/1.1", "Host: x", "X-Large: " + "x" * 60_000], 401),
        (["GET /v1/ops HTTP/1.1", "Host: x", "X-Large: " + "x" * 70_000], 431),
        (["GET /v1/ops?" + "x" * 70_000 + " HTTP/1.1", "Host: x"], 431),
        (["GET /v1/ops HTTP/1.1"], 400),
        (["GET /v1/ops HTTP/3.0", "Host: x"], 400),
        (["POST /v1/ops/ReluGrad HTTP/1.1", "Host: x", "Transfer-Encoding: gzip, chunked"], 400),
        (["POST /v2/models/ReluGrad/infer HTTP/1.1", "Host: x", "Transfer-Encoding: gzip"], 400),
        (["TRACE /v1/ops HTTP/1.1", "Host: x"], 405),
        (["GET /proxy-error/v1 HTTP/1.1", "Host: x"], 404),
        (["GET /proxy-error/v2?x HTTP/1.1", "Host: x"], 404),
    ],
    ids=[
        "60 KB",
        "70 KB",
        "a path of 70 KB",
        "no host",
        "another version",
        "another coding",
        "another coding on v2",
        "another method",
        "a page of nginx",
        "another page of nginx",
    ],
)
def test_nginx_answers_unreadable_requests_as_the_service_does(stack: Stack, lines: list[str], status: int) -> None:
    assert_error_of_a_proxy(raw(httpx.URL(stack.url).port, lines), lines[0].split()[1], status)


def raw(port: int | None, lines: list[str]) -> tuple[int, Message, bytes]:
    """Send the lines as a request. Return status, headers and body of the answer."""
    with socket.create_connection(("127.0.0.1", port or 80), timeout=30) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.headers, answer.read()


def assert_error_of_a_proxy(answer: tuple[int, Message, bytes], path: str, status: int) -> None:
    """Check that the answer is an error in the form of the service for this path."""
    found, headers, body = answer
    assert headers["X-Request-ID"]
    if path.startswith("/v2"):
        assert (found, headers["Content-Type"], list(json.loads(body))) == (status, "application/json", ["error"])
        return
    assert (found, headers["Content-Type"]) == (status, "application/problem+json")
    codes = {
        400: "malformed_body",
        401: "unauthorized",
        404: "not_found",
        405: "method_not_allowed",
        431: "head_too_large",
    }
    assert (json.loads(body)["status"], json.loads(body)["code"]) == (status, codes[status])


def test_nginx_does_not_buffer_bodies(stack: Stack) -> None:
    gradient = np.ones((25, 1_000_000), np.float32)
    with keyed(stack) as server:
        dX = server.ops.relu_grad(gradient, gradient)
        assert np.array_equal(dX, gradient)
    assert stack.exec("nginx", "find", "/tmp", "-type", "f").split() == ["/tmp/nginx.pid"]
    assert "buffered to a temporary file" not in stack.logs("nginx")


def test_the_log_of_nginx_has_request_ids_and_no_secrets(stack: Stack) -> None:
    given = uuid4().hex
    answers = [
        httpx.get(f"{stack.url}/v1/ops", headers=head, trust_env=False) for head in ({"X-Request-ID": given}, {})
    ]
    ids = [answer.headers["x-request-id"] for answer in answers]
    logs = stack.logs("nginx")
    assert ids[0] == given
    assert all(f"id={one}\n" in logs for one in ids)
    assert '"GET /v2/health/ready HTTP/1.1" 200' in logs
    assert stack.secret not in logs + stack.logs("gradserve")


def test_nginx_logs_only_request_ids_that_the_service_takes(stack: Stack) -> None:
    port, mark = httpx.URL(stack.url).port, uuid4().hex
    for taken in (mark, f"{mark} of mine", f"{mark}{'x' * 96}"):
        _, headers, _ = raw(port, ["GET /v1/ops HTTP/1.1", "Host: x", f"X-Request-ID: {taken}"])
        assert headers["X-Request-ID"] == taken
        assert f"id={taken}\n" in stack.logs("nginx")
    for refused in (f"{mark}{'y' * 97}", f"{mark}\xe9y", f"{mark}\ty"):
        _, headers, _ = raw(port, ["GET /v1/ops HTTP/1.1", "Host: x", f"X-Request-ID: {refused}"])
        assert mark not in headers["X-Request-ID"]
        assert f"id={headers['X-Request-ID']}\n" in stack.logs("nginx")
    assert stack.logs("nginx").count(mark) == 3


def test_the_image_has_no_settings_of_this_machine(stack: Stack) -> None:
    stack.exec("gradserve", "sh", "-c", "test ! -e /etc/pip.conf")
    stack.exec("nginx", "sh", "-c", "test ! -e /etc/pip.conf")


def test_nginx_forwards_a_body_before_its_end(stack: Stack) -> None:
    with socket.create_connection(("127.0.0.1", httpx.URL(stack.url).port or 80), timeout=30) as connection:
        head = "POST /v1/ops/ReluGrad HTTP/1.1\r\nHost: here\r\nContent-Length: 1000000\r\n\r\n{"
        connection.sendall(head.encode())
        assert connection.recv(12) == b"HTTP/1.1 401"  # the service answers without the rest of the body
