"""What the client says in its log, and how its objects print: enough to find a fault, and never a secret."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from gradserve_client import AsyncClient, Client, ConnectionFailed, StepOpen

from tests.clients.both import connected
from tests.clients.scripted import Answering, Clock, Scripted, Step, never_sent, says, sent_on, through

SECRET = "key-that-nobody-may-see"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the lines that a program gets that logs everything, each with its level."""
    caplog.set_level(logging.DEBUG, "gradserve_client")

    def lines() -> list[str]:
        records = [record for record in caplog.records if record.name.startswith("gradserve_client")]
        return [f"{record.levelname} {record.getMessage()}" for record in records]

    return lines


# ----- retries -----


def test_a_streak_of_retries_is_one_warning(kind: str, url: str, clock: Clock, said: Callable[[], list[str]]) -> None:
    streak = [never_sent, says(502), says(429, code="busy")]
    transport = Scripted(*streak, sent_on, sent_on, *streak, sent_on)
    with through(kind, url, transport, api_key=SECRET) as server:
        for _ in range(3):
            server.buffers["scripted"].accumulate([1, 2])
    first, second = said()
    assert first == second
    assert first == (
        f"WARNING POST /v1/buffers/scripted/accumulate at {url}: The connection failed: refused; trying again for up to"
        " 60 s"
    )


def test_a_server_that_is_away_for_several_calls_is_one_warning(
    kind: str, url: str, clock: Clock, said: Callable[[], list[str]]
) -> None:
    with through(kind, url, Scripted(forever=never_sent), timeout=3) as server:
        for _ in range(5):
            with pytest.raises(ConnectionFailed):
                server.buffers["scripted"].info()
    assert len(said()) == 1


def test_a_server_that_stays_away_is_a_warning_a_minute(
    kind: str, url: str, clock: Clock, said: Callable[[], list[str]]
) -> None:
    with through(kind, url, Scripted(forever=never_sent), timeout=170) as server, pytest.raises(ConnectionFailed):
        server.buffers["scripted"].info()
    assert len(said()) == 3


@pytest.mark.parametrize("between", [says(404, code="unknown_buffer"), sent_on, says(409, code="step_open")])
def test_any_answer_ends_a_streak(
    kind: str, url: str, clock: Clock, said: Callable[[], list[str]], between: Step
) -> None:
    with through(kind, url, Scripted(never_sent, between, never_sent, sent_on, sent_on)) as server:
        for _ in range(2):
            try:
                server.buffers["scripted"].info()
            except (LookupError, StepOpen):
                pass
    assert len(said()) == 2


def test_calls_that_succeed_or_are_refused_say_nothing(kind: str, url: str, said: Callable[[], list[str]]) -> None:
    with through(kind, url, Scripted(), max_retries=0) as server:
        server.buffers["scripted"].accumulate([1, 2])
        with pytest.raises(LookupError):
            server.buffers["nowhere"].info()
        with pytest.raises(StepOpen):
            server.buffers["scripted"].value(step=7)
        assert server.is_ready()
    assert said() == []


# ----- waiting -----


def waiting(clock: Clock, **context: Any) -> Step:
    """Return a poll that ends after its time without a step."""

    def step(send: Answering) -> httpx.Response:
        clock.now += 5
        problem = {"code": "step_open", "detail": "it is open", "status": 409, **context}
        return httpx.Response(409, json=problem)

    return step


TIMES = ("5 s", "1 min", "2 min")
"""What the log says of the time after 5, 65 and 125 seconds, and a few."""


def test_a_wait_says_soon_and_every_minute_what_it_waits_for(
    kind: str, url: str, clock: Clock, said: Callable[[], list[str]]
) -> None:
    known = {"buffer": "scripted", "step": 7, "count": 3, "quorum": 4, "missing": ["rank3"]}
    with through(kind, url, Scripted(forever=waiting(clock, **known))) as server, pytest.raises(StepOpen):
        server.buffers["scripted"].value(step=7, timeout=130)
    lines = [f"WARNING waiting for rank3 for {time}: step 7 has 3 of 4 (scripted at {url})" for time in TIMES]
    assert said() == lines


