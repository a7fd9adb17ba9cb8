"""The metadata of imported files: valid metadata is restored, other metadata is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from service.buffers.transfer import read, restore
from service.errors import MalformedBody
from service.limits import Limits
from tests.buffers.calls import Clock, open_memory, value

RULES: dict[str, Any] = {
    "shape": [2],
    "dtype": "float32",
    "nonfinite": "reject",
    "quorum": 9,
    "keep": 3,
    "ttl_seconds": 10.0,
}
STATE: dict[str, Any] = {"spec": RULES, "epoch": 1, "version": 5, "count": 3, "weight": 2.5, "created": 1e9}

LIMITS = Limits(max_tensor_bytes=1 << 20)


def saved(path: Path, about: str) -> Path:
    file = path / "x.safetensors"
    save_file({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}, file, {"buffers": about})
    return file


def with_rules(**rules: Any) -> dict[str, Any]:
    return {**STATE, "spec": {**RULES, **rules}}


def test_valid_metadata_is_restored(tmp_path: Path, clock: Clock) -> None:
    few = {"shape": [2], "dtype": "float32"}
    file = saved(tmp_path, json.dumps({"a": STATE, "b": {**STATE, "weight": 0, "spec": few}}))
    store = open_memory(clock)
    restore(store, read(file, LIMITS, 200))
    record = store.record("a")
    assert record.spec.as_json() == RULES
    assert (record.epoch, record.version, record.count, record.weight, record.created) == (1, 5, 3, 2.5, 1e9)
    assert store.record("b").spec.keep == 1
    assert value(store, "b").tolist() == [1, 1]


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ("{nonsense", "is not JSON: "),
        ("[1]", r"is \[1\], but must be an object"),
        ("null", "is null, but"),
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
        ({**STATE, "extra": 1}, "has 'extra', which is unknown"),
        ({**STATE, "spec": None}, "has spec null, but it must be an object"),
        ({**STATE, "weight": "x"}, "has weight 'x', but it must be a number"),
        ({**STATE, "weight": True}, "has weight true, but it must be a number"),
        ({**STATE, "created": None}, "has created null, but it must be seconds since 1970"),
        (
            {**STATE, "created": 1e12},
            r"has created 1000000000000.0, but .* from 0 to 10\^11$",
        ),
        ({**STATE, "epoch": -1}, "has epoch -1, but it must be an integer, 0 or more"),
        ({**STATE, "version": 1.0}, "has version 1.0, but"),
        ({**STATE, "count": True}, "has count true, but"),
        ({**STATE, "count": 1 << 63}, "has count 9223372036854775808, but"),
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
        (with_rules(keep=1001), "has spec.keep 1001, but"),
        (with_rules(ttl_seconds=0), "has spec.ttl_seconds 0, but"),
        (with_rules(ttl_seconds="10"), "has spec.ttl_seconds '10', but"),
        (with_rules(extra=1), "has 'spec.extra', which is unknown"),
    ],
)
def test_invalid_metadata_of_a_buffer_is_refused(tmp_path: Path, one: Any, words: str) -> None:
    file = saved(tmp_path, json.dumps({"a": STATE, "b": one}))
    with pytest.raises(MalformedBody, match=f"^The metadata of the buffer 'b' in .* {words}"):
        read(file, LIMITS, 200)
