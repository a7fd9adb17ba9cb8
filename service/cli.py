"""The commands of `gradserve`."""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import os
import socket
import ssl
import sys
import time
from datetime import datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import ValidationError  # noqa: TID251 - what a bad setting raises

from service.api.app import store_at
from service.api.server import run
from service.arena import keep_freed_memory
from service.buffers import doctor, transfer
from service.buffers.url import path_of
from service.errors import GradserveError, StoreFailed, shown
from service.kernels import OPERATORS
from service.keys import SCOPES, KeyFileInvalid, KeyUnfit, add, load, remove
from service.limits import Limits
from service.settings import Settings

_VARIABLES = frozenset(f"GRADSERVE_{name.upper()}" for name in Settings.model_fields)
"""What the settings are called in the environment."""


class Unusable(Exception):
    """What is wrong with arguments or settings, a line for each."""


END_OF_TIME = datetime(9999, 1, 1).timestamp()


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns its exit status: 2 where arguments or settings are wrong, 1 where it fails."""
    options = _parser().parse_args(arguments)
    try:
        settings = _settings_with(options)
        status = _run(options, settings)
        if sys.stdout is not None:  # as it is where the shell has closed it
            sys.stdout.flush()  # here, where it can be told what hinders it
        return status
    except BrokenPipeError:  # whoever reads has enough
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left to be written at the end
        return 1
    except Unusable as wrong:
        for line in wrong.args:
            print(f"gradserve: {line}", file=sys.stderr)
        return 2
    except (GradserveError, KeyFileInvalid, OSError) as error:
        print(f"gradserve: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradserve",
        description="Gradient kernels as an HTTP service.",
        epilog="Settings are environment variables: gradserve settings lists them.",
    )
    parser.add_argument("--version", action="version", version=f"gradserve {version('gradserve')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run the server")
    serve.add_argument("--host", help="address to listen on, before GRADSERVE_HOST")
    serve.add_argument("--port", help="port to listen on, before GRADSERVE_PORT")
    commands.add_parser("ops", help="list the operators")
    doctor = commands.add_parser("doctor", help="check the store of the buffers, and say what is in it")
    export = commands.add_parser("export", help="write buffers, as they are at one moment, to a safetensors file")
    export.add_argument("path", metavar="PATH", help="the file, which is replaced if it is there, or - for stdout")
    export.add_argument("--prefix", default="", help="only buffers whose names begin so")
    importing = commands.add_parser("import", help="create buffers from a file that export wrote")
    importing.add_argument("path", metavar="PATH", help="the file, or - for stdin")
    for command in (doctor, export, importing):
        command.add_argument("--store", help="the store, before GRADSERVE_STORE")
    keys = commands.add_parser("keys", help="the API keys of GRADSERVE_KEYS").add_subparsers(
        dest="change", required=True, metavar="add|ls|rm"
    )
    adding = keys.add_parser("add", help="make a key, and print its secret, once")
    adding.add_argument("name", metavar="NAME")
    adding.add_argument("--scopes", default="ops,buffers:read,buffers:write", help=f"some of {','.join(SCOPES)}")
    adding.add_argument("--namespace", default="", help="its buffers are apart from those of other namespaces")
    adding.add_argument("--expires", metavar="WHEN", help="a date, 2027-01-31 or 2027-01-31T12:00+01:00, or days: 90d")
    keys.add_parser("ls", help="list the keys")
    keys.add_parser("rm", help="remove a key; it is good for nothing at once").add_argument("name", metavar="NAME")
    for command in keys.choices.values():
        command.add_argument("--keys", metavar="FILE", help="the file, before GRADSERVE_KEYS")
    commands.add_parser("settings", help="list the settings, their values and meanings")
    return parser


def _settings_with(options: argparse.Namespace) -> Settings:
    """The settings, of which options come before variables. Raises `Unusable`."""
    given = {name: getattr(options, name, None) for name in ("host", "port", "store", "keys")}
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
        path_of(settings.store)
    except ValidationError as invalid:
        raise Unusable(
            *(
                f"GRADSERVE_{'_'.join(map(str, error['loc'])).upper()} is {error['input']!r}: {error['msg']}"
                for error in invalid.errors()
                if error["type"] != "default_factory_not_called"  # what it would be made from is wrong
            )
        ) from None
    except StoreFailed as error:
        raise Unusable(str(error)) from None
    _check_variables()
    return settings


def _run(options: argparse.Namespace, settings: Settings) -> int:
    match options.command:
        case "ops":
            return _ops()
        case "settings":
            return _settings(settings)
        case "doctor":
            return _doctor(settings)
        case "export":
            return _export(settings, _path(options.path), options.prefix)
        case "import":
            return _import(settings, _path(options.path))
        case "keys":
            return _keys(settings, options)
        case _:
            return _serve(settings)


def _path(given: str) -> Path | None:
    """A file, or None for stdin and stdout."""
    return None if given == "-" else Path(given)


def _check_variables() -> None:
    """Raise `Unusable` for a variable that is a setting's but for a slip: KEY for KEYS would let in everybody.

    Those of the compose file end with _FILE.
    """
    for name in os.environ.keys() - _VARIABLES:
        near = difflib.get_close_matches(name, _VARIABLES, 1, cutoff=0.92)
        if name.startswith("GRADSERVE_") and not name.endswith("_FILE") and near and os.environ[name]:
            raise Unusable(f"{name} is no setting; is {near[0]} meant? gradserve settings lists all")


def _ops() -> int:
    for operator in OPERATORS.values():
        print(f"{operator.name:<22}{operator.formula}")
    return 0


def _settings(settings: Settings) -> int:
    for name, field in Settings.model_fields.items():
        print(f"GRADSERVE_{name.upper()}={getattr(settings, name)}\n    {field.description}")
    return 0


def _doctor(settings: Settings) -> int:
    problems = 0
    for line in doctor.examine(_store_path(settings), settings.store_bytes):
        problems += line.startswith(doctor.WRONG)
        print(line)
    print("nothing is wrong" if not problems else f"{problems} things are wrong")
    return 1 if problems else 0


def _export(settings: Settings, path: Path | None, prefix: str) -> int:
    if not prefix.isascii():
        raise Unusable(f"--prefix is {shown(prefix)}, but the names of buffers are of ASCII characters")
    if path is None and sys.stdout is not None and sys.stdout.isatty():
        raise Unusable("stdout is a terminal, which a safetensors file is not for: lead it elsewhere, or name a file")
    count, size = transfer.export(_store_path(settings), settings.store_bytes, path, prefix)
    may_be_read_on = path is None or not path.is_file()  # and this is not for its reader
    print(f"{count} buffers, {size} bytes", file=sys.stderr if may_be_read_on else sys.stdout)
    return 0


def _import(settings: Settings, path: Path | None) -> int:
    _store_path(settings)  # of what is in memory, nothing would be left
    limits = Limits(settings.max_tensor_bytes, sys.maxsize, settings.max_dimensions)
    buffers = transfer.read(path, limits, settings.max_name_length)
    store = store_at(settings)
    try:
        transfer.restore(store, buffers)
    finally:
        store.close()
    print(f"{len(buffers)} buffers")
    return 0


def _keys(settings: Settings, options: argparse.Namespace) -> int:
    path = settings.keys
    if path is None or not path.name:
        raise Unusable("Say which file the keys are in: GRADSERVE_KEYS, or --keys FILE")
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
    expires = None if options.expires is None else _moment(options.expires)
    try:
        secret = add(path, options.name, scopes, options.namespace, expires)
    except KeyUnfit as error:
        raise Unusable(str(error)) from None
    try:
        print(secret, flush=True)
    except OSError:  # nobody has seen it
        remove(path, options.name)
        raise
    print("This is the secret; it is not kept anywhere.", file=sys.stderr)


def _list_keys(path: Path) -> None:
    if not path.exists():
        raise KeyFileInvalid(f"{path} is not there")
    keys = load(path)
    print(f"{'name':<20} {'namespace':<12} {'created':<17} {'expires':<17} scopes")
    for key in keys:
        ends = "never" if key.expires is None else _date(key.expires)
        print(f"{key.name:<20} {key.namespace:<12} {_date(key.created):<17} {ends:<17} {','.join(key.scopes)}")


def _moment(text: str) -> float:
    """Seconds since 1970 of a date, or of so many days from now: a moment that is yet to come."""
    try:
        days = float(text[:-1]) if text.endswith("d") else None
        moment = datetime.fromisoformat(text).timestamp() if days is None else time.time() + days * 24 * 3600
    except ValueError:
        raise Unusable(f"--expires is {text!r}, but must be like 2027-01-31 or 90d") from None
    if not time.time() < moment < END_OF_TIME:
        raise Unusable(f"--expires is {text!r}, but must be a moment that is yet to come, before the year 9999")
    return moment


def _date(moment: float) -> str:
    """The local date and time of a moment in seconds since 1970."""
    return datetime.fromtimestamp(min(max(moment, 0), END_OF_TIME)).strftime("%Y-%m-%d %H:%M")


def _store_path(settings: Settings) -> Path:
    """Where the store is. Raises `Unusable` for one in memory."""
    path = path_of(settings.store)
    if path is None:
        raise Unusable("The store is memory:, of which nothing is on a disk; name another by GRADSERVE_STORE")
    return path


def _serve(settings: Settings) -> int:
    known = {*_VARIABLES, "GRADSERVE_URL", "GRADSERVE_API_KEY"}  # the latter are the client's
    if idle := sorted(name for name in os.environ if name.startswith("GRADSERVE_") and name.upper() not in known):
        print(f"gradserve: not settings of the server, and without effect: {', '.join(idle)}", file=sys.stderr)
    addresses = _addresses(settings)
    _check_settings(settings)
    _check_free(addresses)
    store_at(settings).close()  # what is wrong with it is better said here than in every worker
    keep_freed_memory(settings.reuse_bytes)
    run(settings)
    return 0


def _check_settings(settings: Settings) -> None:
    """Raise `Unusable` for settings with which no server can start, or must: once, rather than in every worker."""
    if settings.keys is None:
        if not settings.allow_anonymous and not _is_loopback(settings.host):
            raise Unusable(
                f"{settings.host or 'an empty host'} can be reached from other machines, and anyone there could use the"
                " service. Set GRADSERVE_KEYS (see gradserve keys add --help), or listen on 127.0.0.1, or set"
                " GRADSERVE_ALLOW_ANONYMOUS=true if that is meant"
            )
    elif not settings.keys.exists():
        raise Unusable(f"{settings.keys} is not there; gradserve keys add NAME makes it")
    else:
        try:
            load(settings.keys)
        except KeyFileInvalid as error:
            raise Unusable(str(error)) from None
    certificate, key = settings.tls_certificate, settings.tls_key
    if (certificate is None) is not (key is None):
        raise Unusable("GRADSERVE_TLS_CERTIFICATE and GRADSERVE_TLS_KEY go together")
    if certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, bytes)
        except OSError as error:
            raise Unusable(
                f"GRADSERVE_TLS_CERTIFICATE is {certificate} and GRADSERVE_TLS_KEY {key}, but they are no certificate"
                f" and its key, PEM and not encrypted: {error}"
            ) from None
    if settings.tracing:
        try:
            import_module("service.api.telemetry.tracing")
        except ModuleNotFoundError as missing:
            raise Unusable(f"GRADSERVE_TRACING needs {missing.name}: pip install 'gradserve[otel]'") from None


def _addresses(settings: Settings) -> list[Any]:
    """What the host means, as `socket.getaddrinfo` has it. Raises `Unusable`."""
    try:
        host = settings.host or None
        return socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise Unusable(
            f"GRADSERVE_HOST is {shown(settings.host)}, but must be an address or the name of one, without a port or"
            " brackets"
        ) from None


def _check_free(addresses: list[Any]) -> None:
    """Raise OSError if the server cannot listen there: said once, rather than after half a start."""
    for family, kind, protocol, _, address in addresses:
        try:
            probe = socket.socket(family, kind, protocol)
        except OSError:
            continue  # there is no IPv6, say
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise OSError(
                    f"The server cannot listen on {address[0]}, port {address[1]} (GRADSERVE_HOST, GRADSERVE_PORT):"
                    f" {error.strerror}"
                ) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
