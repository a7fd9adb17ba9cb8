"""The order of a GRU's gates in its weights, biases and gates: z, r, h, as the docstrings say. PyTorch's is r, z, n."""

from __future__ import annotations

import numpy as np
import pytest

from service.dtypes import Array
from service.kernels import OPERATORS
from tests.kernels.equality import assert_close

H = 2
SHAPES = {"X": (1, 1, 1), "W": (1, 3 * H, 1), "R": (1, 3 * H, H), "B": (1, 6 * H), "H0": (1, 1, H)}


def zeros(**given: Array) -> dict[str, Array]:
    return {name: given.get(name, np.zeros(shape)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("where", ["W", "R", "B of W", "B of R"])
@pytest.mark.parametrize(("block", "gate"), [*enumerate("zrh")])
def test_each_gate_has_its_block(where: str, block: int, gate: str) -> None:
    """A large number in one block moves the gate of this name alone: a gate is 1/2, and the candidate 0, without it."""
    place = slice(block * H, (block + 1) * H)
    inputs = zeros(X=np.ones((1, 1, 1)), H0=np.ones((1, 1, H)))
    if where in ("W", "R"):
        inputs[where][0, place] = 100.0
    else:
        inputs["B"][0, 3 * H :][place] = 100.0 if where == "B of R" else 0.0
        inputs["B"][0, : 3 * H][place] = 100.0 if where == "B of W" else 0.0
    ZRH = OPERATORS["GRUTraining"](inputs, {"linear_before_reset": 1})["ZRH"].reshape(3, H)
    expected = {name: np.full(H, 0.0 if name == "h" else 0.5) for name in "zrh"}
    expected[gate] = np.ones(H)
    assert_close(ZRH, np.array([expected[name] for name in "zrh"]), atol=1e-12)


def test_the_reset_gate_scales_the_bias_of_the_second_half_alone() -> None:
    """With linear_before_reset, the candidate is tanh(Wbh + r * Rbh): r is 1/2 here."""
    for half, expected in ((0, np.tanh(1.0)), (1, np.tanh(0.5))):
        inputs = zeros()
        inputs["B"].reshape(2, 3, H)[half, 2] = 1.0
        results = OPERATORS["GRUTraining"](inputs, {"linear_before_reset": 1})
        assert_close(results["ZRH"].reshape(3, H)[2], np.full(H, expected), rtol=1e-12)


@pytest.mark.parametrize("operator", ["GRUTraining", "GRUGrad"])
def test_the_description_names_the_order(operator: str) -> None:
    """OpenAPI, the page at /, the command line and the client show this text."""
    text = " ".join(OPERATORS[operator].description.split())
    assert "order: z, r, h" in text or "the order z, r, h" in text
    assert "those of W before those of R" in text or "the biases of W before those of R" in text


def turned(blocks: Array) -> Array:
    """Put PyTorch's r, z, n in the order z, r, n, or back, as docs/operators.md does."""
    r, z, n = np.split(blocks, 3)
    return np.concatenate([z, r, n])


@pytest.mark.parametrize("is_turned", [True, False])
def test_weights_of_pytorch_fit_once_their_gates_are_turned(is_turned: bool) -> None:
    """Without that the shapes fit as well, and the gradients are wrong."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    gru, X = torch.nn.GRU(3, 4, bidirectional=True, dtype=torch.float64), torch.randn(5, 2, 3, dtype=torch.float64)
    turn = turned if is_turned else np.asarray
    W, R, b_ih, b_hh = (
        np.stack([turn(gru.get_parameter(f"{name}_l0{end}").detach().numpy()) for end in ("", "_reverse")])
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    states, _ = gru(X)
    states.sum().backward()
    attributes = {"linear_before_reset": 1, "direction": "bidirectional"}
    inputs = {"X": X.numpy(), "W": W, "R": R, "B": np.concatenate([b_ih, b_hh], axis=1)}
    forward = OPERATORS["GRUTraining"](inputs, attributes)
    inputs |= {name: forward[name] for name in ("HAll", "ZRH")}
    results = OPERATORS["GRUGrad"]({**inputs, "grad_HAll": np.ones_like(forward["HAll"])}, attributes)
    halves = dict(zip(("bias_ih", "bias_hh"), np.split(results["dB"], 2, axis=1), strict=True))
    same = [np.allclose(forward["HAll"].swapaxes(1, 2).reshape(5, 2, 8), states.detach().numpy())]
    for name, gradients in {"weight_ih": results["dW"], "weight_hh": results["dR"], **halves}.items():
        for gradient, end in zip(gradients, ("", "_reverse"), strict=True):
            expected = gru.get_parameter(f"{name}_l0{end}").grad
            assert expected is not None
            same.append(np.allclose(turn(gradient), expected.numpy()))
    assert same == [is_turned] * len(same)
