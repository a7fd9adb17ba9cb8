"""Every error that gradserve raises on purpose, and the answer that it becomes.

* GradserveError                500 internal
  x BufferCorrupt               500 buffer_corrupt
  x MalformedBody               400 malformed_body
  x Unauthorized                401 unauthorized
  x Forbidden                   403 forbidden
  x NotFound                    404 not_found
    - UnknownOperator           404 unknown_operator
    - UnknownBuffer             404 unknown_buffer
  x MethodNotAllowed            405 method_not_allowed
  x NotAcceptable               406 not_acceptable
  x RequestTimeout              408 request_timeout
  x Conflict                    409 conflict
    - BufferExists              409 buffer_exists
    - StaleEpoch                409 stale_epoch
    - EpochOpen                 409 epoch_open
    - TooFewGradients           409 too_few_gradients
    - NothingToAverage          409 nothing_to_average
  x TooManyBuffers              409 too_many_buffers
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
    - MissingTensor             422 missing_tensor
    - UnknownTensor             422 unknown_tensor
    - DtypeMismatch             422 dtype_mismatch
    - ShapeMismatch             422 shape_mismatch
    - TooManyDimensions         422 too_many_dimensions
    - AxisOutOfRange            422 axis_out_of_range
    - IndexOutOfRange           422 index_out_of_range
    - NonfiniteGradient         422 nonfinite_gradient
    - KeyReused                 422 idempotency_key_reused
  x Busy                        429 busy
  x NotReady                    503 not_ready
  x Expired                     503 expired
  x StoreFailed                 503 store_failed
  x StoreFull                   507 store_full

`status` and `code` are plain class attributes, so that no layer below the API needs to know the web. The first line of
each docstring is the title of the answer and the text of the documentation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar


class GradserveError(Exception):
    """The server failed; the fault is ours."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"

    def __init__(self, detail: str, **context: Any) -> None:
        """`detail` is a sentence for the person who made the mistake, `context` (tensor, limit, ...) for programs."""
        super().__init__(detail)
        self.detail = detail
        self.context = {
            name: cut(value, LONGEST_MEMBER) if isinstance(value, str) else value for name, value in context.items()
        }

    def __str__(self) -> str:
        return self.detail  # which whoever passes the error on may have made longer

    @classmethod
    def title(cls) -> str:
        """The first line of the docstring, without its full stop."""
        return (cls.__doc__ or "").partition("\n")[0].rstrip(".")


class BufferCorrupt(GradserveError):
    """The buffer's bytes on the disk are not those that were written."""

    code = "buffer_corrupt"


class MalformedBody(GradserveError):
    """The body cannot be read."""

    status = 400
    code = "malformed_body"


class Unauthorized(GradserveError):
    """An API key is needed, and this is none that is good."""

    status = 401
    code = "unauthorized"


class Forbidden(GradserveError):
    """The API key is not good for this, or there is none and a page of another site asks."""

    status = 403
    code = "forbidden"


class NotFound(GradserveError):
    """There is nothing at this path."""

    status = 404
    code = "not_found"


class UnknownOperator(NotFound):
    """There is no operator of this name."""

    code = "unknown_operator"


class UnknownBuffer(NotFound):
    """There is no buffer of this name."""

    code = "unknown_buffer"


class MethodNotAllowed(GradserveError):
    """This path does not take this method."""

    status = 405
    code = "method_not_allowed"


class NotAcceptable(GradserveError):
    """The answer cannot be given in a type that `Accept` names."""

    status = 406
    code = "not_acceptable"


class RequestTimeout(GradserveError):
    """The rest of the request did not come in time."""

    status = 408
    code = "request_timeout"


class Conflict(GradserveError):
    """The state of the buffer does not allow this."""

    status = 409
    code = "conflict"


class BufferExists(Conflict):
    """There is a buffer of this name already, and it differs."""

    code = "buffer_exists"


class StaleEpoch(Conflict):
    """The epoch that the request names is not the buffer's."""

    code = "stale_epoch"


class EpochOpen(Conflict):
    """The epoch has not closed yet."""

    code = "epoch_open"


class TooFewGradients(Conflict):
    """Fewer gradients are in than were asked for."""

    code = "too_few_gradients"


class NothingToAverage(Conflict):
    """The weights of the gradients sum to zero."""

    code = "nothing_to_average"


