"""Adds that one request cannot carry: one push on each server, counted whole and once, or not at all."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
from gradserve_client import ConnectionFailed, InvalidInput, KeyReused, NotFound, Rows, StaleStep, StoreFull, TooLarge
from gradserve_client._wire import pushes
from gradserve_client._wire.tensors import MEDIA_TYPE
from safetensors.numpy import save

from tests.clients.both import connected
from tests.clients.conftest import delete_all
from tests.serving import serving, wait_until

LENGTH = 3 << 16
"""Numbers of a buffer: 768 KiB. Three of them are more than the servers of these tests take in a request."""

NAMES = [f"layer{number}" for number in range(12)]


@pytest.fixture(scope="module")
def small_urls() -> Iterator[list[str]]:
    """Yield the URLs of three servers that take 2 MiB in a request."""
    with ExitStack() as servers:
        yield [servers.enter_context(serving(max_body_bytes=2 << 20, store_bytes=64 << 20)) for _ in range(3)]


@pytest.fixture(params=[1, 3], ids=["one server", "three servers"])
def some_urls(request: pytest.FixtureRequest, small_urls: list[str]) -> list[str]:
    return small_urls[: request.param]


@pytest.fixture
def server(some_urls: list[str], kind: str) -> Iterator[Any]:
    """A client of one server or of three, with the buffers."""
    with spread(kind, some_urls) as server:
        yield server


@contextmanager
def spread(kind: str, urls: list[str], **settings: Any) -> Iterator[Any]:
    """Yield a client of these servers, each of which has as many of the buffers; without `settings`, new ones."""
    with connected(kind, urls, **{"timeout": 20, **settings}) as server:
        server.place({name: urls[number % len(urls)] for number, name in enumerate(NAMES)})
        if not settings:
            delete_all(server)
            server.buffers.create_many({name: {"shape": LENGTH, "keep": 2} for name in NAMES})
        yield server
        if not settings:
            delete_all(server)


class Hooked(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Sends requests over HTTP. `before` sees each request, `after` each whose answer has come; both may raise."""

    def __init__(self, before: Callable[[Any], None] | None = None, after: Callable[[Any], None] | None = None) -> None:
        self._inner, self._inner_async = httpx.HTTPTransport(), httpx.AsyncHTTPTransport()
        self._before, self._after = before or (lambda _: None), after or (lambda _: None)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._before(request)
        answer = self._inner.handle_request(request)
        answer.read()
        self._after(request)
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    def close(self) -> None:
        self._inner.close()

    async def aclose(self) -> None:
        await self._inner_async.aclose()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._before(request)
        answer = await self._inner_async.handle_async_request(request)
        await answer.aread()
        self._after(request)
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)


def gradients(value: float = 1.0) -> dict[str, Any]:
    return {name: np.full(LENGTH, value + number, np.float32) for number, name in enumerate(NAMES)}


def sums(server: Any, step: int | None = None) -> list[float]:
    """Return the first number of each buffer, whose numbers are all equal."""
    values = [server.buffers[name].value(step=step) for name in NAMES]
    assert all((value == value[0]).all() for value in values)
    return [float(value[0]) for value in values]


def ascending(start: float) -> list[float]:
    return [start + number for number in range(len(NAMES))]


def is_last(request: httpx.Request) -> bool:
    """Whether the request completes a push."""
    query = request.url.params
    return "push" in query and query.get("part") == query.get("parts")


def test_an_add_that_is_larger_than_a_request_is_one_push(server: Any, key: str) -> None:
    receipts = server.buffers.accumulate(gradients(), weight=2, step=0, contributor="ann", idempotency_key=key)
    assert [*receipts] == NAMES
    assert {(one.count, one.weight, one.replayed) for one in receipts.values()} == {(1, 2.0, False)}
    again = server.buffers.accumulate(gradients(), weight=2, step=0, contributor="ann", idempotency_key=key)
    assert {(one.count, one.replayed) for one in again.values()} == {(1, True)}
    assert sums(server) == [2 * value for value in ascending(1)]
    assert server.buffers.pushes() == []
    with pytest.raises(KeyReused):
        server.buffers.accumulate(gradients(2), weight=2, step=0, contributor="ann", idempotency_key=key)
    assert sums(server) == [2 * value for value in ascending(1)]


