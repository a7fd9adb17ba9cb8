"""The media types of a request's body and of its answer, and the parameters of its query."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ValidationError

from service.api.http.answer import JSON
from service.api.http.body import CODINGS
from service.api.http.call import Call
from service.codecs import json as json_codec
from service.codecs import safetensors
from service.errors import Invalid, InvalidParameter, NotAcceptable, UnknownParameter, UnsupportedMediaType, must, shown

M = TypeVar("M", bound=BaseModel)

MEDIA_TYPES = (JSON, safetensors.MEDIA_TYPE)

PATCH_TYPES = (JSON, "application/merge-patch+json")
"""The types of a PATCH, which means what RFC 7396 says: an absent member stays, and null ends it."""


def media_types(call: Call, takes: Sequence[str] = MEDIA_TYPES) -> tuple[str, str]:
    """Return the media types of the body and of the answer. They are the same unless `Accept` names another.

    The body must have one of the types that the endpoint `takes`, or of a PATCH. Raises `UnsupportedMediaType` and
    `NotAcceptable`.
    """
    header = call.headers.get(b"content-type", b"application/json").decode("latin-1")
    sent = header.partition(";")[0].strip().lower()
    known = PATCH_TYPES if call.method == "PATCH" else takes
    has_body = call.headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in call.headers
    if has_body and sent not in known:
        fields = dict.fromkeys(["Accept", "Accept-Patch"] if known is PATCH_TYPES else ["Accept"], ", ".join(known))
        raise UnsupportedMediaType(f"Content-Type is {shown(header)}, but must be {' or '.join(known)}", fields)
    if sent not in MEDIA_TYPES:
        sent = JSON  # an empty body may have any type: curl -d '' calls it a form
    if b"accept" not in call.headers:
        return sent, sent
    accepted = call.joined(b"accept")
    if accepted == "*/*" or not accepted.strip(" ,"):
        return sent, sent
    ranges = dict(map(_range, accepted.split(",")))
    anything = ranges.get("application/*", ranges.get("*/*", (0.0, False)))
    weights = {media_type: ranges.get(media_type, (anything[0], False)) for media_type in (sent, *MEDIA_TYPES)}
    best = max(weights, key=lambda media_type: weights[media_type])  # if weights are equal, the type of the request
    if not weights[best][0] > 0:
        raise NotAcceptable(f"Accept is {shown(accepted)}, but must allow one of {', '.join(MEDIA_TYPES)}")
    return sent, best


def _range(text: str) -> tuple[str, tuple[float, bool]]:
    """Parse a range of `Accept`, or a coding. Return its name, its weight, and True: a name comes before `*/*`."""
    name, *parameters = (part.strip().lower() for part in text.split(";"))
    weight = next((parameter[2:] for parameter in parameters if parameter.startswith("q=")), "1")
    try:
        return name, (float(weight), True)
    except ValueError:
        return name, (1.0, True)


def wanted_coding(call: Call, encoding: json_codec.Encoding | None) -> str | None:
    """Return the coding of an answer with tensors in this `encoding`, None if they are bytes.

    Only lists shrink well, to a half; bytes and base64 are never compressed. Most HTTP libraries offer several codings
    with every request, but to compress takes longer than to send. So a client gets the only coding besides identity
    that its Accept-Encoding names.
    """
    if encoding != "list" or b"accept-encoding" not in call.headers:
        return None
    ranges = dict(map(_range, call.joined(b"accept-encoding").split(",")))
    named = [name for name, (weight, _) in ranges.items() if weight > 0 and name not in ("", "identity")]
    return named[0] if len(named) == 1 and named[0] in CODINGS else None


def parse_query(call: Call, model: type[M]) -> M:
    """Return the query as a model. Raises `InvalidParameter` and `UnknownParameter`."""
    try:
        return model.model_validate(_values_of(call, model)) if call.query_string else model()
    except ValidationError as invalid:
        error = invalid.errors(include_url=False, include_context=False)[0]
        raise invalid_parameter(error, known=parameters_of(model)) from None


def _values_of(call: Call, model: type[BaseModel]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    lists, known = lists_of(model), parameters_of(model)
    for name, value in query_pairs(call):
        if name not in known:  # pydantic would make an error of each
            raise invalid_parameter({"type": "extra_forbidden", "loc": (name,)}, known=known)
        if name in lists:
            values.setdefault(name, []).append(value)
        elif name not in values:
            values[name] = value
        else:
            _refuse_repeated(name, call)
    return values


def query_pairs(call: Call) -> list[tuple[str, str]]:
    return parse_qsl(call.query_string.decode("latin-1"), keep_blank_values=True)


def check_no_query(call: Call) -> None:
    """Raise `UnknownParameter` if the request has a query, which nothing would read."""
    if call.query_string:
        for name, _ in query_pairs(call):
            raise invalid_parameter({"type": "extra_forbidden", "loc": (name,)})


def _refuse_repeated(name: str, call: Call) -> None:
    count = sum(parameter == name for parameter, _ in query_pairs(call))
    raise InvalidParameter(f"{shown(name)} is given {count} times, not once", parameter=name)


def lists_of(model: type[BaseModel]) -> frozenset[str]:
    """Return the parameters of the model that may repeat."""
    fields = model.model_fields.items()
    return frozenset(field.alias or name for name, field in fields if "list[" in str(field.annotation))


def parameters_of(model: type[BaseModel]) -> list[str]:
    """Return the names that a request has for the members of the model."""
    return [field.alias or name for name, field in model.model_fields.items()]


def invalid_parameter(error: Mapping[str, Any], kind: str = "query parameter", known: Collection[str] = ()) -> Invalid:
    """Turn pydantic's error about a parameter, or about another `kind`, into ours; `known` are the valid names."""
    name = next((part for part in reversed(error["loc"]) if isinstance(part, str)), "")  # not an index in a list
    if error["type"] == "extra_forbidden":
        others = f"; it must be one of {', '.join(known)}" if known else ""
        return UnknownParameter(f"The {kind} {shown(name)} is unknown{others}", parameter=name)
    if error["type"] == "missing":
        return InvalidParameter(f"The {kind} {name} is missing", parameter=name)
    return InvalidParameter(must(name, error["msg"], error["input"]), parameter=name)
