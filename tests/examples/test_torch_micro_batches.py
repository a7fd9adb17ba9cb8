"""The example that accumulates a PyTorch model's gradients through a bad network, run as a user runs it."""

from __future__ import annotations

import re
from typing import Any

import pytest

import service.api.buffers.request
from tests.examples.running import run, shared
from tests.serving import serving


def test_the_example_equals_pytorch_behind_a_bad_network_and_leaves_no_buffer() -> None:
    with shared("0.weight") as url:
        done = run("torch_micro_batches", "--short", "--url", url)
        assert done.returncode == 0, done.stderr
    (requests, harmed) = map(int, re.findall(r"saw (\d+) requests, and did harm to (\d+)", done.stdout)[0])
    assert requests // 5 <= harmed <= requests // 5 + 1
    kinds = {kind: int(count) for count, kind in re.findall(r"^ +(\d+) (.+) \(", done.stdout, re.MULTILINE)}
    assert len(kinds) == 5
    assert sum(kinds.values()) == harmed
    assert min(kinds.values()) >= 1
    (difference,) = re.findall(r"largest difference .*: (\S+)", done.stdout)
    assert float(difference) <= 1e-6


def test_the_example_fails_if_the_server_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgotten(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr(service.api.buffers.request, "key_of", forgotten)
    with serving() as url:
        done = run("torch_micro_batches", "--short", "--url", url)
    assert done.returncode == 1
    signs = ("The difference is beyond 1e-06", "StepOpen", "StaleStep")  # by what was counted twice
    assert any(sign in done.stderr for sign in signs), done.stderr
