"""Several servers as one: where buffers are, what all servers answer together, and what counts after failures."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import numpy as np
import pytest
from gradserve_client import (
    AsyncClient,
    Client,
    ConnectionFailed,
    InvalidInput,
    KeyReused,
    NotFound,
    StaleStep,
    StepOpen,
)
from gradserve_client._http import policy
from gradserve_client._http.placement import Placement, balanced
from hypothesis import given
from hypothesis import strategies as st

from tests.clients.both import adding, connected, go_on
from tests.clients.conftest import delete_all
from tests.clients.scripted import Scripted
from tests.faults.servers import Server

NAMES = [f"layer{number}.{part}" for number in range(10) for part in ("weight", "bias")]


@pytest.fixture(scope="module")
def shared(urls: list[str], kind: str) -> Iterator[Any]:
    with connected(kind, urls, timeout=20) as server:
        yield server


@pytest.fixture
def shards(shared: Any) -> Iterator[Any]:
    """A client of three servers, without buffers before and after the test."""
    delete_all(shared)
    yield shared
    delete_all(shared)


def create(server: Any, *names: str, **rules: Any) -> None:
    for name in names:
        server.buffers[name].create((2,), **rules)


def ones(*names: str) -> dict[str, Any]:
    return {name: np.full(2, 1.0 + number, np.float32) for number, name in enumerate(names)}


def on_each(server: Any) -> dict[str, str]:
    """Return a name of a buffer on each server, by the server's URL."""
    placement = Placement(server.urls)
    names: dict[str, str] = {}
    for number in range(100):
        names.setdefault(server.urls[placement.server_of(f"w{number}")], f"w{number}")
    assert len(names) == len(server.urls)
    return {url: names[url] for url in server.urls}


# ----- where buffers are -----

LISTS = st.lists(st.integers(1, 60_000), min_size=2, max_size=6, unique=True).map(
    lambda ports: [f"http://10.0.0.{port % 250}:{port}" for port in ports]
)


@given(LISTS, st.integers(0, 1000))
def test_names_are_spread_evenly(urls: list[str], seed: int) -> None:
    placement = Placement(urls)
    counts = Counter(placement.server_of(f"model{seed}.layer{number}.weight") for number in range(600))
    share = 600 / len(urls)
    assert all(abs(counts[number] - share) < 6 * share**0.5 for number in range(len(urls)))


@given(LISTS, st.randoms())
def test_a_further_server_moves_only_names_to_itself(urls: list[str], random: Any) -> None:
    before, after = Placement(urls[:-1]), Placement(random.sample(urls, len(urls)))
    for name in NAMES:
        assert after.urls[after.server_of(name)] in (before.urls[before.server_of(name)], urls[-1])


@given(LISTS, st.lists(st.integers(0, 1 << 30), min_size=1, max_size=60), st.randoms())
def test_bytes_are_balanced_whatever_the_order(urls: list[str], sizes: list[int], random: Any) -> None:
    named = {f"p{number}": size for number, size in enumerate(sizes)}
    places = balanced(named, urls)
    held = [sum(named[name] for name, place in places.items() if place == url) for url in urls]
    assert max(held) - min(held) <= max(sizes)
    shuffled = dict(random.sample(list(named.items()), len(named)))
    assert balanced(shuffled, random.sample(urls, len(urls))) == places


def test_each_buffer_is_on_the_server_of_its_name(shards: Any) -> None:
    create(shards, *NAMES)
    placement = Placement(shards.urls)
    for number, url in enumerate(shards.urls):
        with Client(url) as one:
            wanted = sorted(name for name in NAMES if placement.server_of(name) == number)
            assert [info.name for info in one.buffers.list()] == wanted != []
    assert shards.places("layer3.") == {
        name: shards.urls[placement.server_of(name)] for name in NAMES if name.startswith("layer3.")
    }


def test_buffers_can_be_placed(shards: Any) -> None:
    first, second, third = shards.urls
    with Client(third) as one:
        create(one, "elsewhere")
    places = shards.places("else")
    assert places == {"elsewhere": third}
    shards.place(places)
    assert shards.buffers["elsewhere"].accumulate([1, 2]).count == 1
    assert shards.buffers.accumulate({"elsewhere": [1, 2]})["elsewhere"].count == 2
    with pytest.raises(InvalidInput, match="'w' is on http://other, but the client's servers are " + first):
        shards.place({"w": "http://other"})
    assert shards.url == first
    assert shards.urls == (first, second, third)


@pytest.mark.parametrize(
    ("urls", "words"), [([], "empty"), (["http://a", "http://b", "http://A:80/"], "has http://a twice")]
)
def test_malformed_lists_are_refused(urls: list[str], words: str) -> None:
    for make in (Client, AsyncClient):
        with pytest.raises(InvalidInput, match=words):
            make(urls)


def test_a_list_of_one_is_a_server(url: str, kind: str) -> None:
    with connected(kind, [url]) as server:
        assert server.urls == (server.url,) == (url,)
        create(server, "single")
        assert server.places("sing") == {"single": url}
        server.buffers["single"].delete()


# ----- as if they were one server -----


