"""The requests and answers of `/v2`, in the terms of the Open Inference Protocol."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, WithJsonSchema
from typing_extensions import TypedDict

from service.api.http.tensor_forms import absent
from service.dtypes import OPEN_INFERENCE


class ServerMetadata(TypedDict):
    """The server."""

    name: str
    version: str
    extensions: Annotated[list[str], Field(description="Extensions of the protocol.")]


class IndexEntry(TypedDict):
    """A model in the list."""

    name: str
    version: str
    state: str
    reason: str


class TensorMetadata(TypedDict):
    """An input or output of a model."""

    name: str
    datatype: Annotated[str, Field(description="The datatype of the tensor's default dtype; others are taken, too.")]
    shape: Annotated[list[int], Field(description="-1 for a dimension of any length.")]


class ModelMetadata(TypedDict):
    """A model, and its tensors."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ConfiguredOutput(TypedDict):
    """An output as Triton describes it."""

    name: str
    data_type: str
    dims: list[int]


class ConfiguredInput(ConfiguredOutput):
    """An input as Triton describes it."""

    optional: bool


class ModelConfiguration(TypedDict):
    """A model as Triton describes it."""

    name: str
    platform: str
    max_batch_size: int
    input: list[ConfiguredInput]
    output: list[ConfiguredOutput]


class ModelReady(TypedDict):
    """A model that takes requests."""

    name: str
    ready: bool


class Duration(TypedDict):
    """The time of some requests."""

    count: int
    ns: Annotated[int, Field(description="Nanoseconds in all.")]


class InferenceDurations(TypedDict):
    """The times of a model's requests, by phase."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class OneModelStatistics(TypedDict):
    """The statistics of a model."""

    name: str
    version: str
    last_inference: Annotated[int, Field(description="Milliseconds since 1970; 0 before the first.")]
    inference_count: int
    execution_count: int
    inference_stats: InferenceDurations
    batch_stats: Annotated[list[str], Field(description="Always empty: no requests are batched.")]


class ModelStatistics(TypedDict):
    """The statistics of models."""

    model_stats: list[OneModelStatistics]


def _inline(members: Any, *others: str) -> WithJsonSchema:
    """Let OpenAPI show the members of an object in its place: the object gets no name of its own."""
    schema = TypeAdapter(members).json_schema()
    shown: dict[str, Any] = {part: schema[part] for part in ("properties", "required") if part in schema}
    return WithJsonSchema({**shown, "type": ["object", *others] if others else "object"})


Bytes = Annotated[int, Field(ge=0)]

_BUFFERS = ["dW:gru.W"]


class BinaryParameters(TypedDict, total=False):
    """How a tensor travels, if it is bytes."""

    binary_data_size: Annotated[Bytes, Field(description="Bytes of the tensor after the JSON.")]


class SharedParameters(TypedDict, total=False):
    """Where a tensor is in shared memory."""

    shared_memory_region: Annotated[str, Field(description="The registered region that holds the tensor.")]
    shared_memory_offset: Annotated[Bytes, Field(description="Where in the region the tensor begins.")]
    shared_memory_byte_size: Annotated[
        Bytes, Field(description="The tensor's bytes in the region; of an output, the room for them.")
    ]


class TensorParameters(BinaryParameters, SharedParameters):
    """Where the elements of an input are, if they are not its data."""


class _Tensor(TypedDict):
    name: str
    shape: list[Bytes]
    datatype: Literal[tuple(OPEN_INFERENCE.values())]  # type: ignore[valid-type]
    data: NotRequired[
        Annotated[list[Any], Field(description="Its elements, flat or nested, unless it is bytes or in shared memory.")]
    ]


class InferTensor(_Tensor):
    """An input."""

    parameters: NotRequired[Annotated[dict[str, Any] | None, _inline(TensorParameters, "null")]]


class InferOutput(_Tensor):
    """An output. In shared memory it has neither data nor parameters."""

    parameters: NotRequired[Annotated[dict[str, Any], _inline(BinaryParameters)]]


class OutputParameters(SharedParameters, total=False):
    """Where an output goes, if it is no text."""

    binary_data: Annotated[bool, Field(description="Whether the output travels as bytes.")]


class RequestedOutput(TypedDict):
    """An output to return."""

    name: str
    parameters: NotRequired[Annotated[dict[str, Any] | None, _inline(OutputParameters, "null")]]


class BufferParameters(BaseModel):
    """The parameters of every model. A parameter that names buffers may name several, with commas."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sources: str = Field(
        alias="from",
        default_factory=str,
        description="Inputs to take from buffers, separated by commas.",
        examples=_BUFFERS,
    )
    into: str = Field(
        default_factory=str, description="Outputs to add to buffers, separated by commas.", examples=_BUFFERS
    )
    sets: str = Field(
        alias="set",
        default_factory=str,
        description="Outputs to write over buffers, separated by commas.",
        examples=_BUFFERS,
    )
    weight: float = Field(
        default_factory=absent, allow_inf_nan=False, description="With `into`: the weight of each added gradient."
    )
    step: int = Field(default_factory=absent, ge=0, description="With `into`: the step that the buffers must be in.")
    contributor: str = Field(default_factory=absent, description="With `into`: who adds.")
    life: str = Field(default_factory=absent, description="The life of the run that the buffers must belong to.")
    reduce: Literal["sum", "mean"] = Field(
        default_factory=absent,
        description="With `@` in `from`: the sum of the step, or the sum divided by the sum of the weights.",
    )


class InferParameters(BufferParameters, extra="ignore"):
    """The parameters that OpenAPI shows; a model's attributes come with them."""

    binary_data_output: bool = Field(default_factory=absent, description="Whether all outputs travel as bytes.")


class InferRequest(TypedDict, total=False):
    """A request that runs a model."""

    id: str
    parameters: Annotated[
        dict[str, Any] | None,
        _inline(InferParameters, "null"),
        Field(description="The model's attributes, and parameters of the query of its endpoint under /v1/ops."),
    ]
    inputs: Required[list[InferTensor]]
    outputs: Annotated[
        list[Annotated[dict[str, Any], _inline(RequestedOutput)]],
        Field(description="The outputs to return; by default all."),
    ]


class AnswerParameters(TypedDict, total=False):
    """What an answer has beside its outputs."""

    receipts: Annotated[str, Field(description="With `into`: the receipts by output, as JSON.")]


class InferAnswer(TypedDict):
    """The outputs of a model."""

    id: NotRequired[Annotated[str, Field(description="The request's, if it has any.")]]
    model_name: str
    model_version: str
    parameters: NotRequired[Annotated[dict[str, Any], _inline(AnswerParameters)]]
    outputs: list[InferOutput]