class TooManyBuffers(GradserveError):
    """The namespace has as many buffers as it may; nothing was changed."""

    status = 409
    code = "too_many_buffers"


class EpochGone(GradserveError):
    """What the request refers to was there once, and is not kept any more."""

    status = 410
    code = "epoch_gone"


class PreconditionFailed(GradserveError):
    """The buffer is not in the state that `If-Match` or `If-None-Match` asks for."""

    status = 412
    code = "precondition_failed"


class BodyTooLarge(GradserveError):
    """The body is larger than the server takes."""

    status = 413
    code = "body_too_large"


class TensorTooLarge(GradserveError):
    """An input or output is larger than the server allows."""

    status = 413
    code = "tensor_too_large"


class TooManyTensors(GradserveError):
    """A request has more tensors than the server takes."""

    status = 413
    code = "too_many_tensors"


class UnsupportedMediaType(GradserveError):
    """The body is of a type or encoding that the server does not read."""

    status = 415
    code = "unsupported_media_type"


class Invalid(GradserveError):
    """The request was read but makes no sense."""

    status = 422
    code = "invalid_request"


class InvalidParameter(Invalid):
    """An attribute or query parameter has no valid value."""

    code = "invalid_parameter"


class UnknownParameter(Invalid):
    """A query parameter, or a member of the body, is not one of this endpoint's."""

    code = "unknown_parameter"


class InvalidTensor(Invalid):
    """A tensor's form, numbers or bytes are invalid."""

    code = "invalid_tensor"


class MissingTensor(Invalid):
    """A required input is missing."""

    code = "missing_tensor"


class UnknownTensor(Invalid):
    """A tensor is not one that this request has."""

    code = "unknown_tensor"


class DtypeMismatch(Invalid):
    """A tensor's dtype is not one that the operator takes there."""

    code = "dtype_mismatch"


class ShapeMismatch(Invalid):
    """The shapes of the tensors do not fit together."""

    code = "shape_mismatch"


class TooManyDimensions(Invalid):
    """A tensor has more dimensions than the server takes."""

    code = "too_many_dimensions"


class AxisOutOfRange(Invalid):
    """The axis is not one of the tensor's."""

    code = "axis_out_of_range"


class IndexOutOfRange(Invalid):
    """An index lies outside the dimension that it indexes."""

    code = "index_out_of_range"


class NonfiniteGradient(Invalid):
    """After this gradient the buffer would be infinite or NaN, which it was created to refuse."""

    code = "nonfinite_gradient"


class KeyReused(Invalid):
    """The Idempotency-Key was used before, for another request."""

    code = "idempotency_key_reused"


class Busy(GradserveError):
    """The server has as much to do as it takes on; try again soon."""

    status = 429
    code = "busy"


class NotReady(GradserveError):
    """The server is starting or stopping."""

    status = 503
    code = "not_ready"


class Expired(GradserveError):
    """The request waited for a thread as long as its sender waits, and was not begun."""

    status = 503
    code = "expired"


class StoreFailed(GradserveError):
    """The store of the buffers cannot be used."""

    status = 503
    code = "store_failed"


class StoreFull(GradserveError):
    """The store of the buffers has no room left; nothing was changed."""

    status = 507
    code = "store_full"


LONGEST, LONGEST_MEMBER = 80, 1000
"""Characters of a value that an error shows, and of one that programs read: the name of a buffer is never cut."""


def cut(text: str, longest: int = LONGEST) -> str:
    """`text`, its end left out where it is long.

    >>> cut("abcdefgh", longest=6)
    'abc...'
    """
    return text if len(text) <= longest else text[: longest - 3] + "..."


def shown(value: object) -> str:
    """`value` as an error message shows it, with JSON's words.

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
            text = f"{{{_joined(f'{shown(key)}: {shown(one)}' for key, one in value.items())}}}"
        case _:
            text = repr(value)
    return cut(text)


def _joined(texts: Iterable[str]) -> str:
    """The texts with commas between them, those left out that would be cut."""
    joined = ""
    for text in texts:
        joined += f", {text}" if joined else text
        if len(joined) > LONGEST:
            break
    return joined


def tree(root: type[GradserveError] = GradserveError) -> Iterator[type[GradserveError]]:
    """`root` and every class below it, parents first."""
    yield root
    for child in root.__subclasses__():
        yield from tree(child)
