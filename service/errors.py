"""Every error that gradserve raises on purpose, with the status and code of its answer.

A class says its status, unless it has its parent's, and its code: no layer below the API imports the web. The first
line of each docstring is the answer's title and the documentation's text: at most six words that state the fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from service.texts import cut as cut
from service.texts import must as must
from service.texts import shown as shown


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

    def __init_subclass__(cls, *, code: str, status: int | None = None) -> None:
        cls.code, cls.status = code, status or cls.status

    @classmethod
    def title(cls) -> str:
        """Return the first line of the docstring, without its full stop."""
        return (cls.__doc__ or "").partition("\n")[0].rstrip(".")


class BufferCorrupt(GradserveError, code="buffer_corrupt"):
    """Stored buffer data is damaged."""


class GraphCorrupt(BufferCorrupt, code="graph_corrupt"):
    """Stored graph is damaged."""


class MalformedBody(GradserveError, status=400, code="malformed_body"):
    """Request body cannot be read."""


class OldClient(GradserveError, status=400, code="old_client"):
    """Client is older than the server."""


class Unauthorized(GradserveError, status=401, code="unauthorized"):
    """Missing or invalid API key."""


class Forbidden(GradserveError, status=403, code="forbidden"):
    """Missing scope, cross-site, or unknown Host."""


class NotFound(GradserveError, status=404, code="not_found"):
    """Path not found."""


class UnknownOperator(NotFound, code="unknown_operator"):
    """Operator not found."""


class UnknownBuffer(NotFound, code="unknown_buffer"):
    """Buffer not found."""


class UnknownGraph(NotFound, code="unknown_graph"):
    """Graph not found."""


class UnknownRun(NotFound, code="unknown_run"):
    """Run not found."""


class UnknownRegion(NotFound, code="unknown_region"):
    """Shared memory region not found."""


class MethodNotAllowed(GradserveError, status=405, code="method_not_allowed"):
    """Method not allowed on this path."""


class NotAcceptable(GradserveError, status=406, code="not_acceptable"):
    """No acceptable media type."""


class RequestTimeout(GradserveError, status=408, code="request_timeout"):
    """Request did not arrive in time."""


class Conflict(GradserveError, status=409, code="conflict"):
    """Conflict with the buffer's state."""


class BufferExists(Conflict, code="buffer_exists"):
    """Buffer already exists."""


class StaleStep(Conflict, code="stale_step"):
    """Step does not match the buffer."""


class SourceChanged(Conflict, code="source_changed"):
    """Source buffer has changed meanwhile."""


class StepOpen(Conflict, code="step_open"):
    """Step is still open."""


class TooFewGradients(Conflict, code="too_few_gradients"):
    """Too few gradients."""


class NothingToAverage(Conflict, code="nothing_to_average"):
    """There is nothing to average."""


class DuplicateContributor(Conflict, code="duplicate_contributor"):
    """Contributor is in the step already."""


class TooManyBuffers(GradserveError, status=409, code="too_many_buffers"):
    """Too many buffers in the namespace."""


class GraphExists(GradserveError, status=409, code="graph_exists"):
    """Another graph has this name."""


class RunExists(GradserveError, status=409, code="run_exists"):
    """Another run has this name."""


class RunEnded(GradserveError, status=409, code="run_ended"):
    """Run has ended."""


class RunReplaced(GradserveError, status=409, code="run_replaced"):
    """Run was deleted or replaced."""


class WorkerReplaced(GradserveError, status=409, code="worker_replaced"):
    """Another process is this worker."""


class TooManyGraphs(GradserveError, status=409, code="too_many_graphs"):
    """Too many graphs in the namespace."""


class RegionExists(GradserveError, status=409, code="region_exists"):
    """Shared memory region already exists."""


class TooManyRegions(GradserveError, status=409, code="too_many_regions"):
    """Too many regions in the namespace."""


class StepGone(GradserveError, status=410, code="step_gone"):
    """Requested data is no longer kept."""


