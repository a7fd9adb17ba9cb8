"""OpenAPI: the real shape of every operator's request and answer, with examples that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.api.buffer_models import Metadata, Names, NewBuffer
from service.api.changes import LONGEST_KEY
from service.api.problems import MEDIA_TYPE
from service.api.tensors import Problem, Receipts, answer_model, request_model
from service.buffers.names import NAME
from service.codecs import json as json_codec
from service.codecs import safetensors
from service.dtypes import OPEN_INFERENCE
from service.kernels import OPERATORS, Operator

_SAFETENSORS: dict[str, Any] = {safetensors.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_BYTES: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

_REF = "#/components/schemas/{model}"


_PROBLEM = {"content": {MEDIA_TYPE: {"schema": {"$ref": _REF.format(model="Problem")}}}}
"""An error, wherever it is answered."""


def example_answer(operator: Operator) -> Any:
    """The answer to the operator's example."""
    tensors = {one.name: np.array(operator.example[one.name], one.kind.default) for one in operator.inputs}
    return orjson.loads(b"".join(json_codec.encode(operator(tensors, {}), "list")))


def operation(operator: Operator) -> dict[str, Any]:
    """The request and the answers of the operator's endpoint."""

    def json(name: str, example: Any) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": _REF.format(model=operator.name + name)}, "example": example}}

    return {
        **_headers(*ONE),
        "requestBody": {"content": {**json("Request", dict(operator.example)), **_SAFETENSORS}},
        "responses": {
            "200": {
                "description": "The outputs",
                "content": {**json("Answer", example_answer(operator)), **_SAFETENSORS},
            },
            "400": {"description": "The body cannot be read", **_PROBLEM},
            "408": {"description": "The rest of the body did not come in time", **_PROBLEM},
            "406": {"description": "The answer cannot be given in a type that Accept names", **_PROBLEM},
            "413": {"description": "The body or a tensor is too large", **_PROBLEM},
            "415": {"description": "The body is of a type that the server does not read", **_PROBLEM},
            "422": {"description": "The body was read, but makes no sense", **_PROBLEM},
            "503": {"description": "The server is starting or stopping", **_PROBLEM},
        },
    }


_HEADERS: dict[str, dict[str, Any]] = {
    "Idempotency-Key": {
        "description": "The change is made once, however often the request comes with this key.",
        "schema": {"type": "string", "maxLength": LONGEST_KEY},
    },
    "If-Match": {"description": "The tag that the buffer must have.", "schema": {"type": "string"}},
    "If-None-Match": {
        "description": "The tag that the client has seen: while it is the buffer's, the answer is 304, without a body;"
        " or, to create a buffer, `*`: there must be none yet.",
        "schema": {"type": "string"},
    },
}

ONE, MANY, READING = ("Idempotency-Key", "If-Match"), ("Idempotency-Key",), ("If-None-Match",)
"""The headers of requests that change one buffer, that change several, and that read one."""

CREATING = (*ONE, *READING)
"""Those of a request that creates a buffer."""


def _told(name: str, description: str) -> dict[str, Any]:
    return {name: {"description": description, "schema": {"type": "string"}}}


_ETAG = _told("ETag", "The tag of the buffer's state.")
_REPLAYED = _told("Idempotency-Replayed", "`true`: the request was made before, and this is its receipt of then.")
_LOCATION = _told("Location", "The path of the buffer.")
_RETRY = _told("Retry-After", "Seconds after which to try again; with 429 and 503.")
"""Headers of answers."""

_KEY = {"type": "http", "scheme": "bearer", "description": "An API key, where the server has a file of them."}

_UNCHANGED: dict[str, Any] = {"304": {"description": "The buffer still has a tag that If-None-Match names"}}
"""What those that read a buffer may be answered, too."""


def _headers(*names: str) -> dict[str, Any]:
    """The headers that an endpoint knows."""
    return {"parameters": [{"name": name, "in": "header", **_HEADERS[name]} for name in names]}


METADATA: dict[str, Any] = {**_headers(*READING), "responses": {"200": {"headers": _ETAG}, **_UNCHANGED}}
DELETION: dict[str, Any] = {**_headers(*ONE), "responses": {"204": {"headers": _REPLAYED}}}
"""What these endpoints know and answer besides what FastAPI can tell."""


GRADIENT: dict[str, Any] = {
    "type": "object",
    "required": ["gradient"],
    "properties": {"gradient": {}},
    "additionalProperties": False,
    "example": {"gradient": [[1.0, 2.0], [3.0, 4.0]]},
}

GRADIENTS: dict[str, Any] = {
    "type": "object",
    "additionalProperties": {},
    "minProperties": 1,
    "example": {"layer.weight": [[1.0, 2.0], [3.0, 4.0]], "layer.bias": [1.0, 2.0]},
}