def story(server: Any, prefix: str) -> Iterator[Any]:
    """Use every method that takes several buffers, and yield the results."""
    names = [prefix + name for name in NAMES]
    create(server, *names, quorum=3, keep=2)
    yield [(info.name, info.shape, info.quorum) for info in server.buffers.list(prefix)]
    for weight in (1, 2, 4):
        receipts = server.buffers.accumulate(ones(*reversed(names)), weight=weight, idempotency_key=f"{prefix}{weight}")
        yield sorted(receipts.items())
    yield server.buffers.accumulate(ones(*names), weight=4, idempotency_key=f"{prefix}5")[names[0]]
    values = server.buffers.value(names, step=0, reduce="mean", timeout=5)
    yield {name: value.tolist() for name, value in values.items()}
    yield {name: value.tolist() for name, value in server.buffers.value(prefix=prefix, dtype="float64").items()}
    taken = server.buffers.take(prefix=prefix, min_count=1, step=1)
    yield {name: (one, one.value.tolist()) for name, one in taken.items()}
    yield server.buffers.zero(names[:5], idempotency_key=f"{prefix}6")
    yield server.buffers.zero(names[:5], idempotency_key=f"{prefix}6")
    with pytest.raises(KeyReused):
        server.buffers.accumulate(ones(*names), weight=3, idempotency_key=f"{prefix}1")
    with pytest.raises(StepOpen) as caught:
        server.buffers.value(names, step=3)
    yield caught.value.code
    for call in (server.buffers.take, server.buffers.value):
        with pytest.raises(NotFound):
            call(prefix="none of these")
    yield server.buffers.zero(prefix="none of these")
    with pytest.raises(InvalidInput):
        server.buffers.value([])
    yield server.is_ready(), len(server.operators())


def test_many_servers_answer_as_one(shards: Any, url: str) -> None:
    prefix = f"{uuid.uuid4().hex}."
    with Client(url) as one:
        results = zip(story(shards, prefix), story(one, prefix), strict=True)
        for found, expected in results:
            assert found == expected
        one.buffers.zero(prefix=prefix)
        for info in one.buffers.list(prefix):
            one.buffers[info.name].delete()


def test_results_have_the_order_of_the_names(shards: Any) -> None:
    create(shards, *NAMES)
    names = NAMES[::-1]
    assert [*shards.buffers.accumulate(ones(*names))] == names
    assert [*shards.buffers.value(names)] == names
    assert [*shards.buffers.take(prefix="layer")] == sorted(names)
    assert [info.name for info in shards.buffers.list()] == sorted(names)


def test_many_buffers_are_created_on_their_servers(shards: Any, key: str) -> None:
    names = NAMES[::-1]
    made = shards.buffers.create_many({name: {"shape": 2, "quorum": 2} for name in names}, idempotency_key=key)
    assert [*made] == names
    for url in shards.urls:
        with Client(url) as one:
            for info in one.buffers.list():
                assert shards.buffers[info.name].info() == info == made[info.name]
    assert sorted(info.name for info in shards.buffers.list()) == sorted(names)
    assert shards.buffers.create_many({name: {"shape": 2, "quorum": 2} for name in names}) == made


def test_a_prefix_may_fit_the_buffers_of_one_server(shards: Any) -> None:
    create(shards, "only")
    assert shards.buffers.accumulate({"only": [1, 2]})["only"].count == 1
    assert shards.buffers.value(prefix="on")["only"].tolist() == [1, 2]
    assert shards.buffers.take(prefix="on")["only"].value.tolist() == [1, 2]
    assert [*shards.buffers.zero(prefix="on")] == ["only"]


def test_operators_read_and_add_on_the_server_of_the_buffer(shards: Any) -> None:
    (first, *_, last), server = on_each(shards).values(), shards
    create(server, first, last)
    for name in (first, last):
        assert server.ops.relu_grad([1, 2], [1, -1], into=server.buffers[name]).count == 1
        assert server.ops.relu_grad(server.buffers[name], [1, 1]).tolist() == [1, 0]
    with pytest.raises(
        InvalidInput, match=f"several servers: '{first}' on {server.urls[0]}, '{last}' on .*one request"
    ):
        server.ops.relu_grad(server.buffers[first], [1, 1], into=last)


def test_operators_run_on_every_server_by_turns(urls: list[str], kind: str) -> None:
    transport = Scripted()
    with connected(kind, urls, transport=transport) as server:
        for _ in range(6):
            server.ops.relu_grad([1], [1])
    assert [str(request.url.copy_with(path="/")).rstrip("/") for request in transport.seen] == 2 * urls


# ----- failures -----


def test_errors_name_the_server(shards: Any, key: str) -> None:
    names = on_each(shards)
    for url, name in names.items():
        with pytest.raises(NotFound, match=f"^{url}: ") as caught:
            shards.buffers[name].info()
        assert caught.value.detail == str(caught.value)
    first, second, third = names
    create(shards, names[second])
    with pytest.raises(NotFound, match=rf"^{first}: .*; {third}: ") as caught:
        shards.buffers.accumulate(ones(*names.values()), idempotency_key=key)
    assert (caught.value.idempotency_key, caught.value.maybe_done) == (key, True)
    create(shards, names[first], names[third])
    receipts = shards.buffers.accumulate(ones(*names.values()), idempotency_key=key)
    assert [receipt.count for receipt in receipts.values()] == [1, 1, 1]
    assert [receipt.replayed for receipt in receipts.values()] == [False, True, False]


