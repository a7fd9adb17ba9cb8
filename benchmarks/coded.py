"""Gradients in 8 bits against float32, by turns: `python -m benchmarks.coded`.

Bytes of a push, processor time of the server and of the client, a step over a link of 100 Mbit/s, and the losses of
three models that train with gradients and means in 8 bits, with error feedback and without it.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import httpx
import numpy as np
import torch
from gradserve_client import Client
from gradserve_client._runs.feedback import Feedback
from gradserve_client._wire.codes import encoded
from gradserve_client.arrays import GradientAccumulator as OfArrays
from gradserve_client.torch import GradientAccumulator
from torch import nn

from benchmarks.servers import Server, gradserve, serving
from benchmarks.timing import table, verdict, watched
from service.codecs import safetensors
from service.dtypes import Array

LARGE, MIDDLE = 25_000_000, 1_000_000
LINK_BYTES = 12_500_000
"""Bytes a second of the link in each direction: 100 Mbit/s."""
ADDS, TURNS = 40, 7
STEPS, SEEDS = 500, 3
CODED: Any = {"wire_dtype": "int8", "pull_dtype": "int8"}


class Counted(httpx.HTTPTransport):
    """Counts the bytes of the bodies that are sent."""

    sent = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.sent += int(request.headers.get("Content-Length", 0))
        return super().handle_request(request)


def gradient(size: int) -> Array:
    """Return normal numbers."""
    return np.random.default_rng(0).standard_normal(size, np.float32)


def pushed_bytes(server: Server, run: str, **form: Any) -> int:
    """Return the bytes of a push of `LARGE` parameters."""
    link = Counted()
    with Client(server.url, transport=link) as client:
        worker = OfArrays(np.zeros(LARGE, np.float32), client, run=run, **form)
        link.sent = 0
        worker.push(gradient(LARGE))
        client.runs.delete(run)
    return link.sent


def server_seconds(server: Server) -> tuple[float, float]:
    """Return the server's processor seconds for an add of `MIDDLE` elements: in int8 and in float32."""
    numbers = gradient(MIDDLE)
    coded = encoded(numbers)
    bodies = {
        "int8": {"gradient/codes": coded.codes, "gradient/scales": coded.scales},
        "float32": {"gradient": numbers},
    }
    taken: dict[str, list[float]] = {name: [] for name in bodies}
    headers = {"Content-Type": safetensors.MEDIA_TYPE, "Accept": "application/json"}
    with httpx.Client(base_url=server.url) as http:
        for name in bodies:
            http.put(f"/v1/buffers/{name}", json={"shape": [MIDDLE]}).raise_for_status()
        for _ in range(TURNS):
            for name, tensors in bodies.items():
                body, before = b"".join(safetensors.encode(tensors)), _processor_seconds(server.pid)
                for _ in range(ADDS):
                    http.post(f"/v1/buffers/{name}/accumulate", content=body, headers=headers).raise_for_status()
                taken[name].append((_processor_seconds(server.pid) - before) / ADDS)
    return statistics.median(taken["int8"]), statistics.median(taken["float32"])


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def client_seconds() -> tuple[float, float]:
    """Return the processor seconds to encode `LARGE` elements, and to copy them."""
    numbers, target = gradient(LARGE), np.empty(LARGE, np.float32)
    contenders: dict[str, Callable[[], object]] = {
        "encode": lambda: encoded(numbers),
        "copy": lambda: np.copyto(target, numbers),
    }
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(TURNS):
        for name, call in contenders.items():
            start = time.process_time()
            call()
            taken[name].append(time.process_time() - start)
    return statistics.median(taken["encode"]), statistics.median(taken["copy"])


