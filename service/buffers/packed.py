"""Records and idempotency keys as stores keep them: lists that JSON can hold, and checksums.

What most buffers do not use takes no bytes: rules with their defaults, contributors, and deadlines.
"""

from __future__ import annotations

import array
import base64
import hashlib
import itertools
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, get_args

import orjson
import xxhash

from service.buffers.names import BufferName
from service.buffers.record import Key, Known, Record, Spec
from service.buffers.specs import RULES
from service.buffers.steps import Closed, ClosedBy
from service.dtypes import DTYPES
from service.errors import BufferCorrupt, StoreFailed

FORMAT = 9
"""The number of the format of all stores. Every change of what they hold raises it, and it never goes back."""

READABLE = ("7", "8", str(FORMAT))
"""The formats that this version reads. A server makes 9 of 7 and 8.

Records of 7 do not say when the last step closed: then it is the last change before the upgrade.
"""

FINGERPRINT_BYTES = 16
"""Length of the fingerprint of a request with a key."""

SEAL_BYTES = 8
"""Length of a checksum."""

DIGEST_BYTES = 16
"""Length of the digest of a key: with 128 bits no two keys are ever expected to share a digest."""

_STATE = ("updated", "closed", "step", "version", "count", "weight")
"""The members of every receipt behind the name. Only the answer to a new buffer, or to new rules, has others."""

_NUMBERS = struct.Struct("<QddQQQdQdd")
"""The numbers of a record: id, created, updated, step, version, count, weight, value, began and closed_at."""

_SHAPES = [_STATE, (*_STATE, "closed_by", "contributors")]
"""The members of receipts that are stored as a number: those of a receipt, and those of a closed step."""

MOST_SPECS = 128
"""Different specifications that are remembered: at their limits, each takes 0.1 MB."""

_LARGE_BYTES = 1 << 14
"""Bytes of a record that is remembered once it is read, if its buffer is a client's: 2,000 closed steps take 2 ms."""

_MOST_LARGE = 16
"""Large records that are remembered: each takes up to 2 MB."""

_REASONS = {*get_args(ClosedBy)}
"""What may close a step."""

_COMPRESSED_FROM = 256
"""Bytes of receipts that are compressed: to compress fewer takes longer than to store them."""


def check_format(found: str, store: str, readable: Sequence[str] = READABLE) -> None:
    """Raise `StoreFailed` if the format that was found in the store is not `readable`."""
    if found not in readable:
        raise StoreFailed(
            f"{store} has format {found}, but this version of gradserve knows format {FORMAT}. Use the version that"
            " wrote it. Or carry its buffers over: run `gradserve export FILE` with that version, then"
            " `gradserve import FILE` with this version and an empty store"
        )


def present(word: str) -> str:
    """Return the present name of what versions before 0.4 called an epoch."""
    return word.replace("epoch", "step")


def spec_of(members: Mapping[str, Any]) -> Spec:
    """Return the specification whose `as_json` has these members. Absent rules have their defaults."""
    if members.get("contributors") is not None:
        members = {**members, "contributors": tuple(members["contributors"])}
    return Spec(**{**members, "shape": tuple(members["shape"]), "dtype": DTYPES[members["dtype"]]})


def seed_of(text: bytes | memoryview) -> int:
    """Return the seed of the checksum of what is stored under this name: in another place, it is damaged, too."""
    return xxhash.xxh3_64_intdigest(text)


def seal(data: bytes, seed: int) -> bytes:
    """Return the data and its checksum."""
    return data + xxhash.xxh3_64_digest(data, seed)


def unseal(sealed: bytes | memoryview, seed: int) -> memoryview | None:
    """Return the data without its checksum; None if the two do not match."""
    data = memoryview(sealed)[:-SEAL_BYTES]
    return data if xxhash.xxh3_64_digest(data, seed) == bytes(sealed[-SEAL_BYTES:]) else None


