"""Traces: a collector gets a span for each request, with parent, route, phases and errors."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from service.api.telemetry import tracing
from service.api.telemetry.metrics import PHASES
from service.engine.engine import Engine
from service.keys import add
from tests.faults.servers import Server
from tests.serving import serving
from tests.zygote import ROOT

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A stand-in for a collector: it keeps the exported spans."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.answers = threading.Event()
        self.answers.set()
        self.gave_up = False
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                collector.gave_up |= not collector.answers.wait(15)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list[tuple[Span, dict[str, Any], dict[str, Any]]]:
        """Return each span with its attributes and those of its process, in the order of their starts."""
        found = [
            (span, attributes(span), attributes(part.resource))
            for body in self.bodies
            for part in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        ]
        return sorted(found, key=lambda one: one[0].start_time_unix_nano)


def attributes(of: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # only the stop of the server sends spans
    yield collector
    collector.server.shutdown()
    thread.join()
    collector.server.server_close()


def stop(server: Server) -> None:
    server.process.terminate()
    assert server.process.wait(30) == 0, server.log.read_text()


def test_a_span_names_https(collector: Collector, certificate: tuple[Path, Path]) -> None:
    made, key = certificate
    with serving(tracing=True, tls_certificate=made, tls_key=key) as url:
        tls = ssl.create_default_context(cafile=str(made))
        assert httpx.get(f"{url.replace('http:', 'https:')}/v2", verify=tls).status_code == 200
    assert {one["url.scheme"] for _, one, _ in collector.spans()} == {"https"}


@pytest.mark.parametrize("workers", [1, 2])
def test_each_request_is_a_span_with_its_phases(tmp_path: Path, collector: Collector, workers: int) -> None:
    given: dict[str, Any] = {"tracing": True, "store_bytes": 8 << 20, "access_log": True, "log_format": "json"}
    with Server(tmp_path / "store", workers=workers, **given) as server:
        send = [
            ("POST", "/v1/ops/ReluGrad?encoding=list", {"dY": [1.5], "X": [2]}, 200),
            ("PUT", "/v1/buffers/mine", {"shape": [1]}, 201),
            ("POST", "/v1/buffers/mine/accumulate", {"gradient": [1]}, 200),
            ("POST", "/v2/models/ReluGrad/infer", {"inputs": []}, 400),
            ("PUT", "/v1/buffers/large", {"shape": [10_000_000]}, 201),
            ("POST", "/v1/buffers/large/accumulate", {"gradient": 1}, 507),
            ("DELETE", "/v1/ops/ReluGrad", None, 405),
            ("GET", "/v1/nothing", None, 404),
            ("HEAD", "/v1/buffers/mine", None, 200),
        ]
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "User-Agent": "tests"}
        for method, path, body, status in send:
            assert httpx.request(method, server.url + path, json=body, headers=headers).status_code == status
        stop(server)
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    found = [one for one in collector.spans() if one[0].trace_id.hex() == TRACE]
    assert [(span.name, own["http.response.status_code"]) for span, own, _ in found] == [
        ("POST /v1/ops/ReluGrad", 200),  # each operator is a route
        ("PUT /v1/buffers/{name}", 201),
        ("POST /v1/buffers/{name}/accumulate", 200),
        ("POST /v2/models/{op}/infer", 400),
        ("PUT /v1/buffers/{name}", 201),
        ("POST /v1/buffers/{name}/accumulate", 507),
        ("DELETE /v1/ops/ReluGrad", 405),
        ("GET", 404),
        ("HEAD /v1/buffers/{name}", 200),
    ]
    for (span, own, process), (method, path, _, _) in zip(found, send, strict=True):
        assert span.kind == Span.SPAN_KIND_SERVER
        assert span.parent_span_id.hex() == PARENT
        assert span.start_time_unix_nano < span.end_time_unix_nano
        assert (own["http.request.method"], own["url.path"]) == (method, path.partition("?")[0])
        assert (own["url.scheme"], own["network.protocol.version"]) == ("http", "1.1")
        assert (own["client.address"], own["server.address"], own["server.port"]) == ("127.0.0.1",) * 2 + (server.port,)
        assert own["user_agent.original"] == "tests"
        assert own.get("http.route") == (span.name.partition(" ")[2] or None)
        failed = own["http.response.status_code"] >= 500
        assert span.status.code == (Status.STATUS_CODE_ERROR if failed else Status.STATUS_CODE_UNSET)
        assert own.get("error.type") == ("507" if failed else None)
        assert process["service.name"] == "gradserve"
    phases = [{name for name in PHASES if f"gradserve.{name}_seconds" in own} for _, own, _ in found]
    assert phases[0] == set(PHASES) - {"store"}
    assert phases[2] >= {"read", "store", "write"}
    assert all(0 <= own[key] < 60 for _, own, _ in found for key in own if key.endswith("_seconds"))
    assert found[0][1]["http.request.body.size"] == len(b'{"dY":[1.5],"X":[2]}')
    logged = [line["span_id"] for line in lines if line.get("trace_id") == TRACE]
    # An answer is there before its line, and the next request may go to the other worker.
    assert sorted(logged) == sorted(span.span_id.hex() for span, _, _ in found)


def test_each_span_names_its_worker_process(tmp_path: Path, collector: Collector) -> None:
    with Server(tmp_path / "store", workers=2, tracing=True) as server:
        workers = server.workers()
        with httpx.Client(base_url=server.url, headers={"Connection": "close"}) as client:
            for _ in range(100):  # each on a new connection, which either process may accept
                client.get("/v2/health/live")
        stop(server)
    found = [process["process.pid"] for _, own, process in collector.spans() if own["url.path"].endswith("live")]
    assert len(found) == 100
    assert set(found) <= set(workers)


def test_a_list_in_several_lines_is_one(collector: Collector) -> None:
    """W3C's recommendation wants the lines of tracestate joined. Of two traceparents, none is valid."""
    parent, other = (("traceparent", f"00-{trace}-{PARENT}-01") for trace in (TRACE, TRACE[::-1]))
    states = [("tracestate", "a=1"), ("tracestate", "b=2, c=3")]
    with serving(tracing=True) as url:
        for headers in ([parent, *states], [parent, other, *states]):
            assert httpx.get(f"{url}/v1/ops", headers=headers).status_code == 200
    one, two = (span for span, _, _ in collector.spans())
    assert (one.trace_id.hex(), one.parent_span_id.hex(), one.trace_state) == (TRACE, PARENT, "a=1,b=2,c=3")
    assert two.trace_id.hex() not in (TRACE, TRACE[::-1])
    assert (two.parent_span_id, two.trace_state) == (b"", "")


