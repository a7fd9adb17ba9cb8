"""Steps of `GradientAccumulator` by turns: a push of nothing, a split push, pushes beside the next pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from gradserve_client import Client
from gradserve_client.torch import GradientAccumulator

from benchmarks.timing import alternate

MEGABYTES = 1 << 20
MICRO_BATCHES = 4
MANY = 2000


def flat(megabytes: int) -> Any:
    """Return a model of eight parameters with this many bytes in float32."""
    return torch.nn.ParameterList([torch.zeros(megabytes * MEGABYTES // 32) for _ in range(8)])


def pushing(server: Client, run: str, megabytes: int, *, weight: float = 1.0, **options: Any) -> Callable[[], object]:
    """Return a call that pushes the gradients of a model, closing a step each time."""
    model = flat(megabytes)
    gradients = GradientAccumulator(model, server, run=run, quorum=1, **options)
    numbers = [torch.ones_like(parameter) for parameter in model]

    def push() -> None:
        for parameter, gradient in zip(model, numbers, strict=True):
            parameter.grad = gradient
        step = gradients.push(weight=weight).step
        gradients.load_state_dict({"step": step + 1, "pushes": 0})

    return push


def stepping(server: Client, run: str, *, wait: bool) -> Callable[[], object]:
    """Return a call that makes a step of several micro-batches on a model of 16 MB."""
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])
    samples = torch.randn(128, 1024)
    gradients = GradientAccumulator(model, server, run=run)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            model(samples).square().mean().backward()
            gradients.push(wait=wait)
        gradients.pull()
        optimizer.step()
        optimizer.zero_grad()

    return step


def accumulator_rows(server: Client) -> list[list[str]]:
    """Return the rows of the table: a case, its median time, what it is compared with, and the ratio."""
    torch.set_num_threads(1)  # the server on this machine needs the other cores
    full = pushing(server, "full", 16, worker="0")
    cases = {
        "push of nothing, 16 MB, ms": (pushing(server, "nothing", 16, worker="0", weight=0), full),
        "push of 64 MB in 16 requests, not 1, ms": (
            pushing(server, "split", 64, worker="0", request_bytes=4 * MEGABYTES),
            pushing(server, "whole", 64, worker="0", request_bytes=64 * MEGABYTES),
        ),
        "step of 4 pushes of 16 MB, wait=False, ms": (
            stepping(server, "overlapped", wait=False),
            stepping(server, "waiting", wait=True),
        ),
    }
    rows = []
    for case, (one, other) in cases.items():
        times = alternate({"one": one, "other": other}, seconds=8.0, least=5)
        ratio = times["one"] / times["other"]
        rows.append([case, f"{times['one'] * 1e3:.1f}", f"{times['other'] * 1e3:.1f}", f"{ratio:.2f}"])
        print(f"  {case}: {ratio:.2f}", flush=True)
    model = torch.nn.ParameterList([torch.zeros(8) for _ in range(MANY)])
    start = time.perf_counter()
    GradientAccumulator(model, server, run="many")
    rows.append([f"constructor, {MANY} parameters, ms", f"{(time.perf_counter() - start) * 1e3:.0f}", "-", "-"])
    return rows
