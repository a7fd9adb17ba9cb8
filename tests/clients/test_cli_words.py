"""What the front ends call things: errors name the option or the argument, and help shows what a flag takes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gradserve_client import Client, InvalidInput, KeyReused
from safetensors.numpy import save_file
from typer.main import get_command

from tests.clients.conftest import delete_all
from tests.clients.terminal import Call, plain

ERRORS = {
    "create w 2 --quorum 4 --deadline 3 --min-count 2": "not 4, deadline_seconds null, not 3.0, min_count 1, not 2",
    "create v 2 --quorum 0": "--quorum is 0, but must be greater than or equal to 1",
    "create v 2 --quorum-weight -1": "--quorum-weight is ",
    "create v 2 --deadline 0": "--deadline is ",
    "create v 2 --min-count 0": "--min-count is ",
    "create v 2 --per-contributor 0": "--per-contributor is ",
    "create v 2 --keep 0": "--keep is ",
    "create v 2 --ttl -1": "--ttl is ",
    "create v 2 --max-norm nan": "--max-norm is nan, but must be a finite number",
    "create v 2 --dtype float8": "--dtype is 'float8'",
    "create v 2 --contributor a --contributor a": "--contributor has 'a' 2 times",
    "set-rules w --ttl nan": "--ttl is nan",
    "take w --min-count 3": "--min-count is 3, but 'w' closes a step by itself",
    "take w --min-count 1": "step 0, but min_count is 1",
    "take w --timeout -1": "--timeout is -1.0",
    "get w --step -1": "--step is ",
    "get w --step 4": "error: Step 4 of 'w' has not closed: the buffer is in step 0",
    "add w g.npy --weight nan": "--weight is ",
    "add w g.npy --contributor=": "--contributor is '', but must be",
    "add w g.npy --key=": "--key is ''",
    "show nowhere": "There is no buffer 'nowhere'; gradserve-client buffers create nowhere SHAPE creates one",
}
"""Mistaken commands about buffers, and what their errors say."""

RUNS = {
    "SoftmaxGrad_13 in.safetensors -a axis=x": "--set axis is 'x', but must be an integer",
    "SoftmaxGrad_13 in.safetensors -a foo=1": "--set foo: The query parameter 'foo' is unknown; it must be one of ",
    "ReluGrad in.safetensors -a foo=1": "--set foo: The query parameter 'foo' is unknown; it must be one of ",
    "ReluGrad in.safetensors -a into=dX:w": "error: into is not an attribute of an operator",
    "ReluGrad in.safetensors --weight 2": "--weight is only for outputs that into= adds to a buffer",
    "ReluGrad in.safetensors --outputs dX": "--outputs: The query parameter 'outputs' is unknown",
    "ReluGrad in.safetensors --into dZ:w": "--into is 'dZ:w', but must be one of dX",
    "ReluGrad --from dQ:w": "--from is 'dQ:w', but must be one of dY, X",
}
"""The same for commands that run operators."""


@pytest.fixture(scope="module")
def shared(url: str) -> Iterator[Client]:
    with Client(url) as client:
        delete_all(client)
        client.buffers["w"].create(2, quorum=3)
        yield client
        delete_all(client)


@pytest.fixture
def server(shared: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.chdir(tmp_path)
    np.save("g.npy", np.ones(2, np.float32))
    save_file({name: np.ones((2, 2), np.float32) for name in ("dY", "Y")}, "in.safetensors")
    return shared


@pytest.mark.parametrize(
    ("line", "words"),
    [
        *((f"buffers {line}", words) for line, words in ERRORS.items()),
        *((f"run {one}", words) for one, words in RUNS.items()),
    ],
)
def test_an_error_names_the_option(call: Call, server: Client, line: str, words: str) -> None:
    for as_json in ([], ["--json"]):
        done = call(server, *line.split(), *as_json)
        assert done.code in (3, 4, 5)
        assert words.removeprefix("error: ") in done.err if as_json else words in done.err


def test_an_error_names_the_argument(server: Client) -> None:
    w, run = server.buffers["w"], server.run
    relu: dict[str, Any] = {"dY": [1], "X": [1]}
    cases: list[tuple[Any, str]] = [
        (lambda: w.zero(if_match="abc"), r"^If-Match is 'abc'"),
        (lambda: run("SoftmaxGrad_13", {"dY": [[1]], "Y": [[1]]}, {"foo": 1}), r"'foo' is unknown; .*axis"),
        (lambda: run("ReluGrad", relu, outputs=["dX"]), r"'outputs' is unknown"),
        (lambda: server.buffers.create_many({"a.b": {"shape": 2, "quorum": 0}}), r"^buffers\.a\.b\.quorum is 0, but"),
        (lambda: server.buffers.create_many({}), r"^specs is empty"),
        (lambda: server.buffers.accumulate({}), r"^gradients is empty"),
        (lambda: server.buffers.take([]), r"^names is empty"),
        (lambda: w.set_rules(max_norm=float("inf")), r"^max_norm is inf, but must be a finite number"),
    ]
    for wrong, words in cases:
        with pytest.raises(InvalidInput, match=words):
            wrong()


def test_the_error_of_a_reused_key_names_it(server: Client, key: str) -> None:
    server.buffers["w"].accumulate([1, 2], weight=0, do_update=False, idempotency_key=key)
    with pytest.raises(KeyReused, match=f"^The Idempotency-Key '{key}' was used"):
        server.buffers["w"].accumulate([1, 3], weight=0, do_update=False, idempotency_key=key)


# ----- help -----


def test_flags_take_no_value(call: Call, server: Client) -> None:
    from gradserve_client._cli.commands import app

    buffers = get_command(app).commands["buffers"].commands  # type: ignore[attr-defined]
    for command in (["watch"], ["run"], ["info"], [], ["buffers"], *(["buffers", name] for name in buffers)):
        said = plain(call(server, *command, "--help").out)
        assert "--help" in said
        assert "<bool>" not in said, command
        assert "BOOLEAN" not in said, command


# ----- info -----


def test_info(call: Call, server: Client) -> None:
    said = dict(line.split(maxsplit=1) for line in call(server, "info").out.splitlines())
    assert said["url"].strip() == server.url
    assert said["server"].strip() == f"gradserve {version('gradserve')}"
    assert said["client"].strip() == f"gradserve-client {version('gradserve-client')}"
    assert (said["ready"].strip(), said["max_names"].strip()) == ("yes", "100,000")
    assert said["max_body_bytes"].strip().endswith("B")
    found = call(server, "info", "--json").json
    limits = httpx.get(f"{server.url}/v1/limits").json()
    assert (found["url"], found["ready"], found["limits"]) == (server.url, True, limits)
    assert call("http://127.0.0.1:9", "--timeout", "0.1", "info").code == 6


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ({"name": "ann", "namespace": "team", "scopes": ["ops"], "keys": True}, "ann, team, ops"),
        ({"name": "ann", "namespace": "", "scopes": [], "keys": True}, "ann, the default namespace, no scopes"),
        ({"name": "", "namespace": "", "scopes": ["ops"], "keys": False}, "anyone: the server has no API keys"),
        (None, None),
    ],
)
def test_info_says_whom_the_server_takes_you_for(
    call: Call, server: Client, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any] | None, line: str | None
) -> None:
    """Servers of this version may not have the endpoint yet, and older ones never."""
    from gradserve_client._cli import server as commanded
    from gradserve_client._http.channels import HttpxChannel

    def refused(status: int, code: str) -> httpx.Response:
        return httpx.Response(status, json={"code": code, "detail": code})

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/caller":
            return refused(404, "not_found") if answer is None else httpx.Response(200, json=answer)
        if request.url.path == "/v2/health/ready":
            return refused(503, "not_ready")
        return httpx.Response(200, json={"name": "gradserve", "max_names": 7})

    monkeypatch.setattr(commanded, "channel", lambda *_: HttpxChannel(httpx.MockTransport(handle)))
    done = call(server, "info")
    assert done.code == 0, done.err
    said = dict(one.split(maxsplit=1) for one in done.out.splitlines())
    assert (said.get("caller", "").strip() or None) == line
    assert (said["ready"].strip(), said["server"].strip(), said["max_names"].strip()) == ("no", "gradserve", "7")
