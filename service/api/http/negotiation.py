"""What a request says besides its path: the types of its body and answer, parameters that are given once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from starlette.requests import Request

from service.codecs import safetensors
from service.errors import InvalidParameter, NotAcceptable, UnsupportedMediaType, shown

JSON = "application/json"
MEDIA_TYPES = (JSON, safetensors.MEDIA_TYPE)


def media_types(request: Request) -> tuple[str, str]:
    """The media types of the request and of its answer, which is the same unless `Accept` asks for another.

    Raises `UnsupportedMediaType` and `NotAcceptable`.
    """
    header = request.headers.get("content-type", JSON)
    sent = header.partition(";")[0].strip().lower()
    if sent not in MEDIA_TYPES:
        if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            raise UnsupportedMediaType(f"Content-Type is {shown(header)}, but must be one of {', '.join(MEDIA_TYPES)}")
        sent = JSON  # an empty body may be called anything: curl -d '' calls it a form
    accepted = ",".join(request.headers.getlist("accept"))
    if not accepted.strip(" ,"):
        return sent, sent
    wishes = dict(map(_wish, accepted.split(",")))
    anything = wishes.get("application/*", wishes.get("*/*", (0.0, False)))
    wanted = {one: wishes.get(one, (anything[0], False)) for one in (sent, *MEDIA_TYPES)}
    best = max(wanted, key=lambda one: wanted[one])  # of equals the first: as the request
    if not wanted[best][0] > 0:
        raise NotAcceptable(f"Accept is {shown(accepted)}, but must allow one of {', '.join(MEDIA_TYPES)}")
    return sent, best


def _wish(text: str) -> tuple[str, tuple[float, bool]]:
    """A range of `Accept`: its name, and how much it is wanted; of equals, what is named rather than any."""
    name, *parameters = (part.strip().lower() for part in text.split(";"))
    weight = next((one[2:] for one in parameters if one.startswith("q=")), "1")
    try:
        return name, (float(weight), True)
    except ValueError:
        return name, (1.0, True)


def check_given_once(request: Request, lists: Collection[str] = ()) -> None:
    """Raise `InvalidParameter` for a query parameter that is given twice, unless it is one of `lists`."""
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if count > 1 and name not in lists:
            raise InvalidParameter(f"{shown(name)} is given {count} times, not once", parameter=name)
