"""The `gradserve` command."""

from __future__ import annotations

import argparse
import ipaddress
import signal
import sys
from importlib.metadata import version
from pathlib import Path

import uvicorn
from pydantic import ValidationError  # noqa: TID251 - what a bad setting raises
from uvicorn.supervisors import Multiprocess

from service import transfer
from service.api.app import server_config, store_at
from service.arena import keep_freed_memory
from service.buffers.url import path_of
from service.errors import GradserveError, StoreFailed
from service.kernels import OPERATORS
from service.limits import Limits
from service.settings import Settings


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns its exit status: 2 for a usage error."""
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
    export.add_argument("path", metavar="PATH", help="the file; it is replaced if it is there")
    export.add_argument("--prefix", default="", help="only buffers whose names begin so")
    importing = commands.add_parser("import", help="create buffers from a file that export wrote")
    importing.add_argument("path", metavar="PATH", help="the file")
    for command in (doctor, export, importing):
        command.add_argument("--store", help="the store, before GRADSERVE_STORE")
    commands.add_parser("settings", help="list the settings, their values and meanings")
    options = parser.parse_args(arguments)
    if options.command == "ops":
        return _ops()
    given = {name: value for name in ("host", "port", "store") if (value := getattr(options, name, None)) is not None}
    try:
        settings = Settings(**given)
    except ValidationError as invalid:
        for error in invalid.errors():
            name = "GRADSERVE_" + "_".join(map(str, error["loc"])).upper()
            print(f"gradserve: {name} is {error['input']!r}: {error['msg']}", file=sys.stderr)
        return 2
    try:
        match options.command:
            case "settings":
                return _settings(settings)
            case "doctor":
                return _doctor(settings)
            case "export":
                return _export(settings, Path(options.path), options.prefix)
            case "import":
                return _import(settings, Path(options.path))
            case _:
                return _serve(settings)
    except (GradserveError, OSError) as error:
        print(f"gradserve: {error}", file=sys.stderr)
        return 1


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
    for line in transfer.examine(_path(settings), settings.store_bytes):
        problems += line.startswith(transfer.WRONG)
        print(line)
    print("nothing is wrong" if not problems else f"{problems} things are wrong")
    return 1 if problems else 0


def _export(settings: Settings, path: Path, prefix: str) -> int:
    count, size = transfer.export(_path(settings), settings.store_bytes, path, prefix)
    print(f"{count} buffers, {size} bytes")
    return 0


def _import(settings: Settings, path: Path) -> int:
    store = store_at(settings)
    try:
        names = transfer.restore(store, path, Limits(settings.max_tensor_bytes))
    finally:
        store.close()
    print(f"{len(names)} buffers")
    return 0


def _path(settings: Settings) -> Path:
    path = path_of(settings.store)
    if path is None:
        raise StoreFailed("The store is memory:, of which nothing is on a disk; name another by GRADSERVE_STORE")
    return path


def _serve(settings: Settings) -> int:
    if not settings.allow_anonymous and not _is_loopback(settings.host):
        print(
            f"gradserve: {settings.host} can be reached from other machines, and anyone there could use the service.\n"
            "Listen on 127.0.0.1, or set GRADSERVE_ALLOW_ANONYMOUS=true if that is meant.",
            file=sys.stderr,
        )
        return 2
    store_at(settings).close()  # what is wrong with it is better said here than in every worker
    keep_freed_memory(settings.reuse_bytes)
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn handles both, and raises them again once it has stopped: then there is nothing left to do.
        signal.signal(number, lambda *_: None)
    config = server_config(settings)
    if settings.workers == 1:
        uvicorn.Server(config).run()
    else:
        Multiprocess(config, sockets=[config.bind_socket()]).run()
    return 0


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    sys.exit(main())
