"""Counts that keep `make test` and `make check` short: what a process imports to collect tests, and what it starts."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))

FRAMEWORKS = {"jax", "matplotlib", "nbclient", "nbformat", "optax", "sklearn", "torch"}
"""What only `make test` installs. It takes seconds to import, in each process that collects the tests."""


def variable(name: str) -> list[str]:
    """Return the words of a variable of the Makefile."""
    command = ["make", "--no-print-directory", f"--eval=shown: ; @echo $({name})", "shown"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a module imports while it is imported itself, not in its functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imported(node)


def frameworks() -> dict[Path, set[str]]:
    """Return the frameworks that each file imports, itself or through other files of the tests."""
    imports = {path: set(imported(ast.parse(path.read_text()))) for path in FILES}
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    found = {path: {name.partition(".")[0] for name in names} & FRAMEWORKS for path, names in imports.items()}
    while True:
        more = {
            path: found[path].union(*(found[files[name]] for name in names if name in files))
            for path, names in imports.items()
        }
        if more == found:
            return found
        found = more


def test_neither_check_nor_the_light_folders_import_a_framework() -> None:
    heavy, light = variable("HEAVY"), tuple(one.removesuffix("%") for one in variable("LIGHT"))
    found = {path.relative_to(ROOT).as_posix(): names for path, names in frameworks().items() if names}
    assert found.keys() >= {"tests/clients/torch/test_steps.py", "tests/examples/test_graphs.py"}
    left_out = tuple(f"tests/{one}" for one in heavy)
    tests = [path for path in found if Path(path).name.startswith(("test_", "conftest"))]
    assert [path for path in tests if not path.startswith(left_out)] == []
    assert [path for path in tests if path.startswith(light)] == []


def test_a_run_imports_no_module_that_is_no_test(pytestconfig: pytest.Config) -> None:
    """The suite of ONNX makes 939 cases when it is collected, 20 seconds in each process."""
    ignored = {
        path for path in FILES if pytestconfig.hook.pytest_ignore_collect(collection_path=path, config=pytestconfig)
    }
    assert TESTS / "graphs/onnx_suite.py" in ignored
    assert {path.name for path in set(FILES) - ignored if not path.name.startswith("test_")} == {
        "__init__.py",
        "conftest.py",
    }


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("fork=False", 4),  # a server by exec takes ten times as long as a fork, with its workers
        ("STORES = ", 4),  # the API does the same with each store that does not block
    ],
)
def test_few_files_have_what_is_dear(text: str, most: int) -> None:
    found = [path for path in FILES if text in path.read_text() and path != Path(__file__)]
    assert 0 < len(found) <= most