def buffer_operation(
    body: dict[str, Any] | type[BaseModel] | None,
    answer: type[BaseModel],
    knows: Sequence[str],
    *,
    created: bool = False,
) -> dict[str, Any]:
    """The request, with the headers that it `knows`, and the answers of a buffer's endpoint.

    Its tensors may also travel as safetensors.
    """

    def schema(of: dict[str, Any] | type[BaseModel]) -> dict[str, Any]:
        return {"schema": of if isinstance(of, dict) else {"$ref": _REF.format(model=of.__name__)}}

    content = {"application/json": schema(answer), **({} if created else _SAFETENSORS)}
    told = {**(_ETAG if answer is not Receipts else {}), **(_REPLAYED if "Idempotency-Key" in knows else {})}
    success = {"content": content, "headers": told}
    responses = {"200": {"description": "There was such a buffer" if created else "The receipt", **success}}
    if created:
        responses["201"] = {"description": "The new buffer", **success, "headers": {**told, **_LOCATION}}
    if knows == READING:
        responses |= _UNCHANGED
    operation: dict[str, Any] = {**_headers(*knows), "responses": responses}
    if body is not None:
        content = {"application/json": schema(body), **(_SAFETENSORS if isinstance(body, dict) else {})}
        operation["requestBody"] = {"required": not isinstance(body, type) or created, "content": content}
    return operation


_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"enum": list(OPEN_INFERENCE.values())},
        "parameters": {"type": "object", "properties": {"binary_data_size": {"type": "integer", "minimum": 0}}},
        "data": {"type": "array", "items": {}},
    },
}

_NAMED = {"type": "string", "examples": ["dW:gru.W"]}

_PARAMETERS = {
    "type": "object",
    "description": "The model's attributes, and what its endpoint under /v1/ops has as a query.",
    "properties": {
        "from": {"description": "Inputs to take from buffers, separated by commas.", **_NAMED},
        "into": {"description": "Outputs to add to buffers, separated by commas.", **_NAMED},
        "weight": {"type": "number", "description": "With `into`: the weight of what is added."},
        "epoch": {
            "type": "integer",
            "minimum": 0,
            "description": "With `into`: the epoch that the buffers must be in.",
        },
    },
}

_INFER: dict[str, Any] = {
    "tags": ["open inference protocol"],
    "summary": "Run a model",
    "description": "With the header Inference-Header-Content-Length, the JSON ends there, and tensors follow as bytes.",
    "operationId": "infer",
    "parameters": [
        {"name": "op", "in": "path", "required": True, "schema": {"type": "string"}, "example": "ReluGrad"},
        {"name": "Inference-Header-Content-Length", "in": "header", "schema": {"type": "integer", "minimum": 0}},
        *_headers(*ONE)["parameters"],
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
            **_BYTES,
        },
    },
    "responses": {
        "200": {
            "description": "The outputs",
            "content": {
                "application/json": {
                    "schema": {"type": "object", "properties": {"outputs": {"type": "array", "items": _TENSOR}}}
                },
                **_BYTES,
            },
        },
    },
}
"""The endpoint that FastAPI does not know."""


def _tell_errors(made: dict[str, Any]) -> None:
    """Every operation may be refused, in the form of its API, which is not FastAPI's own."""
    plain = {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "string"}}}}}
    for path, operations in made["paths"].items():
        content = plain if path.startswith("/v2") else _PROBLEM["content"]
        for operation in operations.values():
            responses = operation["responses"]
            if "HTTPValidationError" in str(responses.get("422")):
                del responses["422"]
            for status, side in (("4XX", "request"), ("5XX", "server")):
                error = {"description": f"What is wrong with the {side}", "content": content}
                responses.setdefault(status, error)
            for status in responses.keys() & {"4XX", "5XX", "503"}:
                responses[status] = {**responses[status], "headers": _RETRY}
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and path.startswith("/v1/buffers"):
                    parameter["schema"] |= {"pattern": f"^{NAME.pattern}$"}
                    parameter["example"] = "layer.weight"
    for unused in ("HTTPValidationError", "ValidationError"):
        made["components"]["schemas"].pop(unused, None)


def install(app: FastAPI) -> None:
    """Serve a schema whose components hold the operators' models."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            models: list[type[BaseModel]] = [Problem, Receipts, NewBuffer, Metadata, Names]
            for operator in OPERATORS.values():
                models += [request_model(operator), answer_model(operator)]
            _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
            made.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            made["paths"]["/v2/models/{op}/infer"] = {"post": _INFER}
            made["components"]["securitySchemes"] = {"key": _KEY}
            made["security"] = [{}, {"key": []}]
            _tell_errors(made)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]
