"""The graphs of a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gradserve_client._http.log import logger
from gradserve_client._http.runner import Runner
from gradserve_client._wire import bulk, graphs
from gradserve_client._wire.onnx_files import read_model
from gradserve_client.errors import InvalidInput
from gradserve_client.graph_models import GraphHead, GraphInfo
from gradserve_client.model import Model

EXPORT = "PyTorch's exporter keeps the parameters with torch.onnx.export(net, args, path, dynamo=True, optimize=False)"


class Graphs:
    """The graphs of a server. `server.graphs["mlp"]` is a single graph, a model."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    __iter__ = None  # otherwise Python would call __getitem__ with 0, 1, 2, ... without end
    __contains__ = None

    def __getitem__(self, name: str) -> Model:
        """Return the model of this name, which need not exist: 1 to 200 of the characters A-Z a-z 0-9 . _ : -"""
        return Model(one_server(self._runner), name)

    def list(self, prefix: str = "") -> list[GraphHead]:
        """Return the graphs whose names begin with `prefix`, ordered by name.

        >>> [graph.name for graph in server.graphs.list("lin")]
        ['linear']
        """
        one_server(self._runner)
        heads: list[GraphHead] = []
        cursor: str | None = ""
        while cursor is not None:
            page, cursor = self._runner.run(bulk.page("graphs", GraphHead.of, prefix, cursor))
            heads += page
        return heads

    def put(
        self,
        name: str,
        model: str | Path | bytes,
        *,
        loss: str | None = None,
        train: str | None = None,
        set: Mapping[str, str] | None = None,
        strict: bool = False,
        idempotency_key: str | None = None,
    ) -> GraphInfo:
        """Upload an ONNX model, a file or its bytes, and return what it takes and gives. The same may exist already.

        With `loss`, the server differentiates the model: an output that is one number, or SoftmaxCrossEntropyLoss,
        NegativeLogLikelihoodLoss, MSELoss, L1Loss or BCEWithLogitsLoss. `train` has the parameters to train, as
        patterns: `"!embed.*"`. `set={"parameters": "m.p.*"}` writes the model's own weights into new buffers.

        If an exporter seems to have changed the parameters, the log warns with the result's `doubts`; `strict` refuses
        such a model.
        If the model has weights in files beside it, the package onnx reads them: gradserve-client[onnx].

        Raises `InvalidInput` for a model that the server cannot run, and `Conflict` if another model has the name.

        >>> info = server.graphs.put("linear", content, loss="MSELoss")
        >>> info.kind, [*info.inputs], [*info.parameters]
        ('training', ['x', 'target'], ['w', 'b'])
        """
        one_server(self._runner)
        content = model if isinstance(model, bytes) else read_model(Path(model))
        options = {"loss": loss, "train": train, "strict": "true" if strict else None}
        info = self._runner.run(graphs.put(name, content, options, set or {}, idempotency_key))
        for doubt in info.doubts:
            logger.warning("graph %s may train another model than the exported one: %s", name, doubt)
        if info.doubts:
            logger.warning("%s", EXPORT)
        return info


def one_server(runner: Runner) -> Runner:
    """Return the runner. Raises `InvalidInput` for several servers: a graph runs beside its buffers."""
    if len(runner.shards) > 1:
        raise InvalidInput("The client has several servers, but a graph is on one: use the client of that server")
    return runner
