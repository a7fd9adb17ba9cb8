"""The commands of `gradserve keys`."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime
from pathlib import Path

from service.commands.preflight import UsageError
from service.keys import MAX_TIME_SECONDS, SCOPES, KeyFileInvalid, KeyInvalid, add, load, remove
from service.settings import Settings

DAY_SECONDS = 24 * 3600
"""Keys expire in days of this length, whatever a local clock does meanwhile."""


def add_key_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `gradserve keys`."""
    parser.set_defaults(run=_run)
    commands = parser.add_subparsers(dest="change", required=True, metavar="add|ls|rm")
    adding = commands.add_parser("add", help="create a key and print its secret, which cannot be shown again")
    adding.add_argument("name", metavar="NAME", help="name of the key, unique in the file")
    adding.add_argument(
        "--scopes",
        default="ops,buffers:read,buffers:write",
        help=f"comma-separated scopes out of {','.join(SCOPES)}; by default %(default)s",
    )
    adding.add_argument(
        "--namespace", default="", help="namespace of its buffers; keys of other namespaces cannot see them"
    )
    adding.add_argument(
        "--expires", metavar="WHEN", help="date such as 2027-01-31 or 2027-01-31T12:00+01:00, or days such as 90d"
    )
    commands.add_parser("ls", help="list the keys")
    removing = commands.add_parser("rm", help="remove a key; the server rejects it at once")
    removing.add_argument("name", metavar="NAME", help="name of the key")
    for command in commands.choices.values():
        command.add_argument("--keys", metavar="FILE", help="file of API keys; overrides GRADSERVE_KEYS")


def _run(settings: Settings, options: argparse.Namespace) -> int:
    path = settings.keys
    if path is None or not path.name:
        raise UsageError("No file of API keys is named: set GRADSERVE_KEYS, or pass --keys FILE")
    match options.change:
        case "add":
            _add_key(path, options)
        case "rm":
            remove(path, options.name)
        case _:
            _list_keys(path)
    return 0


def _add_key(path: Path, options: argparse.Namespace) -> None:
    scopes = [scope.strip() for scope in options.scopes.split(",")]
    expires = None if options.expires is None else _expiry(options.expires)
    try:
        secret = add(path, options.name, scopes, options.namespace, expires)
    except KeyInvalid as error:
        raise UsageError(str(error)) from None
    try:
        print(secret, flush=True)
    except OSError:  # nobody has seen the secret, so that nobody could use the key
        remove(path, options.name)
        raise
    print("This is the key's secret. Save it now: it is stored nowhere else.", file=sys.stderr)


def _list_keys(path: Path) -> None:
    if not path.exists():
        raise KeyFileInvalid(f"{path} does not exist")
    keys = load(path)
    print(f"{'name':<20} {'namespace':<12} {'created':<17} {'expires':<17} scopes")
    for key in keys:
        expires = "never" if key.expires is None else _date(key.expires)
        print(f"{key.name:<20} {key.namespace:<12} {_date(key.created):<17} {expires:<17} {','.join(key.scopes)}")


def _expiry(text: str) -> float:
    """Return the seconds since 1970 of a date, or of a number of days from now. Raises `UsageError`."""
    try:
        days = float(text[:-1]) if text.endswith("d") else None
        moment = datetime.fromisoformat(text).timestamp() if days is None else time.time() + days * DAY_SECONDS
    except ValueError:
        raise UsageError(f"--expires is {text!r}, but must be a date like 2027-01-31, or days like 90d") from None
    if not time.time() < moment < MAX_TIME_SECONDS:
        raise UsageError(f"--expires is {text!r}, but must be in the future, before the year 9999")
    return moment


def _date(moment: float) -> str:
    """Return the local date and time of a moment in seconds since 1970."""
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M")
