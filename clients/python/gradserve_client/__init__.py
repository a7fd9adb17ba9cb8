"""The client of gradserve: gradient kernels as calls, and gradients that count exactly once."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradserve_client._async.buffer import AsyncBuffer
    from gradserve_client._async.buffers import AsyncBuffers
    from gradserve_client._async.client import AsyncClient
    from gradserve_client._async.graphs import AsyncGraphs
    from gradserve_client._async.model import AsyncModel
    from gradserve_client._async.runs import AsyncRuns
    from gradserve_client.buffer import Buffer
    from gradserve_client.buffers import Buffers
    from gradserve_client.client import Client
    from gradserve_client.errors import (
        Busy,
        Conflict,
        ConnectionFailed,
        DuplicateContributor,
        GradserveError,
        InvalidInput,
        KeyReused,
        NotFound,
        NothingToAverage,
        PreconditionFailed,
        ServerFailed,
        StaleStep,
        StepGone,
        StepOpen,
        StoreFull,
        TimedOut,
        TooLarge,
        TooManyBuffers,
        Unauthorized,
        Unavailable,
    )
    from gradserve_client.graph_models import GraphHead, GraphInfo, GraphTensor, MicroBatch, Step
    from gradserve_client.graphs import Graphs
    from gradserve_client.model import Model
    from gradserve_client.models import (
        BufferInfo,
        BufferRules,
        BufferSpec,
        OperatorInfo,
        Receipt,
        RunInfo,
        StagedPush,
        Statistics,
        Taken,
        TensorInfo,
    )
    from gradserve_client.rows import Rows
    from gradserve_client.runs import Runs

__all__ = [
    "AsyncBuffer",
    "AsyncBuffers",
    "AsyncClient",
    "AsyncGraphs",
    "AsyncModel",
    "AsyncRuns",
    "Buffer",
    "BufferInfo",
    "BufferRules",
    "BufferSpec",
    "Buffers",
    "Busy",
    "Client",
    "Conflict",
    "ConnectionFailed",
    "DuplicateContributor",
    "GradserveError",
    "GraphHead",
    "GraphInfo",
    "GraphTensor",
    "Graphs",
    "InvalidInput",
    "KeyReused",
    "MicroBatch",
    "Model",
    "NotFound",
    "NothingToAverage",
    "OperatorInfo",
    "PreconditionFailed",
    "Receipt",
    "Rows",
    "RunInfo",
    "Runs",
    "ServerFailed",
    "StagedPush",
    "StaleStep",
    "Statistics",
    "Step",
    "StepGone",
    "StepOpen",
    "StoreFull",
    "Taken",
    "TensorInfo",
    "TimedOut",
    "TooLarge",
    "TooManyBuffers",
    "Unauthorized",
    "Unavailable",
]

_HOMES = (
    "errors",
    "models",
    "graph_models",
    "rows",
    "buffer",
    "client",
    "model",
    *map("_async.{}".format, ("buffer", "client", "model")),
)
"""The modules that have all of these names, those that import least first."""


def __getattr__(name: str) -> Any:
    """Import what a program asks for: to start the command line, or a synchronous program, takes half the time."""
    if name in __all__:
        for home in _HOMES:
            if found := vars(import_module(f"{__name__}.{home}")).get(name):
                globals()[name] = found
                return found
    if name in (*_HOMES, "buffers", "graphs", "ops", "runs"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
