"""The types of user code, checked by mypy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

GOOD = """
import numpy as np
from gradserve_client import AsyncClient, Buffer, BufferInfo, Client, Receipt, Rows, Taken

ones = np.ones((2, 3), np.float32)

with Client("http://here", api_key="k", timeout=1) as server:
    weights: Buffer = server.buffers["w"]
    reveal_type(server.ops.relu_grad(ones, [1.0, 2.0]))  # ndarray
    reveal_type(server.ops.relu_grad(ones, weights))  # ndarray
    reveal_type(server.ops.relu_grad(ones, ones, into="w", weight=2.0, step=1))  # Receipt
    reveal_type(server.ops.relu_grad(ones, ones, into=weights, idempotency_key="k"))  # Receipt
    reveal_type(server.ops.gru_grad(ones, ones, ones, None, None, None, ones, ones))  # GRUGradOutputs
    reveal_type(server.ops.gru_grad(ones, ones, ones, None, None, None, ones, ones).dX)  # ndarray
    reveal_type(server.ops.gru_grad(ones, ones, ones, HAll=ones, ZRH=ones).dX)  # ndarray
    gru = server.ops.gru_grad
    reveal_type(gru(ones, ones, ones, None, None, None, ones, ones, outputs=["dX"]))  # dict[str, ndarray]
    reveal_type(gru(ones, ones, ones, None, None, None, ones, ones, into={"dW": "w"}))  # dict[str, ndarray | Receipt]
    reveal_type(server.run("ReluGrad", {"dY": 1.0, "X": weights}))  # dict[str, ndarray | Receipt]
    reveal_type(server.ops.in_place_accumulator(ones, ones, True))  # ndarray
    sgd = server.ops.sgd_optimizer_v2
    reveal_type(sgd(0.5, {"w": ones, "b": weights}, {"w": ones, "b": ones}).updated_weights)  # dict[str, ndarray]
    reveal_type(sgd(0.5, [ones], [weights]).updated_weights)  # list[ndarray]
    reveal_type(weights.create((2, 3), dtype=np.float32))  # BufferInfo
    reveal_type(weights.accumulate(ones, weight=2))  # Receipt
    reveal_type(weights.accumulate(Rows([0, -1], ones)))  # Receipt
    reveal_type(server.buffers.accumulate({"w": Rows([0], [[1, 2, 3]]), "b": ones}))  # dict[str, Receipt]
    reveal_type(weights.value(reduce="mean"))  # ndarray
    reveal_type(weights.take())  # Taken
    reveal_type(weights.take().value)  # ndarray
    reveal_type(weights.info())  # BufferInfo
    reveal_type(weights.info(step=3, timeout=1))  # Receipt
    reveal_type(weights.set_rules(quorum=None, deadline_seconds=30, contributors=["rank0"]))  # BufferInfo
    reveal_type(weights.delete())  # None
    reveal_type(server.buffers.take(prefix="w"))  # dict[str, Taken]
    reveal_type(server.buffers.accumulate({"w": ones}))  # dict[str, Receipt]
    reveal_type(server.buffers.value(["w"]))  # dict[str, ndarray]
    reveal_type(server.buffers.list())  # list[BufferInfo]
    reveal_type(weights.statistics(heat_map=8))  # Statistics
    reveal_type(server.buffers.statistics(["w"]))  # dict[str, Statistics | None]


async def main() -> None:
    async with AsyncClient() as server:
        weights = server.buffers["w"]
        reveal_type(await server.ops.relu_grad(ones, weights))  # ndarray
        reveal_type(await server.ops.relu_grad(ones, ones, into=weights))  # Receipt
        reveal_type(await server.ops.gru_grad(ones, ones, ones, None, None, None, ones, ones))  # GRUGradOutputs
        reveal_type(await weights.take(min_count=1))  # Taken
        reveal_type(await weights.value())  # ndarray
        reveal_type(await weights.info(step=3))  # Receipt
        reveal_type(await weights.set_rules(quorum=3))  # BufferInfo
        reveal_type(await server.buffers.take(["w"]))  # dict[str, Taken]
        reveal_type(await weights.statistics())  # Statistics
        reveal_type(await server.run("ReluGrad", {}))  # dict[str, ndarray | Receipt]
