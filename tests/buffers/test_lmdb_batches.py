"""Group commit: waiting requests share a transaction, and a failed request fails alone."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from service.buffers import failpoints
from service.buffers.changes import Add, Delete
from service.buffers.perform import Request
from service.errors import GradserveError, NonfiniteGradient, ShapeMismatch, StaleStep, StoreFailed, UnknownBuffer
from tests.buffers.calls import LARGE, add, create, do, key, ones, request, value
from tests.buffers.stores import PATIENCE, Gate, Reopen


def test_waiting_requests_share_a_transaction(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    store, gate = reopen(), Gate(monkeypatch)
    create(store, "a", "b")
    before = store.generation()
    names = ["a" if number % 2 else "b" for number in range(64)]
    futures = gate.together(store, [request(Add(name=name, gradient=ones(2))) for name in names])
    counts = [one.result(PATIENCE).receipts[name]["count"] for one, name in zip(futures, names, strict=True)]
    assert counts == [1 + number // 2 for number in range(64)]
    assert store.generation() - before <= 2


def test_a_failed_request_fails_alone_in_its_batch(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    store, gate = reopen(), Gate(monkeypatch)
    create(store, "a", "b", shape=(LARGE,), nonfinite="reject")
    nan = ones(LARGE)
    nan[-1] = np.nan
    good = Add(name="a", gradient=ones(LARGE))
    bad: dict[int, tuple[Request, type[GradserveError]]] = {
        0: (request(Add(name="a", gradient=nan)), NonfiniteGradient),
        7: (request(good, Add(name="b", gradient=nan)), NonfiniteGradient),
        8: (request(Add(name="a", gradient=nan, overwrite=True)), NonfiniteGradient),
        13: (request(good, Add(name="b", gradient=ones(3))), ShapeMismatch),
        14: (request(good, Delete(name="nowhere")), UnknownBuffer),
        15: (request(good, Add(name="b", gradient=nan, step=3)), StaleStep),
        29: (Request([good, Add(name="b", gradient=nan)], key()), NonfiniteGradient),
    }
    requests = [bad[number][0] if number in bad else request(good) for number in range(30)]
    futures = gate.together(store, requests)
    for number, future in enumerate(futures):
        error = future.exception(PATIENCE)
        assert type(error) is (bad[number][1] if number in bad else type(None))
    counts = [one.result().receipts["a"]["count"] for number, one in enumerate(futures) if number not in bad]
    assert counts == list(range(1, 24))
    assert set(value(store, "a")) == {23.0}
    assert not value(store, "b").any()
    assert store.recall(key()) is None


@pytest.mark.parametrize("failing", ["the gradient", "the commit"])
@pytest.mark.parametrize("elements", [2, LARGE])
def test_a_failure_leaves_the_sum_unchanged(
    reopen: Reopen, monkeypatch: pytest.MonkeyPatch, elements: int, failing: str
) -> None:
    """A failed request has already changed values that the writer caches."""
    store = reopen()
    create(store, "a", "b", shape=(elements,), nonfinite="reject")
    add(store, "a", ones(1))
    add(store, "a", ones(1))
    wrong = ones(elements)
    with monkeypatch.context() as patch:
        if failing == "the gradient":
            wrong[-1] = np.nan
        else:

            def fail(point: str) -> None:
                if point == "before commit":
                    raise OSError("no commit")

            patch.setattr(failpoints, "action", fail)
        with pytest.raises((NonfiniteGradient, StoreFailed)):
            do(store, Add(name="b", gradient=ones(1)), Add(name="a", gradient=wrong))
    do(store, *[Add(name=name, gradient=ones(1)) for name in ("a", "b")])
    assert set(value(store, "a")) == {3}
    assert set(value(store, "b")) == {1}


def test_a_repeated_key_in_one_batch_counts_once(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    store, gate = reopen(), Gate(monkeypatch)
    create(store, "a")
    futures = gate.together(store, [Request([Add(name="a", gradient=ones(2))], key()) for _ in range(10)])
    outcomes = [one.result(PATIENCE) for one in futures]
    assert [one.replayed for one in outcomes] == [False] + [True] * 9
    assert all(one.receipts == outcomes[0].receipts for one in outcomes)
    assert store.record("a").count == 1


def test_cancelled_requests_change_nothing(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    store = reopen()
    create(store, "a")
    held, opened = threading.Event(), threading.Event()

    def wait(point: str) -> None:
        held.set()
        opened.wait(PATIENCE)

    monkeypatch.setattr(failpoints, "action", wait)
    first = store.submit(request(Add(name="a", gradient=ones(2))))
    assert held.wait(PATIENCE)
    others = [store.submit(request(Add(name="a", gradient=ones(2)))) for _ in range(4)]
    assert [one.cancel() for one in (first, *others[::2])] == [False, True, True]
    opened.set()
    for one in (first, *others[1::2]):
        one.result(PATIENCE)
    assert store.record("a").count == 3
