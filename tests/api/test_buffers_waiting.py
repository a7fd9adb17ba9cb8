"""Long polls of `/v1/buffers` over real HTTP, with each store and with several processes."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from service.api.http import call
from service.api.http.waiting import Waiting
from service.buffers.memory import MemoryStore
from service.buffers.names import BufferName
from tests.api.calls import (
    PATIENCE,
    add,
    create,
    fresh,
    get,
    loaded,
    metadata,
    naming,
    ok,
    post,
    serving_workers,
    value,
)
from tests.api.headers import TO_SAFETENSORS
from tests.serving import assert_problem, in_flight, serving, wait_until

STORES = ["lmdb", "postgres"]

# ----- waiting -----

waits: list[str] = []
"""The buffers that requests to servers of this process have begun to wait for."""


@pytest.fixture(autouse=True)
def _waits_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    change = Waiting._change

    def noted(self: Waiting, key: Any, *to: Any) -> Any:
        waits.append(key.name)
        return change(self, key, *to)

    monkeypatch.setattr(Waiting, "_change", noted)


def wait_in(pool: ThreadPoolExecutor, call: Callable[..., httpx.Response], *args: Any, **more: Any) -> Any:
    """Return the future answer of a call that has begun to wait."""
    before = len(waits)
    future: Future[httpx.Response] = pool.submit(call, *args, **more)
    wait_until(lambda: len(waits) > before)
    assert not future.done()
    return future


@pytest.mark.parametrize("close", ["quorum", "take"])
def test_a_read_waits_for_the_step(http: httpx.Client, pool: ThreadPoolExecutor, close: str) -> None:
    name = create(http, quorum=2 if close == "quorum" else None)
    waiting = [wait_in(pool, get, http, name, step=0, timeout=60) for _ in range(3)]
    add(http, name, [1, 2])
    assert not any(one.done() for one in waiting)
    if close == "quorum":
        add(http, name, [1, 2])
    else:
        post(http, name, "take")
    for one in waiting:
        answer = ok(one.result(PATIENCE))
        assert (answer["step"], answer["closed"], answer["value"]["data"][0]) == (0, True, answer["count"])


def test_a_read_waits_for_many_buffers(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    a, b = create(http, quorum=1), create(http, quorum=1)
    params = {"step": 0, "timeout": 60}
    waiting = wait_in(pool, http.post, "/v1/buffers/value", json=naming(a, b), params=params, headers=TO_SAFETENSORS)
    add(http, a, [1, 1])
    wait_until(lambda: waits[-1] == b)
    assert not waiting.done()
    add(http, b, [2, 2])
    tensors, _ = loaded(waiting.result(PATIENCE))
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {a: [1, 1], b: [2, 2]}


def test_a_read_waits_for_a_buffer_with_the_longest_name(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    name = create(http, "n" * 200, quorum=1)
    problem = assert_problem(get(http, name, step=0), 409, "step_open")
    assert problem["buffer"] == name
    waiting = wait_in(pool, get, http, name, step=0, timeout=60)
    add(http, name, [1, 2])
    assert ok(waiting.result(PATIENCE))["step"] == 0


def test_a_take_waits_for_its_count(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    name, other = create(http), create(http)
    waiting = wait_in(pool, post, http, name, "take", min_count=3, timeout=60)
    both = wait_in(pool, http.post, "/v1/buffers/take", json=naming(other), params={"min_count": 1, "timeout": 60})
    for _ in range(2):
        add(http, name, [1, 2])
        assert not waiting.done()
    add(http, name, [1, 2])
    answer = ok(waiting.result(PATIENCE))
    assert (answer["count"], answer["value"]["data"]) == (3, [3, 6])
    add(http, other, [1, 2])
    assert ok(both.result(PATIENCE))["buffers"][other]["value"]["data"] == [1, 2]


def test_each_waiting_take_takes_once(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    name = create(http)
    waiting = [wait_in(pool, post, http, name, "take", min_count=2, timeout=PATIENCE) for _ in range(4)]
    added = 0
    while not all(one.done() for one in waiting):
        ok(add(http, name, [1, 2]))
        added += 1
    answers = [ok(one.result()) for one in waiting]
    assert sorted(one["step"] for one in answers) == [0, 1, 2, 3]
    assert all(one["count"] >= 2 for one in answers)
    assert sum(one["value"]["data"][0] for one in answers) + value(http, name)[0] == added


def test_a_wait_ends_at_its_timeout(http: httpx.Client) -> None:
    name = create(http, quorum=2)
    add(http, name, [1, 1])
    problem = assert_problem(get(http, name, step=0, timeout=0.05), 409, "step_open", "1 of 2")
    assert problem["count"] == 1
    assert_problem(get(http, name, step=3, timeout=0.05), 409, "step_open")
    assert ok(get(http, name, timeout=60))["count"] == 1  # nothing to wait for
    assert_problem(get(http, fresh(), step=0, timeout=60), 404, "unknown_buffer")
    assert_problem(post(http, fresh(), "take", min_count=1, timeout=60), 404, "unknown_buffer")


def test_a_buffer_that_expires_during_a_wait_is_unknown(http: httpx.Client) -> None:
    name = create(http, quorum=2, ttl_seconds=0.2)
    assert_problem(get(http, name, step=0, timeout=1), 404, "unknown_buffer", name)


def test_deleting_buffers_does_not_prolong_a_wait_for_a_prefix(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    """A wait that each delete restarts would never end."""
    prefix = fresh("pre") + "."
    names = [create(http, prefix + letter) for letter in "ab"]
    waiting = wait_in(pool, http.post, "/v1/buffers/take", params={"prefix": prefix, "min_count": 1, "timeout": 1})

    def disturbed() -> bool:
        for name in names:
            http.delete(f"/v1/buffers/{name}").raise_for_status()
            create(http, name)
        return bool(waiting.done())

    wait_until(disturbed)
    assert_problem(waiting.result(), 409, "too_few_gradients")


@pytest.mark.parametrize("what", ["value", "take"])
def test_a_wait_ends_when_its_buffer_expires(http: httpx.Client, pool: ThreadPoolExecutor, what: str) -> None:
    name = create(http, ttl_seconds=0.5)
    if what == "value":
        waiting = pool.submit(get, http, name, step=0, timeout=2 * PATIENCE)
    else:
        waiting = pool.submit(post, http, name, "take", min_count=1, timeout=2 * PATIENCE)
    assert_problem(waiting.result(PATIENCE), 404, "unknown_buffer", name)


def test_a_wait_ends_when_its_buffer_is_deleted(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    name, other = create(http), create(http)
    waiting = [
        wait_in(pool, http.post, "/v1/buffers/take?min_count=1&timeout=60", json=naming(name, other)),
        wait_in(pool, http.post, "/v1/buffers/value?step=0&timeout=60", json=naming(name, other)),
        wait_in(pool, get, http, name, step=0, timeout=60),
        wait_in(pool, post, http, name, "take", min_count=1, timeout=60),
    ]
    http.delete(f"/v1/buffers/{name}")
    for one in waiting:
        assert_problem(one.result(PATIENCE), 404, "unknown_buffer", name)


def test_a_wait_ends_when_its_step_is_zeroed(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    name = create(http)
    waiting = wait_in(pool, get, http, name, step=0, timeout=60)
    post(http, name, "zero")
    assert_problem(waiting.result(PATIENCE), 410, "step_gone")


@pytest.mark.parametrize("accept", ["", "application/json", "application/vnd.safetensors"])
def test_a_wait_ends_when_the_tag_changes(http: httpx.Client, pool: ThreadPoolExecutor, accept: str) -> None:
    name = create(http)
    tag = get(http, name, {"Accept": accept}).headers["etag"] if accept else '"0-0"'
    waiting = wait_in(pool, post, http, name, "take", {"If-Match": tag}, min_count=2, timeout=60)
    add(http, name, [1, 2])
    assert_problem(waiting.result(PATIENCE), 412, "precondition_failed")


def test_a_wait_for_a_prefix_takes_the_buffers_present_at_its_end(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    prefix = fresh("late.")
    first, second = create(http, f"{prefix}:a"), create(http, f"{prefix}:b")
    params = {"prefix": f"{prefix}:", "min_count": 1, "timeout": 60}
    waiting = wait_in(pool, http.post, "/v1/buffers/take", params=params)
    http.delete(f"/v1/buffers/{first}")
    late = create(http, f"{prefix}:c")
    add(http, second, [1, 2])
    wait_until(lambda: waits[-1] == late)
    assert not waiting.done()
    add(http, late, [3, 4])
    taken = ok(waiting.result(PATIENCE))["buffers"]
    assert {name: one["value"]["data"] for name, one in taken.items()} == {second: [1, 2], late: [3, 4]}


@pytest.mark.parametrize("what", ["take?min_count=1", "value?step=0"])
@pytest.mark.parametrize("few", [0, 256])
def test_a_wait_for_many_buffers_ends_alike_in_pool_and_loop(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, what: str, few: int
) -> None:
    monkeypatch.setattr(call, "INLINE_LOOKUPS", few)
    with serving(threads=2) as url, httpx.Client(base_url=url, timeout=30) as http:
        names = [create(http, f"p.{number}", quorum=2 if "value" in what else None) for number in range(5)]
        named = wait_in(pool, http.post, f"/v1/buffers/{what}&timeout=60", json=naming(*names))
        if "value" in what:
            prefixed = wait_in(pool, http.post, f"/v1/buffers/{what}&prefix=p.&timeout=60")
        for name in names * (2 if "value" in what else 1):
            assert not named.done()
            add(http, name, [1, 2])
        taken = ok(named.result(PATIENCE))["buffers"]
        if "value" in what:
            assert ok(prefixed.result(PATIENCE))["buffers"] == taken
        assert [*taken] == names
        assert_problem(http.post(f"/v1/buffers/{what}", json=naming("none", *names)), 404, "unknown_buffer", "none")
        assert [*ok(http.post("/v1/buffers/zero?prefix=p."))["buffers"]] == names


@pytest.mark.parametrize("what", ["take?min_count=1", "value?step=0"])
def test_a_wait_for_names_does_not_look_at_ready_buffers_again(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """One buffer is not ready: the wait looks at that buffer only."""
    looks, look = Counter[str](), MemoryStore.look

    def counted(store: MemoryStore, names: Collection[BufferName]) -> Any:
        looks.update(name.name for name in names)
        return look(store, names)

    monkeypatch.setattr(MemoryStore, "look", counted)
    with serving() as url, httpx.Client(base_url=url, timeout=30) as http:
        names = [create(http, quorum=1 if "value" in what else None) for _ in range(5)]
        for name in names[:-1]:
            add(http, name, [1, 2])
        other = create(http)
        waiting = wait_in(pool, http.post, f"/v1/buffers/{what}&timeout=60", json=naming(*names))
        for seen in range(looks[names[-1]], looks[names[-1]] + 12):
            add(http, other, [1, 1])
            wait_until(lambda seen=seen: looks[names[-1]] > seen)  # type: ignore[misc]
        add(http, names[-1], [1, 2])
        assert len(ok(waiting.result(PATIENCE))["buffers"]) == 5
    assert looks[names[-1]] > 10
    assert max(looks[name] for name in names[:-1]) < 10


@pytest.mark.parametrize("what", ["take?min_count=1", "value?step=0"])
def test_a_wait_for_a_prefix_does_not_list_it_for_each_change(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    listings, names_of = [], MemoryStore.names

    def counted(store: MemoryStore, prefix: str = "", *args: Any, **more: Any) -> Any:
        listings.append(prefix)
        return names_of(store, prefix, *args, **more)

    monkeypatch.setattr(MemoryStore, "names", counted)
    with serving() as url, httpx.Client(base_url=url, timeout=30) as http:
        names = [create(http, f"p.{number}", quorum=2 if "value" in what else None) for number in range(20)]
        other = create(http)
        waiting = wait_in(pool, http.post, f"/v1/buffers/{what}&prefix=p.&timeout=60")
        for _ in range(30):
            add(http, other, [1, 1])
        for name in names * 2:
            add(http, name, [1, 2])
        assert len(ok(waiting.result(PATIENCE))["buffers"]) == 20
    assert 2 <= len(listings) <= 4


@pytest.mark.parametrize("what", ["take?min_count=1", "value?step=0"])
def test_a_wait_for_a_prefix_ends_with_the_last_buffer(http: httpx.Client, pool: ThreadPoolExecutor, what: str) -> None:
    name = create(http)
    waiting = wait_in(pool, http.post, f"/v1/buffers/{what}&prefix={name}&timeout=60")
    http.delete(f"/v1/buffers/{name}")
    assert_problem(waiting.result(PATIENCE), 404, "unknown_buffer", name)


@pytest.mark.parametrize("path", ["/{name}/take?", "/take?prefix={name}&"])
def test_a_take_of_more_than_the_quorum_is_refused(http: httpx.Client, path: str) -> None:
    """The count returns to zero at the quorum, so a larger count never comes."""
    name = create(http, quorum=2)
    answer = http.post(f"/v1/buffers{path.format(name=name)}min_count=2&timeout=60")
    problem = assert_problem(answer, 422, "invalid_parameter", "min_count is 2", "quorum of 2", f"'{name}'")
    assert problem["parameter"] == "min_count"
    assert_problem(post(http, name, "take", min_count=1), 409, "too_few_gradients")


@pytest.mark.parametrize("end", ["/{name}/take?", "/take?prefix={name}&"])
def test_a_client_that_leaves_takes_nothing(http: httpx.Client, pool: ThreadPoolExecutor, end: str) -> None:
    """A later wait for the same change ends: it would have woken the take before."""
    name = create(http)
    path = f"/v1/buffers{end.format(name=name)}min_count=1&timeout=60"
    with socket.create_connection((http.base_url.host, http.base_url.port or 80)) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        wait_until(lambda: in_flight(http.base_url) == 1)
    wait_until(lambda: in_flight(http.base_url) == 0)
    later = wait_in(pool, post, http, name, "take", {"If-Match": '"0-0"'}, min_count=2, timeout=60)
    add(http, name, [1, 2])
    assert_problem(later.result(PATIENCE), 412, "precondition_failed")
    assert metadata(http, name)["step"] == 0
    assert value(http, name) == [1, 2]


def test_a_connection_serves_requests_after_a_wait(http: httpx.Client) -> None:
    with httpx.Client(base_url=http.base_url, limits=httpx.Limits(max_connections=1), timeout=30) as client:
        name = create(client)
        for _ in range(3):
            assert_problem(get(client, name, step=0, timeout=0.01), 409, "step_open")
            assert_problem(post(client, name, "take", min_count=9, timeout=0.01), 409, "too_few_gradients")
            assert ok(add(client, name, [1, 1]))["updated"] is True


# ----- several processes -----


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_workers(2, tmp_path_factory.mktemp("shared")) as url:
        yield url


@pytest.fixture
def pair(two_workers: str) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Yield two clients, each connected to a different worker."""
    with ExitStack() as stack:
        clients: dict[int, httpx.Client] = {}
        deadline = time.monotonic() + PATIENCE
        while len(clients) < 2:
            assert time.monotonic() < deadline, "one worker gets all connections"
            one = httpx.Limits(max_connections=1)
            client = stack.enter_context(httpx.Client(base_url=two_workers, timeout=30, limits=one))
            if not clients:
                client.post("/v1/ops/ReluGrad", json={"dY": [1], "X": [1]})
            stats = client.get("/v2/models/ReluGrad/stats").json()["model_stats"]
            clients.setdefault(stats[0]["inference_count"], client)
        first, second = clients.values()
        yield first, second


