"""A request sent twice counts once, at the same time or after a lost answer. A late request does not count."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import httpx
import numpy as np
import pytest

from tests.faults.servers import LONG, PATIENCE, Client, Server, new_key, tensors
from tests.serving import assert_problem, in_flight, wait_until

ROUNDS = 500 if LONG else 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("once") / "store", workers=2) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def at_once(server: Server, path: str, times: int = 2, **request: Any) -> list[httpx.Response]:
    """Send a request several times at once, each on its own connection; return the answers."""
    ready = Barrier(times)

    def send(_: int) -> httpx.Response:
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
            http.get("/v2/health/live")
            ready.wait(PATIENCE)
            return http.post(path, **request)

    with ThreadPoolExecutor(times) as threads:
        return list(threads.map(send, range(times)))


def with_key(key: str, **request: Any) -> dict[str, Any]:
    return {**request, "headers": {**request.get("headers", {}), "Idempotency-Key": key}}


def one_was_first(answers: list[httpx.Response]) -> None:
    """Check that all answers are equal, and all except one are marked as replays."""
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    assert len({answer.content for answer in answers}) == 1
    assert sum("Idempotency-Replayed" not in answer.headers for answer in answers) == 1


def test_concurrent_adds_with_one_key_count_once(server: Server, client: Client) -> None:
    client.create("twice", (3,))
    for count in range(1, ROUNDS + 1):
        one_was_first(
            at_once(server, "/v1/buffers/twice/accumulate", **with_key(new_key(), **tensors(gradient=np.ones(3))))
        )
        assert client.metadata("twice")["count"] == count
    assert (client.value("twice") == ROUNDS).all()


def test_concurrent_takes_with_one_key_take_once(server: Server, client: Client) -> None:
    client.create("taken", (3,))
    for step in range(ROUNDS // 4):
        client.add("taken", np.full(3, 1.0 + step))
        answers = at_once(server, "/v1/buffers/taken/take", **with_key(new_key()))
        one_was_first(answers)
        assert answers[0].json()["value"]["data"] == [1.0 + step] * 3
        assert client.metadata("taken")["step"] == step + 1


def test_waiting_takes_with_one_key_take_once(server: Server, client: Client) -> None:
    client.create("awaited", (3,))
    rounds = ROUNDS // 8
    with ThreadPoolExecutor(1) as thread:
        for step in range(rounds):
            patient: dict[str, Any] = {"params": {"min_count": 1, "timeout": PATIENCE / 2}}
            waiting = thread.submit(at_once, server, "/v1/buffers/awaited/take", 4, **with_key(new_key(), **patient))
            wait_until(lambda: in_flight(server.url) >= 4)
            client.add("awaited", np.full(3, 1.0 + step))
            one_was_first(waiting.result(PATIENCE))
            assert client.metadata("awaited")["step"] == step + 1


def test_a_late_add_changes_nothing(client: Client) -> None:
    client.create("ahead", (3,), quorum=2)
    for _ in range(3):
        client.add("ahead", np.ones(3))
    for step in (0, 2):
        before = client.state()["ahead"]
        late = client.once(
            "POST", "/v1/buffers/ahead/accumulate", key=new_key(), params={"step": step}, **tensors(gradient=np.ones(3))
        )
        assert_problem(late, 409, "stale_step", f"Step {step}")
        assert client.state()["ahead"] == before
    assert (client.value("ahead", step=0) == 2).all()
    assert client.add("ahead", np.ones(3), step=1)["closed"]


def test_a_repeated_add_that_closed_its_step_is_not_stale(client: Client) -> None:
    client.create("closing", (3,), quorum=1)
    key = new_key()
    receipts = [client.add("closing", np.ones(3), key=key, step=0) for _ in range(3)]
    assert receipts[0] == receipts[1] == receipts[2]
    assert client.metadata("closing")["version"] == 1


@pytest.mark.parametrize("size", [3, 200_000])
def test_a_take_whose_answer_was_lost_is_answered_again(size: int, server: Server, client: Client) -> None:
    chance = random.Random(size)
    name = f"lost.{size}"
    client.create(name, (size,))
    for step in range(ROUNDS // 4):
        expected = np.full(size, 1.0 + step)
        client.add(name, expected)
        key = new_key()
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
            connection.sendall(
                f"POST /v1/buffers/{name}/take?encoding=base64 HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n"
                f"Idempotency-Key: {key}\r\n\r\n".encode()
            )
            time.sleep(chance.choice([0, 0.001, 0.01]))
        answers = [
            client.send("POST", f"/v1/buffers/{name}/take", key=key, params={"encoding": "base64"}) for _ in range(2)
        ]
        assert answers[0].json() == answers[1].json()
        assert answers[0].json()["step"] == step
        assert client.metadata(name)["step"] == step + 1
        assert (client.value(name, step=step) == expected).all()
