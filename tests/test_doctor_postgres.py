"""`gradserve doctor` on a PostgreSQL store: in use, and with each kind of damage."""

from __future__ import annotations

import re
import uuid
from typing import NamedTuple

import httpx
import numpy as np
import psycopg
import pytest

from service.buffers.changes import Add, Create, Take
from service.buffers.doctor import examine
from service.buffers.perform import Request
from service.buffers.postgres import PostgresStore
from service.buffers.pushes import Part
from service.buffers.record import Key, Spec
from service.dtypes import FLOAT32
from tests.buffers.postgres import more_rows
from tests.commands import add, called, put
from tests.serving import serving

LARGE = 50_000
"""Elements of a gradient that is a blob of four rows."""


class Made(NamedTuple):
    """A store in a database."""

    url: str
    schema: str

    def change(self, statement: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"set search_path to {self.schema}".encode())
            connection.execute(statement.encode())

    def wrong(self) -> list[str]:
        """Return the damage that the doctor reports, with N for each number."""
        lines = examine(self.url, 1 << 30, self.schema)
        return [re.sub(r"\d+", "N", line[7:]) for line in lines if line.startswith("WRONG: ")]


@pytest.fixture
def made(postgres_url: str) -> Made:
    """Return a store: `small` and `large` have three gradients each, and one of a push; `taken` has a closed step."""
    made = Made(postgres_url, f"test_{uuid.uuid4().hex}")
    store = PostgresStore(postgres_url, schema=made.schema)
    for name, size in (("small", 5), ("large", LARGE), ("taken", LARGE)):
        store.submit(Request([Create(name=name, spec=Spec((size,), FLOAT32))])).result(20)
        for number in range(3):
            key = Key("", f"{name} {number}", bytes(16))
            store.submit(Request([Add(name=name, gradient=np.ones(size, np.float32))], key)).result(20)
    store.submit(Request([Take(name="taken")])).result(20)
    part = Part("p", 1, 2, "", bytes(16), 900.0)
    adds = [Add(name=name, gradient=np.ones(size, np.float32)) for name, size in (("small", 5), ("large", LARGE))]
    store.submit(Request(adds, part=part)).result(20)
    store.close()
    return made


SMALL = "(select min(value) from deltas)"

STAGED = "(select max(value) from deltas where blob {} null)"
"""The value of a staged gradient: in a row, or in a blob."""

PUSH = "starts_with(namespace, '+pushes+')"

LOST = "value N belongs to no buffer, graph or push that can be read"

MISCOUNTED = "the value N has a gradient whose bytes are counted wrong"

HURT_PUSH = {name: f"the gradient of {name!r} in the push 'p' is damaged" for name in ("small", "large")}

HURT = {name: f"the running value of the buffer {name!r} is damaged" for name in ("small", "large")}

