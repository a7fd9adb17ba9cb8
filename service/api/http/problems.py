"""Errors as answers: RFC 9457 `application/problem+json`, and on `/v2` the form of the Open Inference Protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypeAliasType

from service.api.http.answer import JSON, Answer
from service.api.http.tensor_forms import absent
from service.errors import (
    Busy,
    Expired,
    GradserveError,
    NotReady,
    RequestTimeout,
    StoreFailed,
    Unauthorized,
    UnsupportedMediaType,
    tree,
)

MEDIA_TYPE = "application/problem+json"

CLIENT_GONE = 499
"""The status, in logs and metrics, of a request whose client left before the answer; nginx uses the same number."""

_PROTOCOL_STATUSES = {406: 400, 408: 400, 415: 400, 422: 400}
"""The statuses on `/v2`, if they differ: the Open Inference Protocol knows few."""


def answer_error(path: str, error: GradserveError, fields: Mapping[str, str] | None = None) -> Answer:
    """Return the answer of `error`, in the form of the API at `path`."""
    if isinstance(error, RequestTimeout):
        fields = {"Connection": "close"}  # the rest of the body may still come, and must not be read as a request
    if isinstance(error, (Busy, Expired, NotReady, StoreFailed)):
        fields = {"Retry-After": "1"}
    if isinstance(error, Unauthorized):
        fields = {"WWW-Authenticate": "Bearer"}
    if isinstance(error, UnsupportedMediaType):
        fields = error.accepted  # Accept-Encoding or Accept, which tell the two causes apart (RFC 9110, 15.5.16)
    if path == "/v2" or path.startswith("/v2/"):
        status = _PROTOCOL_STATUSES.get(error.status, error.status)
        answer = Answer([json.dumps({"error": error.detail}).encode()], JSON, fields, status)
    else:
        answer = Answer([json.dumps(_problem(error)).encode()], MEDIA_TYPE, fields, error.status)
    answer.code = error.code
    return answer


def _problem(error: GradserveError) -> dict[str, Any]:
    return {
        "type": f"urn:gradserve:problem:{error.code}",
        "title": error.title(),
        "status": error.status,
        "detail": error.detail,
        "code": error.code,
        **error.context,
    }


def answer_bug(path: str) -> Answer:
    """Return the answer to a request that failed by a bug of the server. It closes the connection."""
    error = GradserveError("The server failed to answer this request; its log says why")
    return answer_error(path, error, {"Connection": "close"})


ErrorCode = TypeAliasType("ErrorCode", Literal[tuple(sorted({error.code for error in tree()}))])  # type: ignore[valid-type]


EXAMPLE: dict[str, Any] = {
    "type": "urn:gradserve:problem:shape_mismatch",
    "title": "Tensor shapes do not fit together",
    "status": 422,
    "detail": "X has shape [1], but must have the shape of dY, [2]",
    "code": "shape_mismatch",
    "tensor": "X",
    "op": "ReluGrad",
}
"""The answer to `{"dY": [1, 2], "X": [1]}` at `/v1/ops/ReluGrad`."""


class Problem(BaseModel):
    """An error (RFC 9457), with what it is about, if that helps."""

    model_config = ConfigDict(json_schema_extra={"example": EXAMPLE})

    type: str = Field(description="`urn:gradserve:problem:` and the code.")
    title: str = Field(description="The fault in a few words, the same for each error of this code.")
    status: int = Field(ge=400, le=599, description="The status of the answer.")
    detail: str = Field(description="A sentence for a person: what was wrong, what was expected, and what came.")
    code: ErrorCode = Field(  # type: ignore[valid-type]
        description="What programs tell errors by. Codes stay; new ones may come."
    )
    op: str = Field(default_factory=absent)
    tensor: str = Field(default_factory=absent)
    parameter: str = Field(default_factory=absent)
    axis: int = Field(default_factory=absent)
    index: int = Field(default_factory=absent)
    limit: float = Field(default_factory=absent)
    buffer: str = Field(default_factory=absent)
    buffers: list[str] = Field(default_factory=absent, description="The first 100 buffers that differ.")
    step: int = Field(default_factory=absent, description="The buffer's current step.")
    count: int = Field(default_factory=absent, description="The gradients in that step so far.")
    quorum: int = Field(default_factory=absent)
    min_count: int = Field(default_factory=absent)
    norm: float | None = Field(default_factory=absent, description="The gradient's 2-norm; null if it is not finite.")
    max_norm: float = Field(default_factory=absent)
    missing: list[str] = Field(
        default_factory=absent, description="Contributors that are not in that step, if they are known."
    )
    receipt: dict[str, Any] = Field(default_factory=absent, description="The receipt of a step without a mean.")
    scope: str = Field(default_factory=absent, description="The scope that the API key lacks.")
    receipts: dict[str, Any] = Field(
        default_factory=absent, description="The receipts of the same request, which was made before."
    )


class ProtocolError(BaseModel):
    """An error in the form of the Open Inference Protocol."""

    error: str = Field(description="A sentence for a person.")
