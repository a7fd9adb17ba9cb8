"""OpenAPI: the real shape of every operator's request and answer, with examples that run."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.api.problems import MEDIA_TYPE
from service.api.tensors import Problem, answer_model, request_model
from service.codecs import json as json_codec
from service.kernels import OPERATORS, Operator

_REF = "#/components/schemas/{model}"


def example_answer(operator: Operator) -> Any:
    """The answer to the operator's example."""
    tensors = {one.name: np.array(operator.example[one.name], one.kind.default) for one in operator.inputs}
    return orjson.loads(b"".join(json_codec.encode(operator(tensors, {}), "list")))


def operation(operator: Operator) -> dict[str, Any]:
    """The request and the answers of the operator's endpoint."""

    def json(name: str, example: Any) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": _REF.format(model=operator.name + name)}, "example": example}}

    problem = {"content": {MEDIA_TYPE: {"schema": {"$ref": _REF.format(model="Problem")}}}}
    return {
        "requestBody": {"required": True, "content": json("Request", dict(operator.example))},
        "responses": {
            "200": {"description": "The outputs", "content": json("Answer", example_answer(operator))},
            "400": {"description": "The body cannot be read", **problem},
            "406": {"description": "The answer cannot be given in a type that Accept names", **problem},
            "413": {"description": "The body or a tensor is too large", **problem},
            "415": {"description": "The body is of a type that the server does not read", **problem},
            "422": {"description": "The body was read, but makes no sense", **problem},
            "503": {"description": "The server is starting or stopping", **problem},
        },
    }


def install(app: FastAPI) -> None:
    """Serve a schema whose components hold the operators' models."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            models: list[type[BaseModel]] = [Problem]
            for operator in OPERATORS.values():
                models += [request_model(operator), answer_model(operator)]
            _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
            made.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]
