"""The command line on the buffers of a run: removed, or with other rules, by their prefix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gradserve_client import Client

from tests.clients.conftest import delete_all
from tests.clients.terminal import Call, on_terminal, plain

RUN = ["run7.a", "run7.b", "run7.c"]


@pytest.fixture
def server(url: str) -> Iterator[Client]:
    with Client(url) as client:
        delete_all(client)
        client.buffers.create_many({name: {"shape": 2} for name in [*RUN, "run70.a"]})
        yield client
        delete_all(client)


def names(server: Client) -> list[str]:
    return [info.name for info in server.buffers.list()]


def test_a_run_is_removed(call: Call, server: Client) -> None:
    assert call(server, "buffers", "rm", "--prefix", "run7.") == (0, "removed 3 buffers\n", "")
    assert names(server) == ["run70.a"]
    assert call(server, "buffers", "rm", "--prefix", "run7.", "--json").json == {"removed": []}
    assert call(server, "buffers", "rm", "--all", "--json").json == {"removed": ["run70.a"]}
    assert names(server) == []


def test_a_command_repeated_with_its_key_removes_once(call: Call, server: Client, key: str) -> None:
    again = [call(server, "buffers", "rm", "--prefix", "run7.", "--key", key, "--json").json for _ in range(2)]
    assert again == [{"removed": RUN}] * 2
    server.buffers["run7.a"].create(2)
    assert call(server, "buffers", "rm", "--prefix", "run7.", "--key", key, "--json").json == {"removed": RUN}
    assert names(server) == ["run7.a", "run70.a"]


@pytest.mark.parametrize("command", [["rm"], ["set-rules", "--quorum", "3"]])
@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (["--prefix", ""], ["--prefix is empty", "--all"]),
        ([], ["give one of NAME, --prefix PREFIX and --all"]),
        (["run7.a", "--prefix", "run7."], ["give one of"]),
        (["--prefix", "run7.", "--all"], ["give one of"]),
    ],
)
def test_what_to_change_must_be_plain(
    call: Call, server: Client, command: list[str], chosen: list[str], words: list[str]
) -> None:
    done = call(server, "buffers", *command, *chosen)
    assert (done.code, done.out) == (2, "")
    said = " ".join(plain(done.err).replace("│", " ").split())
    assert all(word in said for word in words), said
    assert names(server) == [*RUN, "run70.a"]
    assert {info.quorum for info in server.buffers.list()} == {None}


def test_rm_asks_on_a_terminal(server: Client) -> None:
    for types, code, rest in (("n\n", 1, [*RUN, "run70.a"]), ("y\n", 0, ["run70.a"])):
        done = on_terminal(server, "buffers", "rm", "--prefix", "run7.", types=types)
        assert "Remove 3 buffers, from run7.a to run7.c? [y/N]:" in plain(done.out)
        assert (done.code, names(server)) == (code, rest)


def test_the_rules_of_a_run_change(call: Call, server: Client) -> None:
    server.buffers["run7.a"].accumulate([1, 2])
    done = call(server, "buffers", "set-rules", "--prefix", "run7.", "--quorum", "1", "--ttl", "1000")
    assert done == (0, "changed 3 of 3 buffers; steps closed: 1\n", "")
    assert [(info.quorum, info.ttl_seconds) for info in server.buffers.list()] == [(1, 1000)] * 3 + [(None, None)]
    receipts = call(server, "buffers", "set-rules", "--prefix", "run7.", "--unset", "quorum", "--json").json
    assert [(receipt["name"], receipt["updated"], receipt["closed"]) for receipt in receipts] == [
        (name, True, False) for name in RUN
    ]
    assert call(server, "buffers", "set-rules", "--all", "--quorum", "5").code == 0
    assert {info.quorum for info in server.buffers.list()} == {5}
    assert call(server, "buffers", "set-rules", "--prefix", "nothing.", "--quorum", "5").code == 3
