"""The OpenAPI entries of the buffers' endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from service.api.buffers.models import CreatedBuffers, GradientBodies, GradientBody, Names, Receipts
from service.api.http.openapi import ONE, READING, REF, SAFETENSORS_CONTENT, answer_header, header_parameters

CREATING = (*ONE, *READING)
"""The headers of a request that creates a buffer."""


_ETAG = answer_header("ETag", "The tag of the buffer's state, in the form of this answer.")


_REPLAYED = answer_header(
    "Idempotency-Replayed", "`true` if this key was seen before; the receipt is the original one."
)


_LOCATION = answer_header("Location", "The path of the buffer, relative to that of the request.")


_UNCHANGED: dict[str, Any] = {"304": {"description": "The buffer still has a tag that If-None-Match names"}}
"""The answer of a conditional read."""


METADATA: dict[str, Any] = {**header_parameters(*READING), "responses": {"200": {"headers": _ETAG}, **_UNCHANGED}}


DELETION: dict[str, Any] = {**header_parameters(*ONE), "responses": {"204": {"headers": _REPLAYED}}}
"""The headers of this endpoint, and answers that FastAPI does not describe."""


def buffer_operation(
    body: type[BaseModel] | None,
    answer: type[BaseModel],
    knows: Sequence[str],
    *,
    created: bool = False,
) -> dict[str, Any]:
    """Return the entry of an endpoint: its body, the headers that it `knows`, and its answers.

    Tensors travel as JSON or as safetensors.
    """

    def schema(of: type[BaseModel]) -> dict[str, Any]:
        return {"schema": {"$ref": REF.format(model=of.__name__)}}

    content = {"application/json": schema(answer), **({} if created else SAFETENSORS_CONTENT)}
    is_single = answer not in (Receipts, CreatedBuffers)
    headers = {**(_ETAG if is_single else {}), **(_REPLAYED if "Idempotency-Key" in knows else {})}
    success = {"content": content, "headers": headers}
    responses = {"200": {"description": "The buffer already existed" if created else "The receipt", **success}}
    if created:
        responses["201"] = {"description": "The new buffer", **success, "headers": {**headers, **_LOCATION}}
    if knows == READING:
        responses |= _UNCHANGED
    operation: dict[str, Any] = {**header_parameters(*knows), "responses": responses}
    if body is not None:
        content = {
            "application/json": schema(body),
            **(SAFETENSORS_CONTENT if body in (GradientBody, GradientBodies) else {}),
        }
        operation["requestBody"] = {"required": body is not Names, "content": content}
    return operation
