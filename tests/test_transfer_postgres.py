"""`gradserve export` and `import` move a store between LMDB and PostgreSQL, either way and beside a running server."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file

from service.keys import add as add_key
from tests.commands import add, adding, called, put
from tests.serving import serving

LARGE = 100_003


@pytest.fixture
def schema(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a new schema, which the commands use."""
    name = f"test_{uuid.uuid4().hex}"
    monkeypatch.setenv("GRADSERVE_POSTGRES_SCHEMA", name)
    return name


def seen(url: str, secret: str) -> dict[str, Any]:
    """Return what a client sees of each buffer, without the time of its last change and its closed steps."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secret}"}) as client:
        buffers = client.get("/v1/buffers").json()["buffers"]
        values = {one["name"]: client.get(f"/v1/buffers/{one['name']}/value").json() for one in buffers}
        for one in buffers:
            del one["updated_at"], one["expires_at"], one["closed_steps"], one["closed_at"]
        return {one["name"]: (one, values[one["name"]]["value"]) for one in buffers}


def stage(client: httpx.Client) -> None:
    """Send one of two parts of a push. No export has it."""
    path = "/v1/buffers/accumulate?push=p&part=1&parts=2"
    assert client.post(path, json={"net.w": 1, "net.large": 1}).status_code == 202


def test_a_store_moves_to_postgresql_and_back(tmp_path: Path, postgres_url: str, schema: str) -> None:
    keys, files = tmp_path / "keys", [str(tmp_path / name) for name in ("one", "two")]
    secrets = [add_key(keys, name, ["buffers:read", "buffers:write"], name) for name in ("ann", "bob")]
    first, last = f"lmdb:{tmp_path}/a", f"lmdb:{tmp_path}/b"
    with serving(store=first, keys=keys) as url:
        for number, secret in enumerate(secrets):
            with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secret}"}) as client:
                put(client, "net.w", shape=[2, 3], dtype="float64", quorum=9, keep=3, nonfinite="reject")
                rules = {"deadline_seconds": 10**6, "min_count": 2, "quorum_weight": 50.0, "per_contributor": 3}
                put(client, "net.large", shape=[LARGE], ttl_seconds=10**6, contributors=["x", "y"], **rules)
                put(client, "net.empty", shape=[0, 3], dtype="float16")
                put(client, "net.scalar", shape=[], dtype="bfloat16")
                put(client, "zeros", shape=[4])
                add(client, "net.w", 5.5)
                client.post("/v1/buffers/net.w/take")
                stage(client)
                for name in ("net.w", "net.large", "net.scalar"):
                    add(client, name, 1.5 + number, weight=0.5, contributor="x")
        before = [seen(url, secret) for secret in secrets]
    assert called("export", files[0], "--store", first)[0] == 0
    assert called("import", files[0], "--store", postgres_url) == (0, "10 buffers\n", "")
    status, _, complaint = called("import", files[0], "--store", postgres_url)
    assert (status, "~ann/net.large, ~ann/net.scalar, ~ann/net.w" in complaint) == (1, True)
    with serving(store=postgres_url, postgres_schema=schema, keys=keys) as url:
        assert [seen(url, secret) for secret in secrets] == before
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secrets[0]}"}) as client:
            assert client.get("/v1/pushes").json()["pushes"] == []
            stage(client)
    assert called("export", files[1], "--store", postgres_url)[0] == 0
    assert Path(files[1]).read_bytes() == Path(files[0]).read_bytes()
    assert called("import", files[1], "--store", last) == (0, "10 buffers\n", "")
    with serving(store=last, keys=keys) as url:
        assert [seen(url, secret) for secret in secrets] == before
    status, out, _ = called("export", files[1], "--store", postgres_url, "--prefix", "~bob/net.")
    assert (status, set(load_file(files[1]))) == (0, {f"~bob/net.{name}" for name in ("w", "large", "empty", "scalar")})
    assert out.startswith("4 buffers")


def test_an_export_from_postgresql_is_of_one_moment(tmp_path: Path, postgres_url: str, schema: str) -> None:
    names = [f"b{number}" for number in range(8)]
    with serving(store=postgres_url, postgres_schema=schema) as url, httpx.Client(base_url=url) as client:
        for name in names:
            put(client, name, shape=[20_000])
        counts: list[float] = []
        with adding(url, names):
            for number in range(4):
                file = tmp_path / f"{number}.safetensors"
                assert called("export", str(file), "--store", postgres_url)[0] == 0
                sums = {value for tensor in load_file(file).values() for value in tensor.tolist()}
                assert len(sums) == 1
                counts += sums
    assert counts[0] < counts[-1]


def test_commands_say_what_is_wrong_with_the_database(tmp_path: Path, postgres_url: str, schema: str) -> None:
    file = str(tmp_path / "x")
    nowhere = "postgresql://postgres:hidden@127.0.0.1:1/postgres"
    for command in (["export", file], ["doctor"], ["keys-forget", "--older-than", "1h"]):
        status, _, complaint = called(*command, "--store", postgres_url)
        assert (status, f"no store in the PostgreSQL schema '{schema}'" in complaint) == (1, True)
        status, out, complaint = called(*command, "--store", nowhere)
        assert (status, "The database does not serve" in complaint, "hidden" in out + complaint) == (1, True, False)
    assert [*tmp_path.iterdir()] == []
