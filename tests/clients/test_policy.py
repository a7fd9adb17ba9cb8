"""Retries: when the client sends a call again, and when not."""

from __future__ import annotations

import random
import time
from email.utils import formatdate
from typing import Any

import httpx
import pytest
from gradserve_client import (
    Busy,
    ConnectionFailed,
    GradserveError,
    InvalidInput,
    NotFound,
    ServerFailed,
    StoreFull,
    TimedOut,
    TooLarge,
    TooManyBuffers,
    Unavailable,
)
from gradserve_client._http import channels, policy, runner

from tests.clients.both import connected
from tests.clients.scripted import (
    Answering,
    Clock,
    Scripted,
    Step,
    answer_cut,
    answer_lost,
    late,
    mangled,
    never_sent,
    refusal_mangled,
    renamed,
    says,
    sent_on,
    silent,
    stray,
    through,
    unreachable,
)

AGAIN: dict[str, list[Step]] = {
    "never sent": [never_sent, never_sent],
    "the answer is lost": [answer_lost],
    "the answer is cut": [answer_cut, answer_lost],
    "the answer is damaged": [mangled],
    "a refusal is damaged": [answer_lost, refusal_mangled],
    "silence": [silent],
    "late": [late, late],
    "unreachable": [unreachable],
    "busy": [says(429, code="busy", Retry_After="7")],
    "starting": [says(503, code="not_ready")],
    "away, says a proxy": [says(502), says(503), says(504), says(408)],
    "other steps went first": [says(409, code="source_changed"), says(409, code="source_changed")],
    "the key is in progress": [answer_lost, says(409, code="conflict", Retry_After="2")],
    "all at once": [never_sent, late, says(502), answer_lost, says(429), unreachable],
}


@pytest.mark.parametrize("fault", AGAIN)
def test_a_call_is_retried_until_answered_and_counts_once(kind: str, url: str, clock: Clock, fault: str) -> None:
    transport = Scripted(*AGAIN[fault])
    with through(kind, url, transport) as server:
        receipt = server.buffers["scripted"].accumulate([1, 2], weight=3)
        first, *others = transport.seen
        assert len(others) == len(clock.waits) == len(AGAIN[fault])
        for other in others:
            assert (other.content, other.url) == (first.content, first.url)
            assert other.headers == first.headers
        assert (receipt.count, receipt.weight) == (1, 3.0)
        assert receipt.replayed is any(step in (answer_lost, answer_cut, late, mangled) for step in AGAIN[fault])
        assert server.buffers["scripted"].value().tolist() == [3.0, 6.0]


