"""The headers and the answers of the endpoints that use buffers, as OpenAPI shows them beside their models."""

from __future__ import annotations

from typing import Any, TypeAlias

from pydantic import BaseModel

from service.api.buffers.models import CreatedBuffers, Metadata, StagedParts
from service.api.buffers.preconditions import MAX_KEY_CHARACTERS
from service.api.buffers.receipt_models import Receipt, Receipts
from service.api.http.negotiation import PATCH_TYPES
from service.api.http.routing import REF, SAFETENSORS_CONTENT, answer_header, header

Answers: TypeAlias = dict[int | str, dict[str, Any]]

MANY = [
    header(
        "Idempotency-Key",
        "A text that is new for each change. A retry with the same text counts once.",
        min_length=1,
        max_length=MAX_KEY_CHARACTERS,
    )
]
"""The headers of a request that changes several buffers."""

ONE = [*MANY, header("If-Match", "An ETag of the state that the buffer must have.", min_length=1)]
"""The headers of a request that changes one buffer."""

READING = [
    header(
        "If-None-Match",
        "The ETag that the client has: if the answer would have it, too, it is 304, without a body."
        " To create a buffer, `*`: it must not exist yet.",
        min_length=1,
    )
]
"""The headers of a request that reads one buffer."""

CREATING = [*ONE, *READING]
"""The headers of a request that creates a buffer."""

ETAG = answer_header("ETag", "The tag of the buffer's state, in the form of this answer.")

REPLAYED = answer_header("Idempotency-Replayed", "`true` if this key was seen before; the receipt is the original one.")

_LOCATION = answer_header("Location", "The path of the buffer, relative to that of the request.")

UNCHANGED: Answers = {304: {"description": "The buffer still has a tag that If-None-Match names"}}
"""The answer of a conditional read."""


def merge_patch(model: type[BaseModel]) -> dict[str, Any]:
    """Return the entry of an endpoint that takes the model as a merge patch, too."""
    (_, media_type), schema = PATCH_TYPES, {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"content": {media_type: {"schema": schema}}}}


def _answer(model: type[BaseModel], headers: dict[str, Any]) -> Answers:
    """Tensors travel as JSON or as safetensors."""
    return {200: {"description": "The receipt", "model": model, "content": SAFETENSORS_CONTENT, "headers": headers}}


CREATED_ONE: Answers = {
    200: {"description": "The buffer already existed", "model": Metadata, "headers": ETAG | REPLAYED},
    201: {"description": "The new buffer", "model": Metadata, "headers": ETAG | REPLAYED | _LOCATION},
}

CREATED_MANY = _answer(CreatedBuffers, REPLAYED)

METADATA: Answers = {200: {"headers": ETAG}, **UNCHANGED}

DELETED: Answers = {204: {"headers": REPLAYED}}

CHANGED_RULES: Answers = {
    200: {"description": "The buffer with its new rules", "model": Metadata, "headers": ETAG | REPLAYED}
}

CHANGED_ONE = _answer(Receipt, ETAG | REPLAYED)

CHANGED_MANY = _answer(Receipts, REPLAYED)

STAGED: Answers = {
    **CHANGED_MANY,
    202: {
        "description": "The part is staged; the push is not complete",
        "model": StagedParts,
        "content": {"application/json": {}, **SAFETENSORS_CONTENT},  # generated clients take the first
        "headers": REPLAYED,
    },
}

READ_ONE: Answers = {**_answer(Receipt, ETAG), **UNCHANGED}

READ_MANY = _answer(Receipts, {})