def test_rows_and_keys_with_spaces_are_fine(server: Any, key: str) -> None:
    server.buffers["rows"].create((1 << 17, 2))
    sparse = Rows([1], [[5, 6]])
    for _ in range(2):
        server.buffers.accumulate({**gradients(), "rows": sparse}, idempotency_key=f"step 1 {key}")
    assert server.buffers["rows"].value()[:2].tolist() == [[0, 0], [5, 6]]
    assert sums(server) == ascending(1)


def test_a_gradient_that_is_larger_than_a_request_is_too_large(server: Any) -> None:
    with pytest.raises(
        TooLarge, match=r"^The gradient of 'layer3' takes \d+ bytes .*up to 2097152 \(GRADSERVE"
    ) as caught:
        server.buffers.accumulate({**gradients(), "layer3": np.zeros((12, LENGTH))})
    assert (caught.value.code, caught.value.context) == ("body_too_large", {"buffer": "layer3", "limit": 2 << 20})
    assert server.buffers.pushes() == []


def test_a_push_has_a_thousand_parts_at_most(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "PART_BUFFERS", 1)
    with pytest.raises(TooLarge, match=r"parts, but the server takes up to 1000 \(max_parts\)"):
        server.buffers.accumulate({**gradients(), **{f"b{number}": 1.0 for number in range(3100)}})


def test_an_overwrite_is_no_push(server: Any) -> None:
    with pytest.raises(TooLarge):
        server.buffers.accumulate(gradients(), overwrite=True)
    assert server.buffers.pushes() == []


def test_a_refusal_leaves_nothing_on_any_server(server: Any, key: str) -> None:
    server.buffers["layer7"].delete()
    for _ in range(2):
        with pytest.raises(NotFound, match="layer7") as caught:
            server.buffers.accumulate(gradients(), idempotency_key=key)
        assert (caught.value.idempotency_key, caught.value.maybe_done) == (key, False)
        assert server.buffers.pushes() == []
    server.buffers["layer7"].create(LENGTH)
    server.buffers.accumulate(gradients(3), idempotency_key=key)
    assert sums(server) == ascending(3)


def test_a_late_push_counts_nowhere(server: Any) -> None:
    for name in (NAMES[2], NAMES[9]):
        server.buffers[name].take()
    with pytest.raises(StaleStep):
        server.buffers.accumulate(gradients(), step=0)
    assert sums(server) == [0.0] * len(NAMES)
    assert server.buffers.pushes() == []


def test_an_add_without_room_leaves_no_parts(server: Any) -> None:
    """The servers let a namespace stage 16 MiB: a quarter of their stores."""
    names = [f"more{number}" for number in range(96)]
    server.buffers.create_many({name: {"shape": LENGTH} for name in names})
    with pytest.raises(StoreFull, match="incomplete pushes") as caught:
        server.buffers.accumulate({name: np.ones(LENGTH, np.float32) for name in names})
    assert caught.value.code == "pushes_full"
    assert server.buffers.pushes() == []
    server.buffers.accumulate(gradients())


