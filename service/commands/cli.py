"""The commands of `gradserve`."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from contextlib import closing
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError  # noqa: TID251 - pydantic-settings raises it for a bad setting

from service.buffers import doctor, transfer
from service.buffers.readonly import WRONG
from service.buffers.url import forget, path_of, without_password
from service.commands import preflight
from service.commands.keys import add_key_commands
from service.commands.preflight import UsageError
from service.errors import GradserveError, StoreFailed, must, shown
from service.host.system import keep_freed_memory
from service.host.tcp import AddressInvalid
from service.kernels import OPERATORS
from service.keys import KeyFileInvalid
from service.limits import Limits
from service.settings import VARIABLES, Settings

SIMILARITY = 0.92
"""The least likeness, from 0 to 1, to call a variable a misspelt setting. KEY passes for KEYS; API_KEY does not."""

UNIT_SECONDS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
"""The units of an age."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a command. Import the server, which takes most of a second, only for a command with it."""
    options = _parser().parse_args(arguments)
    if options.run in (_serve, _import):
        import_module("service.api.server")
    return options


def main(options: argparse.Namespace) -> int:
    """Run the command and return its exit status: 0, 1 if it fails, or 2 if arguments or settings are wrong."""
    try:
        status: int = options.run(_settings_from(options), options)
        if sys.stdout is not None:  # None if the shell has closed it
            sys.stdout.flush()  # now, so that an error is reported below
        return status
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        return 1
    except (UsageError, AddressInvalid) as error:
        for line in error.args:
            _complain(line)
        return 2
    except (GradserveError, KeyFileInvalid, OSError) as error:
        _complain(str(error))
        return 1


def _complain(line: str) -> None:
    print(f"gradserve: {line}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradserve",
        description="Gradient kernels and gradient accumulation over HTTP.",
        epilog="Settings are environment variables; gradserve settings lists them.",
    )
    parser.add_argument("--version", action="version", version=f"gradserve {version('gradserve')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run the server")
    serve.set_defaults(run=_serve)
    serve.add_argument("--host", help="address to listen on; overrides GRADSERVE_HOST")
    serve.add_argument("--port", help="port to listen on; overrides GRADSERVE_PORT")
    serve.add_argument("--socket", help="UNIX socket to listen on; overrides GRADSERVE_SOCKET")
    commands.add_parser("ops", help="list the operators").set_defaults(run=_ops)
    examining = commands.add_parser("doctor", help="check the buffer store for damage and summarise its content")
    examining.set_defaults(run=_doctor)
    exporting = commands.add_parser("export", help="write a snapshot of buffers and graphs to a safetensors file")
    exporting.set_defaults(run=_export)
    exporting.add_argument(
        "path", metavar="PATH", type=_path, help="file to write; an existing one is replaced; - is stdout"
    )
    exporting.add_argument("--prefix", default="", help="write only buffers and graphs whose names start with PREFIX")
    importing = commands.add_parser("import", help="create buffers and graphs from a file that export wrote")
    importing.set_defaults(run=_import)
    importing.add_argument("path", metavar="PATH", type=_path, help="file to read; - is stdin")
    forgetting = commands.add_parser(
        "keys-forget", help="forget Idempotency-Keys: a full store has room again, but a retry may count twice"
    )
    forgetting.set_defaults(run=_forget)
    forgetting.add_argument(
        "--older-than", required=True, type=age, metavar="AGE", help="forget keys of this age, such as 30m, 6h or 2d"
    )
    forgetting.add_argument("--namespace", help='forget the keys of this namespace only; "" is the default namespace')
    for command in (examining, exporting, importing, forgetting):
        command.add_argument("--store", help="buffer store, such as lmdb:PATH; overrides GRADSERVE_STORE")
    add_key_commands(commands.add_parser("keys", help="manage the API keys in the file GRADSERVE_KEYS"))
    commands.add_parser("settings", help="list the settings with their values and meanings").set_defaults(run=_settings)
    return parser


def age(text: str) -> float:
    """Return the seconds of an age in minutes, hours or days. Raises ValueError.

    >>> age("90m"), age("1.5h"), age("2d")
    (5400.0, 5400.0, 172800.0)
    """
    seconds = float(text[:-1]) * UNIT_SECONDS.get(text[-1:], float("nan"))
    if not 0 <= seconds < float("inf"):
        raise ValueError(text)
    return seconds


def _settings_from(options: argparse.Namespace) -> Settings:
    """Return the settings; an option overrides its variable. Raises `UsageError`."""
    values = {name: getattr(options, name, None) for name in ("host", "port", "socket", "store", "keys")}
    try:
        settings = Settings(**{name: value for name, value in values.items() if value is not None})
        path_of(settings.store)  # raises if this is no URL of a store
    except ValidationError as invalid:
        raise UsageError(*_faults(invalid)) from None
    except StoreFailed as error:
        raise UsageError(str(error)) from None
    _check_variables()
    return settings


