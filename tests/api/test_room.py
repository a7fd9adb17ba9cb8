"""A namespace whose Idempotency-Keys take too much of the store, and the command that makes room again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.keys import add as add_key
from tests.commands import called, run
from tests.serving import assert_problem, serving

STORE_BYTES = 3 << 17
BUFFERS = 100


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"lmdb:{tmp_path}/store"


@pytest.fixture
def clients(store: str, tmp_path: Path) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Yield clients of two namespaces of a small store, the first with some buffers."""
    keys = tmp_path / "keys"
    secrets = [add_key(keys, name, ["buffers:read", "buffers:write"], name) for name in ("greedy", "modest")]
    heads = [{"Authorization": f"Bearer {secret}"} for secret in secrets]
    with serving(store=store, store_bytes=STORE_BYTES, keys=keys) as url:
        with (
            httpx.Client(base_url=url, headers=heads[0]) as greedy,
            httpx.Client(base_url=url, headers=heads[1]) as modest,
        ):
            for number in range(BUFFERS):
                assert greedy.put(f"/v1/buffers/{number}", json={"shape": [1]}).status_code == 201
            assert modest.put("/v1/buffers/a", json={"shape": [1]}).status_code == 201
            yield greedy, modest


def zero(client: httpx.Client, key: str | None = None, prefix: str = "") -> httpx.Response:
    """Zero all buffers with this prefix."""
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post("/v1/buffers/zero", params={"prefix": prefix}, headers=headers)


def add(client: httpx.Client, name: str, key: str) -> httpx.Response:
    headers = {"Idempotency-Key": key}
    return client.post(f"/v1/buffers/{name}/accumulate", json={"gradient": [1]}, headers=headers)


def zero_until_full(client: httpx.Client) -> httpx.Response:
    """Zero buffers with new keys until the server refuses; each prefix needs a list of names of its own."""
    for number in range(10_000):
        answer = zero(client, f"{number}", prefix="" if number % 2 else str(number // 2 % 10))
        if answer.status_code != 200:
            return answer
    raise AssertionError("no limit")


def test_the_keys_of_a_namespace_do_not_fill_the_store(
    clients: tuple[httpx.Client, httpx.Client], store: str, tmp_path: Path
) -> None:
    greedy, modest = clients
    problem = assert_problem(zero_until_full(greedy), 507, "keys_full", "nothing was changed", "gradserve keys-forget")
    assert (problem["title"], problem["limit"]) == ("Namespace remembers too many Idempotency-Keys", STORE_BYTES // 4)
    assert (tmp_path / "store" / "data.mdb").stat().st_size < STORE_BYTES
    assert zero(greedy, "1").headers["idempotency-replayed"] == "true"
    assert zero(greedy).status_code == 200
    for number in range(20):
        assert add(modest, "a", f"{number}").status_code == 200

    status, out, error = run("keys-forget", "--older-than", "0h", "--namespace", "greedy", "--store", store)
    assert (status, int(out.removesuffix(" keys\n")) > 100) == (0, True)
    assert "counts twice" in error
    assert zero(greedy, "again").status_code == 200
    assert "idempotency-replayed" not in zero(greedy, "1").headers
    assert add(modest, "a", "0").headers["idempotency-replayed"] == "true"
    assert modest.get("/v1/buffers/a").json()["count"] == 20


def test_keys_forget_needs_an_age_and_a_store(store: str, tmp_path: Path) -> None:
    assert called("keys-forget", "--store", store)[0] == 2
    for age in ("", "h", "7", "7x", "-1h", "nanh", "infd"):
        status, _, error = called("keys-forget", "--older-than", age, "--store", store)
        assert status == 2
        assert "--older-than" in error
    status, _, error = called("keys-forget", "--older-than", "1h", "--store", store)
    assert (status, error) == (1, f"gradserve: There is no store in {tmp_path}/store\n")
    assert not (tmp_path / "store").exists()
    assert called("keys-forget", "--older-than", "1h", "--store", "memory:")[0] == 2


@pytest.mark.parametrize("age", ["1h", "0h"])
def test_keys_forget_without_a_server(store: str, age: str) -> None:
    with serving(store=store) as url, httpx.Client(base_url=url) as client:
        assert client.put("/v1/buffers/a", json={"shape": [1]}).status_code == 201
        assert add(client, "a", "k").status_code == 200
    assert called("keys-forget", "--older-than", age, "--store", store)[:2] == (0, f"{int(age == '0h')} keys\n")
    with serving(store=store) as url, httpx.Client(base_url=url) as client:
        assert ("idempotency-replayed" in add(client, "a", "k").headers) == (age == "1h")
    assert called("doctor", "--store", store)[0] == 0


def test_the_staged_parts_of_a_namespace_do_not_fill_the_store(clients: tuple[httpx.Client, httpx.Client]) -> None:
    greedy, modest = clients
    size = STORE_BYTES // 4 // 10  # elements: two of three buffers fit into the share

    def stage(client: httpx.Client, push: str, name: str) -> httpx.Response:
        client.put(f"/v1/buffers/{name}", json={"shape": [size]})
        query: dict[str, Any] = {"push": push, "part": 1, "parts": 2}
        return client.post("/v1/buffers/accumulate", params=query, json={name: [1] * size})

    assert [stage(greedy, name, name).status_code for name in ("x", "y")] == [202, 202]
    problem = assert_problem(stage(greedy, "z", "z"), 507, "pushes_full", "nothing was changed", "GET /v1/pushes")
    assert (problem["title"], problem["limit"]) == ("Namespace has staged too much", STORE_BYTES // 4)
    assert stage(modest, "x", "x").status_code == 202
    assert greedy.delete("/v1/pushes", params={"push": "x"}).json()["forgotten"] == [1]
    assert stage(greedy, "z", "z").status_code == 202
