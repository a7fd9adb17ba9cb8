"""Files that people bring and no server can run, and what they can do about it."""

from __future__ import annotations

from typing import Any

from service.errors import InvalidGraph

FORMATS = {
    (0, b"PK\x03\x04"): "a zip, as PyTorch's .pt and Keras's .keras are",
    (0, b"\x80\x02"): "a pickle, as old .pt files of PyTorch are",
    (0, b"\x89HDF\r\n\x1a\n"): "HDF5, as Keras's .h5 are",
    (4, b"TFL3"): "a .tflite of TensorFlow",
    (8, b'{"'): "a .safetensors, which has weights alone",
}
"""What other files begin with, by the place of the mark."""

EXPORTS = (
    "PyTorch makes one with torch.onnx.export(net, args, path, dynamo=True, optimize=False)",
    "Keras and TensorFlow with tf2onnx",
)

WAYS = {
    "AffineGrid": "PyTorch's default exporter writes it in nodes that are served: dynamo=True, optimize=False",
    "If": "a branch is served if its sides are views of the same tensors: export with dynamo=True, optimize=False",
    "Loop": "unroll a loop; nn.EmbeddingBag is one: write nn.Embedding, then .mean(1), .sum(1) or .amax(1)",
    "Scan": "unroll a scan",
    "SequenceAt": "a sequence must have parts and places that are constants",
}
"""What a person can do about an operator that is not served."""


def check_kind(content: Any) -> None:
    """Raise `InvalidGraph` for a file's bytes that are of another format."""
    for (at, mark), kind in FORMATS.items():
        if bytes(content[at : at + len(mark)]) == mark:
            raise InvalidGraph(f"the file is {kind}, and no ONNX model: {'; '.join(EXPORTS)}")
