"""Run one of ONNX Runtime's training kernels by itself, as a model of one node.

Needs onnxruntime-training 1.19.2, the last release, and onnx; only to ask the kernels anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnx import helper
from onnxruntime.capi import onnxruntime_pybind11_state as refusals

from service.dtypes import Array
from service.kernels import OPERATORS
from tests.golden.child import Refused

onnxruntime.set_default_logger_severity(4)  # fatal only: some of the questions are meant to fail

SOURCE = f"onnxruntime {onnxruntime.__version__}"
REFUSALS = (refusals.Fail, refusals.InvalidArgument, refusals.RuntimeException)

ONNX = {
    "AveragePoolGrad",
    "MaxPoolGrad",
    "SoftmaxCrossEntropyLoss",
    "SparseSoftmaxCrossEntropy",
    "SparseSoftmaxCrossEntropyGrad",
}
"""The operators in the domain ai.onnx. The others are in com.microsoft."""
OPSETS = {"NegativeLogLikelihoodLossInternal": 12}
"""The opset of ai.onnx, where it must not be 15."""
SHAPED = {"AveragePoolGrad", "MaxPoolGrad"}
"""The operators whose input `shape` is not ONNX Runtime's: it takes the shape of the output from the graph."""
UNTYPED = {"InvertibleLayerNormalizationGrad", "ReduceAllL2"}
"""The operators whose outputs have the dtype of the first input, which ONNX Runtime does not see by itself."""
VARIADIC = {"ConcatTraining", "ReduceAllL2", "SplitTraining"}
"""The operators whose groups are any number of inputs or outputs. The groups of the others are sequences of tensors."""
INPUTS: dict[str, list[str]] = {}
"""ONNX Runtime's inputs, in order, where they are not those that the operator declares."""


def run(
    operator: str, inputs: Mapping[str, Array], asked: Sequence[str], attributes: Mapping[str, Any]
) -> dict[str, Array]:
    """The outputs `asked` of `operator`, name -> array. Raises `Refused` if the kernel refuses the call.

    One thread, so that every sum has one order. ONNX Runtime does not check that the shapes fit together: where they do
    not, it reads and writes out of bounds or ends the process.
    """
    try:
        session, given = prepared(operator, inputs, asked, attributes)
        answers = session.run(list(asked), given)
    except REFUSALS as refusal:
        raise Refused(_reason(str(refusal))) from None
    members = [name.partition(".")[2] for name in inputs if "." in name]
    return dict(pair for name, answer in zip(asked, answers, strict=True) for pair in _named(name, answer, members))


def prepared(
    operator: str, inputs: Mapping[str, Array], asked: Sequence[str], attributes: Mapping[str, Any], threads: int = 1
) -> tuple[onnxruntime.InferenceSession, dict[str, Array | list[Array]]]:
    """The session of one node, and what it takes. Raises one of `REFUSALS` if the node cannot be."""
    given, shape = _given(operator, inputs)
    declared = OPERATORS.get(operator)
    takes = INPUTS.get(operator) or ([one.name for one in declared.inputs] if declared else _groups(given))
    makes = [one.name for one in declared.outputs] if declared else _groups(asked)
    names = [name for name in takes if shape is None or name != "shape"]
    first, typed = next(iter(inputs.values())), operator in SHAPED | UNTYPED
    domain = "" if operator in ONNX else "com.microsoft"
    node = helper.make_node(operator, _places(names, given), _places(makes, asked), domain=domain, **attributes)
    made = [_described(name, first, shape) if typed else helper.make_empty_tensor_value_info(name) for name in asked]
    graph = helper.make_graph(
        [node],
        operator,
        [_described(name, value, getattr(value, "shape", None)) for name, value in given.items()],
        made,
    )
    return _session(operator, graph, threads), given


def _given(operator: str, inputs: Mapping[str, Array]) -> tuple[dict[str, Array | list[Array]], list[int] | None]:
    """Copies of the inputs, which some kernels write to, with each sequence as a list, and the static shape."""
    given: dict[str, Any] = {}
    for name, array in inputs.items():
        group, dot, _ = name.partition(".")
        if dot and operator not in VARIADIC:
            given.setdefault(group, []).append(np.array(array))
        else:
            given[name] = np.array(array)
    return given, given.pop("shape").ravel().tolist() if operator in SHAPED else None


def _groups(names: Iterable[str]) -> list[str]:
    """The names without those of members, in order: what an operator that is not declared yet seems to have."""
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def _places(declared: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names in the order of the operator: "" in the place of one that is not there, but not at the end."""
    names = list(names)
    places = [name for one in declared for name in [name for name in names if name.partition(".")[0] == one] or [""]]
    while places and not places[-1]:
        places.pop()
    return places


def _described(name: str, value: Array | list[Array], shape: Sequence[int] | None) -> Any:
    if isinstance(value, list):
        return helper.make_tensor_sequence_value_info(name, helper.np_dtype_to_tensor_dtype(value[0].dtype), None)
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), shape)


def _session(operator: str, graph: Any, threads: int) -> onnxruntime.InferenceSession:
    opsets = [helper.make_opsetid("", OPSETS.get(operator, 15)), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Idle threads must not spin on a core that others need.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _named(name: str, answer: Array | list[Array], members: Iterable[str]) -> Iterator[tuple[str, Array]]:
    """The output by its name. A sequence has the names of the first group of inputs."""
    if isinstance(answer, list):
        yield from zip((f"{name}.{member}" for member in members), answer, strict=False)
    else:
        yield name, answer


def _reason(message: str) -> str:
    """The sentence that says what was wrong, without places in ONNX Runtime's source."""
    return (message.partition("Status Message: ")[2] or message).rpartition(" was false. ")[2].strip()
