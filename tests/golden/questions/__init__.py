"""The questions that ONNX Runtime's kernels are asked; none lies where those read or write out of bounds.

Names that begin with `peer` are the cases of ONNX Runtime's own tests. The numbers of a case depend on its name alone.
`torch_gru` asks PyTorch.
"""

from tests.golden.questions import accumulate, activations, broadcast, gather, gru, softmax, torch_gru

__all__ = ["accumulate", "activations", "broadcast", "gather", "gru", "softmax", "torch_gru"]
