"""The calls of several buffers at once: what to send, and how to read the answer. Both clients share them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import numpy.typing as npt

from gradserve_client._http.outcomes import Answer
from gradserve_client._http.policy import Call
from gradserve_client._wire import answers
from gradserve_client._wire.answers import JSON
from gradserve_client._wire.arguments import answered, as_key, as_name, as_query, check_mapping, check_some
from gradserve_client._wire.codes import Coded
from gradserve_client._wire.specs import Reduce, add_query, rules_json, spec_json
from gradserve_client._wire.tensors import MEDIA_TYPE, Array, TensorLike, encode
from gradserve_client.errors import InvalidInput, mistaken
from gradserve_client.models import BufferInfo, BufferRules, BufferSpec, Receipt, Taken
from gradserve_client.rows import Rows, tensors_of

T = TypeVar("T")

PAGE_BUFFERS = 1000
"""Buffers that one request lists: the most that the server allows."""


def page(kind: str, of: Callable[[Mapping[str, Any]], T], prefix: str, cursor: str) -> Call[tuple[list[T], str | None]]:
    """List some buffers, graphs or runs, and tell where the next ones begin."""
    if not isinstance(prefix, str):
        raise mistaken("prefix", f"is {prefix!r}, but must be a string")

    def read(answer: Answer) -> tuple[list[T], str | None]:
        found = json.loads(answer.body)
        return [of(fields) for fields in found[kind]], found["next_cursor"]

    query = {"prefix": prefix, "cursor": cursor, "limit": PAGE_BUFFERS}
    return Call("GET", f"/v1/{kind}", read, query=query, headers={"Accept": JSON})


def create(specs: Mapping[str, BufferSpec], *, idempotency_key: str | None) -> Call[dict[str, BufferInfo]]:
    """Create several buffers."""
    check_mapping("specs", specs, "specifications")
    described = {as_name(name): _described(name, spec) for name, spec in specs.items()}

    def body(names: Collection[str]) -> list[bytes | memoryview]:
        return [json.dumps({"buffers": {name: described[name] for name in names}}).encode()]

    return Call(
        "POST",
        "/v1/buffers/create",
        answers.infos,
        headers={"Content-Type": JSON, "Accept": JSON},
        body=body(described),
        key=as_key(idempotency_key),
        buffers=described,
        body_for=body,
    )


def _described(name: str, spec: BufferSpec) -> dict[str, Any]:
    try:
        return spec_json(**spec)
    except TypeError as error:
        fault = str(error).removeprefix(f"{spec_json.__name__}() ")
        raise InvalidInput(f"The specification of {name!r}: {fault}", code="invalid_parameter") from None


def accumulate(
    gradients: Mapping[str, TensorLike | Rows | Coded],
    *,
    weight: float,
    step: int | None,
    overwrite: bool = False,
    do_update: bool = True,
    contributor: str | None,
    idempotency_key: str | None,
    life: str | None = None,
) -> Call[dict[str, Receipt]]:
    """Add a gradient to each of several buffers."""
    check_mapping("gradients", gradients, "gradients")
    tensors = {name: tensors_of(gradient, name) for name, gradient in gradients.items()}

    def body(names: Collection[str]) -> list[bytes | memoryview]:
        return encode({place: array for name in names for place, array in tensors[name].items()})

    return Call(
        "POST",
        "/v1/buffers/accumulate",
        answers.receipts,
        query=add_query(weight, step, overwrite, do_update, contributor, life),
        headers={"Content-Type": MEDIA_TYPE, "Accept": JSON},
        body=body(tensors),
        key=as_key(idempotency_key),
        buffers=tensors,
        body_for=body,
    )


def on_several(
    names: Collection[str] | None,
    prefix: str | None,
    action: str,
    read: Callable[[Answer], T],
    *,
    accept: str = JSON,
    query: Mapping[str, Any] | None = None,
    **more: Any,
) -> Call[T]:
    """Return a call of the buffers with these names, or with a prefix: `action` is the end of its path."""
    parameters = as_query({"prefix": prefix, **(query or {})})
    naming = _naming(names, prefix, accept=accept)
    return Call("POST", f"/v1/buffers/{action}", read, query=parameters, **naming, **more)


def value(
    names: Collection[str] | None,
    prefix: str | None,
    *,
    step: int | None,
    reduce: Reduce,
    dtype: npt.DTypeLike | None,
    timeout: float,
    wire_dtype: str | None = None,
    life: str | None = None,
) -> Call[dict[str, Array]]:
    """Read the values of several buffers."""
    query = {"step": step, "reduce": reduce, **answered(dtype, wire_dtype), "life": life}
    return on_several(names, prefix, "value", answers.values, accept=MEDIA_TYPE, query=query, wait=timeout)


def take(
    names: Collection[str] | None,
    prefix: str | None,
    *,
    min_count: int,
    step: int | None,
    timeout: float,
    reduce: Reduce,
    dtype: npt.DTypeLike | None,
    idempotency_key: str | None,
    wire_dtype: str | None = None,
    life: str | None = None,
) -> Call[dict[str, Taken]]:
    """Close the steps of several buffers, and return their values."""
    query = {"min_count": min_count, "step": step, "reduce": reduce, **answered(dtype, wire_dtype), "life": life}
    more: Any = {"accept": MEDIA_TYPE, "query": query, "key": as_key(idempotency_key), "wait": timeout}
    return on_several(names, prefix, "take", answers.taken_by_name, **more)


def close_step(
    names: Collection[str] | None,
    prefix: str | None,
    *,
    min_count: int,
    step: int | None,
    timeout: float,
    idempotency_key: str | None,
    life: str | None = None,
) -> Call[dict[str, Receipt]]:
    """Close the steps of several buffers."""
    query = {"min_count": min_count, "step": step, "return": "receipt", "life": life}
    key = as_key(idempotency_key)
    return on_several(names, prefix, "take", answers.receipts, query=query, key=key, wait=timeout)


def set_rules(
    names: Collection[str] | None, prefix: str | None, rules: BufferRules, *, all: bool, idempotency_key: str | None
) -> Call[dict[str, Receipt]]:
    """Change some rules of several buffers."""
    described = rules_json(rules)

    def body(names: Collection[str]) -> list[bytes | memoryview]:
        return [json.dumps({"names": [*names], **described}).encode()]

    if names is not None and prefix is None and not all:
        naming = _naming(names, None, accept=JSON)
        sent = {**naming, "body": body(naming["buffers"]), "body_for": body}
    else:
        sent = {"body": [json.dumps(described).encode()], "query": _wide(names, prefix, all), "buffers": None}
        sent["headers"] = {"Content-Type": JSON, "Accept": JSON}
    return Call("PATCH", "/v1/buffers", answers.receipts, key=as_key(idempotency_key), **sent)


def delete(prefix: str | None, *, all: bool, idempotency_key: str | None) -> Call[dict[str, Receipt]]:
    """Delete all buffers with a prefix."""
    return Call(
        "DELETE",
        "/v1/buffers",
        answers.receipts,
        query=_wide(None, prefix, all),
        headers={"Accept": JSON},
        key=as_key(idempotency_key),
        buffers=None,
    )


def _wide(names: Collection[str] | None, prefix: str | None, all: bool) -> dict[str, Any]:
    """Return the query of a request for all buffers with a prefix, or for all buffers."""
    if not isinstance(prefix, str | None):
        raise mistaken("prefix", f"is {prefix!r}, but must be a string")
    if (names is not None) + bool(prefix) + bool(all) != 1:
        raise InvalidInput(
            "Give either a prefix that is not empty, or all=True for all buffers" + ", or names" * (names is not None),
            code="invalid_parameter",
        )
    return as_query({"all": True} if all else {"prefix": prefix})


def _naming(names: Collection[str] | None, prefix: str | None, *, accept: str) -> dict[str, Any]:
    """Return the fields of a request for several buffers that depend on their names."""
    if (names is None) is (prefix is None):
        raise InvalidInput("Give either names or prefix", code="invalid_parameter")
    if names is None:
        return {"headers": {"Accept": accept}, "buffers": None}
    if isinstance(names, str):
        raise mistaken("names", f"is {names!r}, but must be a list of names")
    headers = {"Content-Type": JSON, "Accept": accept}
    check_some("names", names)
    names = [as_name(name) for name in names]
    return {"headers": headers, "body": _named(names), "buffers": names, "body_for": _named}


def _named(names: Collection[str]) -> list[bytes | memoryview]:
    return [json.dumps({"names": [*names]}).encode()]