NEVER = {
    "conflict": (says(409, code="conflict"), GradserveError),
    "proxy's conflict": (says(409), GradserveError),
    "too many": (says(409, code="too_many_buffers"), TooManyBuffers),
    "input": (says(422, code="invalid_tensor"), InvalidInput),
    "malformed": (says(400, code="malformed_body"), InvalidInput),
    "not found": (says(404), NotFound),
    "bug": (says(500, code="internal"), ServerFailed),
    "full": (says(507, code="store_full"), StoreFull),
    "large": (says(413), TooLarge),
    "redirect": (says(301, Location="https://elsewhere"), ServerFailed),
    "page": (says(200), ServerFailed),
    "empty page": (says(200, body=""), ServerFailed),
    "odd": (says(451), ServerFailed),
    "scheme": (lambda send: (_ for _ in ()).throw(httpx.UnsupportedProtocol("what?")), InvalidInput),
    "header": (lambda send: (_ for _ in ()).throw(httpx.LocalProtocolError("what?")), InvalidInput),
    "certificate": (
        lambda send: (_ for _ in ()).throw(httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed")),
        ConnectionFailed,
    ),
}


@pytest.mark.parametrize("case", NEVER)
def test_some_failures_are_not_retried(kind: str, url: str, clock: Clock, case: str) -> None:
    step, error = NEVER[case]
    transport = Scripted(step)
    with through(kind, url, transport) as server:
        with pytest.raises(error) as caught:
            server.buffers["scripted"].accumulate([1, 2])
        (sent,) = transport.seen
        assert clock.waits == []
        assert caught.value.idempotency_key == sent.headers["idempotency-key"]
        assert caught.value.request_id == sent.headers["x-request-id"]
        assert server.buffers["scripted"].info().count == 0


def test_the_answer_to_another_request_is_not_used(kind: str, url: str, clock: Clock) -> None:
    transport = Scripted(sent_on, stray, stray)
    with through(kind, url, transport) as server:
        assert server.buffers["scripted"].info().count == 0
        assert server.buffers["scripted"].accumulate([1, 2]).count == 1
        assert len(transport.seen) == 4


def test_a_proxy_may_replace_request_ids(kind: str, url: str, clock: Clock) -> None:
    transport = Scripted(forever=renamed)
    with through(kind, url, transport) as server:
        for count in (1, 2):
            assert server.buffers["scripted"].accumulate([1, 2]).count == count
        assert len(transport.seen) == 2


DOUBT: dict[str, tuple[bool, list[Step]]] = {
    "never sent": (False, [never_sent, unreachable]),
    "busy": (False, [says(429, code="busy"), says(503, code="expired"), says(429)]),
    "stopping": (True, [says(503, code="not_ready")]),
    "refused": (False, [says(422, code="invalid_tensor")]),
    "no such page": (False, [says(404)]),
    "lost": (True, [answer_lost]),
    "lost, then busy": (True, [answer_lost, says(429, code="busy")]),
    "lost, then refused connections": (True, [late, never_sent]),
    "lost, then a page": (True, [answer_lost, says(404)]),
    "lost, then without a key": (True, [answer_lost, says(401, code="unauthorized")]),
    "lost, then refused": (True, [silent, says(409, code="stale_step")]),
    "refused for good": (False, [says(409, code="stale_step")]),
    "gone": (False, [says(410, code="step_gone")]),
    "gone, but made": (True, [says(410, code="step_gone", receipts={"scripted": {}})]),
    "nginx cannot reach it": (True, [says(502, code="not_ready")]),
    "still running": (True, [says(409, code="conflict", Retry_After="2")]),
    "damaged": (True, [mangled]),
    "a bug": (True, [says(500, code="internal")]),
    "the store fails": (True, [says(503, code="store_failed")]),
    "a proxy gives up": (True, [says(504)]),
    "full": (False, [says(507, code="store_full")]),
}


@pytest.mark.parametrize("case", DOUBT)
def test_an_error_says_whether_the_change_may_have_been_made(kind: str, url: str, clock: Clock, case: str) -> None:
    doubt, steps = DOUBT[case]
    transport = Scripted(*steps[:-1], forever=steps[-1])
    with through(kind, url, transport) as server:
        with pytest.raises(GradserveError) as caught:
            server.buffers["scripted"].accumulate([1, 2])
        assert caught.value.maybe_done is doubt
        with pytest.raises(GradserveError) as caught:
            server.buffers["scripted"].value()
        assert caught.value.maybe_done is False


@pytest.mark.parametrize("status", [200, 204])
def test_delete_needs_the_status_204(kind: str, url: str, clock: Clock, status: int) -> None:
    transport = Scripted(never_sent, says(status, body=""))
    with through(kind, url, transport) as server:
        if status == 204:
            server.buffers["scripted"].delete()
        else:
            with pytest.raises(ServerFailed, match="204"):
                server.buffers["scripted"].delete()


def test_each_call_has_its_own_key_or_the_callers(kind: str, url: str, clock: Clock) -> None:
    transport = Scripted(never_sent, answer_lost)
    with through(kind, url, transport) as server:
        own = f"my own; {kind}"
        server.buffers["scripted"].accumulate([1, 2], idempotency_key=own)
        assert {one.headers["idempotency-key"] for one in transport.seen} == {own}
        del transport.seen[:]
        for _ in range(20):
            server.buffers["scripted"].accumulate([1, 2])
        assert len({one.headers["idempotency-key"] for one in transport.seen}) == 20
        del transport.seen[:]
        server.ops.relu_grad([1], [1])
        server.buffers["scripted"].value()
        assert not any("idempotency-key" in one.headers for one in transport.seen)


@pytest.mark.parametrize(
    ("step", "error"), [(never_sent, ConnectionFailed), (silent, TimedOut), (says(503), Unavailable), (says(429), Busy)]
)
def test_retries_end_at_the_timeout(kind: str, url: str, clock: Clock, step: Step, error: type[GradserveError]) -> None:
    def slow(send: Answering) -> httpx.Response:
        clock.now += transport.seen[-1].extensions["timeout"]["read"]  # as long as it may take
        return step(send)

    transport = Scripted(forever=slow)
    start = clock.now
    with through(kind, url, transport, timeout=30, attempt_timeout=4) as server, pytest.raises(error) as caught:
        server.buffers["scripted"].accumulate([1, 2])
    assert caught.value.attempts == len(transport.seen) > 3
    assert clock.now <= start + 30 + 1e-6
    assert all(0 < limit <= 4 for one in transport.seen for limit in one.extensions["timeout"].values())
    assert caught.value.idempotency_key == transport.seen[0].headers["idempotency-key"]


def test_max_retries_bounds_the_attempts(kind: str, url: str, clock: Clock) -> None:
    for most in (0, 2):
        transport = Scripted(forever=never_sent)
        with through(kind, url, transport, max_retries=most) as server, pytest.raises(ConnectionFailed) as caught:
            server.operators()
        assert caught.value.attempts == len(transport.seen) == most + 1
    transport = Scripted(says(503))
    with through(kind, url, transport) as server:
        assert not server.is_ready()  # which asks once
        assert server.is_ready()
    assert clock.waits[2:] == []


def test_delays_grow_and_differ_among_clients(kind: str, url: str, clock: Clock) -> None:
    random.seed(0)
    runs = []
    for _ in range(2):
        with through(kind, url, Scripted(forever=never_sent)) as server, pytest.raises(ConnectionFailed):
            server.operators()
        runs.append(clock.waits)
        clock.waits = []
    for waits in runs:
        assert len(waits) > 10
        for number, wait in enumerate(waits):
            longest = min(0.1 * 2**number, 5.0)
            assert longest / 2 <= wait <= longest
    assert all(one != other for one, other in zip(*runs, strict=False))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7.0), ("1.5", 1.5), ("soon", None), ("", None), ("-5", 0.0), ("nan", None), ("1e400", None)]
    + [(formatdate(1030, usegmt=True), 30.0), (formatdate(900), 0.0), ("Mon, 01 Jan 99999 00:00:00 GMT", None)]
    + [("Mon, 01 Jan 99999999999999999999 00:00:00 GMT", None)],
)
def test_the_client_waits_as_retry_after_says(
    kind: str, url: str, clock: Clock, text: str, seconds: float | None
) -> None:
    with through(kind, url, Scripted(says(503, Retry_After=text)), max_retries=0) as server:
        with pytest.raises(Unavailable) as caught:
            server.operators()
        assert caught.value.retry_after == (None if seconds is None else pytest.approx(seconds, abs=2))
    with through(kind, url, Scripted(says(503, Retry_After=text))) as server:
        server.operators()
    (wait,) = clock.waits
    if seconds:
        assert wait == pytest.approx(seconds)
    else:
        assert 0.05 <= wait <= 0.1