def _faults(invalid: ValidationError) -> list[str]:
    """Return one line for each invalid setting."""
    return [
        must(f"GRADSERVE_{'_'.join(map(str, error['loc'])).upper()}", error["msg"], error["input"])
        for error in invalid.errors()
        if error["type"] != "default_factory_not_called"  # the setting that the default depends on has its own line
    ]


def _check_variables() -> None:
    """Raise `UsageError` for a misspelt setting: GRADSERVE_KEY in place of GRADSERVE_KEYS would let everybody in.

    Variables that end with _FILE belong to compose.yaml.
    """
    for name in os.environ.keys() - VARIABLES:
        similar = difflib.get_close_matches(name, VARIABLES, 1, cutoff=SIMILARITY)
        if name.startswith("GRADSERVE_") and not name.endswith("_FILE") and similar and os.environ[name]:
            raise UsageError(f"{name} is not a setting. Did you mean {similar[0]}? gradserve settings lists all")


def _path(argument: str) -> Path | None:
    """Return the file, or None for stdin and stdout."""
    return None if argument == "-" else Path(argument)


def _ops(settings: Settings, options: argparse.Namespace) -> int:
    width = max(map(len, OPERATORS)) + 2
    for operator in OPERATORS.values():
        print(f"{operator.name:<{width}}{operator.formula}")
    return 0


def _settings(settings: Settings, options: argparse.Namespace) -> int:
    for name, field in Settings.model_fields.items():
        value = getattr(settings, name)
        print(f"GRADSERVE_{name.upper()}={without_password(value) if name == 'store' else value}")
        print(f"    {field.description}")
    return 0


def _doctor(settings: Settings, options: argparse.Namespace) -> int:
    problems = 0
    for line in doctor.examine_apart(_store(settings), settings.store_bytes, settings.postgres_schema):
        problems += line.startswith(WRONG)
        print(line)
    print(f"problems found: {problems}" if problems else "no problems found")
    return 1 if problems else 0


def _export(settings: Settings, options: argparse.Namespace) -> int:
    path, prefix = options.path, options.prefix
    if not prefix.isascii():
        raise UsageError(f"--prefix is {shown(prefix)}, but buffer names are ASCII")
    if path is None and sys.stdout is not None and sys.stdout.isatty():
        raise UsageError("stdout is a terminal, but a safetensors file is binary: redirect stdout, or name a file")
    preflight.check_backup(path, path_of(settings.store))
    buffers, graphs, size = transfer.export(
        _store(settings), settings.store_bytes, path, prefix, settings.postgres_schema
    )
    is_stream = path is None or not path.is_file()  # another program may read it, and must not read this line
    print(f"{_counted(buffers, graphs)}, {size} bytes", file=sys.stderr if is_stream else sys.stdout)
    return 0


def _import(settings: Settings, options: argparse.Namespace) -> int:
    from service.api.app import store_at

    _store(settings)  # a store in memory would be gone when the command ends
    limits = Limits(settings.max_tensor_bytes, sys.maxsize, settings.max_dimensions)
    contents = transfer.read(options.path, limits, settings.max_name_length)
    store = store_at(settings)
    try:
        transfer.restore(store, contents)
    finally:
        store.close()
    print(_counted(len(contents.buffers), len(contents.graphs)))
    return 0


def _counted(buffers: int, graphs: int) -> str:
    return f"{buffers} buffers" + (f", {graphs} graphs" if graphs else "")


def _forget(settings: Settings, options: argparse.Namespace) -> int:
    store, size, schema = _store(settings), settings.store_bytes, settings.postgres_schema
    print(f"{forget(store, options.older_than, options.namespace, max_bytes=size, schema=schema)} keys")
    _complain("a request that is repeated with one of these keys is made again: an add counts twice")
    return 0


def _store(settings: Settings) -> str:
    """Return the store's URL. Raises `UsageError` for a store in memory."""
    if settings.store == "memory:":
        raise UsageError("GRADSERVE_STORE is memory:, which no other process can read; set it to lmdb:PATH")
    return settings.store


def _serve(settings: Settings, options: argparse.Namespace) -> int:
    from service.api.app import store_at
    from service.api.server import listening, run

    if unused := preflight.unused_variables():
        _complain(f"variables without effect: {', '.join(unused)}")
    preflight.check(settings)
    with listening(settings) as sockets:
        with closing(store_at(settings)) as store:  # a fault of the store is reported here, rather than by every worker
            buffers, _ = store.size()
        keep_freed_memory(settings.reuse_bytes)
        run(settings, sockets, buffers)
    return 0
