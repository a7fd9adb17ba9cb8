"""Authorization: API keys, their scopes and their namespaces."""

from __future__ import annotations

import ipaddress
import re
from importlib.metadata import version

from service.api.http.call import ANYONE, Call, Caller
from service.api.http.routing import Access
from service.errors import Forbidden, OldClient, Unauthorized, shown
from service.host.unix_socket import is_private
from service.keys import SCOPES, KeyFile
from service.settings import Settings

_OLD_CLIENTS = tuple(f"gradserve-client/0.{minor}.".encode() for minor in range(4))
"""Versions of the Python client whose words for a step and a run are others: nothing of theirs may count."""

_FORWARDING_HEADERS = (b"x-forwarded-for", b"x-real-ip", b"forwarded")


def known_hosts(settings: Settings) -> re.Pattern[bytes]:
    """Return what Host must be on a server without API keys: empty, localhost, an address, or a name of the settings.

    A browser sends the name in the URL of the page. The owner of any other name may let it lead here.
    """
    names = ["localhost", "*.localhost", settings.host, *settings.host_names.split(",")]
    known = "|".join(re.escape(name.strip()).replace(r"\*", ".*") for name in names)
    return re.compile(rf"(\[.*\]|[0-9.]+|{known}|)\.?(:[0-9]*)?".encode(), re.IGNORECASE)


def authorize(call: Call, access: Access, keys: KeyFile | None, hosts: re.Pattern[bytes]) -> Caller:
    """Return the caller if it may send this request. Without keys, Host must match `hosts`.

    Raises `OldClient`, `Unauthorized` and `Forbidden`.
    """
    if access.open or call.method == "OPTIONS":
        return ANYONE
    agent = call.headers.get(b"user-agent")
    if agent is not None and agent.startswith(_OLD_CLIENTS):
        raise OldClient(
            f"This client is {shown(agent.decode('latin-1'))}, but gradserve {version('gradserve')} speaks with"
            " versions from 0.4.0 on: pip install --upgrade gradserve-client"
        )
    if keys is None:
        _refuse_other_hosts(call, hosts)
        if b"sec-fetch-site" in call.headers or b"origin" in call.headers:
            _refuse_other_sites(call)
        return ANYONE
    if access.label == "metrics" and _metrics_are_open(call):
        return ANYONE
    lines = call.head.values(b"authorization")
    if not lines:
        raise Unauthorized("The request has no API key, but needs one: Authorization: Bearer gs_...")
    kind, _, secret = lines[0].decode("latin-1").strip().partition(" ")
    if kind.lower() != "bearer" or len(lines) > 1:
        raise Unauthorized("Authorization must be one API key: Bearer gs_...")
    key = keys.find(secret.strip())
    if key is None:
        raise Unauthorized("This API key is unknown, was removed, or has expired")
    caller = Caller(key.namespace, frozenset(SCOPES if "admin" in key.scopes else key.scopes), key.name)
    for scope in access.scopes:
        caller.require(scope)
    return caller


def _refuse_other_hosts(call: Call, hosts: re.Pattern[bytes]) -> None:
    """Raise `Forbidden` for an unknown Host: without API keys, a page of that name could read and change buffers.

    No browser opens a UNIX socket, but a proxy does.
    """
    host = call.headers.get(b"host", b"")
    if not hosts.fullmatch(host) and (call.ends.path is None or _is_forwarded(call)):
        raise Forbidden(
            f"Host is {shown(host.decode('latin-1'))}, but without API keys the server answers only for localhost,"
            " addresses, GRADSERVE_HOST and the names in GRADSERVE_HOST_NAMES"
        )


def _refuse_other_sites(call: Call) -> None:
    """Raise `Forbidden` for a request from a page of another website: without API keys it could change buffers.

    Browsers send the origin of a request in Sec-Fetch-Site, old browsers in Origin; other clients send neither header.
    """
    site = call.headers.get(b"sec-fetch-site")
    if site in (b"same-origin", b"none"):
        return
    origin = call.headers.get(b"origin") or None
    if site is None and (origin is None or origin.partition(b"://")[2] == call.headers.get(b"host")):
        return
    host = shown(call.headers.get(b"host", b"").decode("latin-1"))
    source = "" if origin is None else f", {shown(origin.decode('latin-1'))}, and names the Host {host}"
    raise Forbidden(
        f"This request comes from a page of another website{source}; without API keys the server refuses those"
    )


def _metrics_are_open(call: Call) -> bool:
    metrics_open = call.settings.metrics_open
    return metrics_open == "always" or (metrics_open == "loopback" and _is_near(call))


def _is_forwarded(call: Call) -> bool:
    """Return whether the request came through a proxy that says so."""
    return any(header in call.headers for header in _FORWARDING_HEADERS)


def _is_near(call: Call) -> bool:
    """Return whether the request comes from this machine, and not through a proxy.

    A UNIX socket is as near as loopback if only its owner can open it.
    """
    if _is_forwarded(call):
        return False
    if call.ends.path is not None:
        return is_private(call.settings.socket_mode)
    return call.ends.client is not None and ipaddress.ip_address(call.ends.client[0]).is_loopback