class PreconditionFailed(GradserveError, status=412, code="precondition_failed"):
    """If-Match or If-None-Match failed."""


class BodyTooLarge(GradserveError, status=413, code="body_too_large"):
    """Request body too large."""


class TensorTooLarge(GradserveError, status=413, code="tensor_too_large"):
    """Tensor too large."""


class TooManyTensors(GradserveError, status=413, code="too_many_tensors"):
    """Too many tensors in the request."""


class UnsupportedMediaType(GradserveError, status=415, code="unsupported_media_type"):
    """Unsupported media type or encoding."""

    def __init__(self, detail: str, accepted: Mapping[str, str]) -> None:
        """Make an error from `detail`. `accepted` has the answer's headers that say what would be read."""
        super().__init__(detail)
        self.accepted = accepted


class HeadTooLarge(MalformedBody, status=431, code="head_too_large"):
    """Request head too large."""


class Invalid(GradserveError, status=422, code="invalid_request"):
    """Invalid request."""


class InvalidParameter(Invalid, code="invalid_parameter"):
    """Invalid attribute or parameter."""


class UnknownParameter(Invalid, code="unknown_parameter"):
    """Unknown query parameter or body member."""


class InvalidTensor(Invalid, code="invalid_tensor"):
    """Invalid tensor form or data."""


class RegionUnusable(Invalid, code="region_unusable"):
    """Shared memory region cannot be used."""


class MissingTensor(Invalid, code="missing_tensor"):
    """Required tensor is missing."""


class UnknownTensor(Invalid, code="unknown_tensor"):
    """Unknown tensor name."""


class DtypeMismatch(Invalid, code="dtype_mismatch"):
    """Tensor has the wrong dtype."""


class ShapeMismatch(Invalid, code="shape_mismatch"):
    """Tensor shapes do not fit together."""


class TooManyDimensions(Invalid, code="too_many_dimensions"):
    """Tensor has too many dimensions."""


class AxisOutOfRange(Invalid, code="axis_out_of_range"):
    """Axis out of range."""


class IndexOutOfRange(Invalid, code="index_out_of_range"):
    """Index out of range."""


class NonfiniteGradient(Invalid, code="nonfinite_gradient"):
    """Buffer would become infinite or NaN."""


class NormTooLarge(Invalid, code="norm_too_large"):
    """Norm of the gradient too large."""


class InvalidGraph(Invalid, code="invalid_graph"):
    """Model cannot be run here."""


class GraphTooSlow(Invalid, code="graph_too_slow"):
    """Graph takes too long."""


class KeyReused(Invalid, code="idempotency_key_reused"):
    """Key reused for another request."""


class Busy(GradserveError, status=429, code="busy"):
    """Server is busy; try again soon."""


class GraphsNotInstalled(GradserveError, status=501, code="graphs_not_installed"):
    """Server cannot run graphs."""


class NotReady(GradserveError, status=503, code="not_ready"):
    """Server is starting or stopping."""


class Expired(GradserveError, status=503, code="expired"):
    """Request waited too long to start."""


class StoreFailed(GradserveError, status=503, code="store_failed"):
    """Buffer store is unavailable."""


class StoreFull(GradserveError, status=507, code="store_full"):
    """Buffer store is full."""


class PushesFull(StoreFull, code="pushes_full"):
    """Namespace has staged too much."""


class KeysFull(StoreFull, code="keys_full"):
    """Namespace remembers too many Idempotency-Keys."""


MAX_DETAIL_CHARACTERS = 4000
"""The longest detail: a shape of 64 dimensions has 1,300 characters. Names of tensors have no limit of their own."""

MAX_MEMBER_CHARACTERS = 1000
"""The longest text in `context`: programs look up buffer names there, and a name has at most 200 characters."""


def tree(root: type[GradserveError] = GradserveError) -> Iterator[type[GradserveError]]:
    """Yield `root` and every class below it, parents first."""
    yield root
    for child in root.__subclasses__():
        yield from tree(child)
