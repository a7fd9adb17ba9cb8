"""Four processes train one network with local steps, as DiLoCo does, and send a twenty-fifth of the bytes.

Each process takes ten steps of AdamW on its own rows. What these steps change is its pseudo-gradient: the parameters
before them minus the parameters after them. Pseudo-gradients travel in 8 bits a number. What rounding cuts off one is
added to the next. The server averages them, and takes one outer step of Nesterov's momentum with the mean: parameters
and momentum are buffers. All processes ask for this step with one key, so it happens once. Each reads the parameters.

The same network learns from the same rows data-parallel, with an average after every step. The bytes sent and the final
losses of both are printed.

    python examples/local_sgd.py [--url http://127.0.0.1:8000] [--steps 240]
"""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx
import torch
from _digits import Digits, delete_buffers, network, parameter_bytes, processes  # type: ignore[import-not-found]  # beside this file
from _server import server as running_server  # type: ignore[import-not-found]  # beside this file
from digits_data_parallel import load  # type: ignore[import-not-found]  # beside this file
from gradserve_client import Client
from gradserve_client.torch import GradientAccumulator

WORKERS = 4
BATCH = 128  # 32 rows for each worker
INNER_STEPS = 10
INNER_RATE = 0.005
OUTER_RATE, OUTER_MOMENTUM = 0.6, 0.9

NO_SECOND_MOMENT: Any = {"beta": 1.0, "epsilon": 1.0, "adam_mode": 1, "correct_bias": 0, "weight_decay": 0.0}
MOMENTUM = {"alpha": OUTER_MOMENTUM, **NO_SECOND_MOMENT}
"""AdamW with these is momentum, with its mean of gradients in place of their sum."""

LARGEST_DIFFERENCE = 0.03
"""The share of digits that local steps may recognize less than data-parallel training: 11 of the 360 held out."""


class Link(httpx.HTTPTransport):
    """Counts the bytes of the bodies that a process sends."""

    sent = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.sent += int(request.headers.get("Content-Length", 0))
        return super().handle_request(request)


@dataclass
class Worker:
    """One of the processes, with its model, its accumulator and the bytes that it has sent."""

    number: int
    digits: Digits
    model: Any
    gradients: GradientAccumulator
    server: Client
    link: Link

    def inner_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=INNER_RATE)

    def backward(self, step: int) -> None:
        """Compute the gradients of this worker's rows."""
        self.digits.loss(self.model, self.digits.share(step, BATCH, self.number, WORKERS)).backward()


class Outer:
    """The parameters and the momentum of the outer steps, on the server."""

    def __init__(self, worker: Worker) -> None:
        """Create them, unless another worker has."""
        self.server, self.sums = worker.server, worker.gradients.prefix
        self.prefix = f"{self.sums.removesuffix('.')}-outer."
        self.parameters = dict(worker.model.named_parameters())
        state = {f"{kind}.{name}": torch.zeros_like(one) for kind in "mv" for name, one in self.parameters.items()}
        state |= {f"p.{name}": one.detach() for name, one in self.parameters.items()}
        self.server.buffers.set(state, prefix=self.prefix, idempotency_key=f"{self.prefix} start")

    def step(self, number: int) -> None:
        """Take a step with the mean of this closed step, unless another worker has, and read the parameters.

        Nesterov's step is a step of momentum, which AdamW is without its second moment, and then one of plain SGD.
        """
        momentum = {"lr": OUTER_RATE * OUTER_MOMENTUM / (1 - OUTER_MOMENTUM), "step": 1}
        self._update("AdamWOptimizer", number, momentum, MOMENTUM, weights="p", momentums_1="m", momentums_2="v")
        self._update("SGDOptimizerV2", number, {"lr": OUTER_RATE}, {}, weights="p")
        found = self.server.buffers.value(prefix=f"{self.prefix}p.", dtype="float16")
        for name, parameter in self.parameters.items():
            parameter.data.copy_(torch.from_numpy(found[f"{self.prefix}p.{name}"]))

    def _update(self, op: str, number: int, numbers: Any, attributes: Any, **state: str) -> None:
        buffers = self.server.buffers
        means = {name: buffers[f"{self.sums}{name}@{number}"] for name in self.parameters}
        groups = {name: f"{self.prefix}{kind}.*" for name, kind in state.items()}
        tensors = {**numbers, "gradients": means, **{name: buffers[group] for name, group in groups.items()}}
        self.server.run(
            op,
            tensors,
            attributes,
            set={f"updated_{name}": group for name, group in groups.items()},
            reduce="mean",
            timeout=600.0,
            idempotency_key=f"{self.prefix} {op} {number}",
        )


