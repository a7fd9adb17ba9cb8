"""The OpenAPI document: FastAPI's, with the errors of every endpoint, in the forms that client generators need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi

from service.api.http import problems
from service.api.http.answer import JSON
from service.api.http.routing import REF, answer_header
from service.buffers.names import NAME

_DESCRIPTION = """The gradient kernels of ONNX Runtime over HTTP, and buffers that count each gradient once.

Each error has a `code`, which stays. An error under `/v2` has the form of the Open Inference Protocol instead.
Requests with an `Idempotency-Key` may be sent again after any failure."""

_TAGS = {
    "operators": "The gradient kernels, with an endpoint each. Tensors travel as JSON or as safetensors.",
    "open inference protocol": "The same operators as models of the Open Inference Protocol, version 2.",
    "graphs": "Models that clients bring. A graph runs as an operator does, also from buffers and into buffers.",
    "buffers": "Named sums of gradients, which survive crashes. An add with an `Idempotency-Key` counts once.",
    "runs": "What the workers of a training have in common, who of them is awaited, and how it ends.",
    "health": "Liveness, readiness, the limits of requests, and metrics.",
    "service": "The caller, the server with its settings, and how fast it is.",
}

_KEY = {"type": "http", "scheme": "bearer", "description": "An API key, if the server has any (GRADSERVE_KEYS)."}

_RETRY = answer_header("Retry-After", "Seconds to wait before a retry; sent with 429 and 503.")

_ERRORS: dict[int | str, dict[str, Any]] = dict.fromkeys(
    ("4XX", "5XX"), {"model": problems.Problem | problems.ProtocolError}
)
"""The errors of every endpoint. `_complete` says which form they have at its path."""


def _error(model: str, description: str, media_type: str, example: dict[str, Any]) -> dict[str, Any]:
    content = {media_type: {"schema": {"$ref": REF.format(model=model)}, "example": example}}
    return {model: {"description": description, "headers": _RETRY, "content": content}}


_RESPONSES = {
    **_error("Problem", "An error; its `code` tells which", problems.MEDIA_TYPE, problems.EXAMPLE),
    **_error("ProtocolError", "An error", JSON, {"error": problems.EXAMPLE["detail"]}),
}
"""The answers of errors: one under `/v2`, the other elsewhere."""

INT32_LIMIT = 1 << 31

INT64_LIMIT = 1 << 63


def document_of(app: FastAPI, routers: Sequence[APIRouter]) -> dict[str, Any]:
    """Return the document of the endpoints of the application's routers."""
    included = APIRouter(generate_unique_id_function=lambda route: route.name)  # that of its handler
    for router in routers:
        included.include_router(router, responses=_ERRORS)
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.description,
        description=_DESCRIPTION,
        routes=included.routes,
        tags=[{"name": name, "description": text} for name, text in _TAGS.items()],
        contact={"name": "The gradserve authors"},
        license_info={"name": "Apache License 2.0", "identifier": "Apache-2.0"},
        servers=[{"url": "."}],  # beside the schema: behind a proxy, the paths may have a prefix
    )
    components = document["components"]
    components |= {"responses": _RESPONSES, "securitySchemes": {"key": _KEY}}
    document["security"] = [{}, {"key": []}]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(path, operation)
    for one in components["schemas"].values():
        _simplify(one)
    for one in _schemas(document):
        _add_format(one)
    return document


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Add the operation's errors in place of FastAPI's own, and examples of the parameters in its path."""
    name = "ProtocolError" if path.startswith("/v2") else "Problem"
    operation["responses"] |= {status: {"$ref": f"#/components/responses/{name}"} for status in ("4XX", "5XX")}
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path" and path.startswith(("/v1/buffers", "/v1/graphs", "/v1/runs")):
            parameter["schema"] |= {"pattern": f"^{NAME.pattern}$"}
            parameter["example"] = {"b": "layer.weight", "g": "mlp", "r": "line"}[path[4]]
        elif parameter["in"] == "path" and path.startswith("/v2/systemsharedmemory"):
            parameter["example"] = "gradients"
        elif parameter["in"] == "path":
            parameter["example"] = "ReluGrad"


def _simplify(schema: dict[str, Any]) -> None:
    """Say defaults in descriptions alone: generators of clients take a member with a default for one that is there.

    Leave out titles of members, which generators take for names of types.
    """
    for one in _within(schema):
        if one is not schema:
            one.pop("title", None)
        default = one.pop("default", None)
        if default is not None:
            one["description"] = f"{one.get('description', '')} By default {default}.".strip()


def _add_format(schema: dict[str, Any]) -> None:
    """Say how many bits a number has."""
    kinds = schema.get("type", ())
    if "integer" in kinds:
        for bound in {"minimum", "maximum", "exclusiveMaximum"} & schema.keys():
            schema[bound] = int(schema[bound])  # FastAPI has made a double of it, and 2^63 of 2^63 - 1
        if schema.get("maximum") == INT64_LIMIT:
            schema["maximum"] -= 1
        small = schema.get("maximum", INT32_LIMIT) < INT32_LIMIT
        schema.setdefault("format", "int32" if small else "int64")
    elif "number" in kinds:
        schema.setdefault("format", "double")


def _schemas(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every schema of the document."""
    members = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, member in members:
        if name == "schema":
            yield from _within(member)
        elif name == "schemas":
            for schema in member.values():
                yield from _within(schema)
        elif name not in ("example", "examples"):
            yield from _schemas(member)


def _within(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schema and those in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name in ("properties", "$defs"):
        for child in schema.get(name, {}).values():
            yield from _within(child)
    for name in ("anyOf", "allOf", "oneOf", "prefixItems"):
        for child in schema.get(name, ()):
            yield from _within(child)
    for name in ("items", "additionalProperties"):
        yield from _within(schema.get(name))
