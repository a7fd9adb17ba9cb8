"""Every error that gradserve raises on purpose, with the status and code of its answer.

* GradserveError                500 internal
  x BufferCorrupt               500 buffer_corrupt
  x MalformedBody               400 malformed_body
  x Unauthorized                401 unauthorized
  x Forbidden                   403 forbidden
  x NotFound                    404 not_found
    - UnknownOperator           404 unknown_operator
    - UnknownBuffer             404 unknown_buffer
    - UnknownRegion             404 unknown_region
  x MethodNotAllowed            405 method_not_allowed
  x NotAcceptable               406 not_acceptable
  x RequestTimeout              408 request_timeout
  x Conflict                    409 conflict
    - BufferExists              409 buffer_exists
    - StaleEpoch                409 stale_epoch
    - EpochOpen                 409 epoch_open
    - TooFewGradients           409 too_few_gradients
    - NothingToAverage          409 nothing_to_average
    - DuplicateContributor      409 duplicate_contributor
  x TooManyBuffers              409 too_many_buffers
  x RegionExists                409 region_exists
  x TooManyRegions              409 too_many_regions
  x EpochGone                   410 epoch_gone
  x PreconditionFailed          412 precondition_failed
  x BodyTooLarge                413 body_too_large
  x TensorTooLarge              413 tensor_too_large
  x TooManyTensors              413 too_many_tensors
  x UnsupportedMediaType        415 unsupported_media_type
  x Invalid                     422 invalid_request
    - InvalidParameter          422 invalid_parameter
    - UnknownParameter          422 unknown_parameter
    - InvalidTensor             422 invalid_tensor
    - RegionUnusable            422 region_unusable
    - MissingTensor             422 missing_tensor
    - UnknownTensor             422 unknown_tensor
    - DtypeMismatch             422 dtype_mismatch
    - ShapeMismatch             422 shape_mismatch
    - TooManyDimensions         422 too_many_dimensions
    - AxisOutOfRange            422 axis_out_of_range
    - IndexOutOfRange           422 index_out_of_range
    - NonfiniteGradient         422 nonfinite_gradient
    - NormTooLarge              422 norm_too_large
    - KeyReused                 422 idempotency_key_reused
  x Busy                        429 busy
  x NotReady                    503 not_ready
  x Expired                     503 expired
  x StoreFailed                 503 store_failed
  x StoreFull                   507 store_full
    - KeysFull                  507 keys_full

`status` and `code` are plain class attributes, so that no layer below the API imports the web. The first line of each
docstring is the answer's title and the documentation's text: at most six words that state the fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar


class GradserveError(Exception):
    """Internal server error."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"

    def __init__(self, detail: str, **context: Any) -> None:
        """Make an error from `detail`, a sentence for a person, and `context` (tensor, limit, ...), for programs."""
        detail = cut(detail, MAX_DETAIL_CHARACTERS)
        super().__init__(detail)
        self.detail = detail
        self.context = {
            name: cut(value, MAX_MEMBER_CHARACTERS) if isinstance(value, str) else value
            for name, value in context.items()
        }

    def __str__(self) -> str:
        return self.detail  # not args[0]: a handler may have added to the detail

    @classmethod
    def title(cls) -> str:
        """Return the first line of the docstring, without its full stop."""
        return (cls.__doc__ or "").partition("\n")[0].rstrip(".")


class BufferCorrupt(GradserveError):
    """Stored buffer data is damaged."""

    code = "buffer_corrupt"


class MalformedBody(GradserveError):
    """Request body cannot be read."""

    status = 400
    code = "malformed_body"


class Unauthorized(GradserveError):
    """Missing or invalid API key."""

    status = 401
    code = "unauthorized"


class Forbidden(GradserveError):
    """Missing scope or cross-site request."""

    status = 403
    code = "forbidden"


class NotFound(GradserveError):
    """Path not found."""

    status = 404
    code = "not_found"


class UnknownOperator(NotFound):
    """Operator not found."""

    code = "unknown_operator"


class UnknownBuffer(NotFound):
    """Buffer not found."""

    code = "unknown_buffer"


class UnknownRegion(NotFound):
    """Shared memory region not found."""

    code = "unknown_region"


class MethodNotAllowed(GradserveError):
    """Method not allowed on this path."""

    status = 405
    code = "method_not_allowed"


class NotAcceptable(GradserveError):
    """No acceptable media type."""

    status = 406
    code = "not_acceptable"


class RequestTimeout(GradserveError):
    """Request did not arrive in time."""

    status = 408
    code = "request_timeout"


class Conflict(GradserveError):
    """Conflict with the buffer's state."""

    status = 409
    code = "conflict"


class BufferExists(Conflict):
    """Buffer already exists."""

    code = "buffer_exists"


class StaleEpoch(Conflict):
    """Epoch does not match the buffer."""

    code = "stale_epoch"


class EpochOpen(Conflict):
    """Epoch is still open."""

    code = "epoch_open"


class TooFewGradients(Conflict):
    """Too few gradients."""

    code = "too_few_gradients"


class NothingToAverage(Conflict):
    """Gradient weights sum to zero."""

    code = "nothing_to_average"


class DuplicateContributor(Conflict):
    """Contributor is in the epoch already."""

    code = "duplicate_contributor"


