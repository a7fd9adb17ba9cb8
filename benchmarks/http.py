"""The service against a plain FastAPI endpoint, over HTTP: `python -m benchmarks.http`.

Each server is a process of uvicorn on a free port of the loopback interface, with the same options. Requests go by
turns over one keep-alive connection to each. A time runs from sending the prepared request to having read the whole
answer. Every answer is compared with NumPy's. The exit status is 1 if an answer is wrong.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import orjson

from benchmarks.servers import Connection, gradserve, serving, uvicorn
from benchmarks.timing import alternate, table, verdict, watched
from service.dtypes import Array

SECONDS = 20.0
ROUNDS = 25
LARGE = 1 << 20
SMALL = 256
PLAIN = uvicorn("benchmarks.plain:app", "--timeout-graceful-shutdown", "30", "--no-access-log")
LISTS_TARGET = 0.25
BASE64_TARGET = 0.4


@dataclass(frozen=True)
class Case:
    """One kind of request: its bodies for our server and for the plain endpoint, and the readers of dX."""

    title: str
    plain_path: str
    our_body: bytes
    plain_body: bytes
    our_dX: Callable[[Any], Array]
    plain_dX: Callable[[Any], Array]
    expected: Array
    target: float | None

    def run(self, ours: Connection, plain: Connection) -> list[str]:
        """Return the row of the table. Exit if an answer is wrong."""
        for connection in (ours, plain):
            connection.close()  # possibly idle for too long; the next request opens it again
        contenders = {
            "ours": partial(post, ours, "/v1/ops/ReluGrad", self.our_body),
            "plain": partial(post, plain, self.plain_path, self.plain_body),
        }
        medians = alternate(contenders, seconds=SECONDS if self.target else 3, least=ROUNDS, check=self._check)
        ratio = medians["ours"] / medians["plain"]
        judged = ["-", "-"] if self.target is None else [f"<= {self.target}", verdict(ratio <= self.target)]
        sent, milliseconds = f"{len(self.our_body) / 1e6:.1f}", (f"{1e3 * median:.2f}" for median in medians.values())
        return [self.title, f"{self.expected.size:,}", sent, *milliseconds, f"{ratio:.3f}", *judged]

    def _check(self, name: str, answer: bytes) -> None:
        read = self.our_dX if name == "ours" else self.plain_dX
        if not np.array_equal(read(orjson.loads(answer)["dX"]), self.expected):
            sys.exit(f"{self.title}: the answer of {name} is wrong: {answer[:200]!r}")


def post(connection: Connection, path: str, body: bytes) -> bytes:
    """Return the answer to `body`."""
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        sys.exit(f"{path} answers {response.status}: {answer[:500].decode()}")
    return answer


def lists(title: str, tensors: Mapping[str, Array], encode: Callable[[Any], bytes], target: float | None) -> Case:
    """Return the case of JSON lists that `encode` writes; both sides take the same body."""
    body = encode(tensors)
    return Case(
        title=title,
        plain_path="/lists",
        our_body=body,
        plain_body=body,
        our_dX=lambda dX: np.array(dX["data"], np.float32),
        plain_dX=lambda dX: np.array(dX, np.float32),
        expected=relu_grad(**tensors),
        target=target,
    )


def in_base64(tensors: Mapping[str, Array], target: float | None) -> Case:
    """Return the case of base64 tensors; our body also has dtype and shape."""
    texts = {name: base64.b64encode(tensor.tobytes()).decode() for name, tensor in tensors.items()}
    described = {
        name: {"dtype": tensor.dtype.name, "shape": tensor.shape, "base64": texts[name]}
        for name, tensor in tensors.items()
    }
    return Case(
        title="base64",
        plain_path="/base64",
        our_body=json.dumps(described).encode(),
        plain_body=json.dumps(texts).encode(),
        our_dX=lambda dX: np.frombuffer(base64.b64decode(dX["base64"]), np.float32),
        plain_dX=lambda dX: np.frombuffer(base64.b64decode(dX), np.float32),
        expected=relu_grad(**tensors),
        target=target,
    )


def relu_grad(dY: Array, X: Array) -> Array:
    return np.where(X > 0, dY, np.float32(0))


def from_lists(tensors: Mapping[str, Array]) -> bytes:
    """Encode as most clients do: each float32 with all digits of Python's float64."""
    return json.dumps({name: tensor.tolist() for name, tensor in tensors.items()}).encode()


def from_arrays(tensors: Mapping[str, Array]) -> bytes:
    """Encode each float32 with the fewest digits that identify it."""
    return orjson.dumps(tensors, option=orjson.OPT_SERIALIZE_NUMPY)


def cases() -> Iterator[Case]:
    """Yield the cases one at a time, because the bodies are large."""
    for size, judged in ((LARGE, True), (SMALL, False)):
        dY, X = np.random.default_rng(0).standard_normal((2, size), dtype=np.float32)
        tensors = {"dY": dY, "X": X}
        yield lists("lists, float64 digits", tensors, from_lists, LISTS_TARGET if judged else None)
        yield lists("lists, float32 digits", tensors, from_arrays, LISTS_TARGET if judged else None)
        yield in_base64(tensors, BASE64_TARGET if judged else None)


def main() -> None:
    """Print the table."""
    header = ["request", "elements", "body MB", "ours ms", "plain ms", "ours / plain", "target", "met"]
    print("ReluGrad over HTTP, float32, one connection each, medians of requests by turns\n", flush=True)
    with watched():
        with ExitStack() as stack:
            ours = stack.enter_context(serving(gradserve(), "/v2/health/ready"))
            plain = stack.enter_context(serving(PLAIN, "/health"))
            rows = [case.run(ours.connection, plain.connection) for case in cases()]
        print(table(header, rows))


if __name__ == "__main__":
    main()
