"""`/v2`: the server, its models and their statistics, in the terms of the Open Inference Protocol."""

from __future__ import annotations

from importlib import metadata

from fastapi import APIRouter

from service.api.http.answer import JsonAnswer
from service.api.http.body import read_body
from service.api.http.call import GRAPHS, CurrentCall
from service.api.http.routing import access
from service.api.operators.open_inference import VERSION, find_model
from service.api.operators.protocol_models import (
    ConfiguredOutput,
    IndexEntry,
    ModelConfiguration,
    ModelMetadata,
    ModelReady,
    ModelStatistics,
    ServerMetadata,
    TensorMetadata,
)
from service.api.operators.statistics import OperatorStatistics
from service.dtypes import DTYPES, OPEN_INFERENCE
from service.kernels import OPERATORS, Operator, Tensor

EXTENSIONS = ["binary_tensor_data", "model_configuration", "statistics"]
"""Not `model_repository`, which promises that clients can load and unload models. The index is there all the same."""


def routes(statistics: OperatorStatistics) -> APIRouter:
    """Return the endpoints, which report these statistics."""
    router = APIRouter(prefix="/v2", tags=["open inference protocol"])

    @router.get("", summary="Describe the server")
    @access("ops")
    async def server_metadata(call: CurrentCall) -> JsonAnswer[ServerMetadata]:
        """The name and the version of the server, and the extensions of the protocol that it has."""
        extensions = EXTENSIONS + ["system_shared_memory"] * call.settings.shared_memory
        return JsonAnswer({"name": "gradserve", "version": metadata.version("gradserve"), "extensions": extensions})

    @router.post("/repository/index", summary="List the models")
    @access("ops")
    async def repository_index(call: CurrentCall) -> JsonAnswer[list[IndexEntry]]:
        """Every operator is a model, and so is every graph of the caller's namespace. All are ready at all times."""
        await read_body(call)
        graphs = [stored.name for stored in await call.offload(False, call.store.graphs)]
        names = dict.fromkeys([*OPERATORS, *graphs])
        return JsonAnswer([{"name": name, "version": VERSION, "state": "READY", "reason": ""} for name in names])

    @router.get("/models/{op}", summary="A model's inputs and outputs")
    @router.get("/models/{op}/versions/{version}", include_in_schema=False)
    @access("ops")
    async def model_metadata(call: CurrentCall, op: str) -> JsonAnswer[ModelMetadata]:
        """A dimension of any length is -1. 404 if there is no such model."""
        return JsonAnswer(_described(await find_model(call, op)))

    @router.get("/models/{op}/config", summary="A model's configuration")
    @router.get("/models/{op}/versions/{version}/config", include_in_schema=False)
    @access("ops")
    async def model_configuration(call: CurrentCall, op: str) -> JsonAnswer[ModelConfiguration]:
        """As Triton describes a model. 404 if there is no such model."""
        return JsonAnswer(_configuration(await find_model(call, op)))

    @router.get("/models/{op}/ready", summary="Whether the model is ready")
    @router.get("/models/{op}/versions/{version}/ready", include_in_schema=False)
    @access("ops")
    async def model_ready(call: CurrentCall, op: str) -> JsonAnswer[ModelReady]:
        """503 while the server starts or stops. 404 if there is no such model."""
        operator = await find_model(call, op)
        assert call.engine is not None  # raises NotReady before the startup has finished
        return JsonAnswer({"name": operator.name, "ready": True})

    @router.get("/models/stats", summary="Statistics of all models")
    @access("ops")
    async def all_model_statistics(call: CurrentCall) -> JsonAnswer[ModelStatistics]:
        """Counts and nanoseconds of the requests of the caller's namespace."""
        records = [(name, statistics.of(call.caller.namespace, name)) for name in OPERATORS]
        return JsonAnswer({"model_stats": [record.as_json(name, VERSION) for name, record in records]})

    @router.get("/models/{op}/stats", summary="A model's statistics")
    @router.get("/models/{op}/versions/{version}/stats", include_in_schema=False)
    @access("ops")
    async def model_statistics(call: CurrentCall, op: str) -> JsonAnswer[ModelStatistics]:
        """Counts and nanoseconds of the requests of the caller's namespace; of a graph, those of all its graphs. 404 if
        there is no such model.
        """
        name = (await find_model(call, op)).name
        record = statistics.of(call.caller.namespace, name if name in OPERATORS else GRAPHS)
        return JsonAnswer({"model_stats": [record.as_json(name, VERSION)]})

    return router


def _described(operator: Operator) -> ModelMetadata:
    def described(tensor: Tensor) -> TensorMetadata:
        return {"name": _name(tensor), "datatype": _datatype(tensor), "shape": [-1] * tensor.rank}

    return {
        "name": operator.name,
        "versions": [VERSION],
        "platform": "gradserve",
        "inputs": list(map(described, operator.inputs)),
        "outputs": list(map(described, operator.outputs)),
    }


def _configuration(operator: Operator) -> ModelConfiguration:
    def described(tensor: Tensor) -> ConfiguredOutput:
        return {"name": _name(tensor), "data_type": f"TYPE_{_datatype(tensor)}", "dims": [-1] * tensor.rank}

    return {
        "name": operator.name,
        "platform": "gradserve",
        "max_batch_size": 0,
        "input": [{**described(tensor), "optional": tensor.optional} for tensor in operator.inputs],
        "output": list(map(described, operator.outputs)),
    }


def _name(tensor: Tensor) -> str:
    """Return the tensor's name, for a group as a pattern of the names of its tensors."""
    return tensor.name + ".*" * tensor.group


def _datatype(tensor: Tensor) -> str:
    return OPEN_INFERENCE[DTYPES[tensor.kind.default]]
