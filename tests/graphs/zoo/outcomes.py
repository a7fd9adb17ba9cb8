"""The exports of the zoo that do not train: what PyTorch or the server says."""

from __future__ import annotations

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
    "hf_t5 default": "Cannot view a tensor with shape",
}
"""Models and exporters that PyTorch cannot put together, and why: words of PyTorch, or that its file is wrong."""

SEQUENCES = "operators that are not served: SequenceAt, SplitToSequence"
BAGS = "operators that are not served: ConcatFromSequence, If, Loop, SequenceEmpty"

REFUSED = {
    **dict.fromkeys(("swiglu default", "glu_split default", "gpt_chunk default", "decoder default"), SEQUENCES),
    **dict.fromkeys(("diffusion default", "perceiver default", "vae default", "lstm_cell default"), SEQUENCES),
    **dict.fromkeys(("bag_of_sums default", "bag_of_means default", "bag_of_maxima default"), BAGS),
    **dict.fromkeys(("bag_of_sums old", "bag_of_means old", "bag_of_maxima old"), "not served: Loop"),
    **dict.fromkeys(("alexnet old", "gnn_scatter old"), "not served: If"),
    "spatial_transformer default": "not served: GridSample",
    "spatial_transformer old": "not served: AffineGrid, GridSample",
}
"""Models and exporters whose file the server refuses, and a part of what it says."""
