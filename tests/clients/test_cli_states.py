"""What `watch` and `buffers show` say of buffers that wait: who is missing, since when, and if that is too long."""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import httpx
import pytest
from gradserve_client import BufferInfo
from gradserve_client._cli import server as commanded
from gradserve_client._http.channels import HttpxChannel

from tests.clients.terminal import Call, plain

KNOWN = BufferInfo.__dataclass_fields__.keys()
HERE = "http://127.0.0.1:9"
AHEAD_SECONDS = 1000
"""The server's clock is ahead of this machine's."""

PLAIN: dict[str, Any] = {
    "shape": [2],
    "dtype": "float32",
    "nonfinite": "allow",
    "quorum": 3,
    "keep": 1,
    "ttl_seconds": None,
    "step": 5,
    "version": 17,
    "count": 2,
    "weight": 2.0,
    "bytes": 8,
    "closed_steps": [4],
    "expires_at": None,
}
"""The metadata of a buffer that lacks a gradient, as an older server gives them."""

STATES: dict[str, tuple[dict[str, Any], str]] = {
    "a dead worker": ({"still": 40, "missing": ["rank2"]}, "waiting for rank2 for 40 s"),
    "five of them": ({"still": 200, "missing": list("abcde")}, "waiting for a, b, c and 2 more for 3 min"),
    "nobody knows who": ({"still": 40}, "waiting for 1 of 3 for 40 s"),
    "nobody is expected any more": ({"still": 40, "missing": []}, "waiting for 1 of 3 for 40 s"),
    "a quorum of weight": ({"still": 40, "quorum": None, "quorum_weight": 8}, "waiting for more weight for 40 s"),
    "not long": ({"still": 20, "missing": ["rank2"]}, ""),
    "nothing is in": ({"still": 40, "missing": ["rank2"], "count": 0}, ""),
    "without a quorum": ({"still": 40, "quorum": None}, ""),
    "an end that is near": ({"still": 5, "deadline_seconds": 60, "left": 10}, "late"),
    "an end that is far": ({"still": 5, "deadline_seconds": 60, "left": 20}, ""),
    "late and waiting": ({"still": 80, "deadline_seconds": 60, "left": -20}, "waiting for 1 of 3 for 1 min"),
    "infinite": ({"still": 40, "infinite": 1}, "non-finite"),
    "not a number": ({"still": 0, "nan": 1}, "non-finite"),
}
"""Changes of the metadata, with the seconds of a deadline that are left and those without a change, and the words."""


def statistics(given: dict[str, Any]) -> dict[str, Any]:
    sizes = {"step": 5, "version": 17, "count": 2, "weight": 2.0, "size": 2, "zeros": 0}
    values = {"min": 1.0, "max": 1.0, "mean": 1.0, "norm": 1.0}
    return {**sizes, **values, "nan": given.get("nan", 0), "infinite": given.get("infinite", 0)}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Serve buffers with these changes of their metadata, and return the server's time."""

    def served(buffers: dict[str, dict[str, Any]]) -> int:
        now = int(time.time()) + AHEAD_SECONDS

        def info(name: str) -> dict[str, Any]:
            given = dict(buffers[name])
            times = {"created_at": now - 900.0, "updated_at": now - given.pop("still", 0)}
            if "left" in given:
                times["deadline_at"] = now + given.pop("left")
            return {"name": name, **PLAIN, **times, **{each: given[each] for each in given.keys() & KNOWN}}

        def handle(request: httpx.Request) -> httpx.Response:
            answers: dict[str, Any] = {
                "/v1/buffers": {"buffers": [info(name) for name in buffers], "next_cursor": None},
                "/v1/buffers/statistics": {"statistics": {name: statistics(given) for name, given in buffers.items()}},
                "/v1/pushes": {"pushes": []},
                "/v2": {},
                **{f"/v1/buffers/{name}": info(name) for name in buffers},
            }
            return httpx.Response(200, json=answers[request.url.path], headers={"Date": formatdate(now, usegmt=True)})

        monkeypatch.setattr(commanded, "channel", lambda *_: HttpxChannel(httpx.MockTransport(handle)))
        return now

    return served


def test_watch_says_what_is_wrong(call: Call, serve: Callable[..., int]) -> None:
    serve({name: given for name, (given, _) in STATES.items()})
    expected = {name: state for name, (_, state) in STATES.items()}
    lines = [line.split("\t") for line in call(HERE, "watch", "--count", "1").out.splitlines()]
    assert lines[0][-1] == "state"
    assert {line[1]: line[-1] for line in lines[1:]} == expected
    found = call(HERE, "watch", "--count", "1", "--json").json["buffers"]
    assert {one["name"]: one["state"] for one in found} == expected


def test_a_server_without_a_clock_has_that_of_this_machine(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"name": "w", **PLAIN, "created_at": 0, "updated_at": time.time() - 40, "missing": ["rank2"]}
    answer: dict[str, Any] = {"buffers": [info], "next_cursor": None, "statistics": {}}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
    monkeypatch.setattr(commanded, "channel", lambda *_: HttpxChannel(transport))
    assert call(HERE, "watch", "--count", "1").out.endswith("\trank2\twaiting for rank2 for 40 s\n")


def test_show_says_since_when_a_contributor_is_missing(call: Call, serve: Callable[..., int]) -> None:
    at = {"rank1": 1_700_000_000.0, "rank2": 1_700_000_060.5}
    serve({"new": {"missing": ["rank1", "rank2"], "missing_since": at}, "old": {"missing": ["rank1"]}})
    shown = plain(call(HERE, "buffers", "show", "new").out)
    times = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) for seconds in at.values()]
    (line,) = (line for line in shown.splitlines() if line.startswith("missing since"))
    assert f"  rank1 {times[0]}" in line
    assert f", rank2 {times[1]}" in line
    assert call(HERE, "buffers", "show", "new", "--json").json["missing_since"] == at
    assert "missing since" not in call(HERE, "buffers", "show", "old").out
    assert call(HERE, "buffers", "show", "old", "--json").json["missing_since"] is None
