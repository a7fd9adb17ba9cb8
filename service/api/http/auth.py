"""Who asks, and what for: API keys, their scopes and namespaces."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import NamedTuple

from starlette.types import Scope

from service.errors import Forbidden, Unauthorized, shown
from service.keys import SCOPES, KeyFile


class Caller(NamedTuple):
    """Whoever sent a request: the namespace that it sees, and what it may do there."""

    namespace: str
    scopes: frozenset[str]

    def require(self, scope: str) -> None:
        """Raise `Forbidden` unless the caller may do this."""
        if scope not in self.scopes:
            raise Forbidden(
                f"This API key has {', '.join(sorted(self.scopes))}, but the request needs {scope}", scope=scope
            )


ANYONE = Caller("", frozenset(SCOPES))
"""The caller where no keys are asked for."""


def authorize(scope: Scope, headers: Mapping[bytes, bytes], keys: KeyFile | None, metrics_open: str) -> Caller:
    """Who asks, if they may. Raises `Unauthorized` and `Forbidden`."""
    if keys is None:
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            _refuse_other_sites(headers)
        return ANYONE
    if _is_open(scope["path"]):
        return ANYONE
    if scope["path"] == "/metrics" and (metrics_open == "always" or metrics_open == "loopback" and _is_near(scope)):
        return ANYONE
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if not given:
        raise Unauthorized("The request has no API key, but needs one: Authorization: Bearer gs_...")
    kind, _, secret = given[0].decode("latin-1").strip().partition(" ")
    if kind.lower() != "bearer" or len(given) > 1:
        raise Unauthorized("Authorization must be one API key: Bearer gs_...")
    key = keys.find(secret.strip())
    if key is None:
        raise Unauthorized("This API key is unknown, was removed, or has expired")
    scopes = frozenset(SCOPES if "admin" in key.scopes else key.scopes)
    caller = Caller(key.namespace, scopes)
    for needed in _needed(scope):
        caller.require(needed)
    return caller


def _refuse_other_sites(headers: Mapping[bytes, bytes]) -> None:
    """Raise `Forbidden` for what a page of another site makes a browser send: without a key it could change buffers.

    Browsers say where a request comes from in Sec-Fetch-Site, old ones in Origin; other clients have neither.
    """
    site = headers.get(b"sec-fetch-site")
    if site in (b"same-origin", b"none"):
        return
    origin = headers.get(b"origin") or None
    if site is None and (origin is None or origin.partition(b"://")[2] == headers.get(b"host")):
        return
    came = "" if origin is None else f", {shown(origin.decode('latin-1'))}"
    raise Forbidden(
        f"This request comes from a page of another website{came}; without API keys the server refuses those"
    )


def _is_open(path: str) -> bool:
    """What a probe asks, and what is the same on every server."""
    return path.startswith(("/v2/health/", "/docs/")) or path in ("/", "/docs", "/openapi.json")


def _is_near(scope: Scope) -> bool:
    """Whether the request comes from this machine, and not through a proxy on it."""
    client = scope.get("client")
    forwarded = any(name in (b"x-forwarded-for", b"x-real-ip", b"forwarded") for name, _ in scope["headers"])
    return client is not None and ipaddress.ip_address(client[0]).is_loopback and not forwarded


def _needed(scope: Scope) -> list[str]:
    """What a key must be good for. Where a request names buffers otherwise than by its path, that is asked later."""
    path: str = scope["path"]
    if path == "/v1/buffers" or path.startswith("/v1/buffers/"):
        method = scope["method"]
        if method in ("GET", "HEAD") or (method, path) == ("POST", "/v1/buffers/value"):
            return ["buffers:read"]
        takes = method == "POST" and path.endswith("/take")
        return ["buffers:write", "buffers:read"] if takes else ["buffers:write"]
    if path == "/metrics":
        return ["admin"]
    return ["ops"] if path.startswith(("/v1/ops", "/v2")) else []