class TooManyBuffers(GradserveError):
    """Too many buffers in the namespace."""

    status = 409
    code = "too_many_buffers"


class RegionExists(GradserveError):
    """Shared memory region already exists."""

    status = 409
    code = "region_exists"


class TooManyRegions(GradserveError):
    """Too many regions in the namespace."""

    status = 409
    code = "too_many_regions"


class EpochGone(GradserveError):
    """Requested data is no longer kept."""

    status = 410
    code = "epoch_gone"


class PreconditionFailed(GradserveError):
    """If-Match or If-None-Match failed."""

    status = 412
    code = "precondition_failed"


class BodyTooLarge(GradserveError):
    """Request body too large."""

    status = 413
    code = "body_too_large"


class TensorTooLarge(GradserveError):
    """Tensor too large."""

    status = 413
    code = "tensor_too_large"


class TooManyTensors(GradserveError):
    """Too many tensors in the request."""

    status = 413
    code = "too_many_tensors"


class UnsupportedMediaType(GradserveError):
    """Unsupported media type or encoding."""

    status = 415
    code = "unsupported_media_type"

    def __init__(self, detail: str, accepted: Mapping[str, str]) -> None:
        """Make an error from `detail`. `accepted` is the answer's header that says what would be read."""
        super().__init__(detail)
        self.accepted = accepted


class Invalid(GradserveError):
    """Invalid request."""

    status = 422
    code = "invalid_request"


class InvalidParameter(Invalid):
    """Invalid attribute or parameter."""

    code = "invalid_parameter"


class UnknownParameter(Invalid):
    """Unknown query parameter or body member."""

    code = "unknown_parameter"


class InvalidTensor(Invalid):
    """Invalid tensor form or data."""

    code = "invalid_tensor"


class RegionUnusable(Invalid):
    """Shared memory region cannot be used."""

    code = "region_unusable"


class MissingTensor(Invalid):
    """Required tensor is missing."""

    code = "missing_tensor"


class UnknownTensor(Invalid):
    """Unknown tensor name."""

    code = "unknown_tensor"


class DtypeMismatch(Invalid):
    """Tensor has the wrong dtype."""

    code = "dtype_mismatch"


class ShapeMismatch(Invalid):
    """Tensor shapes do not fit together."""

    code = "shape_mismatch"


class TooManyDimensions(Invalid):
    """Tensor has too many dimensions."""

    code = "too_many_dimensions"


class AxisOutOfRange(Invalid):
    """Axis out of range."""

    code = "axis_out_of_range"


class IndexOutOfRange(Invalid):
    """Index out of range."""

    code = "index_out_of_range"


class NonfiniteGradient(Invalid):
    """Buffer would become infinite or NaN."""

    code = "nonfinite_gradient"


class NormTooLarge(Invalid):
    """Norm of the gradient too large."""

    code = "norm_too_large"


class KeyReused(Invalid):
    """Idempotency-Key reused for another request."""

    code = "idempotency_key_reused"


class Busy(GradserveError):
    """Server is busy; try again soon."""

    status = 429
    code = "busy"


class NotReady(GradserveError):
    """Server is starting or stopping."""

    status = 503
    code = "not_ready"


class Expired(GradserveError):
    """Request waited too long to start."""

    status = 503
    code = "expired"


class StoreFailed(GradserveError):
    """Buffer store is unavailable."""

    status = 503
    code = "store_failed"


class StoreFull(GradserveError):
    """Buffer store is full."""

    status = 507
    code = "store_full"


class KeysFull(StoreFull):
    """Namespace remembers too many Idempotency-Keys."""

    code = "keys_full"


MAX_SHOWN_CHARACTERS = 80
"""The longest value in a detail: enough to recognise it, and short enough to keep the sentence readable."""

MAX_DETAIL_CHARACTERS = 4000
"""The longest detail: a shape of 64 dimensions has 1,300 characters. Names of tensors have no limit of their own."""

MAX_MEMBER_CHARACTERS = 1000
"""The longest text in `context`: programs look up buffer names there, and a name has at most 200 characters."""


def cut(text: str, longest: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return `text`, shortened to `longest` characters if it is longer.

    >>> cut("abcdefgh", longest=6)
    'abc...'
    """
    return text if len(text) <= longest else text[: longest - 3] + "..."


def shown(value: object) -> str:
    """Return `value` as an error message shows it, in JSON's words.

    >>> shown(["a", None, {"b": True}])
    "['a', null, {'b': true}]"
    """
    match value:
        case str():
            text = repr(cut(value))
        case None | bool():
            text = json.dumps(value)
        case list() | tuple():
            text = f"[{_joined(map(shown, value))}]"
        case dict():
            text = f"{{{_joined(f'{shown(key)}: {shown(member)}' for key, member in value.items())}}}"
        case _:
            text = repr(value)
    return cut(text)


def _joined(texts: Iterable[str]) -> str:
    """Join the texts with commas, and stop once `cut` would remove the rest: a list may have millions of items."""
    joined = ""
    for text in texts:
        joined += f", {text}" if joined else text
        if len(joined) > MAX_SHOWN_CHARACTERS:
            break
    return joined


def tree(root: type[GradserveError] = GradserveError) -> Iterator[type[GradserveError]]:
    """Yield `root` and every class below it, parents first."""
    yield root
    for child in root.__subclasses__():
        yield from tree(child)
