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
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from service.errors import shown
from service.host.documents import DocumentInvalid, Members, check, is_number, parse
from service.host.files import named, open_new, open_regular, put_in_place
from service.host.system import sync

logger = logging.getLogger(__name__)

SCOPES = {
    "ops": "list and run operators",
    "buffers:read": "read buffers and their values",
    "buffers:write": "create, change and delete buffers",
    "graphs:write": "upload and delete graphs",
    "shared_memory": "register regions of shared memory, and use them",
    "admin": "all of this, and read the metrics",
}
"""What each scope of a key allows."""

PREFIX = "gs"
"""Every secret begins with it, so that people and scanners recognise a leaked one."""

NAME = re.compile(r"[A-Za-z0-9._:@-]{1,100}")
"""The names of keys, and the namespaces of their buffers."""

NAME_RULE = "1 to 100 characters of A-Z a-z 0-9 . _ : @ -"
"""`NAME` in words."""

MAX_TIME_SECONDS = datetime(9999, 1, 1).timestamp()
"""The latest time of a key: `datetime` has no year after 9999."""

_SECRET = re.compile(rf"{PREFIX}_([0-9a-f]{{12}})_[A-Za-z0-9_-]{{43}}")
_ID = re.compile(r"[0-9a-f]{12}")
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


def _is_text(value: Any, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _are_scopes(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(one, str) and one in SCOPES for one in value)


def _is_time(value: Any) -> bool:
    return is_number(value, 0, MAX_TIME_SECONDS)


_KEY: Members = {
    "id": ("12 hexadecimal digits", lambda value: _is_text(value, _ID)),
    "name": (NAME_RULE, lambda value: _is_text(value, NAME)),
    "digest": ("64 hexadecimal digits", lambda value: _is_text(value, _DIGEST)),
    "scopes": (f"a list of some of {', '.join(SCOPES)}", _are_scopes),
    "namespace": (f"empty or {NAME_RULE}", lambda value: value == "" or _is_text(value, NAME)),
    "created": ("seconds since 1970, before the year 9999", _is_time),
    "expires": ("null or seconds since 1970, before the year 9999", lambda value: value is None or _is_time(value)),
}

_FILE: Members = {
    "format": (f"{_FORMAT}, which this gradserve reads", lambda value: type(value) is int and value == _FORMAT),
    "keys": ("a list", lambda value: isinstance(value, list)),
}


def load(path: Path) -> list[ApiKey]:
    """Return the keys in the file, or none if the file does not exist. Raises `KeyFileInvalid`.

    Someone may have edited the file, so that each key is checked as `add` checks a new key.
    """
    try:
        with open(open_regular(path), encoding="utf-8") as file:
            document = parse("it", file.read())
        return _keys(document)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise KeyFileInvalid(f"{path} is not a valid file of API keys: {error}") from None


def _keys(document: Any) -> list[ApiKey]:
    """Return the keys in a document. Raises `DocumentInvalid`."""
    check("it", document, _FILE, _FILE.keys())
    keys = document["keys"]
    for number, members in enumerate(keys, 1):
        name = members.get("name") if isinstance(members, dict) else None
        check(f"key {number}" if name is None else f"key {number}, {shown(name)},", members, _KEY, _KEY.keys())
    for member in ("id", "name"):
        for value, count in Counter(members[member] for members in keys).items():
            if count > 1:
                raise DocumentInvalid(f"{count} keys have the {member} {shown(value)}")
    return [ApiKey(**{**members, "scopes": tuple(members["scopes"])}) for members in keys]


def add(path: Path, name: str, scopes: list[str], namespace: str = "", expires: float | None = None) -> str:
    """Add a key to the file, which is created if it does not exist. Returns the secret, which is stored nowhere.

    `expires` is in seconds since 1970. Raises `KeyInvalid`, `KeyFileInvalid` and OSError.
    """
    given = {"name": name, "scopes": scopes, "namespace": namespace, "expires": expires}
    try:
        check("The new key", given, _KEY, given.keys())
    except DocumentInvalid as error:
        raise KeyInvalid(str(error)) from None
    with _changing(path) as keys:
        if any(key.name == name for key in keys):
            raise KeyFileInvalid(f"{path} already has a key {shown(name)}")
        key_id = secrets.token_hex(6)
        secret = f"{PREFIX}_{key_id}_{secrets.token_urlsafe(32)}"
        keys.append(ApiKey(key_id, name, _digest(secret), tuple(scopes), namespace, time.time(), expires))
    return secret


def remove(path: Path, name: str) -> None:
    """Remove the key of this name from the file. Raises `KeyFileInvalid` and OSError."""
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
    path = Path(os.path.realpath(path))
    keys = load(path)  # a fault of the file leaves no lock behind
    with open(open_regular(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = load(path)
        yield keys
        replacement = path.with_name(f"{path.name}.new")
        replacement.unlink(missing_ok=True)  # a process that was killed has left it
        with named(path), open(open_new(replacement), "w") as file:
            with suppress(FileNotFoundError):
                _copy_access(path, file.fileno())
            json.dump({"format": _FORMAT, "keys": [asdict(key) for key in keys]}, file, indent=1)
            file.flush()
            sync(file.fileno())
        put_in_place(replacement, path)


def _copy_access(path: Path, descriptor: int) -> None:
    """Give the open file the owner, group and mode of `path`: the server may run as another user."""
    before = path.stat()
    os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