def test_no_secret_and_no_tensor_is_sent(tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("hidden")

    monkeypatch.setenv("OTEL_SERVICE_NAME", "by another name")
    secret = add(tmp_path / "keys", "ann", ["ops"])
    headers = {"Authorization": f"Bearer {secret}"}
    with serving(tracing=True, keys=tmp_path / "keys") as url:
        for name in ("ReluGrad", "NoneSuch"):
            httpx.post(f"{url}/v1/ops/{name}?note=hidden", json={"dY": [1234.5], "X": ["hidden"]}, headers=headers)
        monkeypatch.setattr(Engine, "run", broken)
        answer = httpx.post(f"{url}/v1/ops/ReluGrad", json={"dY": [1234.5], "X": [1]}, headers=headers)
        assert answer.status_code == 500
    spans = collector.spans()
    assert [own["http.response.status_code"] for _, own, _ in spans] == [422, 404, 500]
    assert spans[2][1]["error.type"] == "RuntimeError"
    assert spans[2][0].status.code == Status.STATUS_CODE_ERROR
    assert {process["service.name"] for _, _, process in spans} == {"by another name"}
    sent = b"".join(collector.bodies)
    for text in ("hidden", "1234.5", secret, secret.split("_", 2)[2]):
        assert text.encode() not in sent
    assert not any(span.events for span, _, _ in spans)


def test_a_silent_collector_does_not_delay_requests(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.1)
    collector.answers.clear()
    with serving(tracing=True) as url:
        assert httpx.get(f"{url}/v1/ops").status_code == 200
    assert not collector.gave_up
    collector.answers.set()


def test_a_missing_collector_does_not_stop_the_server(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    collector.server.server_close()
    with Server(tmp_path / "store", tracing=True) as server:
        for _ in range(10):
            assert httpx.get(f"{server.url}/v1/ops").status_code == 200
        stop(server)


def test_without_the_extra_the_server_names_the_package_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['opentelemetry.exporter'] = None")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "GRADSERVE_TRACING": "true", "GRADSERVE_PORT": "0"}
    command = [sys.executable, "-m", "service", "serve"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pip install 'gradserve[otel]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_tracing_opentelemetry_is_not_imported() -> None:
    code = (
        "import sys; from service.api.server import create_app; from service.settings import Settings\n"
        "create_app(Settings())\n"
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
