"""The exports of the zoo that do not train: what PyTorch or the server says."""

from __future__ import annotations

from tests.graphs.zoo.exports import EXPORTERS

CHANGED = "the file computes something else"

UNEXPORTED = {
    "stick_breaking default": "prims.prod.default",
    "stick_breaking old": "aten::cumprod",
    "prototypes default": "aten._cdist_forward.default",
    "gpt_rope old": "aten::rms_norm",
    "grouped_queries old": "aten::rms_norm",
    "state_space old": "aten::smooth_l1_loss",
    "robust old": "aten::huber_loss",
    "distillation old": "ONNX does not support label_smoothing",
    "distillation default": CHANGED,
    "gnn_index_add old": CHANGED,
    "gaussian default": "Could not guard on data-dependent expression",
}
"""Models and exporters that PyTorch cannot put together, and why: words of PyTorch, or that its file is wrong."""

REFUSED = {
    **dict.fromkeys(
        (f"bag_of_{mode} {form}" for mode in ("sums", "means", "maxima") for form in EXPORTERS), "nn.EmbeddingBag"
    ),
    "spatial_transformer old": "not served: AffineGrid",
}
"""Models and exporters whose file the server refuses, and a part of what it says."""
