"""The metadata of imported files: valid metadata is restored, other metadata is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from service.buffers.lmdb import LmdbStore
from service.buffers.memory import MemoryStore
from service.buffers.transfer import export, read, restore
from service.errors import GradserveError, MalformedBody, NonfiniteGradient
from service.limits import Limits
from tests.buffers.calls import value
from tests.buffers.stores import Clock
from tests.serving import wait_until

FORM: dict[str, Any] = {"shape": [2], "dtype": "float32"}
RULES = {**FORM, "nonfinite": "reject", "quorum": 9, "keep": 3, "ttl_seconds": 10.0, "max_norm": 2.5}
STATE: dict[str, Any] = {"spec": RULES, "step": 1, "version": 5, "count": 3, "weight": 2.5, "created": 1e9}

LATER = {
    "min_count": 1,
    "per_contributor": 1,
    "deadline_seconds": None,
    "quorum_weight": None,
    "contributors": None,
    "life": None,
}
"""Rules that a file may lack, with their defaults."""

HELD: list[Any] = [[], {"": 1}, {"a": 0}, {"a": 1.5}]
"""Contributors that no step has."""

NUMBERS = ("step", "version", "count")

LIMITS = Limits(max_tensor_bytes=1 << 20)


def saved(path: Path, about: str) -> Path:
    file = path / "x.safetensors"
    save_file({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}, file, {"buffers": about})
    return file


def with_rules(**rules: Any) -> dict[str, Any]:
    return {**STATE, "spec": {**RULES, **rules}}


def test_valid_metadata_is_restored(tmp_path: Path, open_memory: Callable[[], MemoryStore]) -> None:
    file = saved(tmp_path, json.dumps({"a": STATE, "b": {**STATE, "weight": 0, "spec": FORM}}))
    store = open_memory()
    restore(store, read(file, LIMITS, 200))
    record = store.record("a")
    assert record.spec.as_json() == {**RULES, **LATER}
    assert (record.step, record.version, record.count, record.weight, record.created) == (1, 5, 3, 2.5, 1e9)
    assert store.record("b").spec.keep == 1
    assert value(store, "b").tolist() == [1, 1]


@pytest.mark.parametrize("rules", [{"min_count": 2}, {"quorum": 9, "contributors": ["x"]}])
def test_rules_that_an_older_version_has_allowed_are_restored(
    tmp_path: Path, open_memory: Callable[[], MemoryStore], rules: dict[str, Any]
) -> None:
    store = open_memory()
    restore(store, read(saved(tmp_path, json.dumps({"a": with_rules(**rules), "b": STATE})), LIMITS, 200))
    assert store.record("a").spec.as_json() == {**RULES, **LATER, **rules}


def test_a_running_step_is_restored(tmp_path: Path, open_memory: Callable[[], MemoryStore], clock: Clock) -> None:
    """Its contributors are in it, and its deadline counts on: if it is over, the step closes at once."""
    state = {**with_rules(deadline_seconds=5.0, ttl_seconds=None), "began": clock.now - 4, "contributors": {"x": 2}}
    file = saved(tmp_path, json.dumps({"a": state, "b": {**state, "began": clock.now - 5}}))
    store = open_memory()
    restore(store, read(file, LIMITS, 200))
    record = store.record("a")
    assert (record.deadline_at, record.contributors_in, record.step) == (clock.now + 1, {"x": 2}, 1)
    wait_until(lambda: store.record("b").step == 2)
    (snapshot,) = store.read(["b"], 1)
    assert snapshot.receipt()["closed_by"] == "deadline"
    assert snapshot.receipt()["contributors"] == {"x": 2}


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ("{nonsense", "is not JSON: "),
        ("[1]", r"is \[1\], but must be an object"),
        ("null", "is null, but"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"a": 1, "a": 2}', "has two members named 'a'"),
        ("", "JSON"),
    ],
)
def test_metadata_that_is_not_an_object_is_refused(tmp_path: Path, about: str, words: str) -> None:
    with pytest.raises(MalformedBody, match=f"^The metadata of the buffers in .* {words}" if about else words):
        read(saved(tmp_path, about), LIMITS, 200)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (7, "is 7, but must be an object"),
        ([], r"is \[\], but must be an object"),
        *[({member: STATE[member] for member in STATE if member != gone}, f"lacks {gone}") for gone in STATE],
        ({**STATE, "extra": 1}, "has 'extra', which this version does not know"),
        ({**STATE, "spec": None}, "has spec null, but it must be an object"),
        ({**STATE, "weight": "x"}, "has weight 'x', but it must be a number"),
        ({**STATE, "weight": True}, "has weight true, but it must be a number"),
        ({**STATE, "created": None}, "has created null, but it must be seconds since 1970"),
        ({**STATE, "created": 1e12}, r"has created 1000000000000.0, but .* from 0 to 10\^11$"),
        ({**STATE, "step": -1}, "has step -1, but it must be an integer from 0 to 9007199254740992"),
        ({**STATE, "version": 1.0}, "has version 1.0, but"),
        ({**STATE, "count": True}, "has count true, but"),
        ({**STATE, "count": 1 << 63}, "has count 9223372036854775808, but"),
        *[({**STATE, member: (1 << 53) + 1}, f"has {member} 9007199254740993, but") for member in NUMBERS],
        *[({**STATE, member: -1}, f"has {member} -1, but") for member in NUMBERS],
        *[({**STATE, "weight": weight}, "has weight ") for weight in (math.nan, -math.inf, 10**400)],
        *[({**STATE, "created": created}, "has created ") for created in (math.nan, math.inf, -1, 10**400)],
        *[(with_rules(ttl_seconds=seconds), "has spec.ttl_seconds ") for seconds in (math.nan, math.inf, 10**400)],
        ({**STATE, "spec": {"dtype": "float32"}}, "lacks spec.shape"),
        ({**STATE, "spec": {"shape": [2]}}, "lacks spec.dtype"),
        (with_rules(shape=2), "has spec.shape 2, but it must be a list"),
        (with_rules(shape=["2"]), "has spec.shape"),
        (with_rules(shape=[-2]), "has spec.shape"),
        (with_rules(dtype="int7"), "has spec.dtype 'int7', but it must be one of float16, bfloat16"),
        (with_rules(dtype="int64"), "has spec.dtype 'int64', but"),
        (with_rules(dtype=["float32"]), "has spec.dtype"),
        (with_rules(nonfinite="maybe"), "has spec.nonfinite 'maybe', but it must be allow or reject"),
        (with_rules(quorum=0), "has spec.quorum 0, but"),
        (with_rules(quorum="9"), "has spec.quorum '9', but"),
        (with_rules(keep=None), "has spec.keep null, but"),
        (with_rules(keep=2001), "has spec.keep 2001, but"),
        (with_rules(ttl_seconds=0), "has spec.ttl_seconds 0, but"),
        (with_rules(max_norm=0), "has spec.max_norm 0, but"),
        (with_rules(max_norm=math.inf), "has spec.max_norm "),
        (with_rules(ttl_seconds="10"), "has spec.ttl_seconds '10', but"),
        *[(with_rules(**{name: 0}), f"has spec.{name} 0, but") for name in LATER if name != "contributors"],
        *[(with_rules(contributors=names), "has spec.contributors ") for names in ([], ["a", "a"], [""], [3], "a")],
        ({**STATE, "began": "then"}, "has began 'then', but it must be seconds since 1970"),
        *[({**STATE, "contributors": held}, "has contributors ") for held in HELD],
        (with_rules(extra=1), "has 'spec.extra', which this version does not know"),
    ],
)
def test_invalid_metadata_of_a_buffer_is_refused(tmp_path: Path, one: Any, words: str) -> None:
    file = saved(tmp_path, json.dumps({"a": STATE, "b": one}))
    with pytest.raises(MalformedBody, match=f"^The metadata of the buffer 'b' in .* {words}"):
        read(file, LIMITS, 200)


UNUSABLE = ["~ann/x/y", "~/x", "~ann", "~ann/", "~a b/x", "~\0/x", f"~{'a' * 101}/x", "~\u00e9/x", "~~ann/x", "~a/.."]


@pytest.mark.parametrize("name", [*UNUSABLE, "x/y", "..", ""])
def test_a_name_that_no_client_can_use_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "x.safetensors"
    save_file({name: np.ones(2, np.float32)}, file, {"buffers": json.dumps({name: STATE})})
    with pytest.raises(GradserveError, match="buffer"):
        read(file, LIMITS, 200)


def test_a_tensor_without_metadata_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MalformedBody, match="has the tensor 'b', which its metadata does not describe"):
        read(saved(tmp_path, json.dumps({"a": STATE})), LIMITS, 200)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, json.dumps({"a": STATE, "b": STATE}))
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(MalformedBody):
            read(file, LIMITS, 200)


def test_what_was_imported_can_be_exported_and_imported_again(tmp_path: Path) -> None:
    """The extremes of a state, as JSON may write them: integers in place of numbers with a fraction."""
    largest = {"step": 1 << 53, "version": 1 << 53, "count": 1 << 53, "weight": 1 << 62, "created": 10**11}
    state = {**STATE, **largest}
    names = ["a", f"~{'n' * 100}/{'b' * 200}"]
    file, copy = tmp_path / "x", tmp_path / "copy"
    save_file(
        {name: np.ones(2, np.float32) for name in names}, file, {"buffers": json.dumps(dict.fromkeys(names, state))}
    )
    with closing(LmdbStore(tmp_path / "store", max_bytes=1 << 24)) as store:
        restore(store, read(file, LIMITS, 200))
        assert [type(member) for member in (store.record("a").weight, store.record("a").created)] == [float, float]
    assert export(f"lmdb:{tmp_path}/store", 1 << 24, copy)[0] == 2
    again = {change.record.full_name.joined: change.record for change in read(copy, LIMITS, 200).buffers}
    assert again.keys() == {*names}
    for record in again.values():
        assert {name: getattr(record, name) for name in largest} == largest


def test_a_value_that_its_rules_forbid_is_refused(tmp_path: Path, open_memory: Callable[[], MemoryStore]) -> None:
    file = tmp_path / "x"
    save_file({"a": np.array([1, np.nan], np.float32)}, file, {"buffers": json.dumps({"a": STATE})})
    store = open_memory()
    with pytest.raises(NonfiniteGradient):
        restore(store, read(file, LIMITS, 200))
    assert store.records() == []
