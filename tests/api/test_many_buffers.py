"""Requests for many buffers, or for records at their limits: bounded, counted, and dropped if nobody awaits them."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from service.api.buffers.models import MAX_LISTED_BYTES
from service.buffers import failpoints
from service.buffers.memory import MemoryStore
from service.buffers.names import BufferName
from service.buffers.perform import MAX_CHANGED_BYTES
from service.buffers.record import Record
from service.buffers.steps import MAX_CONTRIBUTORS_BYTES
from tests.api.calls import add, create, fresh, metadata, ok, state
from tests.api.headers import KEY, REPLAYED
from tests.api.test_memory import Memory
from tests.faults.servers import Server
from tests.serving import assert_problem, in_flight, serving, wait_until

CROWD = [f"{number:03}{chr(0x10400) * 55}" for number in range(MAX_CONTRIBUTORS_BYTES // 223)]
"""Names of contributors as long as names may be in bytes, as many as a buffer may expect."""

EARLIER = [f"{number:03}{chr(0x10400) * 55}" for number in range(1000)]
"""The names that a buffer could expect before they were bounded in bytes: 223 KB."""

Ask = Callable[[httpx.Client], httpx.Response]


# ----- the names of contributors -----


@pytest.mark.parametrize("names", [EARLIER, [*CROWD, "é" * 100]])
def test_names_of_contributors_are_bounded_in_bytes(http: httpx.Client, names: list[str]) -> None:
    name = create(http, contributors=CROWD)
    before = state(http, name)
    for method, path, body in (
        ("PUT", f"/v1/buffers/{fresh()}", {"shape": [1], "contributors": names}),
        ("POST", "/v1/buffers/create", {"buffers": {fresh(): {"shape": [1], "contributors": names}}}),
        ("PATCH", f"/v1/buffers/{name}", {"contributors": names}),
        ("PATCH", f"/v1/buffers?prefix={name}", {"contributors": names}),
    ):
        answer = http.request(method, path, json=body)
        problem = assert_problem(answer, 422, "invalid_parameter", f"{len(''.join(names).encode())} bytes")
        assert (problem["parameter"], problem["limit"]) == ("contributors", MAX_CONTRIBUTORS_BYTES)
    assert state(http, name) == before


def test_names_that_add_are_bounded_in_bytes(http: httpx.Client) -> None:
    name = create(http, per_contributor=2)
    for each in CROWD:
        add(http, name, [1, 2], contributor=each)
    before = state(http, name)
    for path, body in ((f"{name}/accumulate", {"gradient": [1, 2]}), ("accumulate", {name: [1, 2]})):
        answer = http.post(f"/v1/buffers/{path}", params={"contributor": "é" * 100}, json=body)
        problem = assert_problem(answer, 422, "invalid_parameter", "bytes; the limit is")
        assert problem["limit"] == MAX_CONTRIBUTORS_BYTES
    assert state(http, name) == before
    assert add(http, name, [1, 2], contributor=CROWD[0]).status_code == 200


# ----- the number of buffers -----


CHANGES: dict[str, Ask] = {
    "take": lambda client: client.post("/v1/buffers/take", params={"prefix": "p."}),
    "take named": lambda client: client.post("/v1/buffers/take", json={"names": ["p.0", "p.1", "p.2"]}),
    "receipts": lambda client: client.post("/v1/buffers/take", params={"prefix": "p.", "return": "receipt"}),
    "zero": lambda client: client.post("/v1/buffers/zero", params={"prefix": "p."}),
    "rules": lambda client: client.patch("/v1/buffers", params={"prefix": "p."}, json={"quorum": 3}),
    "delete": lambda client: client.delete("/v1/buffers", params={"prefix": "p."}),
    "delete all": lambda client: client.delete("/v1/buffers", params={"all": "true"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_request_changes_a_bounded_number_of_buffers(change: str) -> None:
    with serving(max_tensors=2) as url, httpx.Client(base_url=url, timeout=30) as client:
        for number in range(3):
            create(client, f"p.{number}")
        before = state(client, "p.0", "p.1", "p.2")
        problem = assert_problem(
            CHANGES[change](client), 413, "too_many_tensors", "3 buffers", "GRADSERVE_MAX_TENSORS", "longer prefixes"
        )
        assert problem["limit"] == 2
        assert state(client, "p.0", "p.1", "p.2") == before
        assert list(ok(client.post("/v1/buffers/value", params={"prefix": "p."}))["buffers"]) == ["p.0", "p.1", "p.2"]
        client.delete("/v1/buffers/p.2")
        assert CHANGES["zero"](client).status_code == 200


def step(client: httpx.Client, **parameters: list[str]) -> httpx.Response:
    return client.post("/v1/ops/SGDOptimizerV2", params=parameters, json={"lr": 1})


STEPS: dict[str, Ask] = {
    "from": lambda client: step(client, **{"from": ["weights:p.*", "gradients:p.*"]}),
    "from a step": lambda client: step(client, **{"from": ["weights:p.*", "gradients:p.*@0"]}),
    "set": lambda client: step(client, **{"from": ["weights:p.*", "gradients:p.*"], "set": ["updated_weights:p.*"]}),
}


@pytest.mark.parametrize("ask", [name for name in (CHANGES | STEPS) if name != "take named"])
def test_no_more_names_of_a_prefix_are_read_than_show_that_they_are_too_many(
    ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """257 names are read in any case, to know whether there are few."""
    read, names = list[int](), MemoryStore.names

    def counted(store: MemoryStore, prefix: str, limit: int | None = None) -> list[str]:
        found = names(store, prefix, limit)
        read.append(len(found))
        return found

    with serving(max_tensors=300) as url, httpx.Client(base_url=url, timeout=30) as client:
        for third in range(3):
            many = {f"p.{third}.{number}": {"shape": [1]} for number in range(300)}
            client.post("/v1/buffers/create", json={"buffers": many}).raise_for_status()
        monkeypatch.setattr(MemoryStore, "names", counted)
        assert_problem((CHANGES | STEPS)[ask](client), 413, "too_many_tensors", "limit is 300")
        assert 300 < max(read) <= 302
        assert len(ok(client.post("/v1/buffers/value", params={"prefix": "p."}))["buffers"]) == 900


@pytest.mark.parametrize("named", [False, True])
def test_a_repeated_request_is_answered_after_a_limit_was_lowered(tmp_path: Path, named: bool) -> None:
    names = [f"p.{number}" for number in range(3)]
    request = {"json": {"names": names}} if named else {"params": {"prefix": "p."}}
    answers = []
    for most in (3, 2):
        with serving(store=f"lmdb:{tmp_path}/store", max_tensors=most) as url, httpx.Client(base_url=url) as client:
            for name in names:
                client.put(f"/v1/buffers/{name}", json={"shape": [1]})
            answers.append(client.post("/v1/buffers/zero", headers={KEY: "k"}, **request))
            assert metadata(client, "p.2")["step"] == 1
    first, again = answers
    assert (ok(again), again.headers[REPLAYED]) == (ok(first), "true")


def test_rules_of_many_buffers_are_bounded_in_bytes(http: httpx.Client) -> None:
    """Together they would have more bytes than a request may write."""
    count, prefix = MAX_CHANGED_BYTES // len("".join(CROWD).encode()) + 1, fresh("many")
    names = [f"{prefix}.{number}" for number in range(count)]
    ok(http.post("/v1/buffers/create", json={"buffers": {name: {"shape": [1]} for name in names}}))
    before = state(http, names[0], names[-1])
    for query, body in (({"prefix": prefix}, {}), ({}, {"names": names})):
        answer = http.patch("/v1/buffers", params=query, json={"contributors": CROWD, **body})
        problem = assert_problem(answer, 413, "too_many_tensors", "contributors", "send it in parts")
        assert problem["limit"] == MAX_CHANGED_BYTES
    assert state(http, names[0], names[-1]) == before


# ----- lists -----


def test_a_page_ends_by_bytes(http: httpx.Client) -> None:
    prefix, count = fresh("page"), 2 * MAX_LISTED_BYTES // MAX_CONTRIBUTORS_BYTES + 10
    names = [f"{prefix}.{number:03}" for number in range(count)]
    buffers = {name: {"shape": [1], "contributors": CROWD} for name in names}
    ok(http.post("/v1/buffers/create", json={"buffers": buffers}))
    found, cursors, cursor = list[str](), 0, ""
    while cursor is not None:
        answer = http.get("/v1/buffers", params={"prefix": prefix, "limit": 1000, "cursor": cursor})
        assert len(answer.content) < 6 * MAX_LISTED_BYTES
        found += [one["name"] for one in ok(answer)["buffers"]]
        cursor, cursors = answer.json()["next_cursor"], cursors + 1
    assert (found, cursors) == (names, 3)


# ----- memory -----


COUNT = 300
"""Buffers of the largest records: a request for all of them may not take all memory of this server."""


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server that may hold 16 MB, with buffers whose records have 10 MB together."""
    store = tmp_path_factory.mktemp("heavy") / "store"
    with (
        Server(store, max_bytes_in_flight=16 << 20, max_tensor_bytes=4 << 20, reuse_bytes=0, threads=2) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        buffers = {f"h.{number}": {"shape": [1], "contributors": CROWD} for number in range(COUNT)}
        for start in range(0, COUNT, 20):
            part = dict([*buffers.items()][start : start + 20])
            ok(client.post("/v1/buffers/create", json={"buffers": part}))
            for each in CROWD:
                ok(client.post("/v1/buffers/accumulate", params={"contributor": each}, json={n: [1] for n in part}))
        yield server


HEAVY: dict[str, Ask] = {
    "take": lambda client: client.post("/v1/buffers/take?prefix=h."),
    "take, receipts": lambda client: client.post("/v1/buffers/take?prefix=h.&return=receipt"),
    "take named": lambda client: client.post("/v1/buffers/take", json={"names": [f"h.{n}" for n in range(COUNT)]}),
    "zero": lambda client: client.post("/v1/buffers/zero?prefix=h."),
    "rules": lambda client: client.patch("/v1/buffers?prefix=h.", json={"contributors": CROWD[1:]}),
    "delete": lambda client: client.delete("/v1/buffers?prefix=h."),
    "value": lambda client: client.post("/v1/buffers/value?prefix=h."),
    "value of a step": lambda client: client.post("/v1/buffers/value?prefix=h.&step=0"),
    "statistics": lambda client: client.post("/v1/buffers/statistics?prefix=h."),
}


@pytest.mark.parametrize("case", HEAVY)
def test_records_are_counted_before_they_are_loaded(heavy: Server, case: str) -> None:
    with httpx.Client(base_url=heavy.url, timeout=60) as client:
        before = metadata(client, "h.0")

        def ask() -> None:
            assert_problem(HEAVY[case](client), 413, "tensor_too_large", "GRADSERVE_MAX_BYTES_IN_FLIGHT")

        assert Memory(heavy.process.pid).growth(ask) < 16 << 20
        assert metadata(client, "h.0") == before


def test_a_list_of_the_largest_records_takes_little_memory(heavy: Server) -> None:
    def ask() -> None:
        with httpx.Client(base_url=heavy.url, timeout=60) as client:
            assert len(ok(client.get("/v1/buffers?limit=1000"))["buffers"]) < 100

    assert Memory(heavy.process.pid).growth(ask) < 48 << 20


def test_records_for_sparse_gradients_are_loaded_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, look = list[int](), MemoryStore.look

    def counted(store: MemoryStore, names: Collection[BufferName]) -> dict[BufferName, Record]:
        loaded.append(len(names))
        return look(store, names)

    monkeypatch.setattr(MemoryStore, "look", counted)
    names = [f"{number}" for number in range(600)]
    with serving() as url, httpx.Client(base_url=url, timeout=60) as client:
        ok(client.post("/v1/buffers/create", json={"buffers": {name: {"shape": [1]} for name in names}}))
        rows = {name: {"indices": [0], "rows": [2]} for name in names}
        assert ok(client.post("/v1/buffers/accumulate", json=rows))["buffers"]["599"]["count"] == 1
    assert (max(loaded), sum(loaded)) == (256, 600)


# ----- clients that leave -----


def test_many_changes_that_nobody_awaits_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has not begun with them."""
    held, opened, wanted = threading.Event(), threading.Event(), [True]

    def hold(point: str) -> None:
        if point == "before commit" and wanted and wanted.pop():
            held.set()
            assert opened.wait(60)

    with serving(store=f"lmdb:{tmp_path}/store") as url, httpx.Client(base_url=url, timeout=60) as client:
        names = [f"p.{number}" for number in range(300)]
        ok(client.post("/v1/buffers/create", json={"buffers": {name: {"shape": [1]} for name in names}}))
        create(client, "a")
        monkeypatch.setattr(failpoints, "action", hold)
        with ThreadPoolExecutor() as pool:
            first = pool.submit(add, client, "a", [1, 2])
            assert held.wait(60)
            address = httpx.URL(url)
            with socket.create_connection((address.host, address.port or 0)) as leaving:
                leaving.sendall(b"POST /v1/buffers/zero?prefix=p. HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
                wait_until(lambda: in_flight(url) == 2)
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            wait_until(lambda: in_flight(url) == 1)
            opened.set()
            assert first.result().status_code == 200
        assert add(client, "p.0", [1]).json()["step"] == 0
        assert ok(client.post("/v1/buffers/zero?prefix=p.", headers={KEY: "k"}))["buffers"]["p.299"]["step"] == 1
