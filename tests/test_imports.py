"""The imports that each module may make: the layers of the design, read from the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.imports import circles, knots

ROOT = Path(__file__).parent.parent
SERVICE = ROOT / "service"

BOTTOM = {"errors", "dtypes", "limits"}
ALLOWED: dict[str, set[str]] = {
    "texts": set(),
    "errors": {"texts"},
    "dtypes": set(),
    "limits": {"errors", "dtypes"},
    "host": {"errors"},
    "settings": {"host"},
    "keys": {"errors", "host"},
    "kernels": BOTTOM,
    "graphs": {"kernels", *BOTTOM},
    "engine": {"kernels", *BOTTOM},
    "codecs": BOTTOM,
    "buffers": {"codecs", "kernels", "engine", "keys", "host", *BOTTOM},
    "api.http": {"buffers", "engine", "codecs", "settings", "keys", "host", *BOTTOM},
    "api.telemetry": {"api.http", "kernels", "settings", "host", "errors"},
    "api.buffers": {"api.http", "buffers", "codecs", "kernels", *BOTTOM},
    "api.operators": {
        *("api.http", "api.buffers", "api.telemetry", "buffers", "engine", "graphs", "codecs", "kernels", "host"),
        *BOTTOM,
    },
    "api.dashboard": {
        *("api.http", "api.telemetry", "api.buffers", "buffers", "engine", "codecs", "settings"),
        *BOTTOM,
    },
    "api": {
        *("api.http", "api.telemetry", "api.buffers", "api.operators", "api.dashboard"),
        *("buffers", "engine", "graphs", "codecs", "kernels", "settings", "keys", "host"),
        *BOTTOM,
    },
    "commands": {"keys", "api", "buffers", "kernels", "settings", "host", *BOTTOM},
    "__main__": {"commands"},
}
"""The rooms that the modules of a room may import."""


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = sorted(path for path in SERVICE.rglob("*.py") if path.parent != SERVICE or path.stem != "__init__")


def room_of(module: str) -> str:
    """Return the room of `service.module`: the longest rule that its name begins with."""
    rooms = [room for room in ALLOWED if f"{module}.".startswith(f"{room}.")]
    return max(rooms, key=len, default=module)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SERVICE).with_suffix("").parts)


def forbidden(path: Path) -> set[str]:
    """Return the modules that `path` imports against the rules."""
    room, names = room_of(module_of(path)), imported(path)
    ours = {room_of(name.partition(".")[2]) for name in names if name.startswith("service.")}
    web = set() if room.startswith("api") else {"fastapi", "starlette"}
    web |= set() if room.startswith("api") or room in {"settings", "commands"} else {"pydantic", "uvicorn", "httpx"}
    return (ours - {room} - ALLOWED[room]) | (web & {name.split(".")[0] for name in names})


def test_each_room_imports_only_the_rooms_below() -> None:
    assert {str(path.relative_to(ROOT)): wrong for path in FILES if (wrong := forbidden(path))} == {}


def test_every_room_has_a_rule() -> None:
    assert {room_of(module_of(path)) for path in FILES} == set(ALLOWED)


def test_no_modules_import_each_other() -> None:
    assert circles(FILES) == []


def test_no_modules_of_the_page_import_each_other() -> None:
    found = dict[str, set[str]]()
    for path in (SERVICE / "api" / "dashboard" / "page").glob("*.js"):
        found[path.name] = {*re.findall(r'(?:from |import\()"\./(\w+\.js)"', path.read_text())}
    assert len(found) > 30
    assert sum(map(len, found.values())) > 100
    assert knots(found) == []


def test_no_module_imports_private_names_of_another() -> None:
    def private(path: Path) -> list[str]:
        package = f"service.{'.'.join(path.relative_to(SERVICE).parts[:-1])}".rstrip(".")
        names = [name.split(".") for name in imported(path) if name.startswith("service.")]
        hidden = [parts for parts in names if any(part.startswith("_") and part[1:2] != "_" for part in parts)]
        # A module whose own name is private is shared within its package.
        return [
            ".".join(parts)
            for parts in hidden
            if parts[-1].startswith("_") or not f"{'.'.join(parts)}.".startswith(f"{package}.")
        ]

    assert {str(path.relative_to(ROOT)): wrong for path in FILES if (wrong := private(path))} == {}


def test_packages_only_re_export() -> None:
    for path in SERVICE.rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign)) for node in body), path


CLIENT = ROOT / "clients" / "python"


def test_the_client_imports_nothing_of_the_server() -> None:
    server = {"service", "clients", "fastapi", "starlette", "pydantic", "uvicorn"}
    for path in CLIENT.rglob("*.py"):
        if path.parent != CLIENT:  # the modules there write the client from the server's registry
            assert not server & {name.split(".")[0] for name in imported(path)}, path
