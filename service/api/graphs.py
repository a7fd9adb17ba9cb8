"""`/v1/graphs`: ONNX models that clients bring. A graph runs as an operator does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field, RootModel
from starlette.responses import Response
from typing_extensions import TypedDict

from service.api.buffers.models import ListQuery, NextCursor
from service.api.buffers.openapi import DELETED, ETAG, MANY, ONE, READING, REPLAYED, UNCHANGED
from service.api.buffers.preconditions import key_of, refuse_headers
from service.api.buffers.receipt_models import Receipt
from service.api.buffers.receipts import replayed
from service.api.buffers.request import receive_no_body
from service.api.buffers.specs import Life
from service.api.graph_files import MEDIA_TYPES, VERSION_HEADERS, ModelQuery, file_of
from service.api.http.answer import Answer, JsonAnswer
from service.api.http.body import read_body
from service.api.http.call import GRAPHS, Call, CurrentCall
from service.api.http.negotiation import check_no_query, media_types
from service.api.http.routing import BYTES_CONTENT, SAFETENSORS_BODY, SAFETENSORS_CONTENT, access, answer_header, body
from service.api.operators.job import BufferUse, uses_of
from service.api.operators.planned import Planned, keep, kept, plan, planned
from service.api.operators.rest import EndpointQuery, answer_body
from service.api.operators.targets import changes_of
from service.buffers.changes import Change
from service.buffers.graph_changes import DeleteGraph, PutGraph
from service.buffers.graphs import StoredGraph
from service.buffers.names import check_length, check_name
from service.buffers.record import Key
from service.errors import Invalid, InvalidGraph, InvalidParameter, UnsupportedMediaType, shown

if TYPE_CHECKING:
    from service.graphs.graph import Graph

READ, WRITE = "ops", "graphs:write"

router = APIRouter(prefix="/v1/graphs", tags=["graphs"])


class PutQuery(BaseModel):
    """What becomes of a model."""

    loss: str | None = Field(
        None,
        description="Differentiate the model: its loss, such as SoftmaxCrossEntropyLoss, or the output that is one.",
    )
    train: str | None = Field(
        None, description="Which tensors are parameters, as patterns with commas between; by default all weights."
    )
    sets: list[str] = Field(
        default_factory=list,
        alias="set",
        description="`parameters:m.p.*`: write the model's weights into new buffers. May repeat.",
    )
    strict: bool = Field(False, description="Refuse a model with `doubts`.")
    life: Life = None


class GraphQuery(EndpointQuery):
    """How a graph runs."""

    outputs: str | None = Field(
        None, description="The outputs to return, separated by commas; by default all. Others are not computed."
    )
    seed: int | None = Field(
        None,
        ge=0,
        lt=1 << 63,
        description="The seed of random nodes; by default that of the Idempotency-Key, or a new one.",
    )
    form: Literal["training", "inference"] = Field(
        "training",
        description="`inference`: evaluate a model with a loss. Dropout is off, BatchNormalization takes its running"
        " statistics, and there are no gradients.",
    )


class GraphHead(TypedDict):
    """A graph in the list."""

    name: str
    bytes: Annotated[int, Field(description="Bytes of the model.")]
    digest: Annotated[str, Field(description="BLAKE2b of the model, in hexadecimal digits.")]
    options: Annotated[dict[str, str], Field(description="`loss` and `train` as they were given.")]
    created_at: Annotated[float, Field(description="Seconds since 1970.")]


class GraphList(TypedDict):
    """A page of graphs, in the order of their names."""

    graphs: list[GraphHead]
    next_cursor: NextCursor


class GraphTensor(TypedDict):
    """An input or output of a graph."""

    dtype: str
    shape: Annotated[list[int | None] | None, Field(description="Null for a length, or all of it, that is open.")]


class GraphInfo(GraphHead):
    """A graph: what it takes and gives, and its nodes."""

    kind: Annotated[str, Field(description="`training` if it gives gradients, else `inference`.")]
    inputs: dict[str, GraphTensor]
    parameters: Annotated[dict[str, GraphTensor], Field(description="The group of parameters, by their names.")]
    statistics: Annotated[dict[str, GraphTensor], Field(description="The group of running means and variances.")]
    outputs: dict[str, GraphTensor]
    gradients: Annotated[dict[str, GraphTensor], Field(description="The group of gradients, named as the parameters.")]
    nodes: Annotated[dict[str, int], Field(description="The number of nodes of each operator.")]
    doubts: Annotated[
        list[str],
        Field(description="Signs that an exporter has changed the parameters: training changes another model."),
    ]


class UploadedGraph(GraphInfo):
    """A graph, and the receipts of the buffers that its weights were written into."""

    buffers: dict[str, Receipt]


class GraphTensors(RootModel[dict[str, Any]]):
    """Tensors by name, and receipts in place of those that went to buffers. A group is an object of them."""

    model_config = ConfigDict(json_schema_extra={"example": {"x": [[1.0, 2.0, 3.0, 4.0]]}})


_HEADERS = answer_header("Location", "The path of the graph, relative to that of the request.") | REPLAYED


@router.put(
    "/{name}",
    summary="Upload a graph",
    dependencies=MANY,
    responses={
        200: {"description": "The graph already existed", "model": UploadedGraph, "headers": _HEADERS},
        201: {"description": "The new graph", "model": UploadedGraph, "headers": _HEADERS},
    },
    openapi_extra={"requestBody": {"required": True, "content": BYTES_CONTENT}},
)
@access(WRITE, label="graphs")
async def put_graph(call: CurrentCall, name: str, query: Annotated[PutQuery, Query()]) -> Answer:
    """The body is an ONNX model. The same model with the same options again is no error: the status is 200, not 201,
    and buffers of `set` that exist keep their values. Raises `invalid_graph`, `graph_exists`, `too_many_graphs` and
    `graphs_not_installed`.
    """
    check_length(check_name(name), call.settings.max_name_length)
    refuse_headers(call, "If-Match", "If-None-Match")
    if query.sets:
        call.caller.require("buffers:write")
    _check_type(call)
    content = await read_body(call)
    options = {each: value for each in ("loss", "train") if (value := getattr(query, each)) is not None}
    call.start_clock()
    put, key, graph = await call.offload(False, _read, call, name, content, options)
    if query.strict and (doubts := graph.signature()["doubts"]):
        problem = f"strict=true, and {'; '.join(doubts)}. Export the model with dynamo=True, optimize=False"
        raise InvalidGraph(problem, doubts=doubts)
    changes = _weights(call, graph, query.sets, query.life) if query.sets else []
    outcome = await call.submit(changes, key, hidden=put)
    assert outcome.graph is not None
    described = _described(keep(call, outcome.graph, graph))
    answer = {**described, "buffers": outcome.receipts}
    return JsonAnswer(answer, 201 if outcome.is_new else 200, {"Location": f"./{name}", **replayed(outcome)})


def _check_type(call: Call) -> None:
    header = call.headers.get(b"content-type", MEDIA_TYPES[0].encode()).decode("latin-1")
    if header.partition(";")[0].strip().lower() not in MEDIA_TYPES:
        accepted = ", ".join(MEDIA_TYPES)
        problem = f"Content-Type is {shown(header)}, but a model has one of {accepted}"
        raise UnsupportedMediaType(problem, {"Accept": accepted})


def _read(call: Call, name: str, content: memoryview, options: Mapping[str, str]) -> tuple[PutGraph, Key | None, Graph]:
    """Return what to store, with the Idempotency-Key, and the planned graph."""
    put = PutGraph.of(name, content, options)
    return put, key_of(call, content), kept(call, put) or plan(call, content, options)


def _weights(call: Call, graph: Graph, texts: Sequence[str], life: str | None) -> list[Change]:
    """Return the changes that write weights into buffers, from texts like `parameters:m.p.*`."""
    initial = graph.initial
    if not initial:
        problem = f"set is {shown(texts[0])}, but the model has no weights of its own: write them into buffers yourself"
        raise InvalidParameter(problem, parameter="set")
    groups = {name.partition(".")[0] for name in initial}
    inputs = [one for one in graph.operator("").inputs if one.name in groups]
    use = BufferUse(targets=uses_of([("set", text) for text in texts], inputs), life=life)
    buffers = [target.buffer for target in map(use.target_of, initial) if target is not None]
    if len({*buffers}) < len(buffers):
        raise Invalid("A request may change each buffer once")
    return changes_of(call, use, initial)


@router.get("", summary="List the graphs")
@access(READ, label="graphs")
async def list_graphs(call: CurrentCall, query: Annotated[ListQuery, Query()]) -> JsonAnswer[GraphList]:
    """In the order of their names, a page at a time."""
    found = await call.offload(False, call.store.graphs, query.prefix, query.cursor, query.limit + 1)
    cursor = found[query.limit - 1].name if len(found) > query.limit else None
    return JsonAnswer({"graphs": [_head(stored) for stored in found[: query.limit]], "next_cursor": cursor})


@router.get("/{name}", summary="Describe a graph")
@access(READ, label="graphs")
async def get_graph(call: CurrentCall, name: str) -> JsonAnswer[GraphInfo]:
    """Its inputs, parameters, outputs and gradients, and its nodes by kind. Raises `unknown_graph`."""
    return JsonAnswer(_described(await planned(call, name)))


@router.get(
    "/{name}/model",
    summary="Download a graph",
    dependencies=READING,
    responses={
        200: {"description": "The model", "content": BYTES_CONTENT, "headers": ETAG | VERSION_HEADERS},
        **UNCHANGED,
    },
    response_class=Response,
)
@access(READ, label="graphs")
async def get_model(call: CurrentCall, name: str, query: Annotated[ModelQuery, Query()]) -> Answer:
    """The bytes of the model as they were uploaded, or with the values of buffers as its weights.

    Raises `unknown_graph` and `unknown_buffer`.
    """
    return await file_of(call, name, query)


@router.delete("/{name}", summary="Delete a graph", status_code=204, dependencies=MANY, responses=DELETED)
@access(WRITE, label="graphs")
async def delete_graph(call: CurrentCall, name: str) -> Answer:
    """Buffers stay. Raises `unknown_graph`."""
    check_no_query(call)
    received = await receive_no_body(call)
    outcome = await call.submit([], received.key, hidden=DeleteGraph(name=check_name(name)))
    return Answer(status=204, fields=replayed(outcome))


@router.post(
    "/{name}",
    summary="Run a graph",
    dependencies=[*ONE, body(GraphTensors, required=False)],
    response_model=GraphTensors,
    responses={200: {"description": "The outputs", "content": SAFETENSORS_CONTENT}},
    openapi_extra=SAFETENSORS_BODY,
)
@access(READ, label="graphs", operator=GRAPHS)
async def run_graph(call: CurrentCall, name: str, query: Annotated[GraphQuery, Query()]) -> Answer:
    """As an operator runs: inputs come from the body or from buffers, and outputs go to the answer or to buffers.
    Raises `unknown_graph`, `invalid_graph` and what its nodes raise.
    """
    call.graph = name
    types, content = media_types(call), await read_body(call)
    found = await planned(call, name)
    operator = found.operator if query.form == "training" else found.graph.inference(name)
    return await answer_body(call, operator, query, types, content)


def _head(stored: StoredGraph) -> GraphHead:
    return {
        "name": stored.name,
        "bytes": stored.nbytes,
        "digest": stored.digest,
        "options": dict(stored.options),
        "created_at": stored.created,
    }


def _described(planned: Planned) -> GraphInfo:
    return cast(GraphInfo, {**_head(planned.stored), **planned.graph.signature()})
