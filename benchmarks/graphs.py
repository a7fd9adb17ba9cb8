"""Micro-batches of whole graphs against train steps of ONNX Runtime and PyTorch: `python -m benchmarks.graphs`.

Theirs run in this process. Each graph is exported by PyTorch and made into a training graph by ONNX Runtime's tool. A
step is the loss and all gradients, added to what there is. Over HTTP the server takes the parameters from buffers and
adds the gradients to buffers, with a key; the batch and the loss are binary. All run by turns, with two threads each.
The exit status is 1 if the gradients differ.
"""

from __future__ import annotations

import os

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # PyTorch's idle threads must not spin on a core that the next one needs

import contextlib
import io
import itertools
import json
import re
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.servers import Server, gradserve, serving
from benchmarks.timing import alternate, table, verdict, watched
from service.api.telemetry.metrics import PHASES
from service.codecs import safetensors
from service.dtypes import Array
from service.engine.engine import Engine
from service.graphs import plan
from service.graphs.graph import Graph
from service.host.system import keep_freed_memory
from service.kernels import Operator
from service.limits import Limits

try:
    import onnx
    import onnxruntime
    from onnxruntime.training import artifacts
    from onnxruntime.training.api import CheckpointState, Module
except ImportError as missing:
    sys.exit(
        f"This needs {missing.name}, which has wheels for CPython 3.11 and older only: make bench PYTHON=python3.11"
    )

THREADS = 2
SECONDS = 4.0
MEMORY = 256 << 20
TARGET = 2.0
"""The target of a step over HTTP, as a multiple of ONNX Runtime's, if that takes `LEAST` seconds or more."""
LEAST = 0.005
FORM = "application/vnd.safetensors"
KINDS = 5
"""Kinds of nodes that the second table shows."""
TOLERANCE = 1e-3
"""How far a gradient may be from ONNX Runtime's, in parts of its largest element: after hundreds of sums in float32."""


class Case(NamedTuple):
    """A model in training form, its input, and the labels or the target."""

    module: nn.Module
    batch: Any
    wanted: Any

    @property
    def classifies(self) -> bool:
        """Whether the loss is the cross entropy, not the mean squared error."""
        return not self.wanted.is_floating_point()


class Residual(nn.Module):  # type: ignore[misc]
    """A block of ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, 1, 1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + x)


class Attention(nn.Module):  # type: ignore[misc]
    """Self-attention and a perceptron, both with layer normalization: a block of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Any) -> Any:
        n, s, d = x.shape
        q, k, v = (one.view(n, s, self.heads, -1).transpose(1, 2) for one in self.qkv(self.norm1(x)).split(d, 2))
        weights = torch.softmax(q @ k.transpose(-2, -1) * (d // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(n, s, d))
        return x + self.mlp(self.norm2(x))


class Tagger(nn.Module):  # type: ignore[misc]
    """Embeddings, an LSTM, and a tag for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.tags = nn.Embedding(1000, 64), nn.LSTM(64, 128), nn.Linear(128, 17)

    def forward(self, words: Any) -> Any:
        return self.tags(self.lstm(self.words(words))[0]).flatten(0, 1)


def convolutions() -> nn.Module:
    """Return LeNet."""
    first = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    last = [nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*first, nn.Flatten(), *last)


def cases() -> dict[str, Case]:
    """Return the graphs by name."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    resnet = nn.Sequential(Residual(64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return {
        "MLP 784-512-10, batch 64": Case(mlp, torch.randn(64, 784), torch.randint(10, (64,))),
        "LeNet, batch 32": Case(convolutions(), torch.randn(32, 1, 28, 28), torch.randint(10, (32,))),
        "ResNet block, 8x64x28x28": Case(resnet, torch.randn(8, 64, 28, 28), torch.randint(10, (8,))),
        "transformer block, 8x128x256": Case(Attention(256, 8), torch.randn(8, 128, 256), torch.randn(8, 128, 256)),
        "LSTM tagger, 32x16": Case(Tagger(), torch.randint(1000, (32, 16)), torch.randint(17, (512,))),
    }


@contextlib.contextmanager
def quiet() -> Any:
    """Discard what ONNX Runtime's tool prints past Python."""
    kept = [os.dup(stream) for stream in (1, 2)]
    with open(os.devnull, "wb") as nothing, contextlib.redirect_stdout(io.StringIO()):
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
        try:
            yield
        finally:
            for stream, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, stream)
                os.close(copy)


