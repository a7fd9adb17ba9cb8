"""Errors as answers, made in one place: RFC 9457 `application/problem+json`, and on `/v2` the protocol's own form."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Collection, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import (
    BaseModel,
    Field,
)
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from service.api.http.body import Answer
from service.api.http.context import context_of
from service.api.http.tensor_forms import absent
from service.errors import (
    Busy,
    Expired,
    GradserveError,
    Invalid,
    InvalidParameter,
    MalformedBody,
    MethodNotAllowed,
    NotFound,
    NotReady,
    RequestTimeout,
    Unauthorized,
    UnknownParameter,
    shown,
)

MEDIA_TYPE = "application/problem+json"

GONE = 499
"""The status, in logs and metrics, of a request whose client was gone before the answer; nginx's word for it."""


def answer(path: str, error: GradserveError, headers: Mapping[str, str] | None = None) -> Response:
    """`error` as an answer, in the form of the API that `path` belongs to."""
    if isinstance(error, RequestTimeout):
        headers = {"Connection": "close"}  # the rest of the body may still come, and is no request
    if isinstance(error, (Busy, Expired, NotReady)):
        headers = {"Retry-After": "1"}
    if isinstance(error, Unauthorized):
        headers = {"WWW-Authenticate": "Bearer"}
    if path == "/v2" or path.startswith("/v2/"):
        # The Open Inference Protocol's form; with 400 for whatever is wrong with the request but its size.
        status = 400 if error.status in (406, 408, 415, 422) else error.status
        return Response(json.dumps({"error": error.detail}), status, headers, "application/json")
    content = {
        "type": f"urn:gradserve:problem:{error.code}",
        "title": error.title(),
        "status": error.status,
        "detail": error.detail,
        "code": error.code,
        **error.context,
    }
    return Response(json.dumps(content), error.status, headers, MEDIA_TYPE)


def invalid_parameter(error: Mapping[str, Any], kind: str = "query parameter", known: Collection[str] = ()) -> Invalid:
    """pydantic's word on one parameter, or on another `kind` of which there are the `known` ones, as an error."""
    name = next((part for part in reversed(error["loc"]) if isinstance(part, str)), "")  # not the place in a list
    if error["type"] == "extra_forbidden":
        others = f"; it must be one of {', '.join(known)}" if known else ""
        return UnknownParameter(f"The {kind} {shown(name)} is unknown{others}", parameter=name)
    if error["type"] == "missing":
        return InvalidParameter(f"The {kind} {name} is missing", parameter=name)
    message = f"{name}: {error['msg']}"
    if "input" in error:
        message += f", but is {shown(error['input'])}"
    return InvalidParameter(message, parameter=name)


def parameters_of(model: type[BaseModel]) -> list[str]:
    """The names by which a request gives the members of the model."""
    return [field.alias or name for name, field in model.model_fields.items()]


def install(app: FastAPI) -> None:
    """Let `app` answer with every error that its routes raise."""

    @app.exception_handler(GradserveError)
    async def ours(request: Request, error: GradserveError) -> Response:
        return answer(request.scope["path"], error)

    @app.exception_handler(RequestValidationError)
    async def query(request: Request, error: RequestValidationError) -> Response:
        route = request.scope["route"]
        known = [name for one in route.dependant.query_params for name in parameters_of(one.field_info.annotation)]
        told = invalid_parameter(error.errors()[0], known=known)
        if route.path.startswith("/v1/ops/"):
            told.context["op"] = route.name
        return answer(request.scope["path"], told)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        if error.status_code == 405:
            # Starlette names the methods of the first route at this path only.
            allowed = ", ".join(method for method in _METHODS if _is_taken(app, {**request.scope, "method": method}))
            allowed = allowed or "GET, HEAD"  # of the files of /docs
            detail = f"{request.url.path} does not allow {request.method}; it allows {allowed}"
            return answer(request.scope["path"], MethodNotAllowed(detail), {"Allow": allowed})
        if error.status_code == 404:
            detail = f"There is nothing at {shown(request.url.path)}; /docs lists all paths"
            if request.url.path.startswith("/v1/buffers/"):
                detail += ". A buffer's name has no slash"
            return answer(request.scope["path"], NotFound(detail))
        return answer(request.scope["path"], MalformedBody(str(error.detail)))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=GONE)  # nobody reads it

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return answer(request.scope["path"], bug(), _CLOSING)


async def answering(scope: Scope, receive: Receive, send: Send, work: Awaitable[Answer]) -> None:
    """Send what `work` returns, or the error that it raises, where FastAPI is passed by."""
    path = scope["path"]
    try:
        done = await work
    except GradserveError as error:
        headers = {"Allow": "POST"} if isinstance(error, MethodNotAllowed) else None
        await answer(path, error, headers)(scope, receive, send)
    except ClientDisconnect:
        context_of(scope).status = GONE  # nobody reads an answer
    except Exception:
        await answer(path, bug(), _CLOSING)(scope, receive, send)
        raise  # for the server to log
    else:
        await done.send(scope, send)


def bug() -> GradserveError:
    """The error of whatever nobody foresaw."""
    return GradserveError("The server failed to answer this request; its log says why")


_CLOSING = {"Connection": "close"}
"""The server closes the connection of a request that failed in it."""

_METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")


def _is_taken(app: FastAPI, scope: Scope) -> bool:
    if scope["method"] == "HEAD":
        scope = {**scope, "method": "GET"}
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)


class Problem(BaseModel):
    """An error (RFC 9457), with what it is about, if that helps."""

    type: str = Field(examples=["urn:gradserve:problem:shape_mismatch"])
    title: str
    status: int
    detail: str
    code: str
    op: str = Field(default_factory=absent)
    tensor: str = Field(default_factory=absent)
    parameter: str = Field(default_factory=absent)
    axis: int = Field(default_factory=absent)
    index: int = Field(default_factory=absent)
    limit: float = Field(default_factory=absent)
    buffer: str = Field(default_factory=absent)
    epoch: int = Field(default_factory=absent, description="The buffer's current epoch.")
    count: int = Field(default_factory=absent, description="The gradients in that epoch so far.")
    min_count: int = Field(default_factory=absent)
    scope: str = Field(default_factory=absent, description="The scope that the API key lacks.")
    receipts: dict[str, Any] = Field(
        default_factory=absent, description="The receipts of the same request, which was made before."
    )
