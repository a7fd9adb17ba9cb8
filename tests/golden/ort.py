"""Run one of ONNX Runtime's training kernels by itself, as a model of one node in the domain com.microsoft.

Needs onnxruntime-training 1.19.2, the last release, and onnx; only to ask the kernels anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnxruntime
from onnx import helper

from service.dtypes import Array

onnxruntime.set_default_logger_severity(4)  # fatal only: some of the questions are meant to fail

SOURCE = f"onnxruntime {onnxruntime.__version__}"

OPTIONAL = {
    "GRUTraining": ["X", "W", "R", "B", "SL", "H0"],
    "GRUGrad": ["X", "W", "R", "B", "SL", "H0", "HAll", "ZRH", "grad_HAll", "grad_Ht"],
}
"""The inputs, in order, of operators that take some inputs only if they are there."""


def run(
    operator: str, inputs: Mapping[str, Array], outputs: Sequence[str], attributes: Mapping[str, float | int | str]
) -> dict[str, Array]:
    """The `outputs` of `operator`, name -> array.

    Inputs and outputs are in the operator's order, and their names are free. One thread, so that every sum has one
    order. ONNX Runtime does not check that the shapes fit together: where they do not, it reads and writes out of
    bounds or ends the process.
    """
    places = OPTIONAL.get(operator, list(inputs))
    names = [name if name in inputs else "" for name in places]
    node = helper.make_node(operator, names, list(outputs), domain="com.microsoft", **attributes)
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    made = [helper.make_empty_tensor_value_info(name) for name in outputs]
    opsets = [helper.make_opsetid("", 15), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], operator, given, made), opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    # Some kernels write to their inputs.
    answers = session.run(list(outputs), {name: array.copy() for name, array in inputs.items()})
    return dict(zip(outputs, answers, strict=True))
