"""Waiting for a step, in several polls, with faults in between."""

from __future__ import annotations

import httpx
import pytest
from gradserve_client import ConnectionFailed, StepOpen

from tests.clients.both import connected
from tests.clients.scripted import Answering, Clock, Scripted, Step, never_sent, says, through


def test_polls_are_equal_and_survive_faults(kind: str, url: str, clock: Clock) -> None:
    still = says(409, code="too_few_gradients")

    def polled(step: Step) -> Step:
        def wait(send: Answering) -> httpx.Response:
            clock.now += 5
            return step(send)

        return wait

    transport = Scripted(polled(still), never_sent, says(502), polled(still), polled(still))
    with through(kind, url, transport) as server:
        with connected("sync", url) as other:
            other.buffers["scripted"].accumulate([1, 2])
        taken = server.buffers["scripted"].take(min_count=1, timeout=50)
    assert taken.value.tolist() == [1.0, 2.0]
    assert {one.url.params["timeout"] for one in transport.seen} == {"5.0"}
    assert len({one.headers["idempotency-key"] for one in transport.seen}) == 1


def test_a_server_that_answers_without_waiting_is_polled_slowly(kind: str, url: str, clock: Clock) -> None:
    transport = Scripted(forever=says(409, code="step_open"))
    start = clock.now
    with through(kind, url, transport) as server, pytest.raises(StepOpen):
        server.buffers["scripted"].value(step=0, timeout=10)
    assert 1 < len(transport.seen) < 200
    assert clock.now - start == pytest.approx(10, abs=1)


def test_a_server_that_is_gone_ends_the_wait(kind: str, url: str, clock: Clock) -> None:
    start = clock.now
    with through(kind, url, Scripted(forever=never_sent), timeout=5) as server, pytest.raises(ConnectionFailed):
        server.buffers["scripted"].value(step=0, timeout=100)
    assert clock.now - start <= 105


def test_long_waits_forgive_many_faults(kind: str, url: str, clock: Clock) -> None:
    def poll(send: Answering) -> httpx.Response:
        clock.now += 20
        return says(409, code="step_open")(send)

    transport = Scripted(*[never_sent, never_sent, poll] * 5)
    with through(kind, url, transport, max_retries=2) as server:
        with connected("sync", url) as other:
            other.buffers["scripted"].take()
        assert server.buffers["scripted"].value(step=0, timeout=2000).tolist() == [0.0, 0.0]
