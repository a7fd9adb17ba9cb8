"""The OpenAPI schema: FastAPI's, with the models of every operator and the errors of every endpoint."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.api.buffers.models import CreatedBuffers, Metadata, Names, Receipts
from service.api.buffers.specs import NewBuffer, NewBuffers
from service.api.http.openapi import PROBLEM, REF, answer_header
from service.api.http.problems import Problem
from service.api.operators.models import answer_model, request_model
from service.buffers.names import NAME
from service.kernels import OPERATORS

_RETRY = answer_header("Retry-After", "Seconds to wait before a retry; sent with 429 and 503.")
"""Headers of answers."""

_KEY = {"type": "http", "scheme": "bearer", "description": "An API key, if the server has any (GRADSERVE_KEYS)."}


def _add_errors(document: dict[str, Any]) -> None:
    """Add the errors of every operation, in the form of its API, in place of FastAPI's own."""
    plain = {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "string"}}}}}
    for path, operations in document["paths"].items():
        content = plain if path.startswith("/v2") else PROBLEM["content"]
        for operation in operations.values():
            responses = operation["responses"]
            if "HTTPValidationError" in str(responses.get("422")):
                del responses["422"]
            for status, side in (("4XX", "request"), ("5XX", "server")):
                error = {"description": f"A fault of the {side}", "content": content}
                responses.setdefault(status, error)
            for status in responses.keys() & {"4XX", "5XX", "503"}:
                responses[status] = {**responses[status], "headers": _RETRY}
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" and path.startswith("/v1/buffers"):
                    parameter["schema"] |= {"pattern": f"^{NAME.pattern}$"}
                    parameter["example"] = "layer.weight"
                elif parameter["in"] == "path":
                    parameter["example"] = "ReluGrad"
    for unused in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(unused, None)


def install(app: FastAPI) -> None:
    """Let the application build this schema."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            models: list[type[BaseModel]] = [Problem, Receipts, NewBuffer, NewBuffers, CreatedBuffers, Metadata, Names]
            for operator in OPERATORS.values():
                models += [request_model(operator), answer_model(operator)]
            _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF)
            document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            document["components"]["securitySchemes"] = {"key": _KEY}
            document["servers"] = [{"url": "."}]  # beside the schema: behind a proxy, the paths may have a prefix
            document["security"] = [{}, {"key": []}]
            _add_errors(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]