@pytest.mark.parametrize(
    ("known", "line"),
    [
        ({"step": 0, "count": 0}, "for 5 s: step 0 has 0 ("),
        ({"step": 0, "count": 1, "min_count": 3}, "for 2 of 3 for 5 s: step 0 has 1 of 3 ("),
        ({"step": 0, "count": 1, "missing": []}, "for 5 s: step 0 has 1 ("),
        ({"step": 0, "count": 1, "missing": ["a", "b"]}, "for a and b for 5 s: step 0 has 1 ("),
        ({"step": 0, "count": 1, "missing": list("abcde")}, "for a, b, c and 2 more for 5 s: step 0 has 1 ("),
        ({}, "for 5 s: it is open ("),
    ],
)
def test_the_state_of_a_step(
    url: str, clock: Clock, said: Callable[[], list[str]], known: dict[str, Any], line: str
) -> None:
    with through("sync", url, Scripted(forever=waiting(clock, **known))) as server:
        with pytest.raises(StepOpen):
            server.buffers["scripted"].value(step=0, timeout=6)
    assert said()[0].startswith(f"WARNING waiting {line}")


@pytest.mark.parametrize(
    ("buffer", "place"),
    [
        ("w", "w"),
        ("exp1.layers.0.weight", "exp1.layers.0.weight"),
        ("team.a::w", "team.a::w"),
        ("exp1.layers.0.weight::tally", "exp1"),
        ("exp1.w::3::tally", "exp1"),
        ("exp1.w::0123456789abcdef0123456789abcdef::tally", "exp1"),
        ("exp1.::start", "exp1"),
        ("team.a.::state.w", "team.a"),
        ("lm.first::p::tally", "lm.first"),
        ("lm.first::::start", "lm.first"),
    ],
)
def test_a_wait_names_the_run_in_place_of_its_bookkeeping(
    url: str, clock: Clock, said: Callable[[], list[str]], buffer: str, place: str
) -> None:
    known = {"step": 0, "count": 1, "quorum": 2, "buffer": buffer}
    with through("sync", url, Scripted(forever=waiting(clock, **known))) as server:
        with pytest.raises(StepOpen):
            server.buffers["scripted"].value(step=0, timeout=6)
    assert said()[0] == f"WARNING waiting for 1 of 2 for 5 s: step 0 has 1 of 2 ({place} at {url})"


def test_a_server_says_the_quorum_and_who_is_missing(url: str) -> None:
    with Client(url) as server:
        buffer = server.buffers["quorate"]
        try:
            buffer.create(2, quorum=4, contributors=["rank0", "rank1"], per_contributor=2)
            buffer.accumulate([1, 2], contributor="rank1")
            with pytest.raises(StepOpen) as caught:
                buffer.value(step=0)
        finally:
            buffer.delete()
    context = caught.value.context
    assert (context["step"], context["count"], context["quorum"], context["missing"]) == (0, 1, 4, ["rank0"])


def test_a_program_without_logging_prints_warnings() -> None:
    """Python prints warnings to stderr where a library has no handler at all, so that nobody waits without a word."""
    code = """
import logging, gradserve_client
from gradserve_client import Client, ConnectionFailed
client = Client("http://127.0.0.1:9", timeout=0.2)
try:
    client.operators()
except ConnectionFailed:
    pass
assert not logging.getLogger("gradserve_client").handlers
assert not logging.getLogger().handlers
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "", 1)
    assert "trying again for up to" in done.stderr


# ----- how objects print -----


def test_clients_and_buffers_say_where_they_are(kind: str, url: str) -> None:
    name = {"sync": "Client", "async": "AsyncClient"}[kind]
    other = url.replace("127.0.0.1", "localhost")
    for urls in (url, [url, other]):
        with connected(kind, urls, api_key=SECRET) as server:
            one = getattr(server, "_inner", server)
            assert repr(one) == f"{name}({urls!r})"
            buffer = one.buffers["w1"]
            prefix = "Async" if kind == "async" else ""
            assert repr(buffer) in {f"{prefix}Buffer('w1' at {place})" for place in (url, other)}


@pytest.mark.parametrize("kind_of_client", [Client, AsyncClient])
def test_no_secret_is_shown(kind_of_client: Any) -> None:
    client = kind_of_client(f"http://127.0.0.1:9/?token={SECRET}", api_key=SECRET)
    shown = [repr(one) for one in (client, client.buffers["w"], client.buffers, client.ops, client._runner)]
    assert all(SECRET not in text for text in shown), shown
