"""Base64 in JSON, safetensors and the Open Inference Protocol's bytes carry every bit of every dtype, both ways."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import numpy as np
import pytest
from hypothesis import given

from service.codecs import json as json_codec
from service.codecs import open_inference, safetensors
from service.codecs.json import Document
from service.dtypes import BOOL, DTYPES, OPEN_INFERENCE, Array, DType
from service.limits import Limits
from tests.codecs.test_json import any_array
from tests.codecs.test_safetensors import EVERY_DTYPE
from tests.kernels.equality import is_nan
from tests.test_contract import assert_same

LIMITS = Limits(1 << 30)
FLOATS = ["float16", "bfloat16", "float32", "float64"]


def special(dtype: DType) -> Array:
    """Every bit pattern of a small dtype; of a large one those with one run of bits, or few bits, set or clear."""
    bits = 8 * dtype.itemsize
    if dtype == BOOL:
        return np.array([False, True, True, False])
    if bits == 16:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype)
    powers = [1 << k for k in range(bits)]
    pairs = [one | other for one in powers for other in powers]
    runs = [other - one for one in powers for other in powers if other > one]  # infinity is one
    edges = [run + offset for run in runs for offset in (-1, 0, 1)]
    patterns = {pattern % (1 << bits) for pattern in pairs + edges}
    return np.array(sorted(patterns | {(1 << bits) - 1 - one for one in patterns}), f"u{dtype.itemsize}").view(dtype)


# ----- each codec, there and back -----


def by_base64(tensors: dict[str, Array]) -> dict[str, Array]:
    document = Document(b"".join(json_codec.encode(tensors, "base64")), LIMITS)
    members = document.members.items()
    read = {name: document.base64(name, one["base64"], DTYPES[one["dtype"]], one["shape"]) for name, one in members}
    document.finish()
    return read


def by_safetensors(tensors: dict[str, Array]) -> dict[str, Array]:
    read = safetensors.decode(memoryview(b"".join(safetensors.encode(tensors))), LIMITS)
    return {name: read[name] for name in tensors}


def by_open_inference(tensors: dict[str, Array]) -> dict[str, Array]:
    pieces, length = open_inference.encode("m", None, tensors, tensors)
    answer = b"".join(pieces)
    head = json.dumps({"inputs": json.loads(answer[:length])["outputs"]}).encode()
    return open_inference.decode(memoryview(head + answer[length:]), len(head), LIMITS).tensors


Trip = Callable[[dict[str, Array]], dict[str, Array]]
EVERY_CODEC = pytest.mark.parametrize("there_and_back", [by_base64, by_safetensors, by_open_inference])


@EVERY_DTYPE
@EVERY_CODEC
def test_every_special_value(there_and_back: Trip, dtype: DType) -> None:
    values = special(dtype)
    tensors = {"askew": np.array([True]), "values": values, "grid": values[: values.size // 2 * 2].reshape(2, -1)}
    assert_same(there_and_back(tensors), tensors)


@given(any_array().map(np.asarray), any_array().map(np.asarray))
def test_all_codecs_agree(one: Array, other: Array) -> None:
    tensors = {"one": one, "other": other}
    for there_and_back in (by_base64, by_safetensors, by_open_inference):
        assert_same(there_and_back(tensors), tensors)


def test_special_values_are_special() -> None:
    for name in FLOATS:
        values = special(DTYPES[name])
        nans = values[is_nan(values)]
        payloads = set(nans.view(f"u{nans.itemsize}").tolist())
        assert len(payloads) > 50
        wide = values[~is_nan(values)].astype(np.float64)
        finite = wide[np.isfinite(wide)]
        assert np.any((finite == 0) & np.signbit(finite))
        assert 0 < np.min(np.abs(finite[finite != 0])) < {2: 1e-7, 4: 1e-44, 8: 1e-323}[values.itemsize]
        assert {np.inf, -np.inf} <= set(wide.tolist())


# ----- over HTTP -----

OUTPUT = "accumulated_gradient"
"""Of InPlaceAccumulatorV2, which with `overwrite` only copies the gradient."""


def through_base64(client: httpx.Client, tensors: dict[str, Array]) -> Array:
    body = b"".join(json_codec.encode(tensors, "base64"))
    answer = client.post("/v1/ops/InPlaceAccumulatorV2", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    document = Document(answer.content, LIMITS)
    one = document.members[OUTPUT]
    return document.base64(OUTPUT, one["base64"], DTYPES[one["dtype"]], one["shape"])


def through_safetensors(client: httpx.Client, tensors: dict[str, Array]) -> Array:
    body = b"".join(safetensors.encode(tensors))
    answer = client.post("/v1/ops/InPlaceAccumulatorV2", content=body, headers={"Content-Type": safetensors.MEDIA_TYPE})
    assert answer.status_code == 200, answer.text
    return safetensors.decode(memoryview(answer.content), LIMITS)[OUTPUT]


def through_open_inference(client: httpx.Client, tensors: dict[str, Array]) -> Array:
    inputs = [
        {
            "name": name,
            "datatype": OPEN_INFERENCE[a.dtype],
            "shape": a.shape,
            "parameters": {"binary_data_size": a.nbytes},
        }
        for name, a in tensors.items()
    ]
    outputs = [{"name": OUTPUT, "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    body = head + b"".join(a.tobytes() for a in tensors.values())
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = client.post("/v2/models/InPlaceAccumulatorV2/infer", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    length = int(answer.headers["Inference-Header-Content-Length"])
    (one,) = json.loads(answer.content[:length])["outputs"]
    dtype = next(dtype for dtype, name in OPEN_INFERENCE.items() if name == one["datatype"])
    return np.frombuffer(answer.content[length:], dtype).reshape(one["shape"])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("through", [through_base64, through_safetensors, through_open_inference])
def test_every_bit_passes_through_an_operator(
    client: httpx.Client, through: Callable[[httpx.Client, dict[str, Array]], Array], dtype: str
) -> None:
    values = special(DTYPES[dtype])
    tensors = {"gradient_buffer": np.zeros_like(values), "gradient": values, "overwrite": np.array(True)}
    assert_same({OUTPUT: through(client, tensors)}, {OUTPUT: values})