def write(case: Case, folder: str) -> bytes:
    """Write the files of ONNX Runtime's tool into the folder. Return the training graph."""
    exported = io.BytesIO()
    names = [name for name, _ in case.module.named_parameters()]
    mode = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False, "opset_version": 15}
    losses = artifacts.LossType
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        torch.onnx.export(case.module, (case.batch,), exported, input_names=["x"], dynamo=False, **mode)
        model = onnx.load_from_string(exported.getvalue())
        loss = losses.CrossEntropyLoss if case.classifies else losses.MSELoss
        artifacts.generate_artifacts(model, requires_grad=names, loss=loss, artifact_directory=folder)
    return Path(folder, "training_model.onnx").read_bytes()


def onnxruntime_step(case: Case, folder: str) -> tuple[Callable[[], object], Callable[[], dict[str, Array]]]:
    """Return ONNX Runtime's step, and a function that returns the gradients of the last one alone."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.add_session_config_entry("session.force_spinning_stop", "1")
    state = CheckpointState.load_checkpoint(str(Path(folder, "checkpoint")))
    module = Module(str(Path(folder, "training_model.onnx")), state, session_options=options)
    module.train()
    given = case.batch.numpy(), case.wanted.numpy()

    def gradients() -> dict[str, Array]:
        module.lazy_reset_grad()
        module(*given)
        return {name: one.grad.copy() for name, one in state.parameters if one.requires_grad}

    return partial(module, *given), gradients


def torch_step(case: Case) -> Callable[[], object]:
    """Return PyTorch's step."""
    loss = nn.functional.cross_entropy if case.classifies else nn.functional.mse_loss
    return lambda: loss(case.module(case.batch), case.wanted).backward()


class OverHttp:
    """A graph on a server: its parameters and its gradients are buffers."""

    def __init__(
        self, server: Server, model: bytes, parameters: Mapping[str, Array], inputs: Mapping[str, Array]
    ) -> None:
        self._server, self._keys = server, itertools.count()
        self._ask("PUT", "/v1/graphs/g", model, {})
        shapes = {f"{kind}.{name}": {"shape": [*one.shape]} for name, one in parameters.items() for kind in "pd"}
        self._ask("POST", "/v1/buffers/create", json.dumps({"buffers": shapes}).encode(), {})
        values = b"".join(safetensors.encode({f"p.{name}": one for name, one in parameters.items()}))
        self._ask("POST", "/v1/buffers/accumulate?overwrite=true", values, {"Content-Type": FORM})
        self._body = b"".join(safetensors.encode(inputs))
        self._path = "/v1/graphs/g?from=parameters:p.*&into=gradients:d.*&outputs=loss&weight=1"

    def step(self) -> None:
        """Send a micro-batch, and read the answer."""
        key = {"Idempotency-Key": f"{next(self._keys)}", "Content-Type": FORM, "Accept": FORM}
        self._ask("POST", self._path, self._body, key)

    def gradients(self) -> dict[str, Array]:
        """Return the mean of all gradients so far."""
        query = "prefix=d.&reduce=mean"
        body = self._ask("POST", f"/v1/buffers/value?{query}", b"", {"Accept": FORM})
        found = safetensors.decode(memoryview(body), Limits(1 << 30))
        return {name.removeprefix("d."): one for name, one in found.items()}

    def phases(self) -> dict[str, float]:
        """Return the seconds of all requests so far, by phase."""
        lines = self._ask("GET", "/metrics", b"", {}).decode()
        found = re.findall(r'^gradserve_phase_seconds_sum\{phase="(\w+)"\} (\S+)$', lines, re.MULTILINE)
        return {phase: float(seconds) for phase, seconds in found}

    def _ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        connection = self._server.connection
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        answer = response.read()
        if response.status >= 300:
            sys.exit(f"{path} answers {response.status}: {answer[:300]!r}")
        return answer