DAMAGE = {
    f"delete from deltas where value = {SMALL} and seq = 1": [HURT["small"]],
    f"delete from deltas where value = {SMALL} and seq = 2": [HURT["small"]],
    f"delete from deltas where value = {SMALL} and seq = 3": [HURT["small"]],
    f"delete from deltas where value = {SMALL}": [HURT["small"]],
    f"update deltas set data = substr(data, 2) where value = {SMALL} and seq = 1": [HURT["small"], MISCOUNTED],
    f"update deltas set bytes = 9 where value = {SMALL} and seq = 1": [MISCOUNTED],
    f"update buffers set seq = 9 where {PUSH}": [
        "the bytes of the push 'p' are counted wrong until its next part comes"
    ],
    f"update deltas set dtype = 'x' where value = {SMALL} and seq = 1": [HURT["small"]],
    f"update deltas set shape = '[7]' where value = {SMALL} and seq = 1": [HURT["small"]],
    "update buffers set seq = 1 where name = 'small'": [HURT["small"]],
    "delete from chunks where number = 1 and blob = (select min(blob) from deltas)": [HURT["large"]],
    more_rows("select min(blob), 9, 'abc' from deltas"): [HURT["large"]],
    "update deltas set shape = '[1000000000000]' where blob = (select min(blob) from deltas)": [HURT["large"]],
    "delete from chunks where blob = (select max(blob) from deltas where seq > 1)": [
        "step N of the buffer 'taken' is damaged"
    ],
    "update chunks set data = substr(data, 2) where number = 3 and blob = (select min(blob) from deltas)": [
        HURT["large"]
    ],
    "update buffers set record = '[' where name = 'small'": ["the buffer 'small' is damaged", LOST],
    "delete from buffers where name = 'small'": [LOST],
    f"delete from buffers where {PUSH}": [LOST, LOST],
    f"update buffers set record = '[' where {PUSH}": ["the push 'p' is damaged", LOST, LOST],
    f"delete from deltas where value = {STAGED.format('is')}": [HURT_PUSH["small"]],
    f"delete from deltas where value = {STAGED.format('is not')}": [
        HURT_PUSH["large"],
        "the blob N of N bytes belongs to no gradient",
    ],
    f"update deltas set data = substr(data, 2) where value = {STAGED.format('is')}": [HURT_PUSH["small"], MISCOUNTED],
    f"update deltas set dtype = 'x' where value = {STAGED.format('is')}": [HURT_PUSH["small"]],
    f"update deltas set seq = 2 where value = {STAGED.format('is')}": [HURT_PUSH["small"]],
    f"insert into unowned select blob, 0 from deltas where value = {STAGED.format('is not')}": [
        "the blob N of the value N will be deleted, although it is used"
    ],
    "insert into chunks values (990, 0, 'abc')": ["the blob N of N bytes belongs to no gradient"],
    "insert into unowned select min(blob), 0 from deltas": [
        "the blob N of the value N will be deleted, although it is used"
    ],
    "update keys set outcome = 'x' where digest = (select max(digest) from keys where outcome <> '')": [
        "N idempotency keys are damaged: a retry with one fails, or counts again"
    ],
    "update keys set digest = set_bit(digest, 5, 1 - get_bit(digest, 5)) where outcome <> ''": [
        "N idempotency keys are damaged: a retry with one fails, or counts again"
    ],
    "alter sequence ids minvalue -9999 restart -5000": [
        "the sequence ids goes on with -N, but the id N has been used: servers correct it"
    ],
}
"""What is done to the store, and what the doctor says of it."""


@pytest.mark.parametrize(("statement", "wrong"), DAMAGE.items())
def test_the_doctor_finds_damage_in_a_database(made: Made, statement: str, wrong: list[str]) -> None:
    assert made.wrong() == []
    made.change(statement)
    assert made.wrong() == wrong


def test_the_doctor_checks_a_database_in_use(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = f"test_{uuid.uuid4().hex}"
    monkeypatch.setenv("GRADSERVE_POSTGRES_SCHEMA", schema)
    with serving(store=postgres_url, postgres_schema=schema) as url, httpx.Client(base_url=url) as client:
        for name, size in (("small", 50), ("large", LARGE), ("taken", LARGE), ("empty", 0)):
            put(client, name, shape=[size])
            for _ in range(20):  # enough for folds
                assert client.post(f"/v1/buffers/{name}/accumulate", json={"gradient": 1}).status_code == 200
        add(client, "small", [1] * 50, overwrite=True)
        client.post("/v1/buffers/taken/take", headers={"Idempotency-Key": "k"})
        rows = {"shape": [LARGE, 2], "indices": [1, 5], "grad": [[1, 2], [3, 4]]}
        put(client, "rows", shape=[LARGE, 2])
        assert client.post("/v1/ops/GatherGrad?into=output:rows", json=rows).status_code == 200
        status, out, _ = called("doctor", "--store", postgres_url)
        assert status == 0
        for words in (f"store {schema} in postgres", "5 buffers", "1 idempotency keys", "no problems found"):
            assert words in out
    made = Made(postgres_url, schema)
    made.change("delete from chunks where number = 1")
    status, out, _ = called("doctor", "--store", postgres_url)
    assert (status, f"problems found: {len(made.wrong())}" in out, bool(made.wrong())) == (1, True, True)