def test_a_closed_client_says_so_once(urls: list[str], kind: str) -> None:
    with connected(kind, urls) as server:
        server.close()
        with pytest.raises(InvalidInput, match=r"^The client is closed: create a new one$"):
            server.buffers.value(NAMES)
        with pytest.raises(InvalidInput, match=r"^The client is closed"):
            server.is_ready()


@pytest.fixture
def durable(processes: list[Server]) -> Iterator[Client]:
    """A client of the processes, without buffers before and after the test."""
    with Client([process.url for process in processes]) as server:
        server.place(server.places())
        delete_all(server)
    with Client(server.urls) as server:
        yield server
        delete_all(server)


def test_a_retry_after_an_unreachable_server_counts_once_everywhere(
    processes: list[Server], durable: Client, kind: str
) -> None:
    names = [*on_each(durable).values()]
    create(durable, *names, quorum=2)
    with connected(kind, durable.urls, max_retries=0) as server:
        processes[1].kill()
        keys: list[Any] = []
        try:
            for _ in range(2):
                with pytest.raises(ConnectionFailed, match=f"^{durable.urls[1]}: The connection failed") as caught:
                    server.buffers.accumulate(ones(*names), idempotency_key=keys[0] if keys else None)
                assert caught.value.maybe_done
                keys.append(caught.value.idempotency_key)
            assert not server.is_ready()
        finally:
            processes[1].start()
        assert len({*keys}) == 1
        receipts = server.buffers.accumulate(ones(*names), idempotency_key=keys[0])
        assert [(one.count, one.replayed) for one in receipts.values()] == [(1, True), (1, False), (1, True)]
        assert all(one.closed for one in server.buffers.accumulate(ones(*names)).values())
        assert server.is_ready()


def test_steps_close_exactly_through_kills(
    processes: list[Server], durable: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers add to all servers, one of them with `await`, while servers are killed."""
    monkeypatch.setattr(policy, "LONGEST_DELAY", 0.2)
    create(durable, *NAMES[:6], dtype="float64", quorum=3, keep=100)

    def add(mine: Any, value: float) -> None:
        mine.buffers.accumulate(dict.fromkeys(NAMES[:6], np.full(2, value)))

    with adding(durable.urls, add) as counts:
        for process in processes:
            go_on(counts)
            process.restart()
    assert all(counts)
    for info in durable.buffers.list():
        assert 3 * info.step + info.count == sum(counts), info
        kept = [durable.buffers[info.name].value(step=step) for step in info.closed_steps[-100:]]
        if info.step <= 100:
            sums = sum(kept) + durable.buffers[info.name].value()
            assert (sums == counts[0] + 2 * counts[1] + 3 * counts[2]).all()


def test_waits_go_to_all_servers_at_once(shards: Any) -> None:
    names = [*on_each(shards).values()]
    create(shards, *names, quorum=1)

    def close() -> None:
        with Client(shards.urls) as other:
            for name in names:
                other.buffers[name].accumulate([1, 2])

    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(close)
        values = shards.buffers.value(names, step=0, timeout=20)
        closing.result()
    assert {name: value.tolist() for name, value in values.items()} == {name: [1, 2] for name in names}
    with pytest.raises(StaleStep):
        shards.buffers.accumulate(ones(*names), step=0)


def test_an_interrupt_ends_a_wait(urls: list[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Client(urls) as server:
            names = [*on_each(server).values()]
            create(server, *names)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                server.buffers.value(names, step=0, timeout=20)
            server.buffers.take(names)  # ends what still waits in the threads
            delete_all(server)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def test_a_cancelled_call_leaves_the_client_usable(urls: list[str]) -> None:
    async def run() -> None:
        async with AsyncClient(urls) as server:
            names = [*on_each(server).values()]
            for name in names:
                await server.buffers[name].create((2,))
            with anyio.move_on_after(0.1) as scope:
                await server.buffers.take(names, min_count=1, timeout=20)
            assert scope.cancelled_caught
            receipts = await server.buffers.accumulate(ones(*names))
            assert [(one.step, one.count) for one in receipts.values()] == [(0, 1)] * 3
            for name in names:
                await server.buffers[name].delete()

    asyncio.run(run())


def test_graphs_and_groups_of_buffers_are_of_one_server(urls: list[str], kind: str) -> None:
    with connected(kind, urls) as server:
        with pytest.raises(InvalidInput, match="several servers, but a graph is on one"):
            server.graphs["mlp"]
        with pytest.raises(InvalidInput, match="several servers, but a graph is on one"):
            server.graphs.list()
        with pytest.raises(InvalidInput, match="several servers, but a graph is on one"):
            server.graphs.put("mlp", b"")
        with pytest.raises(InvalidInput, match="several servers"):
            server.run("ReduceAllL2", {"X": server.buffers["m.g.*"]})
