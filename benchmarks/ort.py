"""One of ONNX Runtime's training kernels alone: a model of one node, with inputs and outputs bound in advance.

The last release, onnxruntime-training 1.19.2, has wheels for CPython up to 3.11.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from service.dtypes import Array

try:
    import onnxruntime
    from onnx import helper
except ImportError as missing:
    sys.exit(
        f"This needs {missing.name}, which is not installed for this Python {sys.version.split()[0]}.\n"
        "onnxruntime-training 1.19.2 has wheels for CPython 3.11 and older only: make bench PYTHON=python3.11"
    )


onnxruntime.set_default_logger_severity(3)  # errors only: each session warns of operators without a schema


class Kernel:
    """The operator `op` of the domain com.microsoft with `threads` threads, ready to run on `inputs` into `outputs`.

    Both are name -> array, in the operator's order, None for an input left out; the names are free. ONNX Runtime works
    in the arrays' own memory and trusts their shapes: with wrong shapes it reads and writes out of bounds.
    """

    def __init__(
        self, op: str, given: Mapping[str, Array | None], outputs: Mapping[str, Array], threads: int, **attributes: Any
    ) -> None:
        places = [name if array is not None else "" for name, array in given.items()]
        inputs: dict[str, Array] = {name: array for name, array in given.items() if array is not None}
        node = helper.make_node(op, places, list(outputs), domain="com.microsoft", **attributes)
        graph = helper.make_graph([node], op, _described(inputs), _described(outputs))
        opsets = [helper.make_opsetid("", 15), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Idle threads must not spin on a core that the next contender needs.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._binding = self._session.io_binding()
        self._memory = [*inputs.values(), *outputs.values()]  # keeps the memory of inputs and outputs alive
        values = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in {**inputs, **outputs}.items()
        }
        for name in inputs:
            self._binding.bind_ortvalue_input(name, values[name])
        for name in outputs:
            self._binding.bind_ortvalue_output(name, values[name])

    def run(self) -> None:
        """Run the kernel alone."""
        self._session.run_with_iobinding(self._binding)


def _described(tensors: Mapping[str, Array]) -> list[Any]:
    return [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in tensors.items()
    ]