def shares(engine: Engine, operator: Operator, tensors: Mapping[str, Array]) -> str:
    """Return which kinds of nodes take most of a step's time, in percent, in this process."""
    taken: dict[str, float] = defaultdict(float)
    run = plan._run

    def timed(step: plan.Step, given: Any) -> Any:
        start = time.perf_counter()
        try:
            return run(step, given)
        finally:
            taken[step.label.partition(" ")[0]] += time.perf_counter() - start

    plan._run = timed
    try:
        for _ in range(20):
            engine.run(operator, tensors, {})
    finally:
        plan._run = run
    most = sorted(taken.items(), key=lambda pair: -pair[1])[:KINDS]
    return ", ".join(f"{kind} {seconds / sum(taken.values()):.0%}" for kind, seconds in most)


def apart(ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> float:
    """Return how far gradients are apart, in parts of the largest element of all."""
    largest = max(float(np.abs(one).max()) for one in theirs.values())
    return max(float(np.abs(ours[name] - one).max()) for name, one in theirs.items()) / largest


def measure(engine: Engine, title: str, case: Case) -> tuple[list[Any], list[Any]]:
    """Return the rows of a graph: its times, and where they go."""
    with tempfile.TemporaryDirectory() as folder, serving(gradserve(threads=THREADS), "/v2/health/ready") as server:
        model = write(case, folder)
        inputs = {"x": case.batch.numpy(), "labels" if case.classifies else "target": case.wanted.numpy()}
        parameters = {name: one.detach().numpy() for name, one in case.module.named_parameters()}
        over_http = OverHttp(server, model, parameters, inputs)
        operator = Graph.read(model).operator(title)
        tensors = {**inputs, **{f"parameters.{name}": one for name, one in parameters.items()}}
        theirs, gradients = onnxruntime_step(case, folder)
        over_http.step()
        if (difference := apart(over_http.gradients(), gradients())) > TOLERANCE:
            sys.exit(f"{title}: the gradients are {difference:.1e} from ONNX Runtime's")
        before, count = over_http.phases(), next(over_http._keys)
        contenders = {
            "http": over_http.step,
            "process": lambda: engine.pool.submit(partial(engine.run, operator, tensors, {})).result(),
            "onnxruntime": theirs,
            "torch": torch_step(case),
        }
        medians = alternate(contenders, seconds=SECONDS)
        requests = next(over_http._keys) - count - 1
        spent = {phase: (seconds - before[phase]) / requests for phase, seconds in over_http.phases().items()}
    times = [f"{1e3 * medians[name]:.2f}" for name in contenders]
    ratio, judged = medians["http"] / medians["onnxruntime"], medians["onnxruntime"] >= LEAST
    row = [title, *times, f"{ratio:.2f}", f"{medians['http'] / medians['torch']:.2f}"]
    row += [f"<= {TARGET:g}" if judged else "-", verdict(ratio <= TARGET) if judged else "-"]
    most = engine.pool.submit(partial(shares, engine, operator, tensors)).result()
    return row, [title, most, *(f"{1e3 * spent[phase]:.2f}" for phase in PHASES)]


def main() -> None:
    """Print the tables."""
    onnxruntime.set_default_logger_severity(4)
    torch.set_num_threads(THREADS)
    keep_freed_memory(MEMORY)  # as the service does
    print(f"Loss and gradients of a micro-batch, float32, {THREADS} threads each, medians of runs by turns", flush=True)
    with watched():
        engine = Engine(threads=THREADS, limits=Limits(1 << 30), reuse_bytes=MEMORY)
        rows = [measure(engine, title, case) for title, case in cases().items()]
        engine.pool.close()
        head = ["graph", "HTTP ms", "in process ms", "ONNX Runtime ms", "PyTorch ms", "HTTP / ONNX Runtime"]
        print(f"\n{table([*head, 'HTTP / PyTorch', 'target', 'met'], [row for row, _ in rows])}")
        rows_of_phases = [row for _, row in rows]
        print(
            f"\n{table(['graph', 'nodes with the largest shares', *(f'{one} ms' for one in PHASES)], rows_of_phases)}"
        )


if __name__ == "__main__":
    main()
