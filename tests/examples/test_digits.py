"""The example that trains in four processes through the service, run as a user runs it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from gradserve_client import Client

from service.kernels import OPERATORS
from tests.examples.running import run
from tests.serving import serving


def test_the_example_learns_the_digits_as_one_process_does_and_adds_each_gradient_once() -> None:
    """The buffers are its own: the server has another buffer of one of the names."""
    with serving() as url, Client(url) as server:
        server.buffers["W1"].create(3)
        done = run("digits_data_parallel", "--steps", "4", "--url", url)
        assert done.returncode == 0, done.stderr
        theirs, *ours = sorted(server.buffers.list(), key=lambda one: one.name != "W1")
    assert (theirs.version, theirs.shape) == (0, (3,))
    assert [one.name.split(".")[1] for one in ours] == ["W1", "W2", "b1", "b2", "loss"]
    assert {(one.step, one.version, one.count) for one in ours} == {(64, 256, 0)}  # 4 steps, 16 batches, 4 workers
    losses = [float(one) for one in re.findall(r"step +\d+  loss (\S+)", done.stdout)]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    (accuracy,) = re.findall(r"held-out accuracy (.*)%", done.stdout)
    assert float(accuracy) > 95
    (difference,) = re.findall(r"largest difference .*: (\S+)", done.stdout)
    assert float(difference) <= 1e-5


def test_the_example_fails_if_an_operator_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(dY: np.ndarray[Any, Any], X: np.ndarray[Any, Any], **_: Any) -> np.ndarray[Any, Any]:
        return np.where(X > 0, dY, 0.01 * dY)

    monkeypatch.setitem(vars(OPERATORS["ReluGrad"]), "kernel", wrong)
    with serving() as url:
        done = run("digits_data_parallel", "--steps", "1", "--url", url)
    assert done.returncode == 1
    assert "The losses are not those of one process" in done.stderr
