"""Records as stores keep them: in few bytes, and read as they were."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from service.buffers.names import BufferName
from service.buffers.packed import SEAL_BYTES, pack_known, pack_record, seal, seed_of, unpack_known, unpack_record
from service.buffers.pushes import Part, Push, StagedPart, unpack_older
from service.buffers.record import Known, Record
from service.buffers.steps import Closed
from service.errors import BufferCorrupt, StaleStep, UnknownBuffer
from tests.buffers.calls import spec

NAME = BufferName("", "a")

PLAIN = (
    b'[{"shape":[2],"dtype":"float32","nonfinite":"allow","quorum":2,"keep":2,"ttl_seconds":null},'
    b"7,1.5,2.5,2,5,1,1.0,9,[[0,2,2,2.0,3],[1,4,1,1.0,null]],2.25]"
)
"""A record without deadline and contributors: its quorum has closed a step, and a take another, at 2.25."""


def text_of(record: Record) -> bytes:
    """Return what is stored of the record, without its checksum."""
    return pack_record(record)[:-SEAL_BYTES]


def record_of(text: bytes) -> Record:
    return unpack_record(NAME, seal(text, seed_of(b"a")))


def test_a_plain_record_takes_few_bytes() -> None:
    record = record_of(PLAIN)
    assert record.spec == spec((2,), quorum=2, keep=2)
    assert (record.step, record.version, record.count, record.value) == (2, 5, 1, 9)
    assert record.closed == (Closed(0, 2, 2, 2.0, 3, "quorum"), Closed(1, 4, 1, 1.0, None, "take"))
    assert (record.began, record.contributors_in, record.deadline_at, record.missing) == (None, {}, None, None)
    assert (record.closed_at, record.absent) == (2.25, {})
    assert text_of(record) == PLAIN
    new = Record(NAME, record.spec, 7, 1.5, 2.5)
    assert text_of(new) == PLAIN[: PLAIN.index(b",2,5")] + b",0,0,0,0.0,null,[]]"


def test_contributors_of_several_steps_are_stored_once() -> None:
    xy, z = {"x": 1, "y": 1}, {"z": 2}
    steps = [(xy, "quorum"), (xy, "quorum"), (xy, "deadline"), ({}, "quorum"), (xy, "quorum"), (z, "members")]
    closed = tuple(Closed(at, at, 2, 2.0, None, by, inside) for at, (inside, by) in enumerate(steps))  # type: ignore[arg-type]
    record = Record(NAME, spec((2,), quorum=2, keep=9), 7, 1.5, 2.5, closed=closed, closed_at=2.5)
    assert text_of(record).count(b'{"x":1,"y":1}') == 2
    assert record_of(text_of(record)).closed == closed


def test_a_large_record_is_read_once() -> None:
    steps = tuple(Closed(at, at, 2, 2.0, None) for at in range(1000))
    record = Record(NAME, spec((2,), keep=1000), 7, 1.5, 2.5, closed=steps, closed_at=2.5)
    sealed = pack_record(record)
    found = unpack_record(NAME, memoryview(sealed))
    assert found.closed == steps
    assert unpack_record(NAME, sealed) is found
    for other, of in ((BufferName("", "b"), sealed), (NAME, sealed.replace(b"7,1.5", b"8,1.5"))):
        with pytest.raises(BufferCorrupt):
            unpack_record(other, of)


def test_a_record_of_a_format_before_8_closed_its_step_with_its_last_change() -> None:
    before = PLAIN.replace(b",2.25]", b"]")
    record = record_of(before)
    assert (record.closed_at, record.absent) == (2.5, {})
    changed = record.changed(updated=9.5)
    assert record_of(text_of(changed)).closed_at == 2.5
    with_names = record_of(before[:-1] + b',null,{"x":1}]')
    assert (with_names.contributors_in, with_names.closed_at) == ({"x": 1}, 2.5)


@pytest.mark.parametrize("began", [None, 3.25])
@pytest.mark.parametrize("held", [{}, {"x": 2, "ü b": 1}])
@pytest.mark.parametrize("rules", [{}, {"deadline_seconds": 2.5, "min_count": 3, "contributors": ("x", "y")}])
@pytest.mark.parametrize("absent", [{}, {"y": 1.5}])
@pytest.mark.parametrize("about", [{}, {"digest": "00", "options": {"loss": "x"}}])
def test_a_record_comes_back(
    began: float | None, held: dict[str, int], rules: dict[str, Any], absent: dict[str, float], about: dict[str, Any]
) -> None:
    closed = (Closed(0, 2, 2, 2.0, 3, "deadline", held), Closed(1, 4, 1, 1.0, 4, "quorum", {}), Closed(2, 5, 1, 1.0, 5))
    full = spec((2, 3), quorum=5, keep=3, quorum_weight=4.0, per_contributor=2, **rules)
    record = Record(NAME, full, 7, 1.5, 2.5, 3, 9, 2, 2.0, 6, closed, began, held, 2.25, absent, about)
    assert record_of(text_of(record)) == record


@pytest.mark.parametrize(
    "packed",
    [
        *(b"", b"[]", b"[{}]", b"3", b"null", PLAIN[:-1], PLAIN[:-1] + b",1,2,3]"),
        *(
            PLAIN[:-6] + rest
            for rest in (b",null,{},2.25,{},1]", b",null,{},2.25,{},{},1]", b",null,{},[]]", b",{}]", b",null,1]")
        ),
    ],
)
def test_what_nothing_has_packed_is_refused(packed: bytes) -> None:
    with pytest.raises(BufferCorrupt, match="'a' is damaged"):
        record_of(packed)


@pytest.mark.parametrize("word", [b'"x"', b"[]", b"{}", b"[null]"])
def test_a_number_of_another_type_is_damage(word: bytes) -> None:
    """No request may fail at it later, as the janitor would that frees the values of an expired buffer."""
    rules: dict[str, Any] = {"quorum_weight": 4.5, "per_contributor": 2, "deadline_seconds": 2.5, "min_count": 3}
    closed = (Closed(0, 2, 2, 2.0, 3, "deadline"), Closed(1, 4, 1, 1.0, None))
    full = spec((2, 3), quorum=5, keep=3, ttl_seconds=9.5, max_norm=1.5, **rules)
    packed = text_of(Record(NAME, full, 7, 1.5, 2.5, 3, 9, 2, 2.0, 6, closed, 3.25, {}, 2.25, {"x": 1.5}))
    numbers = [*re.finditer(rb"(?<=[\[,:])[\d.]+(?=[,\]}])", packed)]
    assert len(numbers) == 10 + 9 + 11
    for number in numbers:
        with pytest.raises(BufferCorrupt, match="'a' is damaged"):
            record_of(packed[: number.start()] + word + packed[number.end() :])


@pytest.mark.parametrize(
    ("member", "wrong"),
    [
        (rb"\{.*?\}", [b"7", b'"x"', b"null", b'{"a":[]}']),
        (rb"\[2,3\]", [b'""', b"{}", b"[[]]", b"[true]", b"[2.0]", b"[-1]", b"[4611686018427387904]"]),
        (rb'"allow"', [b"null", b"[]", b'"x"', b"1"]),
        (rb'\["x","y"\]', [b"1", b'"x"', b"[[]]", b"[{}]", b"[null]", b"[]"]),
        (rb'"deadline"(?=,\{)', [b"null", b"[]", b'"x"', b"1"]),
        (rb'(?<="deadline",)\{"x":1\}', [b"null", b"[]", b'"x"', b"1", b'{"x":[]}', b'{"x":"1"}']),
        (rb'\{"y":1.5\}', [b"null", b"[]", b"1", b'{"y":[]}', b'{"y":"1"}', b'{"y":1}', b'{"y":null}']),
        (rb'\{"x":2\}', [b"null", b"[]", b"[[]]", b'"x"', b"1", b'{"x":[]}', b'{"x":1.5}']),
    ],
)
def test_a_member_that_no_version_has_packed_is_damage(member: bytes, wrong: Sequence[bytes]) -> None:
    closed = (Closed(0, 2, 2, 2.0, 3, "deadline", {"x": 1}),)
    full = spec((2, 3), quorum=2, contributors=("x", "y"))
    packed = text_of(Record(NAME, full, 7, 1.5, 2.5, 3, 9, 2, 2.0, 6, closed, 3.25, {"x": 2}, 2.25, {"y": 1.5}))
    assert len(re.findall(member, packed)) >= 1
    for each in wrong:
        with pytest.raises(BufferCorrupt, match="'a' is damaged"):
            record_of(re.sub(member, lambda _: each, packed, count=1))  # noqa: B023 - it is called here


KNOWN = Known(
    bytes(16), {"a": {"name": "a", "updated": True}, "b": {"name": "b", "count": 3}}, {"a": 7, "b": 0}, ("1-0-2",)
)


@pytest.mark.parametrize(
    "known", [KNOWN, KNOWN._replace(by_prefix=True), KNOWN._replace(answer=b"\0\xff"), Known(bytes(16), {}, {})]
)
def test_what_a_key_answers_comes_back(known: Known) -> None:
    assert unpack_known(pack_known(known), [] if known.by_prefix else [*known.receipts]) == known


def test_what_a_key_answers_is_read_as_it_was_written() -> None:
    """Of columns, order, ids and sources; with the names, and with what is kept of the answer."""
    common = b'[[[["updated"],[[true]]],[["count"],[[3]]]],[0,1],[7,-7],["1-0-2"],'
    for known, rest in (
        (KNOWN, b"null]"),
        (KNOWN._replace(by_prefix=True), b'["a","b"]]'),
        (KNOWN._replace(answer=b"\0\xff"), b'null,"AP8="]'),
    ):
        assert pack_known(known) == bytes(16) + common + rest
        assert unpack_known(bytes(16) + common + rest, ["a", "b"]) == known


def test_what_versions_before_called_an_epoch_is_a_step() -> None:
    columns = b'[[[["epoch","closed_epochs"],[[3],[[2]]]]],[0],[7],[],null]'
    assert unpack_known(bytes(16) + columns, ["w"]).receipts == {"w": {"name": "w", "step": 3, "closed_steps": [2]}}
    name, refusal = Part("p", 2, 3, "ann", b"", 9.0).name, ["stale_epoch", "Epoch 7 is over", {"epoch": 7}]
    push = Push.of(unpack_older(name, orjson.dumps([3, 0.5, 7, None, 1.0, 901.0, [], refusal])))
    with pytest.raises(StaleStep, match="Epoch 7 is over") as caught:
        push.check_not_refused()
    assert caught.value.context == {"step": 7}


OTHERS = [
    b"[[],[0],[1],[],null]",
    b"[[[9,[]]],[],[],[],null]",
    *(b"[[],[],[],[],null,%s]" % answer for answer in (b"1", b"null", b'"YQ"', b'"YQ==",""')),
]


@pytest.mark.parametrize("packed", [b"", b"[]", *OTHERS, b"x\x9c"])
def test_what_nothing_has_packed_with_a_key_is_damage(packed: bytes) -> None:
    with pytest.raises(BufferCorrupt, match="outcome of this Idempotency-Key is damaged"):
        unpack_known(bytes(16) + packed, ["a"])


def test_a_push_is_unpacked_as_it_was_packed() -> None:
    push = Push(3, 0.5, 7, "ann", 1.0, 901.0)
    gradients: dict[str, list[Any]] = {"w": [4, [[5], [2, 3], "float32", 1.0], 24], "b": [6, None, 0]}
    push = push.with_part(2, StagedPart("2:ab", gradients, {"w": 1.5}))
    name = Part("p", 2, 3, "ann", b"", 9.0).name
    for each in (push, push.refused(UnknownBuffer("There is none", buffer="w"))):
        record = unpack_record(name, pack_record(each.record(name)))
        assert (Push.of(record), record.expires, record.spec.nbytes) == (each, 902.0, each.nbytes)
        assert record.values == [5] * (each is push)


@pytest.mark.parametrize("place", [[[5], [2, 3], "float32", 1.0], [5]])  # LMDB's, and PostgreSQL's
def test_a_push_of_an_older_format_is_read(place: list[Any]) -> None:
    name = Part("p", 2, 3, "ann", b"", 9.0).name
    packed = orjson.dumps(
        [3, 0.5, 7, None, 1.0, 901.0, [[2, "2:ab", {"w": [4, place, 24], "b": [6, None, 0]}, {}]], None]
    )
    push = Push.of(unpack_older(name, packed))
    assert (push.until, push.numbers, push.nbytes) == (901.0, [2], 24)
    assert [(buffer, staged.place) for _, buffer, staged in push.gradients] == [("w", [[5], *place[1:]]), ("b", None)]


@pytest.mark.parametrize(
    "packed",
    [
        *(
            b"",
            b"[]",
            b"[1,2]",
            b"{}",
            b"[1,1,1,1,1,1,[[1]],null]",
            b"[1,1,1,1,1,1,7,null]",
            b'["x",1,1,"x",1,1,[],null]',
        ),
        b"[2,1,null,3,1,9,[],null]",
        b"[2,1,null,null,1,9,[],[1]]",
        b'[2,1,null,null,1,9,[["1","m",{"w":[1,null,0]},{}]],null]',
        b'[2,1,null,null,1,9,[[1,"m",{"w":[1,2,3]},{}]],null]',
        b'[2,1,null,null,1,9,[[1,"m",{"w":[1,[2],"3"]},{}]],null]',
    ],
)
def test_a_damaged_push_is_reported_as_damage(packed: bytes) -> None:
    with pytest.raises(BufferCorrupt):
        unpack_older(Part("p", 1, 2, "", b"", 9.0).name, packed)