@contextmanager
def slow_link(url: str) -> Iterator[str]:
    """Yield the URL of a proxy that forwards `LINK_BYTES` a second in each direction."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = urlsplit(url).port

    def forward(source: socket.socket, target: socket.socket) -> None:
        free_at = time.monotonic()
        while data := source.recv(1 << 16):
            free_at = max(free_at, time.monotonic()) + len(data) / LINK_BYTES
            time.sleep(max(0.0, free_at - time.monotonic()))
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", port))
            for pair in ((client, server), (server, client)):
                threading.Thread(target=forward, args=pair, daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def step_seconds(server: Server) -> tuple[float, float]:
    """Return the seconds of a push and a pull of `LARGE` parameters over the link: in 8 bits and in float32."""
    numbers, taken = gradient(LARGE), dict[str, list[float]]()
    with slow_link(server.url) as url, Client(url, timeout=120.0) as client:
        forms: dict[str, Any] = {"int8": CODED, "float32": {}}
        workers = {name: OfArrays(numbers, client, run=f"link-{name}", **form) for name, form in forms.items()}
        for _ in range(3):
            for name, worker in workers.items():
                start = time.perf_counter()
                worker.push(numbers)
                worker.pull()
                taken.setdefault(name, []).append(time.perf_counter() - start)
    return statistics.median(taken["int8"]), statistics.median(taken["float32"])


# ----- training -----


class Characters(nn.Module):  # type: ignore[misc]
    """A transformer of two layers that says the next of 32 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, 64), nn.Embedding(32, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(64, 128)

    def forward(self, x: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layers(self.tokens(x) + self.places(torch.arange(x.shape[1])), mask=mask)).flatten(0, 1)


class Tagger(nn.Module):  # type: ignore[misc]
    """An LSTM that tags words by the word before."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.tags = nn.Embedding(200, 32), nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 17)

    def forward(self, x: Any) -> Any:
        return self.tags(self.lstm(self.words(x))[0]).flatten(0, 1)


def digits() -> tuple[nn.Module, Callable[[], tuple[Any, Any]]]:
    """Return a perceptron, and batches of handwritten digits."""
    from sklearn.datasets import load_digits

    images, labels = (torch.tensor(one) for one in load_digits(return_X_y=True))
    images = images.float() / 16

    def batch() -> tuple[Any, Any]:
        rows = torch.randint(len(images), (64,))
        return images[rows], labels[rows]

    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), batch


def characters() -> tuple[nn.Module, Callable[[], tuple[Any, Any]]]:
    """Return a transformer, and batches of a text: a document of this project."""
    path = Path(__file__).parents[1] / "docs" / "buffers.md"
    text = torch.tensor([min(ord(one), 127) for one in path.read_text()])

    def batch() -> tuple[Any, Any]:
        starts = torch.randint(len(text) - 33, (32,))
        windows = torch.stack([text[start : start + 33] for start in starts])
        return windows[:, :-1], windows[:, 1:].flatten()

    return Characters(), batch


def tags() -> tuple[nn.Module, Callable[[], tuple[Any, Any]]]:
    """Return a tagger, and batches whose tags follow from two words."""

    def batch() -> tuple[Any, Any]:
        words = torch.randint(200, (32, 16))
        return words, ((words + words.roll(1, 1)) % 17).flatten()

    return Tagger(), batch


TASKS = {"digits MLP": digits, "character transformer": characters, "LSTM tagger": tags}

FORMS: dict[str, Any] = {"float32": {}, "with feedback": CODED, "without feedback": CODED}


def final_loss(client: Client, run: str, task: str, form: str, seed: int) -> float:
    """Return the mean loss of the last 50 of `STEPS` steps."""
    torch.manual_seed(seed)
    model, batch = TASKS[task]()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    worker = GradientAccumulator(model, client, run=run, **FORMS[form])
    for _ in range(STEPS):
        samples, wanted = batch()
        loss = nn.functional.cross_entropy(model(samples), wanted)
        loss.backward()
        worker.push()
        worker.pull()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    client.runs.delete(run)
    return statistics.fmean(losses[-50:])


def losses(server: Server) -> list[list[str]]:
    """Return a row for each model: the final losses by form, and their ratios to float32."""
    rows = []
    with Client(server.url) as client:
        for task in TASKS:
            found: dict[str, list[float]] = {form: [] for form in FORMS}
            for seed in range(SEEDS):
                for form in FORMS:
                    with ExitStack() as stack:
                        if form == "without feedback":
                            stack.enter_context(patch.object(Feedback, "keep"))
                        found[form].append(final_loss(client, f"{form[:4]}{seed}", task, form, seed))
            means = {form: statistics.fmean(values) for form, values in found.items()}
            ratios = [means[form] / means["float32"] for form in FORMS if form != "float32"]
            kept = abs(ratios[0] - 1) <= 0.01
            rows.append([task, *(f"{one:.4f}" for one in means.values()), *(f"{one:.4f}" for one in ratios)])
            rows[-1].append(verdict(kept))
    return rows


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    rows = []

    def add(what: str, pair: tuple[float, float], unit: str, target: float | None) -> None:
        coded, plain = pair
        judged = ["-", "-"] if target is None else [f"<= {target:g}", verdict(coded / plain <= target)]
        rows.append([what, f"{coded:.4g} {unit}", f"{plain:.4g} {unit}", f"{coded / plain:.3f}", *judged])

    with watched(), tempfile.TemporaryDirectory() as store:
        with serving(gradserve(store=f"lmdb:{store}"), "/v2/health/ready") as server:
            sizes = pushed_bytes(server, "coded", **CODED), pushed_bytes(server, "plain")
            add("a push of 25 M parameters", sizes, "bytes", 0.26)
            add("server: an add of 1 M elements", server_seconds(server), "s", 1.3)
            add("client: encode 25 M elements, or copy them", client_seconds(), "s", None)
            add("a step of 25 M parameters over 100 Mbit/s", step_seconds(server), "s", 0.30)
            print(table(["what", "8 bits", "float32", "ratio", "target", "met"], rows), flush=True)
            head = ["final loss", *FORMS, "with / float32", "without / float32", "within 1 %"]
            print(f"\n{table(head, losses(server))}")


if __name__ == "__main__":
    main()
