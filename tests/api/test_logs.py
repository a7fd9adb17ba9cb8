"""The log: one line for each request with its id, as text or JSON, and without secrets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.api.telemetry import logs
from service.errors import BufferCorrupt, KeysFull, StoreFailed, StoreFull, UnknownBuffer
from service.keys import add
from tests.faults.servers import Server

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def lines(server: Server) -> list[dict[str, Any]]:
    """Return the requests in the log of an ended server. Every line must be JSON."""
    server.process.terminate()
    assert server.process.wait(30) == 0
    records = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert all({"time", "level", "logger"} <= record.keys() for record in records)
    return [record for record in records if record["logger"] == "gradserve.access"]


@pytest.mark.parametrize("workers", [1, 2])
def test_each_request_is_one_line_of_json(tmp_path: Path, workers: int) -> None:
    with Server(tmp_path / "store", workers=workers, access_log=True, log_format="json") as server:
        given = {"X-Request-ID": "mine-1", "traceparent": TRACE}
        answer = httpx.post(f"{server.url}/v1/ops/ReluGrad", json={"dY": [1.5], "X": [2]}, headers=given)
        assert answer.headers["x-request-id"] == "mine-1"
        given = {"traceparent": TRACE.replace("0af7", "<b>7")}
        made = httpx.get(f"{server.url}/v1/nothing", headers=given).headers["x-request-id"]
        httpx.head(f"{server.url}/v1/ops", headers=[("traceparent", TRACE), ("traceparent", TRACE)])
        found = [record for record in lines(server) if not record["path"].startswith("/v2/health")]
    # An answer is there before its line, and the next request may go to the other worker.
    first, second, third = sorted(found, key=lambda record: ("POST", "GET", "HEAD").index(record["method"]))
    assert (third["method"], third["path"], third["status"], third["bytes_sent"]) == ("HEAD", "/v1/ops", 200, 0)
    assert (first["method"], first["path"], first["status"]) == ("POST", "/v1/ops/ReluGrad", 200)
    assert (first["request_id"], first["trace_id"]) == ("mine-1", "0af7651916cd43dd8448eb211c80319c")
    assert (first["bytes"], first["client"]) == (len(b'{"dY":[1.5],"X":[2]}'), "127.0.0.1")
    assert first["milliseconds"] > 0
    assert first["bytes_sent"] == len(answer.content)
    assert second["bytes_sent"] > 100
    assert (second["status"], second["request_id"]) == (404, made)
    assert "trace_id" not in second.keys() | third.keys()
    assert len(made) == 32


def test_the_log_holds_no_secret_no_tensor_and_no_forged_line(tmp_path: Path) -> None:
    secret = add(tmp_path / "keys", "ann", ["ops", "buffers:write"], "team")
    with Server(tmp_path / "store", access_log=True, keys=tmp_path / "keys") as server:
        head = {"Authorization": f"Bearer {secret}"}
        httpx.put(f"{server.url}/v1/buffers/w", json={"shape": [2]}, headers=head).raise_for_status()
        body = {"gradient": [1234.5, 6789.25]}
        httpx.post(f"{server.url}/v1/buffers/w/accumulate", json=body, headers=head).raise_for_status()
        for path in ("/v1/x%0aINFO: forged", "/v1/ops/%1b[31m", "/v1/%ff"):
            assert httpx.get(server.url + path, headers=head).status_code == 404
        server.process.terminate()
        server.process.wait(30)
        text = server.log.read_text()
    assert secret not in text
    assert secret.split("_", 2)[2] not in text
    assert "1234.5" not in text
    assert "6789.25" not in text
    moment = r"(?m)^20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.search(rf"{moment} INFO: POST /v1/buffers/w/accumulate 200 [\d.]+ ms, ", text)
    assert f", {len(json.dumps(body, separators=(',', ':')))} bytes in, " in text
    assert not [line for line in text.splitlines() if line.startswith("INFO: forged")]
    assert "\x1b[31m" not in text


def test_a_full_store_is_one_line_a_minute(tmp_path: Path) -> None:
    with Server(tmp_path / "store", store_bytes=1 << 17) as server, httpx.Client(base_url=server.url) as client:
        client.put("/v1/buffers/w", json={"shape": [100_000]}).raise_for_status()
        answers = [client.post("/v1/buffers/w/accumulate", json={"gradient": 1}) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [507] * 3
        found = re.findall(r"WARNING: Requests get 507 \(store_full\): (.*)", server.log.read_text())
    assert found == [answers[0].json()["detail"]]


def test_each_fault_of_a_store_has_lines_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = (StoreFull("a"), StoreFull("b"), KeysFull("c"), StoreFailed("d"), BufferCorrupt("e"), UnknownBuffer("f"))
    lines: list[object] = []
    monkeypatch.setattr(logs.store_logger, "warning", lambda *line: lines.append(line[1:]))
    log = logs.StoreLog()
    for error in faults:
        log.note(error)
    assert lines == [
        (507, "store_full", "a"),
        (507, "keys_full", "c"),
        (503, "store_failed", "d"),
        (500, "buffer_corrupt", "e"),
    ]


@pytest.mark.parametrize("given", ["", "x" * 129, "a\tb", "\xe9"])
def test_an_invalid_request_id_is_replaced(url: str, given: str) -> None:
    answer = httpx.get(f"{url}/v1/nothing", headers=[(b"X-Request-ID", given.encode("latin-1"))])
    assert answer.headers["x-request-id"] != given
    assert len(answer.headers["x-request-id"]) == 32


@pytest.mark.parametrize("path", ["/v1/ops", "/v2/health/live", "/v1/buffers", "/v1/nothing", "/metrics"])
def test_every_answer_repeats_the_request_id(url: str, path: str) -> None:
    assert httpx.get(url + path, headers={"X-Request-ID": "an id"}).headers.get_list("x-request-id") == ["an id"]


def test_the_log_level_silences_the_access_log(tmp_path: Path) -> None:
    with Server(tmp_path / "store", access_log=True, log_level="warning") as server:
        assert httpx.get(f"{server.url}/v1/ops").status_code == 200
        server.process.terminate()
        server.process.wait(30)
        assert server.log.read_text() == ""
