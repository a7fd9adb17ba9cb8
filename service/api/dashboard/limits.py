"""The limits of requests: those that are settings, and those that are constants."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field, create_model

from service.api.buffers.models import MAX_LISTED_BUFFERS, MAX_NAMED_BUFFERS, MAX_WAIT_SECONDS
from service.api.buffers.preconditions import MAX_KEY_CHARACTERS
from service.api.http.answer import JsonAnswer
from service.api.http.call import CurrentCall
from service.api.http.routing import access
from service.buffers.pushes import MAX_PARTS
from service.codecs.json import MAX_ELEMENTS, MAX_LISTS, MAX_MEMBERS
from service.settings import Settings

SETTINGS = (
    *(name for name in Settings.model_fields if name.startswith("max_")),
    *("store_bytes", "request_timeout", "idempotency_seconds", "push_seconds"),
)
"""The settings that are limits."""

CONSTANTS: dict[str, tuple[int | float, str]] = {
    "max_idempotency_key_length": (MAX_KEY_CHARACTERS, "Characters in an Idempotency-Key, at most."),
    "max_parts": (MAX_PARTS, "Parts of a push, at most."),
    "max_wait_seconds": (MAX_WAIT_SECONDS, "Seconds that a request may wait for a step, at most."),
    "max_listed": (MAX_LISTED_BUFFERS, "Buffers on one page of a list, at most."),
    "max_names": (MAX_NAMED_BUFFERS, "Buffers that one request may name, at most; a change takes up to max_tensors."),
    "max_json_elements": (
        MAX_ELEMENTS,
        "Elements in the lists of a JSON body, at most; send more as base64 or safetensors.",
    ),
    "max_json_lists": (MAX_LISTS, "Lists in a JSON body, at most, with the lists in lists."),
    "max_json_members": (MAX_MEMBERS, "Members of a JSON object, at most; each may be a tensor."),
}
"""The limits without a setting."""


router = APIRouter(tags=["health"])


def _described() -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name in SETTINGS:
        setting = Settings.model_fields[name]
        fields[name] = (setting.annotation, Field(description=f"{setting.description} (GRADSERVE_{name.upper()})"))
    for name, (value, meaning) in CONSTANTS.items():
        fields[name] = (type(value), Field(description=meaning))
    model: type[BaseModel] = create_model("Limits", **fields)
    return model


@router.get("/v1/limits", summary="The limits of requests", response_model=_described())
@access()
async def get_limits(call: CurrentCall) -> JsonAnswer[dict[str, int | float]]:
    """Each limit has the name of its setting, or, without a setting, of the thing that it limits."""
    constants = {name: value for name, (value, _) in CONSTANTS.items()}
    return JsonAnswer({name: getattr(call.settings, name) for name in SETTINGS} | constants)
