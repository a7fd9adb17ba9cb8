"""The parts that the OpenAPI entries of several endpoints share: media types, headers, the form of errors."""

from __future__ import annotations

from typing import Any

from service.codecs import safetensors

MAX_KEY_CHARACTERS = 255
"""Characters of an Idempotency-Key."""

SAFETENSORS_CONTENT: dict[str, Any] = {safetensors.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}


BYTES_CONTENT: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


REF = "#/components/schemas/{model}"


_HEADERS: dict[str, dict[str, Any]] = {
    "Idempotency-Key": {
        "description": "A text that is new for each change. A retry with the same text counts once.",
        "schema": {"type": "string", "maxLength": MAX_KEY_CHARACTERS},
    },
    "If-Match": {"description": "An ETag of the state that the buffer must have.", "schema": {"type": "string"}},
    "If-None-Match": {
        "description": "The ETag that the client has: if the answer would have it, too, it is 304, without a body."
        " To create a buffer, `*`: it must not exist yet.",
        "schema": {"type": "string"},
    },
}


ONE = ("Idempotency-Key", "If-Match")
"""The headers of a request that changes one buffer."""

MANY = ("Idempotency-Key",)
"""The headers of a request that changes several buffers."""

READING = ("If-None-Match",)
"""The headers of a request that reads one buffer."""


def answer_header(name: str, description: str) -> dict[str, Any]:
    return {name: {"description": description, "schema": {"type": "string"}}}


def header_parameters(*names: str) -> dict[str, Any]:
    """Return the entry of the headers that an endpoint reads."""
    return {"parameters": [{"name": name, "in": "header", **_HEADERS[name]} for name in names]}
