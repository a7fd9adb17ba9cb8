"""The operators' kernels: NumPy in, NumPy out, no knowledge of the web. Importing this package fills `OPERATORS`."""

from service.kernels import (
    accumulate,
    activations,
    broadcast,
    dropout,
    gather,
    gelu,
    gru,
    indexing,
    quantization,
    softmax,
)
from service.kernels._blocks import Workspace, workspace
from service.kernels._op import MAX_MULTIPLY_ADDS, OPERATORS, Operator
from service.kernels._types import Attribute, Tensor

__all__ = [
    "MAX_MULTIPLY_ADDS",
    "OPERATORS",
    "Attribute",
    "Operator",
    "Tensor",
    "Workspace",
    "accumulate",
    "activations",
    "broadcast",
    "dropout",
    "gather",
    "gelu",
    "gru",
    "indexing",
    "quantization",
    "softmax",
    "workspace",
]