def pack_record(record: Record) -> bytes:
    """Return a record as it is stored under its name: JSON, sealed."""
    spec = record.spec
    fields = [
        orjson.Fragment(spec.text),
        record.id,
        record.created,
        record.updated,
        record.step,
        record.version,
        record.count,
        record.weight,
        record.value,
        [_pack_closed(spec, *pair) for pair in zip(record.closed, (None, *record.closed), strict=False)],
    ]
    if record.began is not None or record.contributors_in or record.absent or record.about:
        fields += [record.began, record.contributors_in]
    if record.about:
        fields += [record.closed_at, record.absent, record.about]
    elif record.closed_at is not None or record.absent:
        fields += [record.closed_at, record.absent] if record.absent else [record.closed_at]
    return seal(orjson.dumps(fields), seed_of(record.full_name.joined.encode()))


def unpack_record(name: BufferName, sealed: bytes | memoryview) -> Record:
    """Return the record of this name. Raises `BufferCorrupt` for what no version has packed."""
    if len(sealed) < _LARGE_BYTES or name.namespace.startswith("+"):
        return _unpacked(name, sealed)
    return _unpacked_large(name, bytes(sealed))


def _unpacked(name: BufferName, sealed: bytes | memoryview) -> Record:
    packed = unseal(sealed, seed_of(name.joined.encode())) or b""
    try:
        members, *state = orjson.loads(packed)
        spec = _shared_spec(orjson.dumps(members))
        state[8] = _unpack_closed(spec, state[8])
        began, contributors, closed_at, absent, about = _later(state[9:])
        if closed_at is None and state[8]:
            closed_at = state[2]  # a record of a format before 8
        _NUMBERS.pack(*state[:7], *map(_zeroed, (state[7], began, closed_at)))  # refuses other types
        _check_numbers(contributors)
        _check_numbers(absent, float)
        _check(isinstance(about, dict))
        return Record(name, spec, *[*state[:9], began, contributors, closed_at, absent, about, len(packed)])
    except (LookupError, OverflowError, TypeError, ValueError, struct.error):
        problem = f"The stored record of the buffer {str(name)!r} is damaged on the disk"
        raise BufferCorrupt(problem, buffer=str(name)) from None


_unpacked_large = lru_cache(_MOST_LARGE)(_unpacked)


def sound(stored: Iterable[tuple[BufferName, bytes | memoryview]]) -> Iterator[tuple[BufferName, Record | None]]:
    """Yield the records of these names, None in place of a damaged record."""
    for name, sealed in stored:
        try:
            yield name, unpack_record(name, sealed)
        except BufferCorrupt:
            yield name, None


@lru_cache(MOST_SPECS)
def _shared_spec(text: bytes) -> Spec:
    """Return the specification of this text: one for all buffers that have it. Raises for what no rule allows."""
    members = orjson.loads(text)
    _check(isinstance(members, dict) and isinstance(members["shape"], list))
    _check(all(type(size) is int and size >= 0 for size in members["shape"]))
    _check(all(RULES[name].permits(value) for name, value in members.items() if name in RULES))
    spec = spec_of(members)
    _check(spec.nbytes < 1 << 63)
    return spec


def _check(is_packed: bool) -> None:
    """Raise `ValueError` for what no version has packed."""
    if not is_packed:
        raise ValueError


def _later(fields: Sequence[Any]) -> Sequence[Any]:
    """Return began, contributors_in, closed_at, absent and about from what a record has of them."""
    found = fields if len(fields) > 1 else [None, {}, *fields]
    return [*found, *(None, {}, {})[len(found) - 2 :]]


def _check_numbers(contributors: Any, kind: type = int) -> None:
    """Raise `ValueError` unless these are numbers of adds, or times, by contributor."""
    if contributors != {}:
        _check(isinstance(contributors, dict) and {*map(type, contributors.values())} == {kind})


def _zeroed(value: Any) -> Any:
    """Return the value, or 0 for None."""
    return 0 if value is None else value


def _pack_closed(spec: Spec, closed: Closed, before: Closed | None) -> Sequence[Any]:
    """Return the numbers of a closed step, and without its usual reason that and who was in it, unless as `before`."""
    short = (closed.step, closed.version, closed.count, closed.weight, closed.value)
    if not closed.contributors and closed.closed_by == _usual(spec, closed.count):
        return short
    if before is not None and before.contributors == closed.contributors:
        return (*short, closed.closed_by)
    return (*short, closed.closed_by, closed.contributors)


