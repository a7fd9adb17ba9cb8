"""API keys: a file of them, of which it holds hashes only.

A secret is 32 random bytes, so that a fast hash is as good as a slow one. Its first characters are the id under which
the file has it; the rest of it is compared in constant time.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from service.errors import shown

logger = logging.getLogger(__name__)

SCOPES = {
    "ops": "run operators, and see what there is",
    "buffers:read": "read buffers and their values",
    "buffers:write": "create, change and delete buffers",
    "admin": "all of this, and the metrics",
}

PREFIX = "gs"
_SECRET = re.compile(rf"{PREFIX}_([0-9a-f]{{12}})_[A-Za-z0-9_-]{{43}}")
_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,100}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FORMAT = 1


class KeyFileInvalid(ValueError):
    """The file of API keys cannot be read, or not be changed as asked."""


class KeyUnfit(ValueError):
    """No key can be called, or be good for, what was given."""


@dataclass(frozen=True)
class ApiKey:
    """Who may do what: in the namespace, until `expires`, in seconds since 1970."""

    id: str
    name: str
    digest: str
    scopes: tuple[str, ...]
    namespace: str
    created: float
    expires: float | None

    def lives(self, now: float) -> bool:
        """Whether it has not expired."""
        return self.expires is None or now < self.expires


class KeyFile:
    """The keys in a file, read again whenever it changes. Thread-safe.

    While the file is not there, there are no keys. If it cannot be read, those that were read before stay good.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = path, clock
        self._keys: dict[str, ApiKey] = {}
        self._seen: tuple[int, ...] | None = None
        self._told = ""

    def find(self, secret: str) -> ApiKey | None:
        """The key of this secret, unless it has expired."""
        self._refresh()
        match = _SECRET.fullmatch(secret)
        key = None if match is None else self._keys.get(match[1])
        good = hmac.compare_digest("" if key is None else key.digest, _digest(secret))
        return key if key is not None and good and key.lives(self._clock()) else None

    def _refresh(self) -> None:
        try:
            found = os.stat(self.path)
            seen: tuple[int, ...] = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            seen = ()
        if seen == self._seen:
            return
        try:
            self._keys = {key.id: key for key in load(self.path)}
            self._seen, self._told = seen, ""
        except KeyFileInvalid as error:  # which may pass: it is read again for the next request
            if str(error) != self._told:
                logger.error("gradserve goes on with the keys it has: %s", error)
            self._told = str(error)


def load(path: Path) -> list[ApiKey]:
    """The keys in the file; none if it is not there. Raises `KeyFileInvalid`."""
    try:
        document = json.loads(path.read_text())
        if document["format"] != _FORMAT:
            raise KeyFileInvalid(f"{path} has format {shown(document['format'])}, but this gradserve reads {_FORMAT}")
        return list(map(_key, document["keys"]))
    except FileNotFoundError:
        return []
    except KeyFileInvalid:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise KeyFileInvalid(f"{path} is no file of API keys: {error}") from None


def _key(given: Mapping[str, Any]) -> ApiKey:
    """A key as the file has it, which someone may have edited. Raises `KeyFileInvalid`, and `TypeError`."""
    key = ApiKey(**given)
    texts = (key.id, key.name, key.namespace)
    if not (
        all(isinstance(one, str) for one in texts)
        and isinstance(key.digest, str)
        and _DIGEST.fullmatch(key.digest)
        and isinstance(key.scopes, list)
        and SCOPES.keys() >= set(key.scopes)
        and isinstance(key.created, (int, float))
        and math.isfinite(key.created)
        and isinstance(key.expires, (int, float, type(None)))
        and (key.expires is None or math.isfinite(key.expires))
    ):
        raise KeyFileInvalid(f"The key {shown(str(key.name))} is not as gradserve keys add writes it")
    return replace(key, scopes=tuple(key.scopes))


def add(path: Path, name: str, scopes: list[str], namespace: str = "", expires: float | None = None) -> str:
    """Add a key to the file, which is made if it is not there. Returns the secret, which is nowhere else.

    Raises `KeyUnfit` and `KeyFileInvalid`.
    """
    for what, text in (("The name", name), ("The namespace", namespace)):
        if not _NAME.fullmatch(text) and (text or what == "The name"):
            raise KeyUnfit(f"{what} is {shown(text)}, but must be 1 to 100 of A-Z a-z 0-9 . _ : @ -")
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown or not scopes:
        raise KeyUnfit(f"The scopes are {shown(','.join(scopes))}, but must be some of {', '.join(SCOPES)}")
    with _changing(path) as keys:
        if any(key.name == name for key in keys):
            raise KeyFileInvalid(f"There is a key {shown(name)} already")
        number = secrets.token_hex(6)
        secret = f"{PREFIX}_{number}_{secrets.token_urlsafe(32)}"
        keys.append(ApiKey(number, name, _digest(secret), tuple(scopes), namespace, time.time(), expires))
    return secret


def remove(path: Path, name: str) -> None:
    """Remove the key of this name from the file. Raises `KeyFileInvalid`."""
    if not path.exists():
        raise KeyFileInvalid(f"{path} is not there")
    with _changing(path) as keys:
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            raise KeyFileInvalid(f"There is no key {shown(name)}")
        keys[:] = left


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


@contextmanager
def _changing(path: Path) -> Iterator[list[ApiKey]]:
    """The keys, stored on leaving. The file is replaced as a whole, and one process changes it at a time.

    Whoever could read it before still can.
    """
    path = path.resolve()
    if path.is_dir():
        raise KeyFileInvalid(f"{path} is a directory, and no file of API keys")
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = load(path)
        yield keys
        made = path.with_name(f"{path.name}.new")
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            with suppress(FileNotFoundError):
                before = path.stat()
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
            json.dump({"format": _FORMAT, "keys": [asdict(key) for key in keys]}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
