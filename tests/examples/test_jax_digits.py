"""The example that trains in JAX in three processes, run as a user runs it."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.buffers import changes
from tests.examples.running import EXAMPLES, run, shared
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
    """Its workers are threads of this process here."""
    count = itertools.count()
    monkeypatch.setattr(changes, "adds_nothing", lambda gradient: gradient.ndim == 2 and next(count) == 30)
    monkeypatch.syspath_prepend(EXAMPLES)
    jax_digits = importlib.import_module("jax_digits")
    monkeypatch.setattr(jax_digits, "ProcessPoolExecutor", lambda workers, **_: ThreadPoolExecutor(workers))
    with serving() as url:
        monkeypatch.setattr(sys, "argv", ["jax_digits", "--steps", "10", "--url", url])
        with pytest.raises(SystemExit, match="The parameters are not those of one process"):
            jax_digits.main()
