"""A graph of a server, and what the parameters of its run compute."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradserve_client._http.runner import Runner
from gradserve_client._runs import checkpoint, training
from gradserve_client._runs.names import checked_prefix, run_name
from gradserve_client._wire import files, graphs
from gradserve_client._wire.arguments import as_name
from gradserve_client._wire.calls import Input, Inputs
from gradserve_client._wire.tensors import Array
from gradserve_client.buffers import Buffers
from gradserve_client.errors import NotFound, explained
from gradserve_client.graph_models import GraphInfo


class Graph:
    """A graph by its name, with the parameters of a run or its own. Its methods join no run, and change none."""

    _has_begun = False
    """Whether `run` takes the parameters of the run."""

    def __init__(self, runner: Runner, name: str, run: str | None) -> None:
        self._runner, self.name = runner, as_name(name)
        self._prefix, self._name = (
            checked_prefix(name if run is None else run, None),
            run_name(name if run is None else run),
        )
        self._buffers = Buffers(runner)
        self._info: GraphInfo | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, prefix={self.prefix!r} at {self._runner.place_of(self.name)})"

    @property
    def prefix(self) -> str:
        """What the names of the run's buffers begin with."""
        return self._prefix

    def info(self) -> GraphInfo:
        """Return what the graph takes and gives. Raises `NotFound`.

        >>> server.graphs["linear"].info().outputs["y"]
        GraphTensor(dtype='float32', shape=(None, 1))
        """
        self._info = self._runner.run(graphs.info(self.name))
        return self._info

    def delete(self, *, idempotency_key: str | None = None) -> None:
        """Delete the graph. Buffers stay: `server.buffers.delete(prefix=model.prefix)` deletes those of the run.

        >>> server.graphs["linear"].delete()
        """
        return self._runner.run(graphs.delete(self.name, idempotency_key))

    def run(
        self, tensors: Mapping[str, Input | Inputs], *, outputs: Sequence[str] | None = None, seed: int | None = None
    ) -> dict[str, Array]:
        """Run the graph, and return its outputs by name, or some of them.

        Without `parameters` in `tensors`, they are those of the run once it has started, else the model's own. Other
        buffers take their place, too: `{"parameters": server.buffers["exp1.p.*"]}`.

        >>> server.graphs["linear"].run({"x": [[1, 2]]}, outputs=["y"])
        {'y': array([[9.]], dtype=float32)}
        """
        info = self._info or self.info()
        given = training.sources_of(self._prefix, info, tensors) if self._has_begun else {}
        return self._runner.run(graphs.run(info, {**tensors, **given}, outputs, seed))

    def evaluate(self, tensors: Mapping[str, Input | Inputs], *, outputs: Sequence[str] = ()) -> dict[str, Array]:
        """Return the loss of these tensors and some outputs, by name, with the run's parameters as they are now.

        Dropout is off, and BatchNormalization takes the running statistics. One request: it counts nothing, changes
        nothing, and joins no run. If the graph's own run, without `join`, has not begun, the parameters are the
        model's own. Raises `NotFound` for another run that has not begun.

        >>> server.graphs["linear"].evaluate({"x": [[1, 2]], "target": [[8]]}, outputs=["y"])
        {'loss': array(1., dtype=float32), 'y': array([[9.]], dtype=float32)}
        """
        info = self._info or self.info()
        wanted = [*dict.fromkeys([*(["loss"] if "loss" in info.outputs else []), *outputs])] or None
        given = {**tensors, **training.sources_of(self._prefix, info, tensors)}
        try:
            return self._runner.run(graphs.run(info, given, wanted, form="inference"))
        except NotFound as error:
            if error.code != "unknown_buffer":
                raise
            if self._name != run_name(self.name):
                raise explained(error, f"The run {self._name!r} has not begun: start() begins it") from None
        return self._runner.run(graphs.run(info, tensors, wanted, form="inference"))

    def export(self, path: str | Path) -> int:
        """Write the ONNX model with the run's parameters and statistics, and return the number of steps that they have.

        ONNX Runtime computes from the file what `evaluate` does. It joins no run. Raises `NotFound` if the run has not
        begun, and what `save` raises.

        >>> model.start(), model.export("/dev/null")
        (0, 0)
        """
        buffers = training.sources_of(self._prefix, self._info or self.info())
        with files.writing(Path(path)) as write:
            for _ in range(checkpoint.LOOKS):
                content, versions = self._runner.run(graphs.content(self.name, buffers))
                if versions["parameters"] >= versions.get("statistics", 0):
                    break
                time.sleep(checkpoint.PAUSE)
            else:
                raise training.under_way(self._name)
            first = [one.name for one in self._buffers.list(f"{self._prefix}::first")]
            before = self._buffers.value(first) if first else {}
            write(content)
        return sum(map(int, before.values())) + versions["parameters"] - 1

    def download(self, *, parameters: str | None = None, statistics: str | None = None) -> bytes:
        """Return the ONNX model as it was uploaded, or with the values of buffers, such as `"exp1.p.*"`.

        >>> server.graphs["linear"].download() == content
        True
        """
        given = {"parameters": parameters, "statistics": statistics}
        buffers = {group: buffer for group, buffer in given.items() if buffer is not None}
        file, _ = self._runner.run(graphs.content(self.name, buffers))
        return file
