"""Steps and uploads over a PostgreSQL with a standby: its primary dies between what they read and their commit."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.buffers.postgres import PostgresStore
from tests.faults.cluster import Pair, wait
from tests.faults.servers import PATIENCE, Client, Server, new_key
from tests.faults.test_cluster_standby import WAITERS, adding
from tests.faults.test_steps import doubling
from tests.faults.test_uploads import ROWS, check, upload, weights


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as directory, Pair(Path(directory)) as made:
        yield made


class Two:
    """Two servers and their clients. The first server stops where a test orders it."""

    def __init__(self, pair: Pair, place: Path, stack: ExitStack) -> None:
        self._order, self.schema = place / "order", f"s{new_key()}"
        own: dict[str, Any] = {"store": pair.url, "postgres_schema": self.schema, "durability": "replicated"}
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("GRADSERVE_TEST_KILL", str(self._order))
        self.first = stack.enter_context(Server(place / "first", module="tests.faults.killing", **own))
        self.second = stack.enter_context(Server(place / "second", **own))
        self.clients = [
            stack.enter_context(Client(each.url, patience=2 * PATIENCE)) for each in (self.first, self.second)
        ]
        self.clients[0].create("w", (3,))
        self.clients[0].add("w", np.ones(3))

    def order(self, point: str = "computed") -> None:
        """Let the first server stop at a point: once it has read the sources of the next step, for example."""
        self._order.with_suffix(".done").unlink(missing_ok=True)
        self._order.write_text(f"{point}:1:stop")

    def has_stopped(self) -> bool:
        return self._order.with_suffix(".done").exists()

    def go_on(self) -> None:
        self._order.unlink(missing_ok=True)
        self.first.process.send_signal(signal.SIGCONT)


@pytest.fixture
def two(pair: Pair, tmp_path: Path) -> Iterator[Two]:
    with ExitStack() as stack:
        yield Two(pair, tmp_path, stack)


@pytest.mark.parametrize("meanwhile", ["nothing", "the same step", "an add"])
def test_a_failover_between_read_and_commit(pair: Pair, two: Two, meanwhile: str) -> None:
    request = doubling("w", new_key())
    with ThreadPoolExecutor(1) as thread:
        two.order()
        asking = thread.submit(two.clients[0].send, **request)
        wait(two.has_stopped, "the server does not come to the step")
        others = [two.clients[1].send(**request)] if meanwhile == "the same step" else []
        if meanwhile == "an add":
            two.clients[1].add("w", np.ones(3))
        pair.fail_over()
        two.go_on()
        answers = [asking.result(3 * PATIENCE), *others, two.clients[1].send(**request)]
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    assert len({answer.content for answer in answers}) == 1
    assert two.clients[0].value("w").tolist() == [4 if meanwhile == "an add" else 2] * 3
    assert two.clients[1].metadata("w")["version"] == 2 + (meanwhile == "an add")


def test_a_step_is_not_computed_from_what_a_failover_loses(pair: Pair, two: Two) -> None:
    """The lost change and the change that takes its place make the same version of the buffer."""
    with closing(PostgresStore(pair.url, schema=two.schema)) as behind, ThreadPoolExecutor(1) as thread:
        pair.standby.stop()
        assert adding(two.clients[1], new_key(), 1) is None
        wait(lambda: pair.primary.execute(f"select pg_cancel_backend(pid) {WAITERS}"), "the add does not wait")
        wait(lambda: behind.record("w").version == 2, "the commit is not visible")
        two.second.kill()
        two.order()
        step = doubling("w", new_key())
        assert two.clients[0].once(**step).status_code == 503
        asking = thread.submit(two.clients[0].send, **step)
        assert not two.has_stopped()
        pair.fail_over()
        two.second.start()
        assert two.clients[1].add("w", np.full(3, 2.0))["version"] == 2
        two.go_on()
        assert asking.result(3 * PATIENCE).json()["output"]["version"] == 3
    assert two.clients[1].value("w").tolist() == [6, 6, 6]


def test_a_failover_between_the_staging_of_a_model_and_its_commit(pair: Pair, two: Two) -> None:
    """The next primary may lack what was staged."""
    numbers = weights(1, ROWS)
    request = upload("m", numbers)
    with ThreadPoolExecutor(1) as thread:
        two.order("staged")
        asking = thread.submit(two.clients[0].send, **request)
        wait(two.has_stopped, "the server does not stage the model")
        pair.fail_over()
        two.go_on()
        answers = [asking.result(3 * PATIENCE), two.clients[1].send(**request)]
    assert {answer.status_code for answer in answers} == {201}, [answer.text for answer in answers]
    assert len({answer.content for answer in answers}) == 1
    check(two.clients[1], "m", numbers)