def _unpack_closed(spec: Spec, packed: Sequence[Sequence[Any]]) -> tuple[Closed, ...]:
    """Return the closed steps. All are checked at once: a buffer may keep thousands. Raises for other types."""
    if not packed:
        return ()
    whole, inside = [], dict[str, int]()
    for each in packed:
        inside = {} if len(each) == 5 else inside if len(each) == 6 else each[6]
        whole.append((*each[:5], _usual(spec, each[2]) if len(each) == 5 else each[5], inside, *each[7:]))
    *numbers, reasons, contributors = zip(*whole, strict=True)
    for of_all in (*numbers[:3], map(_zeroed, numbers[4])):
        array.array("Q", of_all)
    array.array("d", numbers[3])
    _check({*reasons} <= _REASONS)
    for each in {id(each): each for each in contributors}.values():
        _check_numbers(each)
    return tuple(map(Closed._make, whole))


def _usual(spec: Spec, count: int) -> ClosedBy:
    """Return what has closed a step that is stored without a reason."""
    return "quorum" if spec.quorum is not None and count >= spec.quorum else "take"


def digest_of(key: Key) -> bytes:
    """Return the name of an idempotency key in a store."""
    return hashlib.blake2b(f"{key.caller}\0{key.text}".encode(), digest_size=DIGEST_BYTES).digest()


def pack_known(known: Known) -> bytes:
    """Return what a store keeps with a key: the fingerprint and, as JSON, columns, which compress well.

    Receipts with the same members share their columns. Of each id its distance from the one before is kept.
    """
    groups: dict[tuple[str, ...], list[list[Any]]] = {}
    order = []
    for receipt in known.receipts.values():
        members = (*receipt,)[1:]
        groups.setdefault(members, []).append([*receipt.values()][1:])
        order.append([*groups].index(members))
    shapes = [_SHAPES.index(each) if each in _SHAPES else each for each in groups]
    columns = [(shape, [*zip(*rows, strict=True)]) for shape, rows in zip(shapes, groups.values(), strict=True)]
    steps = [after - before for before, after in itertools.pairwise([0, *known.ids.values()])]
    names = [*known.receipts] if known.by_prefix else None
    answer = [base64.b64encode(known.answer).decode()] if known.answer else []
    text = orjson.dumps([columns, order, steps, known.sources, names, *answer])
    return known.fingerprint + (text if len(text) < _COMPRESSED_FROM else zlib.compress(text, 1))


def unpack_known(packed: bytes | memoryview, names: Sequence[str]) -> Known:
    """Return what `pack_known` took. Raises `BufferCorrupt`.

    `names` are those of the request's buffers, in its order; a request for a prefix has its own. Those of a request
    with another fingerprint fit nothing: see `check_same`.
    """
    fingerprint, text = bytes(packed[:FINGERPRINT_BYTES]), packed[FINGERPRINT_BYTES:]
    try:
        members = orjson.loads(text if text[:1] == b"[" else zlib.decompress(text))
        columns, order, steps, sources, own, answer = members if len(members) == 6 else [*members, ""]
        groups = [
            (_SHAPES[shape] if isinstance(shape, int) else [*map(present, shape)], zip(*each, strict=True))
            for shape, each in columns
        ]
        receipts = [dict(zip(groups[place][0], next(groups[place][1]), strict=True)) for place in order]
        names = names if own is None else own
        by_name = {name: {"name": name, **receipt} for name, receipt in zip(names, receipts, strict=False)}
        ids = dict(zip(names, itertools.accumulate(steps), strict=False))
        return Known(fingerprint, by_name, ids, tuple(sources), own is not None, base64.b64decode(answer))
    except (LookupError, StopIteration, TypeError, ValueError, zlib.error):
        raise BufferCorrupt("The stored outcome of this Idempotency-Key is damaged on the disk") from None
