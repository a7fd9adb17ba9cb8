"""The training nodes of real graphs over HTTP, as a trainer sends them, against the tensors of one real step.

`make graphs` replays all nodes of the graphs in a folder. Without it, those in `tests/golden/graphs` are replayed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from service.codecs.safetensors import MEDIA_TYPE
from service.dtypes import Array
from service.kernels import OPERATORS
from tests.golden import graph
from tests.kernels.equality import assert_close, assert_same_bits
from tests.serving import serving

FOLDER = Path(os.environ.get("GRADSERVE_GRAPHS", graph.FOLDER))
GRAPHS = {path.stem: graph.load(path) for path in sorted(FOLDER.glob("*.npz"))}
NODES = {
    f"{name}-{place}-{node.operator}": (node, tensors, steps)
    for name, (nodes, tensors, steps) in GRAPHS.items()
    for place, node in enumerate(nodes)
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(threads=2) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def allowed(output: str, expected: Array, tensors: Mapping[str, Array]) -> float:
    """How far an answer may be from what ONNX Runtime computes in float32."""
    if output.startswith("updated_weights."):
        return 1e-3 * float(tensors["lr"].item())
    return 3e-6 * float(np.abs(expected).max(initial=0))


def text(value: Any) -> str:
    """An attribute in the query."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


@pytest.mark.parametrize("name", NODES)
def test_each_node_has_the_outputs_of_the_step(client: httpx.Client, name: str) -> None:
    node, tensors, steps = NODES[name]
    operator = OPERATORS[node.operator]
    inputs, attributes = graph.request(operator, node, tensors)
    answer = client.post(
        f"/v1/ops/{node.operator}",
        params={attribute: text(value) for attribute, value in attributes.items()},
        content=safetensors.numpy.save(
            {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in inputs.items()}
        ),
        headers={"Content-Type": MEDIA_TYPE},
    )
    assert answer.status_code == 200, answer.text
    outputs = safetensors.numpy.load(answer.content)
    compared = 0
    for output, stored in graph.named(operator.outputs, node.outputs):
        got = outputs[output].ravel()[:: steps[stored]] if stored in steps else outputs[output]
        if got.dtype.kind == "f":
            assert_close(got, tensors[stored], atol=allowed(output, tensors[stored], tensors))
        else:
            assert_same_bits(got, tensors[stored])
        compared += 1
    assert compared
