"""Which module may import which: the layers of the design, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
SERVICE = ROOT / "service"

BOTTOM = {"errors", "dtypes", "limits"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "dtypes": set(),
    "limits": {"errors", "dtypes"},
    "arena": {"dtypes"},
    "settings": set(),
    "keys": {"errors"},
    "kernels": BOTTOM,
    "codecs": BOTTOM,
    "buffers": {"codecs", "kernels", *BOTTOM},
    "engine": {"kernels", "arena", *BOTTOM},
    "preflight": {"keys", "settings", "errors"},
    "api": {"arena", "buffers", "engine", "codecs", "kernels", "settings", "keys", *BOTTOM},
    "cli": {"keys", "api", "arena", "buffers", "kernels", "preflight", "settings", *BOTTOM},
    "__main__": {"cli"},
}


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


def forbidden(path: Path) -> set[str]:
    """Return the modules that `path` imports against the rules."""
    layer = path.relative_to(SERVICE).with_suffix("").parts[0]
    ours = {name.split(".")[1] for name in imported(path) if name.startswith("service.")}
    web = set() if layer == "api" else {"fastapi", "starlette"}
    web |= set() if layer in {"api", "settings", "cli"} else {"pydantic", "uvicorn", "httpx"}
    return (ours - {layer} - ALLOWED[layer]) | (web & {name.split(".")[0] for name in imported(path)})


def test_each_layer_imports_only_those_below() -> None:
    assert {str(path.relative_to(ROOT)): wrong for path in FILES if (wrong := forbidden(path))} == {}


def test_every_layer_has_a_rule() -> None:
    assert {path.relative_to(SERVICE).with_suffix("").parts[0] for path in FILES} == set(ALLOWED)


def test_packages_only_re_export() -> None:
    for path in SERVICE.rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign)) for node in body), path


CLIENT = ROOT / "clients" / "python"


def test_the_client_imports_nothing_of_the_server() -> None:
    server = {"service", "clients", "fastapi", "starlette", "pydantic", "uvicorn"}
    for path in CLIENT.rglob("*.py"):
        if path.name != "generate.py":  # it writes the client from the server's registry
            assert not server & {name.split(".")[0] for name in imported(path)}, path
