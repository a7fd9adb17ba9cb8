"""The command line on what ends a step: rules, contributors, deadlines, and who is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradserve_client import Client
from safetensors.numpy import save_file

from tests.clients.conftest import delete_all
from tests.clients.terminal import Call, on_terminal, plain

OPTIONS: dict[str, Any] = {
    "--quorum": 3,
    "--quorum-weight": 99.5,
    "--deadline": 60.0,
    "--min-count": 2,
    "--per-contributor": 4,
    "--ttl": 1000.0,
    "--max-norm": 7.5,
}
"""The options of rules with a value, in the order of `rules`."""

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d"


@pytest.fixture
def server(url: str) -> Iterator[Client]:
    with Client(url) as client:
        delete_all(client)
        yield client
        delete_all(client)


@pytest.fixture
def gradient(tmp_path: Path) -> Path:
    np.save(tmp_path / "g.npy", np.array([1.0, 2.0], np.float32))
    return tmp_path / "g.npy"


def options(given: dict[str, Any]) -> list[str]:
    return [str(word) for pair in given.items() for word in pair]


def rules(info: Any) -> list[Any]:
    return [
        *(info.quorum, info.quorum_weight, info.deadline_seconds, info.min_count, info.per_contributor),
        *(info.ttl_seconds, info.max_norm),
    ]


def test_every_rule_at_creation_and_afterwards(call: Call, server: Client) -> None:
    expected = ["--contributor", "rank0", "--contributor", "rank 1"]
    assert call(server, "buffers", "create", "w", "2", *options(OPTIONS), *expected).code == 0
    info = server.buffers["w"].info()
    assert rules(info) == [*OPTIONS.values()]
    assert info.contributors == ("rank0", "rank 1")
    other = {name: value + 1 for name, value in OPTIONS.items()}
    shown = call(server, "buffers", "set-rules", "w", *options(other), "--contributor", "rank2", "--key", "k")
    assert re.search(r"missing +rank2 *\n", shown.out)
    info = server.buffers["w"].info()
    assert rules(info) == [*other.values()]
    assert info.contributors == ("rank2",)
    unset = [
        word
        for name in ["quorum", "quorum-weight", "deadline", "contributor", "ttl", "max-norm"]
        for word in ("--unset", name)
    ]
    changed = call(server, "buffers", "set-rules", "w", "--min-count", "1", *unset, "--json").json
    assert rules(server.buffers["w"].info()) == [None, None, None, 1, 5, None, None]
    assert (changed["contributors"], changed["missing"], changed["deadline_at"]) == (None, None, None)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [([], 2), (["--unset", "keep"], 2), (["--quorum", "2", "--unset", "quorum"], 2), (["--deadline", "0"], 5)],
)
def test_rules_that_cannot_be(call: Call, server: Client, arguments: list[str], code: int) -> None:
    server.buffers["w"].create(2)
    assert call(server, "buffers", "set-rules", "w", *arguments).code == code
    assert server.buffers["w"].info().version == 0


def test_an_add_has_a_contributor(call: Call, server: Client, gradient: Path) -> None:
    server.buffers["w"].create(2, quorum=3)
    save_file({"dY": np.ones(2, np.float32), "X": np.ones(2, np.float32)}, gradient.with_name("in.safetensors"))
    add = ["buffers", "add", "w", gradient, "--contributor", "rank0"]
    assert call(server, *add).out == "w: step 0, count 1, weight 1\n"
    again = call(server, *add)
    assert (again.code, "'rank0' has added 1 gradient" in again.err) == (4, True)
    run = ["run", "ReluGrad", gradient.with_name("in.safetensors"), "--into", "dX:w", "--contributor", "rank1"]
    assert call(server, *run).code == 0
    assert server.buffers["w"].info().contributors_in == {"rank0": 1, "rank1": 1}
    assert call(server, "buffers", "set-rules", "w", "--quorum", "2").code == 0
    closed = call(server, "buffers", "show", "w", "--step", "0")
    assert closed.out == "w: step 0, count 2, weight 2, closed by quorum\ncontributors: rank0, rank1\n"
    receipt = call(server, "buffers", "show", "w", "--step", "0", "--timeout", "1", "--json").json
    assert (receipt["closed_by"], receipt["contributors"]) == ("quorum", {"rank0": 1, "rank1": 1})
    assert call(server, "buffers", "show", "w", "--step", "1").code == 4


def test_who_is_missing_and_when_the_deadline_ends(call: Call, server: Client) -> None:
    w = server.buffers["w"]
    w.create(2, deadline_seconds=500, min_count=2, contributors=[f"rank{rank}" for rank in range(6)], per_contributor=2)
    for _ in range(2):
        w.accumulate(1.0, contributor="rank0")
    head, row = call(server, "buffers", "ls").out.splitlines()
    assert head.split()[-2:] == ["deadline", "missing"]
    assert re.fullmatch(rf"w .* {TIME}  rank1, rank2, rank3 and 2 more *", row)
    shown = call(server, "buffers", "show", "w").out
    assert re.search(rf"deadline +{TIME}, 500 s after the first gradient, if 2 are in *\n", shown)
    assert re.search(r"contributors +rank0 \(2\); up to 2 of each *\n", shown)
    assert re.search(r"missing +rank1, rank2, rank3, rank4, rank5 *\n", shown)
    line = call(server, "watch", "--count", "1").out.splitlines()[1].split("\t")
    assert re.fullmatch(TIME, line[-3])
    w.set_rules(per_contributor=10**9)
    assert re.search(r"contributors +rank0 \(2\); any number of each *\n", call(server, "buffers", "show", "w").out)
    assert line[-2:] == ["rank1, rank2, rank3 and 2 more", ""]
    (watched,) = call(server, "watch", "--count", "1", "--json").json["buffers"]
    assert (watched["missing"], watched["contributors_in"]) == ([f"rank{rank}" for rank in range(1, 6)], {"rank0": 2})
    assert watched["deadline_at"] == w.info().deadline_at


def test_tables_on_a_terminal_name_the_missing(server: Client) -> None:
    server.buffers["w"].create(2, contributors=["rank0", "rank1"])
    server.buffers["w"].accumulate(1.0, contributor="rank1")
    for command in (["buffers", "ls"], ["watch", "--count", "1"]):
        lines = plain(on_terminal(server, *command).out).splitlines()
        assert "deadline" not in lines[0]
        assert lines[-1].rstrip().endswith("rank0")