def wait_there(pool: ThreadPoolExecutor, call: Callable[..., Any], here: httpx.Client, *args: Any, **more: Any) -> Any:
    """Return the future answer of the only call in flight. A worker process does not show that the call waits."""
    future = pool.submit(call, here, *args, **more)
    wait_until(lambda: all(in_flight(here.base_url) for _ in range(20)))  # either process answers these meanwhile
    return future


def test_a_wait_ends_with_the_add_in_another_process(pair: tuple[httpx.Client, ...], pool: ThreadPoolExecutor) -> None:
    for here, there in (pair, pair[::-1]):
        name, taken = create(here, quorum=2), create(there)
        reading = wait_there(pool, get, here, name, step=0, timeout=60)
        add(there, name, [1, 2])
        time.sleep(0.02)  # a worker process does not show that it has looked
        assert not reading.done()
        add(there, name, [1, 2])
        assert ok(reading.result(PATIENCE))["value"]["data"] == [2, 4]
        taking = wait_there(pool, post, here, taken, "take", min_count=1, timeout=60)
        add(there, taken, [1, 2])
        assert ok(taking.result(PATIENCE))["value"]["data"] == [1, 2]


def test_workers_all_reduce_through_two_processes(two_workers: str, pool: ThreadPoolExecutor) -> None:
    """Sixteen clients all-reduce, each request on a new connection."""

    def work(number: int) -> list[Any]:
        read = []
        for step in range(8):
            with httpx.Client(base_url=two_workers, timeout=PATIENCE) as client:
                add(client, name, [number, 1], step=step)
            with httpx.Client(base_url=two_workers, timeout=PATIENCE) as client:
                read.append(value(client, name, step=step, timeout=PATIENCE))
        return read

    with httpx.Client(base_url=two_workers) as client:
        name = create(client, quorum=16, keep=2)
    for read in pool.map(work, range(16)):
        assert read == [[sum(range(16)), 16]] * 8
