"""safetensors over /v1: the media types read and answered, and the problems of mistakes."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from service.codecs import safetensors as codec
from service.codecs.safetensors import MEDIA_TYPE
from service.kernels import Operator
from service.limits import Limits
from tests.cases import case
from tests.serving import assert_problem
from tests.test_contract import EVERY, FLOATS, assert_same, example
from tests.test_contract import decode as decode_json

JSON = "application/json"
ONES = {"dY": np.ones(2, np.float32), "X": np.ones(2, np.float32)}


def post(
    client: httpx.Client, op: str, content: bytes, *, accept: str | None = None, sent: str = MEDIA_TYPE, **params: Any
) -> httpx.Response:
    headers = {"Content-Type": sent} | ({} if accept is None else {"Accept": accept})
    return client.post(f"/v1/ops/{op}", content=content, headers=headers, params=params)


@EVERY
def test_every_operator_takes_and_answers_safetensors(client: httpx.Client, operator: Operator) -> None:
    for dtype in FLOATS:
        with case(dtype):
            assert_takes_and_answers(client, operator, dtype)


def assert_takes_and_answers(client: httpx.Client, operator: Operator, dtype: str) -> None:
    tensors = example(operator, {"float": dtype})
    expected, params = operator(tensors, operator.example_attributes), operator.example_attributes
    content = safetensors.numpy.save(tensors)
    answer = post(client, operator.name, content, **params)
    assert answer.headers["content-type"] == MEDIA_TYPE
    read = codec.decode(memoryview(answer.content), Limits(1 << 20))
    assert read.keys() == expected.keys()
    assert_same({name: read[name] for name in expected}, expected)
    in_json = decode_json(post(client, operator.name, content, accept=JSON, **params))
    assert_same({name: in_json[name] for name in expected}, expected)  # a file has its tensors in another order
    assert in_json.keys() == expected.keys()


def test_outputs_and_attributes_are_asked_for_in_the_query(client: httpx.Client) -> None:
    buffers = {"gradient_buffer": np.zeros(2, np.float32), "gradient": np.ones(2, np.float32)}
    answer = post(client, "InPlaceAccumulatorV2", safetensors.numpy.save(buffers), outputs="accumulated_gradient")
    assert list(safetensors.numpy.load(answer.content)) == ["accumulated_gradient"]
    leaky = safetensors.numpy.save({"dY": ONES["dY"], "Y": -ONES["X"]})
    answer = post(client, "LeakyReluGrad", leaky, alpha=0.5)
    assert safetensors.numpy.load(answer.content)["dX"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("sent", [MEDIA_TYPE, f"{MEDIA_TYPE}; version=1", MEDIA_TYPE.upper(), f"{MEDIA_TYPE} ;x"])
def test_content_types_that_are_safetensors(client: httpx.Client, sent: str) -> None:
    answer = post(client, "ReluGrad", codec_bytes(ONES), sent=sent)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == MEDIA_TYPE


def codec_bytes(tensors: dict[str, Any]) -> bytes:
    return b"".join(codec.encode(tensors))


@pytest.mark.parametrize(
    ("sent", "accept", "answered"),
    [
        (MEDIA_TYPE, None, MEDIA_TYPE),
        (MEDIA_TYPE, "*/*", MEDIA_TYPE),
        (MEDIA_TYPE, "application/*", MEDIA_TYPE),
        (MEDIA_TYPE, "", MEDIA_TYPE),
        (MEDIA_TYPE, JSON, JSON),
        (MEDIA_TYPE, f"{JSON}, */*;q=0.1", JSON),
        (MEDIA_TYPE, f"{JSON}, {MEDIA_TYPE}", MEDIA_TYPE),
        (MEDIA_TYPE, f"{MEDIA_TYPE};q=0, {JSON}", JSON),
        (MEDIA_TYPE, f"{MEDIA_TYPE};q=0.5, {JSON};q=1", JSON),
        (MEDIA_TYPE, f"{MEDIA_TYPE};q=0.5, {JSON};q=0.4", MEDIA_TYPE),
        (MEDIA_TYPE, f"{MEDIA_TYPE};q=0.1, */*", JSON),
        (MEDIA_TYPE, f"{JSON}, */*", JSON),
        (JSON, None, JSON),
        (JSON, "*/*", JSON),
        (JSON, MEDIA_TYPE, MEDIA_TYPE),
        (JSON, f"text/html, {MEDIA_TYPE.upper()}; q=0.5", MEDIA_TYPE),
        (JSON, f"{MEDIA_TYPE}, {JSON}", JSON),
    ],
)
def test_accept_decides_the_answer(client: httpx.Client, sent: str, accept: str | None, answered: str) -> None:
    content = codec_bytes(ONES) if sent == MEDIA_TYPE else b'{"dY": [1, 1], "X": [1, 1]}'
    answer = post(client, "ReluGrad", content, sent=sent, accept=accept)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == answered
    if answered == MEDIA_TYPE:
        assert safetensors.numpy.load(answer.content)["dX"].tolist() == [1, 1]
    else:
        assert answer.json()["dX"].keys() == {"dtype", "shape", "base64" if sent == MEDIA_TYPE else "data"}


@pytest.mark.parametrize("accept", ["text/html", "application/octet-stream", "application/vnd.safetensors2", "*"])
def test_an_unsupported_accept_is_refused(client: httpx.Client, accept: str) -> None:
    answer = post(client, "ReluGrad", codec_bytes(ONES), accept=accept)
    problem = assert_problem(answer, 406, "not_acceptable", repr(accept), JSON, MEDIA_TYPE)
    assert problem["op"] == "ReluGrad"


@pytest.mark.parametrize("sent", ["application/octet-stream", "application/vnd", "safetensors", "", ";"])
def test_an_unsupported_content_type_is_refused(client: httpx.Client, sent: str) -> None:
    answer = post(client, "ReluGrad", codec_bytes(ONES), sent=sent)
    assert_problem(answer, 415, "unsupported_media_type", JSON, MEDIA_TYPE)


def test_a_body_must_match_its_content_type(client: httpx.Client) -> None:
    answer = post(client, "ReluGrad", b'{"dY": 1, "X": 1}')
    assert_problem(answer, 400, "malformed_body", "safetensors header")
    assert_problem(post(client, "ReluGrad", codec_bytes(ONES), sent=JSON), 400, "malformed_body", "not JSON")


MISTAKES: dict[str, tuple[bytes, int, str, tuple[str, ...]]] = {
    "empty": (b"", 400, "malformed_body", ("0 bytes",)),
    "no tensors": (codec_bytes({}), 422, "missing_tensor", ("'dY'",)),
    "cut off": (codec_bytes(ONES)[:-1], 400, "malformed_body", ("15 bytes follow", "'X', ends at 16")),
    "unknown": (codec_bytes({**ONES, "Y": ONES["X"]}), 422, "unknown_tensor", ("'Y'", "dY, X")),
    "dtype": (codec_bytes({**ONES, "X": np.ones(2, np.int32)}), 422, "dtype_mismatch", ("X is int32",)),
    "shape": (codec_bytes({**ONES, "X": ONES["X"][:1]}), 422, "shape_mismatch", ("X", "[1]")),
    "a dtype that is not read": (
        safetensors.numpy.save({**ONES, "X": np.ones(2, np.uint8)}),
        422,
        "invalid_tensor",
        ("X.dtype is 'U8'",),
    ),
    "too large": (codec_bytes({"dY": np.zeros(300_000, np.float32)}), 413, "tensor_too_large", ("dY", "1200000 bytes")),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_each_mistake_has_its_own_problem(client: httpx.Client, case: str) -> None:
    content, status, code, words = MISTAKES[case]
    problem = assert_problem(post(client, "ReluGrad", content), status, code, *words)
    assert problem["op"] == "ReluGrad"


def test_two_accept_headers_form_one_list(client: httpx.Client) -> None:
    headers = [("Accept", "text/html"), ("Accept", MEDIA_TYPE)]
    answer = client.post("/v1/ops/ReluGrad", json={"dY": 1, "X": 1}, headers=headers).raise_for_status()
    assert answer.headers["content-type"] == MEDIA_TYPE


def test_a_wildcard_with_quality_zero_is_not_acceptable(client: httpx.Client) -> None:
    answer = client.post("/v1/ops/ReluGrad", json={"dY": 1, "X": 1}, headers={"Accept": "*/*;q=0"})
    assert answer.status_code == 406
