"""Damaged pages of LMDB: errors say what to do, and the doctor finds what would end a server."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.buffers import flipping
from tests.buffers.damaging import HEAD, PAGE, prepare
from tests.commands import called, run

ROOT = Path(__file__).parents[2]
SEEDS = 70
FLIPS = 60 * int(os.environ.get("GRADSERVE_FUZZ", "1"))
DAMAGE = {"BufferCorrupt", "StoreFailed"}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what came of each damaged copy of a store."""
    return said_by("damaging", tmp_path_factory.mktemp("damage") / "store", SEEDS)


def said_by(module: str, path: Path, seeds: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", f"tests.buffers.{module}", str(path), "0", str(seeds)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60 + 2 * seeds, check=True)
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


def test_a_flipped_bit_changes_no_sum_in_silence(tmp_path: Path) -> None:
    """But LMDB trusts its own pages: the doctor finds those that mislead it. Some end the process, which all see."""
    flips = said_by("flipping", tmp_path / "store", FLIPS)
    assert len(flips) == FLIPS
    assert [one for one in flips if any("BUG" in line for line in one["doctor"][1])] == []
    silent = [one for one in flips if one["silent"][1] and not one["doctor"][0]]
    assert [one for one in silent if "data.mdb is damaged" not in "".join(one["doctor"][1])] == []
    assert sum(bool(one["doctor"][1]) for one in flips) > FLIPS / 3


def hide_entries(data: bytearray, pages: dict[str, list[int]]) -> None:
    for start in (number * PAGE for number in pages["keys"][1:]):
        data[start + 12 : start + 14] = struct.pack("<H", struct.unpack_from("<H", data, start + 12)[0] - 2)


def mislead(data: bytearray, pages: dict[str, list[int]]) -> None:
    """Change the second key of a branch, which leads to a page."""
    start = pages["buffers"][0] * PAGE
    data[start + struct.unpack_from("<H", data, start + HEAD + 2)[0] + 9] ^= 1


def free_a_page(data: bytearray, pages: dict[str, list[int]]) -> None:
    """Call a page free that is in use."""
    start = pages["free pages"][0] * PAGE
    place = start + struct.unpack_from("<H", data, start + HEAD)[0] + 16
    data[place + 8 : place + 16] = struct.pack("<Q", pages["keys"][0])


def at_newest(place: int, change: Callable[[int], int]) -> Callable[..., None]:
    """Return a damage of a number of the newest transaction's page."""

    def damage(data: bytearray, pages: dict[str, list[int]]) -> None:
        start = max((0, PAGE), key=lambda each: struct.unpack_from("<Q", data, each + 144)[0]) + place
        data[start : start + 8] = struct.pack("<Q", change(struct.unpack_from("<Q", data, start)[0]))

    return damage


HIDDEN: dict[str, tuple[Callable[..., None], str]] = {
    "entries of leaves": (hide_entries, "a tree of data.mdb is damaged: it has "),
    "a key of a branch": (mislead, "its keys are not in order"),
    "a page in use is free": (free_a_page, "it has more than one use"),
    "the newest transaction": (at_newest(144, lambda number: number - 64), "is damaged: its transaction is"),
    "the flags of a tree": (at_newest(92, lambda flags: flags ^ 1 << 16), "a tree of data.mdb is damaged"),
}


@pytest.mark.parametrize("hidden", HIDDEN)
def test_the_doctor_finds_what_misleads_lmdb(tmp_path: Path, hidden: str) -> None:
    damage, words = HIDDEN[hidden]
    store = tmp_path / "store"
    flipping.prepare(store)
    assert called("doctor", "--store", f"lmdb:{store}")[0] == 0
    data = bytearray((store / "data.mdb").read_bytes())
    damage(data, flipping.used(store))
    (store / "data.mdb").write_bytes(data)
    status, out, _ = called("doctor", "--store", f"lmdb:{store}")
    assert (status, words in out) == (1, True), out


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
