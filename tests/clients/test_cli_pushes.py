"""The command line on pushes in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from gradserve_client import Client

from tests.clients.conftest import delete_all
from tests.clients.terminal import Call


@pytest.fixture
def server(url: str) -> Iterator[Client]:
    """A client of a server with two pushes that are not complete; one was refused."""
    with Client(url) as server, httpx.Client(base_url=url) as client:
        forget_all(server)
        server.buffers.create_many({"w1": {"shape": 2}, "w10": {"shape": 2}, "x": {"shape": 2}})
        for push, gradients, more in [
            ("step1", {"w1": [1, 2], "x": [3, 4]}, {"weight": 0.5, "step": 0, "contributor": "ann"}),
            ("step2", {"w10": [1, 2]}, {}),
            ("bad", {"w10": [1, 2, 3]}, {}),
        ]:
            query: dict[str, Any] = {"push": push, "part": 2, "parts": 3, **more}
            client.post("/v1/buffers/accumulate", params=query, json=gradients)
        yield server
        forget_all(server)


def forget_all(server: Client) -> None:
    """Forget the pushes of this and of other modules, and delete the buffers."""
    for left in server.buffers.pushes():
        server.buffers.forget_push(left.push)
    delete_all(server)


def test_pushes_are_listed(call: Call, server: Client) -> None:
    head, *rows = call(server, "buffers", "pushes").out.splitlines()
    assert head.split() == "push parts buffers size weight step contributor expires refused".split()
    first, second, third = (row.split() for row in rows)
    assert first[:8] == "step1 1 of 3 2 16 B 0.5".split()
    assert (first[8:10], second[:8]) == (["0", "ann"], "step2 1 of 3 1 8 B 1".split())
    assert (third[0], third[-1]) == ("bad", "shape_mismatch")
    head, row = call(server, "buffers", "pushes", "w10").out.splitlines()
    assert (head.split()[-1], row.split()[0]) == ("expires", "step2")
    (found,) = call(server, "buffers", "pushes", "x", "--json").json
    assert (found["push"], found["staged"], found["buffers"]) == ("step1", [2], ["w1", "x"])
    assert call(server, "buffers", "pushes", "none", "--json").json == []


def test_a_buffer_shows_what_is_staged_for_it(call: Call, server: Client) -> None:
    assert "staged        1 part of 1 push: see buffers pushes\n" in call(server, "buffers", "show", "w1").out
    assert [push["push"] for push in call(server, "buffers", "show", "w1", "--json").json["pushes"]] == ["step1"]
    server.buffers.forget_push("step1")
    assert "staged        nothing " in call(server, "buffers", "show", "w1").out
    assert "staged" not in call(server, "buffers", "set-rules", "w1", "--quorum", "3").out


def test_a_push_is_forgotten(call: Call, server: Client) -> None:
    assert call(server, "buffers", "forget-push", "step1").out == "forgotten\n"
    assert call(server, "buffers", "forget-push", "step1").out == "nothing was staged\n"
    done = call(server, "buffers", "forget-push", "step2", "--json")
    assert done.json == {"push": "step2", "forgotten": True}
    assert [push.push for push in server.buffers.pushes()] == ["bad"]
    assert call(server, "buffers", "forget-push", "a b").code == 5
