"""How PyTorch exports a model of the zoo to ONNX."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from torch.onnx import TrainingMode

from tests.graphs.zoo.example import Example, Net

EXPORTED = 4
"""The samples of the batch that a model is exported with."""


def default(example: Example, **options: Any) -> bytes:
    """Return what the default exporter writes without its optimizer. `options` are those of `torch.onnx.export`."""
    net, tensors = example.net(), example.tensors(EXPORTED)
    dims = {name: torch.export.Dim(name) for one in example.given.values() for name in one.axes.values()}
    shapes = tuple({axis: dims[name] for axis, name in one.axes.items()} for one in example.given.values())
    with quiet():
        program = torch.onnx.export(
            net,
            tuple(tensors[name] for name in example.given),
            dynamo=True,
            opset_version=example.opset,
            dynamic_shapes=(shapes,) if isinstance(net, Net) else shapes,
            input_names=[*example.given],
            output_names=[output_of(example)],
            verbose=False,
            **{"optimize": False, **options},
        )
        content: bytes = program.model_proto.SerializeToString()
    return content


def optimized(example: Example) -> bytes:
    """Return what the default exporter writes by default. Its optimizer changes the parameters of many models."""
    return default(example, optimize=True)


def old(example: Example) -> bytes:
    """Return what the exporter by TorchScript writes in its form for training."""
    net, tensors = example.net(), example.tensors(EXPORTED)
    file = io.BytesIO()
    with quiet():
        torch.onnx.export(
            net,
            tuple(tensors[name] for name in example.given),
            file,
            dynamo=False,
            opset_version=example.old,
            training=TrainingMode.TRAINING,
            do_constant_folding=False,
            input_names=[*example.given],
            output_names=[output_of(example)],
            dynamic_axes={name: dict(one.axes) for name, one in example.given.items()},
        )
    return file.getvalue()


EXPORTERS: dict[str, Callable[[Example], bytes]] = {"default": default, "old": old}


def check_the_same(example: Example, content: bytes) -> None:
    """Raise `AssertionError` for a file that gives another output than the module, by ONNX's own evaluator."""
    tensors = example.tensors(EXPORTED)
    expected = example.net()(*(tensors[name] for name in example.given)).detach().numpy()
    given = {name: tensors[name].numpy() for name in example.given}
    (found,) = ReferenceEvaluator(onnx.load_from_string(content)).run(None, given)
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-3), "the file computes something else"


def output_of(example: Example) -> str:
    """Return the name of the output."""
    return "loss" if example.loss == "loss" else "y"


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what the exporters say of themselves."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
