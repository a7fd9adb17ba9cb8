"""The changes of the buffers that outputs of a job go to, and what a store keeps of the other outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.api.buffers.preconditions import match_of
from service.api.buffers.request import RECEIPT_BYTES
from service.api.buffers.routes import refusal_of
from service.api.http.call import Call
from service.api.operators.job import BufferUse, Use
from service.buffers.changes import Add, Change
from service.buffers.record import MAX_ANSWER_BYTES, Spec
from service.buffers.sets import Set, Unchanged
from service.codecs import safetensors
from service.dtypes import FLOATS, NAMES, Array
from service.errors import DtypeMismatch, InvalidParameter


def changes_of(call: Call, use: BufferUse, outputs: Mapping[str, Any], sources: Mapping[Use, str] = {}) -> list[Change]:
    """Return the changes of the buffers that outputs go to, computed from `sources` in these states.

    Raises `DtypeMismatch` and `InvalidParameter`.
    """
    changes, match = dict[str, Change](), match_of(call)
    states = {one.buffer: state for one, state in sources.items() if use.overwrites and one.step is None}
    for tensor, output in outputs.items():
        target = use.target_of(tensor)
        if target is None:
            continue
        if NAMES[output.dtype] not in FLOATS.dtypes:
            raise DtypeMismatch(f"{tensor} is {output.dtype}, but a buffer holds floats", tensor=tensor)
        name = target.buffer
        if name in changes:
            problem = f"{tensor} goes to the buffer {name!r} as another output does, but a request may change each once"
            raise InvalidParameter(problem, parameter="set" if target.overwrites else "into")
        given: Any = {"name": name, "match": match, "state": states.pop(name, None), "life": use.life}
        given |= {"tensor": tensor, "gradient": output}
        if target.overwrites:
            spec = Spec(output.shape, output.dtype, life=use.life)
            changes[name] = Set(spec=spec, refusal=refusal_of(call, name, spec), **given)
        else:
            changes[name] = Add(weight=use.weight, step=use.step, contributor=use.contributor, **given)
    call.reserve(RECEIPT_BYTES * len(changes))
    return [*changes.values(), *(Unchanged(name=name, state=state) for name, state in states.items())]


def kept_of(answered: Mapping[str, Array]) -> bytes:
    """Return what the store keeps of the answer for a repeated request: nothing if that is large."""
    if sum([output.nbytes for output in answered.values()]) > MAX_ANSWER_BYTES:
        return b""
    file = b"".join(safetensors.encode(answered, aligned=False))
    return file if len(file) <= MAX_ANSWER_BYTES else b""
