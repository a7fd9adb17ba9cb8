"""What endpoints declare to FastAPI beside their handlers, for OpenAPI alone: headers, bodies and media types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Body, Header
from fastapi.params import Depends

from service.api.http.tensor_forms import absent
from service.codecs import safetensors

REF = "#/components/schemas/{model}"

_STRING = {"type": "string"}

_BYTES = {"schema": {"type": "string", "format": "binary"}}

SAFETENSORS_CONTENT: dict[str, Any] = {safetensors.MEDIA_TYPE: _BYTES}

SAFETENSORS_BODY: dict[str, Any] = {"requestBody": {"content": SAFETENSORS_CONTENT}}
"""The entry of an endpoint whose tensors come as JSON or as safetensors."""

BYTES_CONTENT: dict[str, Any] = {"application/octet-stream": _BYTES}


def _declared(parameter: Any) -> Depends:
    def declared(it: Any) -> None: ...

    declared.__annotations__["it"] = parameter
    return Depends(declared)


def header(name: str, description: str, kind: Any = str, **bounds: Any) -> Depends:
    """Declare a header of requests, which the handler reads by itself."""
    return _declared(Annotated[kind, Header(alias=name, default_factory=absent, description=description, **bounds)])


def body(model: Any, *, required: bool = True) -> Depends:
    """Declare the JSON form of the body, which the handler reads by itself."""
    return _declared(Annotated[model, Body() if required else Body(default_factory=absent)])


def answer_header(name: str, description: str, schema: Mapping[str, Any] = _STRING) -> dict[str, Any]:
    return {name: {"description": description, "schema": dict(schema)}}