def test_a_push_waits_for_the_room_of_others(
    small_urls: list[str], kind: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three pushes takes more than half of what a namespace may stage. A fourth has broken off."""
    uniform = Mock(wraps=random.uniform)
    monkeypatch.setattr(pushes, "PAUSES", (0.02, 0.1))
    monkeypatch.setattr(pushes, "random", Mock(uniform=uniform))
    names = [f"large{number}" for number in range(14)]
    with spread(kind, small_urls[:1]) as server:
        server.buffers.create_many({name: {"shape": LENGTH} for name in names})
        with httpx.Client(base_url=small_urls[0]) as client:
            for number, name in enumerate(names):
                body = save({name: np.ones(LENGTH, np.float32)})
                query: dict[str, Any] = {"push": key, "part": number, "parts": 99}
                head = {"Content-Type": MEDIA_TYPE}
                client.post("/v1/buffers/accumulate", params=query, headers=head, content=body).raise_for_status()

        def add(_: int) -> int:
            return sum(one.count > 0 for one in server.buffers.accumulate(large).values())

        large = {name: np.ones(LENGTH, np.float32) for name in names}
        with connected(kind, small_urls[0], timeout=2) as hasty, pytest.raises(StoreFull) as caught:
            hasty.buffers.accumulate(large)
        assert (caught.value.code, caught.value.maybe_done) == ("pushes_full", False)
        with ThreadPoolExecutor(3) as threads:
            before = uniform.call_count
            adding = threads.map(add, range(3))
            wait_until(lambda: uniform.call_count > before + 3)
            assert server.buffers.forget_push(key)
            assert [*adding] == [14] * 3
        assert {server.buffers[name].value()[0] for name in names} == {3.0}


def test_a_push_that_broke_off_counts_with_what_comes_next(small_urls: list[str], kind: str, key: str) -> None:
    """An interrupted program comes again with other gradients under the same key."""
    count = 0

    def interrupt(request: httpx.Request) -> None:
        nonlocal count
        count += "push" in request.url.params
        if count == 3:
            raise KeyboardInterrupt

    with spread(kind, small_urls[:1]) as server:
        with connected("sync", small_urls[0], transport=Hooked(interrupt)) as broken, pytest.raises(KeyboardInterrupt):
            broken.buffers.accumulate(gradients(), idempotency_key=key)
        (left,) = server.buffers.pushes("layer")
        assert (left.push, left.staged, left.count, left.refused) == (key, (1, 2), 4, None)
        assert left.bytes == left.count * LENGTH * 4
        server.buffers.accumulate(gradients(5), weight=3, idempotency_key=key)
        assert sums(server) == [3 * value for value in ascending(5)]


@pytest.mark.parametrize("lost", ["before", "after"])
def test_a_completion_that_broke_off_is_repeated(
    some_urls: list[str], server: Any, kind: str, key: str, lost: str
) -> None:
    failed = set[str]()

    def fail_once(request: httpx.Request) -> None:
        host = str(request.url.netloc)
        if is_last(request) and host not in failed:
            failed.add(host)
            raise httpx.ReadError("reset")

    with spread(kind, some_urls, transport=Hooked(**{lost: fail_once})) as broken:
        receipts = broken.buffers.accumulate(gradients(), idempotency_key=key)
    assert len(failed) == len(some_urls)
    assert {(one.count, one.replayed) for one in receipts.values()} == {(1, lost == "after")}
    assert sums(server) == ascending(1)


def test_a_completion_that_failed_on_a_server_is_made_up_for(small_urls: list[str], kind: str, key: str) -> None:
    """Two servers count. The caller repeats the call with its key, and the third counts, too."""

    def fail(request: httpx.Request) -> None:
        if is_last(request) and str(request.url).startswith(small_urls[1]):
            raise httpx.ConnectError("refused")

    with spread(kind, small_urls) as server:
        with spread(kind, small_urls, transport=Hooked(fail), max_retries=0) as broken:
            with pytest.raises(ConnectionFailed, match=f"^{small_urls[1]}: ") as caught:
                broken.buffers.accumulate(gradients(), idempotency_key=key)
            assert (caught.value.idempotency_key, caught.value.maybe_done) == (key, True)
        assert 0 < sum(value == 0 for value in sums(server)) < len(NAMES)
        (left,) = server.buffers.pushes()
        assert len(left.staged) == left.parts - 1
        receipts = server.buffers.accumulate(gradients(), idempotency_key=caught.value.idempotency_key)
        assert {one.count for one in receipts.values()} == {1}
        assert sums(server) == ascending(1)


def test_a_push_that_counts_on_a_server_is_completed_with_its_own_gradients(
    small_urls: list[str], kind: str, key: str
) -> None:
    """The program comes again with other gradients. The servers that have not added the first ones do so now."""

    def fail(request: httpx.Request) -> None:
        if is_last(request) and str(request.url).startswith(small_urls[1]):
            raise httpx.ConnectError("refused")

    with spread(kind, small_urls) as server:
        with spread(kind, small_urls, transport=Hooked(fail), max_retries=0) as broken:
            with pytest.raises(ConnectionFailed):
                broken.buffers.accumulate(gradients(), idempotency_key=key)
        for _ in range(2):
            with pytest.raises(KeyReused):
                server.buffers.accumulate(gradients(5), idempotency_key=key)
        assert sums(server) == ascending(1)
        assert server.buffers.pushes() == []


def test_nothing_counts_before_all_servers_have_all_parts(small_urls: list[str], kind: str, key: str) -> None:
    def fail(request: httpx.Request) -> None:
        if "push" in request.url.params and str(request.url).startswith(small_urls[2]):
            raise httpx.ConnectError("refused")

    with spread(kind, small_urls) as server:
        with spread(kind, small_urls, transport=Hooked(fail), max_retries=0) as broken:
            with pytest.raises(ConnectionFailed, match=f"^{small_urls[2]}: ") as caught:
                broken.buffers.accumulate(gradients(), idempotency_key=key)
            assert not caught.value.maybe_done
        assert sums(server) == [0.0] * len(NAMES)
        assert len(server.buffers.pushes()) == 2
        server.buffers.accumulate(gradients(), idempotency_key=key)
        assert sums(server) == ascending(1)
        assert server.buffers.pushes() == []


def test_a_push_that_was_forgotten_before_its_end_is_staged_again(
    some_urls: list[str], server: Any, kind: str, key: str
) -> None:
    """As when it was staged too long ago."""
    forgotten = set[str]()

    def forget(request: httpx.Request) -> None:
        host, query = str(request.url.netloc), request.url.params
        if is_last(request) and host not in forgotten:
            forgotten.add(host)
            httpx.delete(request.url.copy_with(path="/v1/pushes", query=b""), params={"push": query["push"]})

    with spread(kind, some_urls, transport=Hooked(forget)) as broken:
        receipts = broken.buffers.accumulate(gradients(), idempotency_key=key)
    assert {one.count for one in receipts.values()} == {1}
    assert sums(server) == ascending(1)


def test_pushes_are_listed_and_forgotten(server: Any) -> None:
    server.buffers["other"].create(4)
    with httpx.Client(base_url=server.places("other")["other"]) as client:
        query: dict[str, Any] = {"push": "p1", "part": 1, "parts": 3, "weight": 2, "contributor": "ann"}
        client.post("/v1/buffers/accumulate", params=query, json={"other": [0.5] * 4}).raise_for_status()
    (found,) = server.buffers.pushes("oth")
    assert (found.push, found.parts, found.staged, found.bytes, found.count) == ("p1", 3, (1,), 16, 1)
    assert (found.buffers, found.weight, found.step, found.contributor) == (("other",), 2.0, None, "ann")
    assert found.expires_at - found.began_at == 900
    assert server.buffers.pushes("none") == []
    assert server.buffers.forget_push("p1")
    assert not server.buffers.forget_push("p1")
    assert server.buffers.pushes() == []
    for call in (server.buffers.pushes, server.buffers.forget_push):
        with pytest.raises(InvalidInput, match="must be"):
            call(7)


def test_steps_close_without_their_values(server: Any, key: str) -> None:
    server.buffers.accumulate(gradients())
    closed = server.buffers.close_step(NAMES, min_count=1, step=0, idempotency_key=key)
    assert {(one.step, one.count, one.closed, one.closed_by) for one in closed.values()} == {(0, 1, True, "take")}
    again = server.buffers.close_step(NAMES, min_count=1, step=0, idempotency_key=key)
    assert all(one.replayed for one in again.values())
    assert sums(server, step=0) == ascending(1)
    assert sums(server) == [0.0] * len(NAMES)
    with pytest.raises(StaleStep):
        server.buffers.close_step(prefix="layer", step=0)


def test_a_small_add_is_a_push_too_if_the_server_takes_less_than_others(kind: str) -> None:
    with serving(max_body_bytes=1 << 16) as url, connected(kind, [url], timeout=20) as server:
        server.buffers.create_many({name: {"shape": 10_000} for name in NAMES[:4]})
        small = {name: np.ones(10_000, np.float32) for name in NAMES[:4]}
        for _ in range(2):
            receipts = server.buffers.accumulate(small, idempotency_key="small")
            assert {receipt.count for receipt in receipts.values()} == {1}
        with pytest.raises(TooLarge, match="The body has"):
            server.buffers.accumulate(small, overwrite=True)
        with pytest.raises(TooLarge, match="^The gradient of 'layer0' takes"):
            server.buffers.accumulate({**small, "layer0": np.ones(20_000, np.float32)})
        assert server.buffers["layer0"].info().count == 1
