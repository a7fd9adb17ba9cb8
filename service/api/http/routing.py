"""The table of routes, read from the endpoints as FastAPI's routers declare them.

The table dispatches every request. OpenAPI, keys, metrics and tracing read the same declarations. FastAPI's dispatch
is not used: to find and call an endpoint it takes longer than a small request. What an endpoint declares for OpenAPI
alone is here, too: headers, bodies and media types.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypeVar

from fastapi import APIRouter, Body, Header
from fastapi.params import Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel

from service.api.http.answer import Answer
from service.api.http.call import Call
from service.api.http.negotiation import parse_query
from service.api.http.tensor_forms import absent
from service.codecs import safetensors

Handler = Callable[..., Awaitable[Answer]]
H = TypeVar("H", bound=Handler)

REF = "#/components/schemas/{model}"

_STRING = {"type": "string"}

_BYTES = {"schema": {"type": "string", "format": "binary"}}

SAFETENSORS_CONTENT: dict[str, Any] = {safetensors.MEDIA_TYPE: _BYTES}

SAFETENSORS_BODY: dict[str, Any] = {"requestBody": {"content": SAFETENSORS_CONTENT}}
"""The entry of an endpoint whose tensors come as JSON or as safetensors."""

BYTES_CONTENT: dict[str, Any] = {"application/octet-stream": _BYTES}


class Access(NamedTuple):
    """The access to an endpoint, and its label in metrics."""

    scopes: tuple[str, ...]
    """The scopes that an API key needs."""
    label: str
    """The value of the label `route` in metrics."""
    open: bool
    """Whether a caller needs no key, even on a server with keys."""
    operator: str | None = None
    """The operator that the endpoint runs."""


UNKNOWN = Access((), "other", False)
"""The access of a path that no endpoint has."""


def access(*scopes: str, label: str = "other", open: bool = False, operator: str | None = None) -> Callable[[H], H]:
    """Declare the access of an endpoint. This decorator stands below the decorator of FastAPI's router."""

    def declare(handler: H) -> H:
        handler.access = Access(scopes, label, open, operator)  # type: ignore[attr-defined]
        return handler

    return declare


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


class Endpoint(NamedTuple):
    """The handler of a method at a path."""

    path: str
    handler: Handler
    names: Sequence[str]
    """The parameters of the path, which the handler takes."""
    query: type[BaseModel] | None
    access: Access

    def answer(self, call: Call) -> Awaitable[Answer]:
        arguments: dict[str, Any] = {name: call.parameters[name] for name in self.names}
        if self.query is not None:
            arguments["query"] = parse_query(call, self.query)
        return self.handler(call, **arguments)


class _Pattern(NamedTuple):
    """A path with parameters, and its endpoints by method."""

    regex: re.Pattern[str]
    methods: dict[str, Endpoint]


MAX_CACHED_CHARACTERS = 300
"""A longer path is not cached: no buffer has a longer name, and 4,096 paths take a few megabytes at most."""


class Table:
    """The endpoints of the routers."""

    def __init__(self, routers: Iterable[APIRouter]) -> None:
        self._exact: defaultdict[str, dict[str, Endpoint]] = defaultdict(dict)
        self._patterns: dict[str, _Pattern] = {}
        self._cached = lru_cache(4096)(self._search)
        for router in routers:
            for route in router.routes:
                assert isinstance(route, APIRoute)
                self._add(route)

    def _add(self, route: APIRoute) -> None:
        query: Any = next((field.field_info.annotation for field in route.dependant.query_params), None)
        names = [field.name for field in route.dependant.path_params]
        endpoint = Endpoint(route.path, route.endpoint, names, query, route.endpoint.access)  # type: ignore[attr-defined]
        if "{" not in route.path:
            methods = self._exact[route.path]
        else:
            regex = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", route.path))
            methods = self._patterns.setdefault(route.path, _Pattern(regex, {})).methods
        for method in route.methods or ():
            assert method not in methods, f"two endpoints answer {method} {route.path}"
            methods[method] = endpoint

    def find(self, method: str, path: str) -> tuple[Endpoint, Mapping[str, str]] | None:
        """Return the endpoint and the parameters of the path; None without an endpoint."""
        return (self._cached if len(path) <= MAX_CACHED_CHARACTERS else self._search)(method, path)

    def _search(self, method: str, path: str) -> tuple[Endpoint, Mapping[str, str]] | None:
        if (exact := self._exact.get(path)) is not None and method in exact:
            return exact[method], {}
        for pattern, methods in self._patterns.values():
            if method in methods and (fits := pattern.fullmatch(path)) is not None:
                return methods[method], fits.groupdict()
        return None

    def like(self, path: str) -> list[str]:
        """Return the first paths that a GET reads and that this one is a part of: /health of others."""
        return sorted(one for one, by in self._exact.items() if path.rstrip("/z") in one and "GET" in by)[:2]

    def methods(self, path: str) -> Mapping[str, Endpoint]:
        """Return all endpoints of the path, by method."""
        endpoints = dict(self._exact.get(path, {}))
        for pattern, methods in self._patterns.values():
            if pattern.fullmatch(path) is not None:
                endpoints |= {method: endpoint for method, endpoint in methods.items() if method not in endpoints}
        return endpoints
