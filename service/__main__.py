"""The `gradserve` command."""

from __future__ import annotations

import argparse
import ipaddress
import signal
import sys
from importlib.metadata import version

import uvicorn
from pydantic import ValidationError  # noqa: TID251 - what a bad setting raises
from uvicorn.supervisors import Multiprocess

from service.api.app import server_config
from service.arena import keep_freed_memory
from service.kernels import OPERATORS
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
    commands.add_parser("settings", help="list the settings, their values and meanings")
    options = parser.parse_args(arguments)
    if options.command == "ops":
        return _ops()
    given = {name: value for name in ("host", "port") if (value := getattr(options, name, None)) is not None}
    try:
        settings = Settings(**given)
    except ValidationError as invalid:
        for error in invalid.errors():
            name = "GRADSERVE_" + "_".join(map(str, error["loc"])).upper()
            print(f"gradserve: {name} is {error['input']!r}: {error['msg']}", file=sys.stderr)
        return 2
    return _settings(settings) if options.command == "settings" else _serve(settings)


def _ops() -> int:
    for operator in OPERATORS.values():
        print(f"{operator.name:<22}{operator.formula}")
    return 0


def _settings(settings: Settings) -> int:
    for name, field in Settings.model_fields.items():
        print(f"GRADSERVE_{name.upper()}={getattr(settings, name)}\n    {field.description}")
    return 0


def _serve(settings: Settings) -> int:
    if not settings.allow_anonymous and not _is_loopback(settings.host):
        print(
            f"gradserve: {settings.host} can be reached from other machines, and anyone there could use the service.\n"
            "Listen on 127.0.0.1, or set GRADSERVE_ALLOW_ANONYMOUS=true if that is meant.",
            file=sys.stderr,
        )
        return 2
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
