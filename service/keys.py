"""API keys: the file that holds them, as hashes only.

A secret has 32 random bytes: too many to guess, even from a fast hash. It begins with the key's id, which finds the key
in the file; then the hashes are compared in constant time.
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
    "ops": "list and run operators",
    "buffers:read": "read buffers and their values",
    "buffers:write": "create, change and delete buffers",
    "admin": "all of this, and read the metrics",
}
"""What each scope of a key allows."""

PREFIX = "gs"
"""Every secret begins with it, so that people and scanners recognise a leaked one."""

_SECRET = re.compile(rf"{PREFIX}_([0-9a-f]{{12}})_[A-Za-z0-9_-]{{43}}")
_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,100}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FORMAT = 1


class KeyFileInvalid(ValueError):
    """The file of API keys cannot be read, or cannot be changed in this way."""


class KeyInvalid(ValueError):
    """The name, namespace or scopes of a new key are invalid."""


@dataclass(frozen=True)
class ApiKey:
    """A key: its scopes, its namespace and its lifetime; times are seconds since 1970."""

    id: str
    name: str
    digest: str
    scopes: tuple[str, ...]
    namespace: str
    created: float
    expires: float | None

    def expired(self, now: float) -> bool:
        """Return whether the key has expired."""
        return self.expires is not None and self.expires <= now


class KeyFile:
    """The keys in a file, read again whenever the file changes. Thread-safe.

    A missing file holds no keys. While the file cannot be read, the keys that were read before stay valid.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = path, clock
        self._keys: dict[str, ApiKey] = {}
        self.have_several_namespaces = False
        """Whether the keys are not all of one namespace."""
        self._read_state: tuple[int, ...] | None = None
        self._logged_error = ""

    def find(self, secret: str) -> ApiKey | None:
        """Return the key of this secret, or None if the key is unknown or has expired."""
        self._refresh()
        match = _SECRET.fullmatch(secret)
        key = None if match is None else self._keys.get(match[1])
        matches = hmac.compare_digest("" if key is None else key.digest, _digest(secret))
        return key if key is not None and matches and not key.expired(self._clock()) else None

    def _refresh(self) -> None:
        state = _file_state(self.path)
        if state == self._read_state:
            return
        try:
            self._keys = {key.id: key for key in load(self.path)}
            self.have_several_namespaces = len({key.namespace for key in self._keys.values()}) > 1
            self._read_state, self._logged_error = state, ""
        except KeyFileInvalid as error:  # the fault may pass, so the next request reads the file again
            if str(error) != self._logged_error:
                logger.error("Cannot read the API keys again; the keys read before stay valid: %s", error)
            self._logged_error = str(error)


def _file_state(path: Path) -> tuple[int, ...]:
    """Return numbers that differ after each change of the file."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def load(path: Path) -> list[ApiKey]:
    """Return the keys in the file, or none if the file does not exist. Raises `KeyFileInvalid`."""
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
        raise KeyFileInvalid(f"{path} is not a file of API keys: {error}") from None


def _key(members: Mapping[str, Any]) -> ApiKey:
    """Return the key with these members, which someone may have edited. Raises `KeyFileInvalid` and `TypeError`."""
    key = ApiKey(**members)
    texts = (key.id, key.name, key.namespace)
    if not (
        all(isinstance(text, str) for text in texts)
        and isinstance(key.digest, str)
        and _DIGEST.fullmatch(key.digest)
        and isinstance(key.scopes, list)
        and SCOPES.keys() >= set(key.scopes)
        and isinstance(key.created, (int, float))
        and math.isfinite(key.created)
        and isinstance(key.expires, (int, float, type(None)))
        and (key.expires is None or math.isfinite(key.expires))
    ):
        raise KeyFileInvalid(
            f"The key {shown(str(key.name))} is invalid: its values must be as gradserve keys add writes them"
        )
    return replace(key, scopes=tuple(key.scopes))


def add(path: Path, name: str, scopes: list[str], namespace: str = "", expires: float | None = None) -> str:
    """Add a key to the file, which is created if it does not exist. Returns the secret, which is stored nowhere.

    `expires` is in seconds since 1970. Raises `KeyInvalid` and `KeyFileInvalid`.
    """
    _check_name("name", name)
    if namespace:
        _check_name("namespace", namespace)
    if not scopes or not SCOPES.keys() >= set(scopes):
        raise KeyInvalid(f"The scopes are {shown(','.join(scopes))}, but must be some of {', '.join(SCOPES)}")
    with _changing(path) as keys:
        if any(key.name == name for key in keys):
            raise KeyFileInvalid(f"{path} already has a key {shown(name)}")
        key_id = secrets.token_hex(6)
        secret = f"{PREFIX}_{key_id}_{secrets.token_urlsafe(32)}"
        keys.append(ApiKey(key_id, name, _digest(secret), tuple(scopes), namespace, time.time(), expires))
    return secret


def _check_name(member: str, text: str) -> None:
    if not _NAME.fullmatch(text):
        raise KeyInvalid(f"The {member} is {shown(text)}, but must be 1 to 100 characters of A-Z a-z 0-9 . _ : @ -")


def remove(path: Path, name: str) -> None:
    """Remove the key of this name from the file. Raises `KeyFileInvalid`."""
    if not path.exists():
        raise KeyFileInvalid(f"{path} does not exist")
    with _changing(path) as keys:
        remaining = [key for key in keys if key.name != name]
        if len(remaining) == len(keys):
            raise KeyFileInvalid(f"{path} has no key {shown(name)}")
        keys[:] = remaining


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


@contextmanager
def _changing(path: Path) -> Iterator[list[ApiKey]]:
    """Yield the keys, and write them on leaving. The file is replaced as a whole, by one process at a time."""
    path = path.resolve()
    if path.is_dir():
        raise KeyFileInvalid(f"{path} is a directory, but must be a file of API keys")
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = load(path)
        yield keys
        replacement = path.with_name(f"{path.name}.new")
        with open(os.open(replacement, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            with suppress(FileNotFoundError):
                _copy_access(path, file.fileno())
            json.dump({"format": _FORMAT, "keys": [asdict(key) for key in keys]}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        replacement.replace(path)


def _copy_access(path: Path, descriptor: int) -> None:
    """Give the open file the owner, group and mode of `path`: the server may run as another user."""
    before = path.stat()
    os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
