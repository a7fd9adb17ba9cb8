"""Kill -9 between the steps of a commit: each request is whole or absent, and whole if acknowledged."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.faults.servers import LONG, PATIENCE, Client, Server, new_key, tensors
from tests.zygote import ROOT

NAMES = ("a", "b", "c")
CLIENTS = 3
MANY = tuple(f"n{number}" for number in range(40))
SMALL = (CLIENTS, 2000)
"""The shape of many float64 buffers: 48 KB each, held by LMDB itself."""
SHAPE = (CLIENTS, 20_000)
"""The shape of every other float64 buffer, which has several chunks."""

POINTS = dict.fromkeys(
    point
    for path in (ROOT / "service" / "buffers" / "lmdb").rglob("*.py")
    for point in re.findall(r'failpoints\.hit\("([a-z ]+)"\)', path.read_text())
)
ADDS = [
    (point, number)
    for which, point in enumerate(POINTS)
    for number in ((1, 2, 3, 4, 5, 8, 14, 20) if LONG else (5,) if which % 2 else (1,))
]
CLOSES = ["made", "before commit", "committed"]


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that orders a server of `server` to kill itself."""
    path = tmp_path / "order"
    monkeypatch.setenv("GRADSERVE_TEST_KILL", str(path))
    return path


@pytest.fixture
def server(tmp_path: Path, order: Path) -> Iterator[Server]:
    with Server(tmp_path / "store", module="tests.faults.killing") as server:
        yield server


class Adder:
    """A client that adds 1 to its row of every buffer until the server is gone. The last add may or may not count."""

    def __init__(self, row: int, names: tuple[str, ...], shape: tuple[int, int]) -> None:
        self.gradients = {name: np.zeros(shape) for name in names}
        for one in self.gradients.values():
            one[row] = 1
        self.row, self.answered, self.key = row, 0, ""

    def run(self, url: str) -> None:
        with Client(url) as client:
            for _ in range(100):
                self.key = new_key()
                try:
                    client.once("POST", "/v1/buffers/accumulate", key=self.key, **tensors(**self.gradients))
                except httpx.TransportError:
                    return
                self.answered += 1
        raise AssertionError("the server did not kill itself")


def rows(client: Client, names: tuple[str, ...]) -> list[int]:
    """Return the number of adds of each row, after a check that all elements of all buffers agree."""
    receipts, values = client.values(*names)
    found: list[int] = values[names[0]][:, 0].astype(int).tolist()
    for name in names:
        assert (values[name] == np.array(found)[:, None]).all()
        assert receipts[name]["count"] == receipts[name]["version"] == sum(found)
    return found


@pytest.mark.parametrize(
    ("names", "shape", "points"), [(NAMES, SHAPE, ["chunk", *CLOSES]), (MANY, SMALL, CLOSES)], ids=["large", "many"]
)
def test_a_kill_leaves_each_add_whole_or_absent(
    server: Server, order: Path, names: tuple[str, ...], shape: tuple[int, int], points: list[str]
) -> None:
    with Client(server.url) as client, ThreadPoolExecutor(CLIENTS) as threads:
        for name in names:
            client.create(name, shape)
        assert {*POINTS} == {"chunk", *CLOSES}
        for point, number in [one for one in ADDS if one[0] in points]:
            before = rows(client, names)
            order.write_text(f"{point}:{number}")
            adders = [Adder(row, names, shape) for row in range(CLIENTS)]
            for running in [threads.submit(one.run, server.url) for one in adders]:
                running.result(PATIENCE)
            assert server.ended()[0] == -9
            server.start()
            fresh = [now - then for now, then in zip(rows(client, names), before, strict=True)]
            for one, found in zip(adders, fresh, strict=True):
                assert one.answered <= found <= one.answered + 1, (point, number)
            if point != "committed" and number == 1:
                assert fresh == [one.answered for one in adders]
            if point == "committed":
                assert fresh != [one.answered for one in adders]
            for one, found in zip(adders, fresh, strict=True):
                answer = client.send("POST", "/v1/buffers/accumulate", key=one.key, **tensors(**one.gradients))
                assert answer.status_code == 200
                assert ("Idempotency-Replayed" in answer.headers) == (found > one.answered), (point, number)
            expected = [then + one.answered + 1 for then, one in zip(before, adders, strict=True)]
            assert rows(client, names) == expected, (point, number)


def test_a_kill_leaves_a_take_whole_or_absent(server: Server, order: Path) -> None:
    with Client(server.url) as client:
        for name in NAMES:
            client.create(name, SHAPE, keep=2)
        for step, point in enumerate(CLOSES):
            gradients = {name: np.full(SHAPE, 10.0 * step + number) for number, name in enumerate(NAMES)}
            client.add_many(gradients)
            key = new_key()
            take: dict[str, Any] = {"key": key, "json": {"names": NAMES}, "params": {"encoding": "base64"}}
            order.write_text(f"{point}:1")
            with pytest.raises(httpx.TransportError):
                client.once("POST", "/v1/buffers/take", **take)
            assert server.ended()[0] == -9
            server.start()
            assert {client.metadata(name)["step"] for name in NAMES} == {step + (point == "committed")}
            answers = [client.send("POST", "/v1/buffers/take", **take) for _ in range(2)]
            assert ("Idempotency-Replayed" in answers[0].headers) == (point == "committed")
            assert json.loads(answers[0].content) == json.loads(answers[1].content)
            for name in NAMES:
                receipt = answers[0].json()["buffers"][name]
                assert (receipt["step"], receipt["count"], receipt["closed"]) == (step, 1, True)
                assert (client.value(name, step=step) == gradients[name]).all()
                assert client.metadata(name)["step"] == step + 1
