"""The calls of graphs: what to send, and how to read the answer. Both clients share them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gradserve_client._http.outcomes import Answer
from gradserve_client._http.policy import Call
from gradserve_client._wire import answers
from gradserve_client._wire.answers import JSON
from gradserve_client._wire.arguments import as_key, as_name, as_query, as_target
from gradserve_client._wire.calls import Input, Inputs, flat, running
from gradserve_client._wire.tensors import Array
from gradserve_client.graph_models import GraphInfo

GROUPS = ("parameters", "statistics")
"""The groups of a graph's inputs."""


def path_of(name: str) -> str:
    """Return the path of a graph."""
    return f"/v1/graphs/{as_name(name)}"


def put(
    name: str,
    content: bytes,
    options: Mapping[str, str | None],
    sets: Mapping[str, str],
    key: str | None,
    life: str | None = None,
) -> Call[GraphInfo]:
    """Upload a graph. `sets` has the buffers of its groups of weights, which have this life of a run."""
    query = {
        **as_query({**options, "life": life}),
        "set": [f"{group}:{as_target(buffer)}" for group, buffer in sets.items()],
    }
    headers = {"Content-Type": "application/octet-stream", "Accept": JSON}
    return Call("PUT", path_of(name), _info, query=query, headers=headers, body=[content], key=as_key(key))


def info(name: str) -> Call[GraphInfo]:
    """Read what a graph takes and gives."""
    return Call("GET", path_of(name), _info, headers={"Accept": JSON})


def content(name: str, buffers: Mapping[str, Any] = {}) -> Call[tuple[bytes, dict[str, int]]]:
    """Read the model, with the values of the buffers of these groups, and the least version of the buffers of each."""
    query = {group: as_target(buffer) for group, buffer in buffers.items()}

    def read(answer: Answer) -> tuple[bytes, dict[str, int]]:
        return bytes(answer.body), {group: int(answer.headers[f"{group}-version"]) for group in buffers}

    return Call("GET", f"{path_of(name)}/model", read, query=query)


def run(
    info: GraphInfo,
    tensors: Mapping[str, Input | Inputs],
    outputs: Sequence[str] | None,
    seed: int | None = None,
    form: str | None = None,
) -> Call[dict[str, Array]]:
    """Run a graph, and read its outputs."""
    inputs, attributes = flat(tensors, GROUPS), {"seed": seed, "form": form}
    return running(path_of(info.name), inputs, dtypes(info), answers.values, attributes, outputs=outputs)


def delete(name: str, key: str | None) -> Call[None]:
    """Delete a graph."""
    return Call("DELETE", path_of(name), answers.deleted, headers={"Accept": JSON}, key=as_key(key))


def dtypes(info: GraphInfo) -> dict[str, Any]:
    """Return the dtypes of a graph's plain inputs."""
    return {name: one.dtype for name, one in info.inputs.items()}


def _info(answer: Answer) -> GraphInfo:
    return GraphInfo.of(json.loads(answer.body))
