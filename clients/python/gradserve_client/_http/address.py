"""The address of a server: a URL, or a UNIX socket on this machine."""

from __future__ import annotations

import os
import socket
import sys
from typing import NamedTuple
from urllib.parse import quote, unquote

import httpx

from gradserve_client.errors import InvalidInput

UNIX, HTTP_UNIX = "unix:", "http+unix://"
"""The beginnings of a socket's address. Behind the second, a host stands for the path, with %2F for each slash."""

_SOCKET_URL = "http://localhost"
"""The URL of requests over a socket: HTTP/1.1 needs a Host."""

_LONGEST_PATH = 107 if sys.platform == "linux" else 103
"""Bytes of a socket's path that the system takes."""

_HIGHEST_PORT = (1 << 16) - 1


class Address(NamedTuple):
    """Where a server is."""

    url: httpx.URL
    """The URL that requests have."""
    socket: str | None
    """The path of the UNIX socket; None for TCP."""
    text: str
    """The address in one form, as people read it."""


def parsed(text: str) -> Address:
    """Return the address. Raises `InvalidInput` if it is malformed."""
    if text.startswith(HTTP_UNIX):
        host, slash, prefix = text.removeprefix(HTTP_UNIX).partition("/")
        return _unix(text, unquote(host), f"{slash}{prefix}".rstrip("/"))
    if text.startswith(UNIX):
        path = text.removeprefix(UNIX)
        return _unix(text, f"/{path.lstrip('/')}" if path.startswith("/") else path, "")
    url = _url(text, text)
    return Address(url, None, str(url))


def _unix(text: str, path: str, prefix: str) -> Address:
    if not hasattr(socket, "AF_UNIX"):
        raise InvalidInput(f"The URL is {text!r}, but this system has no UNIX sockets")
    if not path or "\0" in path:
        raise InvalidInput(f"The URL is {text!r}, but must name a socket: unix:/path or http+unix://%2Fpath")
    if (size := len(os.fsencode(path))) > _LONGEST_PATH:
        raise InvalidInput(f"The URL is {text!r}, a path of {size} bytes, but a socket's has {_LONGEST_PATH} at most")
    shown = f"{HTTP_UNIX}{quote(path, safe='')}{prefix}" if prefix else f"{UNIX}{path}"
    return Address(_url(text, _SOCKET_URL + prefix), path, shown)


def _url(text: str, url_text: str) -> httpx.URL:
    try:
        url = httpx.URL(url_text.rstrip("/"))
    except httpx.InvalidURL as error:
        raise InvalidInput(f"The URL is {text!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidInput(f"The URL is {text!r}, but must begin with http:// or https:// and a host, or with unix:")
    if url.port is not None and not 0 < url.port <= _HIGHEST_PORT:
        raise InvalidInput(f"The URL is {text!r}, but a port is from 1 to {_HIGHEST_PORT}")
    if url.userinfo:
        raise InvalidInput("The URL has a user or a password, but a gradserve server takes an API key: use api_key")
    return url
