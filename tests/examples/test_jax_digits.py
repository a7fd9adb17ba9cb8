"""The example that trains in JAX in three processes, run as a user runs it."""

from __future__ import annotations

import itertools
import re

import pytest

from service.buffers import changes
from tests.examples.running import run, shared
from tests.serving import serving


def test_the_example_trains_as_one_process_does() -> None:
    with shared("dense_0.kernel") as url:
        done = run("jax_digits", "--url", url)
        assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"held-out accuracy: (.*)% of three", done.stdout)
    assert float(accuracy) > 90
    (difference,) = re.findall(r"largest difference of a parameter: (\S+)", done.stdout)
    assert float(difference) <= 1e-5


def test_the_example_fails_if_a_gradient_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()
    monkeypatch.setattr(changes, "adds_nothing", lambda gradient: next(count) == 50)
    with serving() as url:
        done = run("jax_digits", "--steps", "10", "--url", url)
    assert done.returncode == 1
    assert "The parameters are not those of one process" in done.stderr
