"""`gradserve-client watch` of many buffers: in groups, and on a terminal with fewer lines than there are buffers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from gradserve_client import Client

from tests.clients.conftest import delete_all
from tests.clients.terminal import Call, on_terminal, plain

ONCE = ["--count", "1", "--interval", "0.05"]


@pytest.fixture
def server(url: str) -> Iterator[Client]:
    with Client(url) as client:
        delete_all(client)
        yield client
        delete_all(client)


@pytest.fixture
def model(server: Client) -> Client:
    rules = {"quorum": 4, "contributors": ["rank0", "rank1", "rank2"]}
    names = ["net.bias", "net.layers.0.b", "net.layers.0.w", "net.layers.1.w"]
    server.buffers.create_many({name: {"shape": 2, **rules} for name in names})  # type: ignore[typeddict-item]
    server.buffers["alone"].create(3)
    server.buffers.accumulate({"net.layers.0.w": [3, 4], "net.layers.1.w": [6, 8]}, contributor="rank1", weight=2)
    server.buffers["net.layers.1.w"].accumulate([0, 0], contributor="rank0")
    return server


def test_a_group_is_one_line(call: Call, model: Client) -> None:
    head, *lines = call(model, "watch", "--group", *ONCE).out.splitlines()
    columns = ["time", "prefix", "buffers", "size", "epoch", "count", "weight", "norm", "adds/s", "deadline", "missing"]
    assert head.split("\t") == columns
    assert [line.split("\t")[1:] for line in lines] == [
        ["alone", "1", "12 B", "0", "0", "0", "0", "", "", ""],
        ["net.", "4", "32 B", "0", "0-2 of 4", "0-3", f"{math.hypot(6, 8, 12, 16):.4g}", "", "", "rank0, rank1, rank2"],
    ]


def test_a_longer_prefix_divides_a_group(call: Call, model: Client) -> None:
    _, *lines = call(model, "watch", "net.", "--group", "--no-norm", *ONCE).out.splitlines()
    assert [line.split("\t")[1:7] for line in lines] == [
        ["net.bias", "1", "8 B", "0", "0 of 4", "0"],
        ["net.layers.", "3", "24 B", "0", "0-2 of 4", "0-3"],
    ]
    _, *lines = call(model, "watch", "net.layers.", "--group", "--no-norm", *ONCE).out.splitlines()
    assert [line.split("\t")[1] for line in lines] == ["net.layers.0.", "net.layers.1."]


def test_groups_for_programs(call: Call, model: Client) -> None:
    groups = call(model, "watch", "net.", "--group", "--json", *ONCE).json["groups"]
    assert [one["prefix"] for one in groups] == ["net.bias", "net.layers."]
    layers = groups[1]
    assert {name: layers[name] for name in ("buffers", "bytes", "epoch", "count", "weight", "missing")} == {
        "buffers": 3,
        "bytes": 24,
        "epoch": [0, 0],
        "count": [0, 2],
        "weight": [0.0, 3.0],
        "missing": ["rank0", "rank1", "rank2"],
    }
    assert layers["norm"] == math.hypot(6, 8, 12, 16)


@pytest.fixture
def many(server: Client) -> Client:
    """Forty buffers, for a terminal of 24 lines."""
    server.buffers.create_many({f"m.{number:02}": {"shape": 2} for number in range(40)})
    return server


def screens(server: Client, types: str) -> list[tuple[int, int]]:
    """Return the first and the last buffer of each screen, without repetitions."""
    done = on_terminal(server, "watch", "--no-norm", "--count", "2", "--interval", "0.3", types=types)
    assert done.code == 0
    drawn = [screen for screen in plain(done.out).split("rows ") if " of 40" in screen]
    numbers = [[int(line[2:4]) for line in screen.splitlines() if line.startswith("m.")] for screen in drawn]
    assert all(1 <= len(some) <= 22 and some == list(range(some[0], some[-1] + 1)) for some in numbers), drawn
    return [one for one, _ in itertools.groupby((some[0], some[-1]) for some in numbers)]


def test_a_small_terminal_shows_the_first_rows(many: Client) -> None:
    assert screens(many, "") == [(0, 20)]


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ("\x1b[B", [(0, 20), (1, 21)]),
        (" b", [(0, 20), (19, 39), (0, 20)]),
        ("\x1b[F\x1b[H", [(0, 20), (19, 39), (0, 20)]),
        ("k\x1b[5~?", [(0, 20)]),
    ],
)
def test_keys_scroll(many: Client, keys: str, shown: list[tuple[int, int]]) -> None:
    assert screens(many, keys) == shown


def test_what_fits_has_no_hint(many: Client) -> None:
    done = on_terminal(many, "watch", "m.1", "--no-norm", "--count", "2", "--interval", "0.05", types="G")
    assert " of 10" not in plain(done.out)
    assert "m.19" in done.out
