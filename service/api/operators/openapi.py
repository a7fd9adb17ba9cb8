"""The OpenAPI entries of the operators' endpoints, with examples that run."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import orjson

from service.api.http.openapi import BYTES_CONTENT, ONE, REF, SAFETENSORS_CONTENT, header_parameters
from service.codecs import json as json_codec
from service.dtypes import OPEN_INFERENCE
from service.errors import tree
from service.kernels import Operator


def _ref(name: str) -> dict[str, str]:
    return {"$ref": REF.format(model=name)}


def example_answer(operator: Operator) -> Any:
    tensors = {each.name: np.array(operator.example[each.name], each.kind.default) for each in operator.inputs}
    return orjson.loads(b"".join(json_codec.encode(operator(tensors, {}), "list")))


def operation(operator: Operator) -> dict[str, Any]:
    """Return the entry of the operator's endpoint."""

    def json(name: str, example: Any) -> dict[str, Any]:
        return {"application/json": {"schema": _ref(operator.name + name), "example": example}}

    return {
        **header_parameters(*ONE),
        "requestBody": {"content": {**json("Request", dict(operator.example)), **SAFETENSORS_CONTENT}},
        "responses": {
            "200": {
                "description": "The outputs",
                "content": {**json("Answer", example_answer(operator)), **SAFETENSORS_CONTENT},
            },
        },
    }


_CODES = {error.__name__: error.code for error in tree()}


def description(operator: Operator) -> str:
    """Return what the kernel's docstring says, with the codes of errors in place of the names of their classes."""
    return re.sub(r"`(\w+)`", lambda name: f"`{_CODES.get(name[1], name[1])}`", operator.description)


_SHARED: dict[str, Any] = {
    "shared_memory_region": {"type": "string", "description": "The registered region that holds the tensor."},
    "shared_memory_offset": {"type": "integer", "minimum": 0, "description": "Where in the region the tensor begins."},
    "shared_memory_byte_size": {
        "type": "integer",
        "minimum": 0,
        "description": "The tensor's bytes in the region; of an output, the room for them.",
    },
}
"""The parameters of a tensor in shared memory."""


_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"type": "string", "enum": list(OPEN_INFERENCE.values())},
        "parameters": {
            "type": ["object", "null"],
            "properties": {
                "binary_data_size": {
                    "type": "integer",
                    "minimum": 0,
                    "description": "Bytes of the tensor after the JSON.",
                },
                **_SHARED,
            },
        },
        "data": {"type": "array", "items": {}, "description": "Its elements, flat or nested, unless it is bytes."},
    },
}


_NAMED = {"type": "string", "examples": ["dW:gru.W"]}


_PARAMETERS = {
    "type": ["object", "null"],
    "description": "The model's attributes, and parameters of the query of its endpoint under /v1/ops.",
    "properties": {
        "from": {"description": "Inputs to take from buffers, separated by commas.", **_NAMED},
        "into": {"description": "Outputs to add to buffers, separated by commas.", **_NAMED},
        "weight": {"type": "number", "description": "With `into`: the weight of each added gradient."},
        "epoch": {
            "type": "integer",
            "minimum": 0,
            "description": "With `into`: the epoch that the buffers must be in.",
        },
        "contributor": {"type": "string", "description": "With `into`: who adds."},
        "binary_data_output": {"type": "boolean", "description": "Whether all outputs travel as bytes."},
    },
}


_REQUESTED = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "parameters": {
            "type": ["object", "null"],
            "properties": {
                "binary_data": {"type": "boolean", "description": "Whether the output travels as bytes."},
                **_SHARED,
            },
        },
    },
}


SCHEMAS: dict[str, Any] = {
    "InferTensor": _TENSOR,
    "InferRequest": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": _PARAMETERS,
            "inputs": {"type": "array", "items": _ref("InferTensor")},
            "outputs": {"type": "array", "items": _REQUESTED, "description": "The outputs to return; by default all."},
        },
    },
    "InferAnswer": {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "id": {"type": "string", "description": "The request's, if it has any."},
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "parameters": {
                "type": "object",
                "properties": {
                    "receipts": {"type": "string", "description": "With `into`: the receipts by output, as JSON."}
                },
            },
            "outputs": {"type": "array", "items": _ref("InferTensor")},
        },
    },
}
"""The schemas of the endpoint that runs a model."""


_LENGTH: dict[str, Any] = {
    "description": "Bytes of the JSON, if tensors follow it as bytes.",
    "schema": {"type": "integer", "minimum": 0},
}


INFER: dict[str, Any] = {
    "parameters": [
        {"name": "Inference-Header-Content-Length", "in": "header", **_LENGTH},
        *header_parameters(*ONE)["parameters"],
    ],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": _ref("InferRequest"),
                "example": {
                    "inputs": [
                        {"name": "dY", "shape": [2], "datatype": "FP32", "data": [1.0, 2.0]},
                        {"name": "X", "shape": [2], "datatype": "FP32", "data": [0.5, -1.0]},
                    ]
                },
            },
            **BYTES_CONTENT,
        },
    },
    "responses": {
        "200": {
            "description": "The outputs",
            "headers": {"Inference-Header-Content-Length": _LENGTH},
            "content": {"application/json": {"schema": _ref("InferAnswer")}, **BYTES_CONTENT},
        },
    },
}
"""The entry of the endpoint that runs a model."""
