"""The OpenAPI entries of the operators' endpoints, with examples that run."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from service.api.http.openapi import BYTES_CONTENT, ONE, PROBLEM, REF, SAFETENSORS_CONTENT, header_parameters
from service.codecs import json as json_codec
from service.dtypes import OPEN_INFERENCE
from service.kernels import Operator


def example_answer(operator: Operator) -> Any:
    tensors = {each.name: np.array(operator.example[each.name], each.kind.default) for each in operator.inputs}
    return orjson.loads(b"".join(json_codec.encode(operator(tensors, {}), "list")))


def operation(operator: Operator) -> dict[str, Any]:
    """Return the entry of the operator's endpoint."""

    def json(name: str, example: Any) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": REF.format(model=operator.name + name)}, "example": example}}

    return {
        **header_parameters(*ONE),
        "requestBody": {"content": {**json("Request", dict(operator.example)), **SAFETENSORS_CONTENT}},
        "responses": {
            "200": {
                "description": "The outputs",
                "content": {**json("Answer", example_answer(operator)), **SAFETENSORS_CONTENT},
            },
            "400": {"description": "Request body cannot be read", **PROBLEM},
            "408": {"description": "Request did not arrive in time", **PROBLEM},
            "406": {"description": "No acceptable media type", **PROBLEM},
            "413": {"description": "Request body or tensor too large", **PROBLEM},
            "415": {"description": "Unsupported media type or encoding", **PROBLEM},
            "422": {"description": "Invalid request", **PROBLEM},
            "503": {"description": "Server is starting or stopping", **PROBLEM},
        },
    }


_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"enum": list(OPEN_INFERENCE.values())},
        "parameters": {
            "type": ["object", "null"],
            "properties": {"binary_data_size": {"type": "integer", "minimum": 0}},
        },
        "data": {"type": "array", "items": {}},
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
    },
}


INFER: dict[str, Any] = {
    "parameters": [
        {"name": "Inference-Header-Content-Length", "in": "header", "schema": {"type": "integer", "minimum": 0}},
        *header_parameters(*ONE)["parameters"],
    ],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["inputs"],
                    "properties": {
                        "id": {"type": "string"},
                        "parameters": _PARAMETERS,
                        "inputs": {"type": "array", "items": _TENSOR},
                        "outputs": {"type": "array", "items": {"type": "object", "required": ["name"]}},
                    },
                },
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
            "content": {
                "application/json": {
                    "schema": {"type": "object", "properties": {"outputs": {"type": "array", "items": _TENSOR}}}
                },
                **BYTES_CONTENT,
            },
        },
    },
}
"""The entry of the endpoint that runs a model."""
