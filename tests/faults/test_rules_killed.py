"""Kill -9 within changes of rules, adds of contributors, creations, and closings by a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.faults.cluster import wait
from tests.faults.mortal import KINDS, Mortal
from tests.faults.servers import Client, new_key, tensors
from tests.serving import assert_problem

DEADLINE_SECONDS = 0.2
"""A deadline that a test waits for: an add and the order to die take a tenth of it."""

FAR_SECONDS = 1e6
"""A deadline that no test reaches."""

PAST_SECONDS = 1e-6
"""A deadline that is over with the next request."""

PATCHES: list[tuple[dict[str, Any], str | None]] = [
    ({"quorum": 1, "max_norm": 9.0}, "quorum"),
    ({"deadline_seconds": PAST_SECONDS}, "deadline"),
    ({"quorum_weight": 0.5, "ttl_seconds": 1000.0}, "quorum"),
    ({"min_count": 3, "deadline_seconds": PAST_SECONDS}, None),
    ({"per_contributor": 2, "contributors": ["x"]}, None),
]
"""Rules, and what closes a step whose count and weight are 1 when they are set."""


@pytest.fixture
def client(service: Mortal) -> Iterator[Client]:
    with Client(service.server.url) as client:
        yield client


def answers(client: Client, point: str, method: str, path: str, **request: Any) -> Any:
    """Send the request that killed a process twice again. Check that it was made once, and return the answer."""
    found = [client.send(method, path, **request) for _ in range(2)]
    assert [one.status_code for one in found] == [found[0].status_code] * 2
    assert found[0].is_success, found[0].text
    assert ("Idempotency-Replayed" in found[0].headers) == (point == "committed")
    assert "Idempotency-Replayed" in found[1].headers
    assert found[0].content == found[1].content
    return found[0].json()


def test_an_add_of_a_contributor_counts_once(service: Mortal, client: Client) -> None:
    """The add closes one step and leaves another open. It is no duplicate of itself."""
    for point in service.points:
        closing, staying = new_key(), new_key()
        rules: dict[str, Any] = {"contributors": ["x", "y", "z"], "deadline_seconds": FAR_SECONDS}
        client.create(closing, (2,), quorum=2, **rules)
        client.create(staying, (2,), quorum=3, **rules)
        for name in (closing, staying):
            client.add(name, np.array([1.0, 0.0]), contributor="y")
        both = tensors(**dict.fromkeys((closing, staying), np.array([0.0, 1.0])))
        add: dict[str, Any] = {"params": {"contributor": "x", "step": 0}, "key": new_key(), **both}
        service.loses(client, point, "POST", "/v1/buffers/accumulate", **add)
        made = point == "committed"
        assert (client.metadata(closing)["step"], client.metadata(staying)["count"]) == (made, 1 + made)
        receipts = answers(client, point, "POST", "/v1/buffers/accumulate", **add)["buffers"]
        assert (receipts[closing]["closed_by"], receipts[closing]["contributors"]) == ("quorum", {"x": 1, "y": 1})
        closed = client.done("GET", f"/v1/buffers/{closing}", params={"step": 0})
        assert closed == {**receipts[closing], "updated": False}
        assert (closed["count"], closed["version"]) == (2, 2)
        assert client.value(closing, step=0).tolist() == [1, 1]
        known = client.metadata(staying)
        assert (known["count"], known["contributors_in"], known["missing"]) == (2, {"y": 1, "x": 1}, ["z"])
        body = tensors(gradient=np.ones(2))
        again = client.send("POST", f"/v1/buffers/{staying}/accumulate", params=add["params"], key=new_key(), **body)
        assert_problem(again, 409, "duplicate_contributor")
        assert client.value(staying).tolist() == [1, 1]


def test_a_contributor_whose_step_has_ended_meanwhile(service: Mortal, client: Client) -> None:
    """If its add was made, it gets its receipt; else the step has ended without it."""
    for point in service.points:
        name, key = new_key(), new_key()
        client.create(name, (2,), deadline_seconds=FAR_SECONDS, keep=2)
        client.add(name, np.array([1.0, 0.0]), contributor="y")
        add: dict[str, Any] = {"params": {"contributor": "x", "step": 0}, "key": key}
        add |= tensors(gradient=np.array([0.0, 1.0]))
        service.loses(client, point, "POST", f"/v1/buffers/{name}/accumulate", **add)
        client.done("PATCH", f"/v1/buffers/{name}", json={"deadline_seconds": PAST_SECONDS})
        late, made = client.send("POST", f"/v1/buffers/{name}/accumulate", **add), point == "committed"
        if made:
            assert (late.status_code, late.headers["Idempotency-Replayed"]) == (200, "true")
            assert (late.json()["count"], late.json()["step"], late.json()["closed"]) == (2, 0, False)
        else:
            assert_problem(late, 409, "stale_step", "Step 0")
        closed = client.done("GET", f"/v1/buffers/{name}", params={"step": 0})
        assert (closed["closed_by"], closed["count"]) == ("deadline", 1 + made)
        assert closed["contributors"] == ({"y": 1, "x": 1} if made else {"y": 1})
        assert client.value(name, step=0).tolist() == [1, made]
        assert (client.metadata(name)["step"], client.metadata(name)["count"]) == (1, 0)


def test_a_change_of_rules_is_made_once(service: Mortal, client: Client) -> None:
    first = 2 * KINDS.index(service.kind)  # so that all kinds together make all changes
    for number, point in enumerate(service.points, first):
        rules, closed_by = PATCHES[number % len(PATCHES)]
        name = new_key()
        client.create(name, (2,), "float64", deadline_seconds=FAR_SECONDS)
        client.add(name, np.array([1.0, 2.0]), contributor="x")
        patch: dict[str, Any] = {"json": rules, "key": new_key(), "headers": {"If-Match": '"0-1"'}}
        service.loses(client, point, "PATCH", f"/v1/buffers/{name}", **patch)
        before = client.metadata(name)
        assert before["version"] == 1 + (point == "committed")
        answer = answers(client, point, "PATCH", f"/v1/buffers/{name}", **patch)
        known = client.metadata(name)
        assert known == answer
        assert {rule: known[rule] for rule in rules} == rules
        assert (known["version"], known["step"], known["count"]) == (2, int(closed_by is not None), closed_by is None)
        if closed_by is not None:
            closed = client.done("GET", f"/v1/buffers/{name}", params={"step": 0})
            assert (closed["closed_by"], closed["count"], closed["contributors"]) == (closed_by, 1, {"x": 1})
            assert client.value(name, step=0).tolist() == [1, 2]


def test_many_buffers_are_created_together(service: Mortal, client: Client) -> None:
    for point in service.points:
        prefix = new_key()
        new = {f"{prefix}.{number}": {"shape": [number], "quorum": 2} for number in range(20)}
        create: dict[str, Any] = {"json": {"buffers": new}, "key": new_key()}
        service.loses(client, point, "POST", "/v1/buffers/create", **create)
        there = client.done("GET", "/v1/buffers", params={"prefix": prefix})["buffers"]
        assert len(there) == 20 * (point == "committed")
        made = answers(client, point, "POST", "/v1/buffers/create", **create)["buffers"]
        assert [*made] == [*new]
        assert all(one["created"] for one in made.values())
        found = client.done("POST", "/v1/buffers/create", json=create["json"])["buffers"]
        assert not any(one["created"] for one in found.values())


def check_closed(url: str, names: list[str]) -> None:
    """Check that the server closes the first step of each buffer once. A listing closes none by itself."""
    with Client(url) as client:

        def steps() -> set[int]:
            listed = client.done("GET", "/v1/buffers", params={"limit": 1000})["buffers"]
            return {one["step"] for one in listed if one["name"] in names}

        wait(lambda: steps() == {1}, "nobody closes the steps")
        for name in names:
            receipt = client.done("GET", f"/v1/buffers/{name}", params={"step": 0})
            assert (receipt["closed_by"], receipt["count"], receipt["version"]) == ("deadline", 1, 2)
            assert receipt["contributors"] == {"x": 1}
            known = client.metadata(name)
            assert (known["step"], known["version"], known["closed_steps"]) == (1, 2, [0])
            assert client.value(name, step=0).tolist() == [1, 2]


def check_closed_without(service: Mortal, names: list[str]) -> None:
    """Check it while the process is dead, if another server lives, and after its return."""
    service.await_death()
    if service.other is not None:
        check_closed(service.other.url, names)
    service.revive()
    check_closed(service.server.url, names)


def test_a_server_dies_before_it_closes_a_step(service: Mortal, client: Client) -> None:
    """It dies as soon as the add is made. The answer is lost, and the deadline closes the step all the same."""
    name = new_key()
    client.create(name, (2,), deadline_seconds=DEADLINE_SECONDS)
    add: dict[str, Any] = {"params": {"contributor": "x", "step": 0}, "key": new_key()}
    add |= tensors(gradient=np.array([1.0, 2.0]))
    service.order("committed")
    with pytest.raises(httpx.TransportError):
        client.once("POST", f"/v1/buffers/{name}/accumulate", **add)
    check_closed_without(service, [name])
    receipt = answers(client, "committed", "POST", f"/v1/buffers/{name}/accumulate", **add)
    assert (receipt["count"], receipt["step"], receipt["closed"]) == (1, 0, False)


def test_a_server_dies_while_it_closes_a_step(service: Mortal, client: Client) -> None:
    """Before the commit, and after it. Over PostgreSQL the other server may be the first to close: then try again."""
    for point in service.closing_points:
        names: list[str] = []
        while not names or not service.withdraw():
            names.append(new_key())
            client.create(names[-1], (2,), deadline_seconds=DEADLINE_SECONDS)
            client.add(names[-1], np.array([1.0, 2.0]), contributor="x")
            service.order(point)
            end = time.monotonic() + 10 * DEADLINE_SECONDS
            while not service.has_died() and time.monotonic() < end:
                time.sleep(0.01)
            assert len(names) < 30, "the server does not die"
        check_closed_without(service, names)