def test_a_retry_after_beyond_the_timeout_fails_at_once(kind: str, url: str, clock: Clock) -> None:
    with through(kind, url, Scripted(says(429, Retry_After="61"))) as server, pytest.raises(Busy) as caught:
        server.operators()
    assert (clock.waits, caught.value.retry_after, caught.value.attempts) == ([], 61.0, 1)


def test_a_proxys_page_is_quoted(kind: str, url: str, clock: Clock) -> None:
    for body in ("<html>Bad Gateway</html>", '{"error": "Bad Gateway"}', '{"code": [7], "detail": "Bad Gateway"}'):
        transport = Scripted(forever=says(502, body=body))
        with through(kind, url, transport, max_retries=0) as server, pytest.raises(Unavailable) as caught:
            server.operators()
        assert "Bad Gateway" in caught.value.detail
        assert caught.value.status == 502


def test_a_redirect_is_reported_and_changes_nothing(kind: str, url: str, clock: Clock) -> None:
    transport = Scripted(says(301, body="", Location="https://elsewhere.example/v1/ops"))
    with through(kind, url, transport) as server, pytest.raises(ServerFailed) as caught:
        server.buffers["a"].zero()
    assert "301" in caught.value.detail
    assert "https://elsewhere.example/v1/ops" in caught.value.detail
    assert (caught.value.attempts, caught.value.maybe_done) == (1, False)


def test_deeply_nested_answers_raise_errors_of_the_client(kind: str, url: str, clock: Clock) -> None:
    for status in (200, 404):
        transport = Scripted(says(status, body="[" * 100_000))
        with through(kind, url, transport) as server, pytest.raises((ServerFailed, NotFound)):
            server.operators()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://here", "http://", "http://[::1", "http://a:b", "http://a\0"])
def test_a_malformed_url_is_refused(kind: str, url: str) -> None:
    with pytest.raises(InvalidInput, match="URL"), connected(kind, url):
        pass


def test_a_malformed_api_key_is_refused_and_not_shown(kind: str, url: str) -> None:
    with pytest.raises(InvalidInput, match="API key") as caught, connected(kind, url, api_key="gs_se\ncret"):
        pass
    assert "cret" not in str(caught.value)
    with connected(kind, url, api_key="gs_secret\n") as server:
        assert server.is_ready()


def test_a_url_with_a_password_is_refused_and_not_shown(kind: str) -> None:
    with pytest.raises(InvalidInput, match="api_key") as caught, connected(kind, "http://ann:secret@gradserve.example"):
        pass
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "values"),
    [("max_retries", ["1", -1, 1.5]), ("timeout", [0, float("nan"), "3"]), ("attempt_timeout", [-1])],
)
def test_malformed_settings_are_refused(kind: str, url: str, setting: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidInput, match=setting), connected(kind, url, **{setting: value}):
            pass


def test_the_clients_use_the_clock_of_these_tests(clock: Clock) -> None:
    assert all(vars(module)["time"] is clock for module in (policy, runner, channels))
    assert time.monotonic() != clock.monotonic()
