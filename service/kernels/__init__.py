"""The operators' kernels: NumPy in, NumPy out, no knowledge of the web. Importing this package fills `OPERATORS`."""

from service.kernels import accumulate, activations, broadcast, gather, gru, softmax
from service.kernels._op import OPERATORS, Attribute, Operator, Tensor

__all__ = [
    "OPERATORS",
    "Attribute",
    "Operator",
    "Tensor",
    "accumulate",
    "activations",
    "broadcast",
    "gather",
    "gru",
    "softmax",
]