def data_parallel(worker: Worker, steps: int) -> None:
    """Average the gradients in every step."""
    optimizer = worker.inner_optimizer()
    for step in range(steps):
        worker.backward(step)
        worker.gradients.push()
        worker.gradients.pull()
        optimizer.step()
        optimizer.zero_grad()


def local_steps(worker: Worker, steps: int) -> None:
    """Send pseudo-gradients after every `INNER_STEPS` steps, for an outer step of the server."""
    parameters = list(worker.model.parameters())
    inner, outer = worker.inner_optimizer(), Outer(worker)
    worker.link.sent = 0
    for start in range(0, steps, INNER_STEPS):
        before = [parameter.detach().clone() for parameter in parameters]
        for step in range(start, start + INNER_STEPS):
            worker.backward(step)
            inner.step()
            inner.zero_grad()
        for parameter, old in zip(parameters, before, strict=True):
            parameter.grad = old - parameter.detach()
        worker.gradients.push()
        outer.step(start // INNER_STEPS)
        worker.gradients.catch_up()


Training = Callable[[Worker, int], None]


@dataclass
class Result:
    """What a worker has in the end."""

    sent: int
    loss: float
    accuracy: float
    parameters: bytes


def work(number: int, train: Training, url: str, run: str, arrays: Any, steps: int) -> Result:
    """Train as one of the processes."""
    torch.set_num_threads(1)
    model, digits, link = network(), Digits(arrays), Link()
    form: Any = {"wire_dtype": "int8", "start": "any"} if train is local_steps else {}
    with Client(url, transport=link) as server:
        gradients = GradientAccumulator(model, server, run=f"{run}-{train.__name__}", quorum=WORKERS, **form)
        link.sent = 0
        train(Worker(number, digits, model, gradients, server, link), steps)
    loss, accuracy = digits.evaluate(model)
    return Result(link.sent, loss, accuracy, parameter_bytes(model))


def train_together(train: Training, url: str, run: str, arrays: Any, steps: int) -> Result:
    """Train in all processes, and print a line. All must end with the same bits."""
    job = partial(work, train=train, url=url, run=run, arrays=arrays, steps=steps)
    with ProcessPoolExecutor(WORKERS, mp_context=processes()) as workers:
        results = list(workers.map(job, range(WORKERS)))
    if len({result.parameters for result in results}) > 1:
        sys.exit("The workers ended with different parameters")
    sent = sum(result.sent for result in results)
    print(f"{train.__name__:14} {sent:11,}  {results[0].loss:6.3f}  {results[0].accuracy:8.1%}", flush=True)
    return replace(results[0], sent=sent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server; by default that at GRADSERVE_URL, or a new one")
    parser.add_argument("--steps", type=int, default=240, help=f"a multiple of {INNER_STEPS}")
    options = parser.parse_args()
    if options.steps < 1 or options.steps % INNER_STEPS:
        parser.error(f"--steps is {options.steps}, but must be a multiple of {INNER_STEPS}, and at least that")
    run = f"local_sgd-{uuid.uuid4().hex[:8]}"
    arrays = load()
    print(f"{'':14}  {'bytes sent':>10}  {'loss':>6}  {'accuracy':>8}")
    with running_server(options.url) as url:
        together, local = (
            train_together(train, url, run, arrays, options.steps) for train in (data_parallel, local_steps)
        )
        delete_buffers(url, run)
    print(f"local steps sent 1/{together.sent / local.sent:.0f} of the bytes, for the same number of samples")
    if local.accuracy < together.accuracy - LARGEST_DIFFERENCE:
        sys.exit(f"Local steps recognize over {LARGEST_DIFFERENCE:.0%} fewer digits than data-parallel training")


if __name__ == "__main__":
    main()