"""

SETTINGS = """
[mypy]
[mypy-gradserve_client.*]
follow_imports = silent
[mypy-httpx.*,anyio.*,ml_dtypes.*]
follow_imports = skip
"""
"""Skip the checks of other packages, which would take most of the time."""

BAD = """
import numpy as np
from gradserve_client import AsyncClient, Client, Receipt, Rows

ones = np.ones((2, 3), np.float32)
server = Client()
server.ops.relu_grad(ones)  # call-overload
server.ops.relu_grad(ones, ones, alpha=1.0)  # call-overload
server.ops.relu_grad(ones, ones, weight=2.0)  # call-overload
server.ops.relu_grad(ones, object())  # call-overload
server.ops.relu_grad(ones, None)  # call-overload
server.ops.relu_grad(ones, ones, into=7)  # call-overload
server.ops.broadcast_gradient_args(ones, ones, into={"A_axes": "w"})  # call-overload
server.ops.gru_training(ones, ones, ones, direction="sideways")  # call-overload
server.ops.no_such_grad(ones)  # attr-defined
one: Receipt = server.ops.relu_grad(ones, ones)  # assignment
server.buffers["w"].value(reduce="max")  # arg-type
server.buffers["w"].take().value.no_such  # attr-defined
server.buffers["w"].accumulate(ones, 32)  # misc call-arg
server.buffers["w"].accumulate(None)  # arg-type
server.buffers["w"].accumulate(Rows([0]))  # call-arg
server.ops.relu_grad(Rows([0], ones), ones)  # call-overload
server.buffers.accumulate([ones])  # arg-type
server.buffers["w"].info().step = 3  # misc
server.buffers["w"].set_rules(min_count=None)  # arg-type
server.buffers["w"].set_rules(shape=3)  # call-arg
server.ops.relu_grad(ones, ones, contributor="rank0")  # call-overload
Client(7)  # arg-type


async def main() -> None:
    async with AsyncClient() as server:
        two: Receipt = await server.ops.relu_grad(ones, ones)  # assignment
        (await server.buffers["w"].take()).step.x  # attr-defined
        server.buffers["w"].take().value  # attr-defined
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, list[str]]]:
    """The messages of mypy, by file and line."""
    place = tmp_path_factory.mktemp("types")
    for name, text in {"good.py": GOOD, "bad.py": BAD}.items():
        (place / name).write_text(text)
    (place / "mypy.ini").write_text(SETTINGS)
    flags = ["--strict", "--no-error-summary", "--cache-dir", str(ROOT / ".mypy_cache" / "of users")]
    command = [sys.executable, "-m", "mypy", *flags, "good.py", "bad.py"]
    environment = {"MYPYPATH": str(ROOT / "clients" / "python"), "PATH": ""}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=120)
    found: dict[str, dict[int, list[str]]] = {"good.py": {}, "bad.py": {}}
    for line in done.stdout.splitlines():
        match = re.match(r"(\w+\.py):(\d+): (.*)", line)
        assert match, done.stdout + done.stderr
        found[match[1]].setdefault(int(match[2]), []).append(match[3])
    return found


def short(revealed: str) -> str:
    """Return a type without its module names."""
    text = re.sub(r"numpy\.ndarray\[.*?dtype\[Any\]\]", "ndarray", revealed.split('"')[1])
    return re.sub(r"(\w+\.)+", "", text).partition(", fallback=")[0].removeprefix("tuple[ndarray, ")


def test_types_of_results(said: dict[str, dict[int, list[str]]]) -> None:
    wanted = {
        number: line.partition("# ")[2] for number, line in enumerate(GOOD.splitlines(), 1) if "reveal_type" in line
    }
    assert said["good.py"].keys() == wanted.keys(), said["good.py"]
    for number, (only,) in said["good.py"].items():
        assert only.startswith("note: Revealed type"), only
        found = short(only)
        assert found == wanted[number] or wanted[number] == "GRUGradOutputs" and "GRUGradOutputs" in only, only


def test_wrong_uses_are_refused(said: dict[str, dict[int, list[str]]]) -> None:
    wanted = {number: line.partition("# ")[2] for number, line in enumerate(BAD.splitlines(), 1) if "  # " in line}
    errors = {number: lines for number, lines in said["bad.py"].items() if any("error:" in line for line in lines)}
    assert errors.keys() == wanted.keys(), said["bad.py"]
    for number, codes in wanted.items():
        assert any(f"[{code}]" in line for code in codes.split() for line in errors[number]), errors[number]
