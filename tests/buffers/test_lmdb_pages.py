"""Damaged pages of LMDB: errors say what to do, and the doctor finds what would end a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.buffers.damaging import PAGE, prepare
from tests.commands import called, run

ROOT = Path(__file__).parents[2]
SEEDS = 70
DAMAGE = {"BufferCorrupt", "StoreFailed"}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what came of each damaged copy of a store."""
    path = tmp_path_factory.mktemp("damage") / "store"
    command = [sys.executable, "-m", "tests.buffers.damaging", str(path), "0", str(SEEDS)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_damage_is_reported_as_damage(outcomes: list[dict[str, Any]]) -> None:
    """No use of a damaged store is an internal error, neither of the store nor of the doctor."""
    assert len(outcomes) == SEEDS
    bugs = [one for one in outcomes for _, said in (one["use"], one["doctor"]) if any("BUG" in text for text in said)]
    assert bugs == []
    assert sum(bool(DAMAGE & {*one["use"][1]}) for one in outcomes) > SEEDS / 5


def test_the_doctor_finds_what_harms_a_server(outcomes: list[dict[str, Any]]) -> None:
    """Some damage ends the process that reads or changes the store. The doctor survives it."""
    assert [one for one in outcomes if one["doctor"][0]] == []
    harmful = [one for one in outcomes if one["use"][0] or DAMAGE & {*one["use"][1]}]
    assert [one for one in harmful if not one["doctor"][1]] == []


def test_a_damaged_page_is_named(tmp_path: Path) -> None:
    store = tmp_path / "store"
    prepare(store)
    assert called("doctor", "--store", f"lmdb:{store}")[0] == 0
    data = bytearray((store / "data.mdb").read_bytes())
    for start in range(2 * PAGE, len(data), PAGE):
        data[start + 4] ^= 1
    (store / "data.mdb").write_bytes(data)
    status, out, error = run("doctor", "--store", f"lmdb:{store}")
    assert (status, error) == (1, "")
    assert out.count("of data.mdb is damaged: its head is wrong") > 3


def test_the_doctor_survives_the_end_of_its_reader(tmp_path: Path) -> None:
    """It reads in a process of its own, which ends here when LMDB opens the store."""
    store = tmp_path / "store"
    prepare(store)
    data = bytearray((store / "data.mdb").read_bytes())
    for meta in (0, PAGE):
        root = PAGE * int.from_bytes(data[meta + 128 : meta + 136], "little")
        data[root + 10 : root + 14] = bytes([1, 0, 18, 0])  # now it is a branch, and has one node: LMDB aborts
    (store / "data.mdb").write_bytes(data)
    status, out, error = run("doctor", "--store", f"lmdb:{store}")
    assert (status, error.count("\n"), "failed in mdb_page_search_root" in error) == (1, 1, True)  # LMDB's last words
    assert out.startswith("WRONG: reading data.mdb ended the process (signal ")
    assert "restore the buffers from an export\nproblems found: 1" in out
