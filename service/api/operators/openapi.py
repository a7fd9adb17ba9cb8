"""What the endpoints that run operators declare to FastAPI, with examples that run."""

from __future__ import annotations

import re
from typing import Any

import orjson

from service.api.buffers.openapi import ONE
from service.api.http.routing import BYTES_CONTENT, SAFETENSORS_CONTENT, answer_header, body, header
from service.api.operators.models import answer_model, request_model
from service.api.operators.protocol_models import InferAnswer, InferRequest
from service.codecs import json as json_codec
from service.errors import tree
from service.kernels import Operator


def example_answer(operator: Operator) -> Any:
    outputs = operator(operator.example_tensors, operator.example_attributes)
    return orjson.loads(b"".join(json_codec.encode(outputs, "list", groups=operator.all_groups)))


def declaration(operator: Operator) -> dict[str, Any]:
    """Return what the operator's endpoint declares to FastAPI beside its handler."""

    def content(example: Any) -> dict[str, Any]:
        return {"content": {"application/json": {"example": example}, **SAFETENSORS_CONTENT}}

    return {
        "summary": operator.formula,
        "description": description(operator) or operator.formula,
        "dependencies": [*ONE, body(request_model(operator), required=False)],
        "response_model": answer_model(operator),
        "responses": {200: {"description": "The outputs", **content(example_answer(operator))}},
        "openapi_extra": {"requestBody": content(dict(operator.example))},
    }


_CODES = {error.__name__: error.code for error in tree()}


def description(operator: Operator) -> str:
    """Return what the kernel's docstring says, with the codes of errors in place of the names of their classes."""
    return re.sub(r"`(\w+)`", lambda name: f"`{_CODES.get(name[1], name[1])}`", operator.description)


_LENGTH = "Inference-Header-Content-Length", "Bytes of the JSON, if tensors follow it as bytes."

_EXAMPLE = {
    "inputs": [
        {"name": "dY", "shape": [2], "datatype": "FP32", "data": [1.0, 2.0]},
        {"name": "X", "shape": [2], "datatype": "FP32", "data": [0.5, -1.0]},
    ]
}

INFER: dict[str, Any] = {
    "dependencies": [header(*_LENGTH, int, ge=0), *ONE, body(InferRequest)],
    "response_model": InferAnswer,
    "responses": {
        200: {
            "description": "The outputs",
            "headers": answer_header(*_LENGTH, {"type": "integer", "minimum": 0}),
            "content": BYTES_CONTENT,
        }
    },
    "openapi_extra": {"requestBody": {"content": {"application/json": {"example": _EXAMPLE}, **BYTES_CONTENT}}},
}
"""What the endpoint that runs a model declares to FastAPI."""
