"""The order of an LSTM's gates in its weights, biases and gates: i, o, f, c. PyTorch's is i, f, g, o, and g is c."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from service.dtypes import Array
from service.kernels import OPERATORS
from tests.kernels.equality import assert_close

H = 2
SHAPES = {"X": (1, 1, 1), "W": (1, 4 * H, 1), "R": (1, 4 * H, H), "B": (1, 8 * H), "Ht0": (1, 1, H), "Ct0": (1, 1, H)}


def zeros(**given: Array) -> dict[str, Array]:
    return {name: given.get(name, np.zeros(shape)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("where", ["W", "R", "B of W", "B of R"])
@pytest.mark.parametrize(("block", "gate"), [*enumerate("iofc")])
def test_each_gate_has_its_block(where: str, block: int, gate: str) -> None:
    """A large number in one block moves the gate of this name alone: a gate is 1/2, and the candidate 0, without it."""
    place = slice(block * H, (block + 1) * H)
    inputs = zeros(X=np.ones((1, 1, 1)), Ht0=np.ones((1, 1, H)))
    if where in ("W", "R"):
        inputs[where][0, place] = 100.0
    else:
        inputs["B"].reshape(2, 4 * H)[int(where == "B of R"), place] = 100.0
    iofc = OPERATORS["LSTMTraining"](inputs, {})["iofc"].reshape(4, H)
    expected = {name: np.full(H, 0.0 if name == "c" else 0.5) for name in "iofc"}
    expected[gate] = np.ones(H)
    assert_close(iofc, np.array([expected[name] for name in "iofc"]), atol=1e-12)


@pytest.mark.parametrize(("block", "gate"), [*enumerate("iof")])
def test_each_peephole_has_its_block(block: int, gate: str) -> None:
    P = np.zeros((1, 3 * H))
    P[0, block * H : (block + 1) * H] = 100.0
    iofc = OPERATORS["LSTMTraining"]({**zeros(Ct0=np.ones((1, 1, H))), "P": P}, {})["iofc"].reshape(4, H)
    expected = {name: np.full(H, 0.0 if name == "c" else 0.5) for name in "iofc"}
    expected[gate] = np.ones(H)
    assert_close(iofc, np.array([expected[name] for name in "iofc"]), atol=1e-12)


def test_the_output_gate_sees_the_cells_of_its_own_step() -> None:
    """The candidate is 1 and all gates are 1/2, so the cells go from 0 to 1/2; the other peepholes see 0."""
    inputs = zeros()
    inputs["B"].reshape(2, 4, H)[0, 3] = 100.0
    iofc = OPERATORS["LSTMTraining"]({**inputs, "P": np.ones((1, 3 * H))}, {})["iofc"].reshape(4, H)
    assert_close(iofc, np.repeat([[0.5], [1 / (1 + np.exp(-0.5))], [0.5], [1.0]], H, axis=1), rtol=1e-12)


@pytest.mark.parametrize("operator", ["LSTMTraining", "LSTMGrad"])
def test_the_description_names_the_order(operator: str) -> None:
    """OpenAPI, the page at /, the command line and the client show this text."""
    text = " ".join(OPERATORS[operator].description.split())
    assert "order: i, o, f, c" in text or "the order i, o, f, c" in text
    assert "those of W before those of R" in text or "the biases of W before those of R" in text


def turned(blocks: Array) -> Array:
    """Put PyTorch's i, f, g, o in the order i, o, f, g, as docs/operators.md does."""
    i, f, g, o = np.split(blocks, 4)
    return np.concatenate([i, o, f, g])


@pytest.mark.parametrize(("turn", "fits"), [(turned, True), (np.asarray, False)])
def test_weights_of_pytorch_fit_once_their_gates_are_turned(turn: Callable[[Array], Array], fits: bool) -> None:
    """Without that the shapes fit as well, and the gradients are wrong."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    lstm, X = torch.nn.LSTM(3, 4, bidirectional=True, dtype=torch.float64), torch.randn(5, 2, 3, dtype=torch.float64)
    W, R, b_ih, b_hh = (
        np.stack([turn(lstm.get_parameter(f"{name}_l0{end}").detach().numpy()) for end in ("", "_reverse")])
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    hidden, _ = lstm(X)
    hidden.sum().backward()
    inputs = {"X": X.numpy(), "W": W, "R": R}
    attributes = {"direction": "bidirectional"}
    forward = OPERATORS["LSTMTraining"]({**inputs, "B": np.concatenate([b_ih, b_hh], axis=1)}, attributes)
    inputs |= {name: forward[name] for name in ("HAll", "CAll", "iofc")}
    results = OPERATORS["LSTMGrad"]({**inputs, "dHAll": np.ones_like(forward["HAll"])}, attributes)
    halves = dict(zip(("bias_ih", "bias_hh"), np.split(results["dB"], 2, axis=1), strict=True))
    same = [np.allclose(forward["HAll"].swapaxes(1, 2).reshape(5, 2, 8), hidden.detach().numpy())]
    for name, gradients in {"weight_ih": results["dW"], "weight_hh": results["dR"], **halves}.items():
        for gradient, end in zip(gradients, ("", "_reverse"), strict=True):
            expected = lstm.get_parameter(f"{name}_l0{end}").grad
            assert expected is not None
            same.append(np.allclose(gradient, turn(expected.numpy())))
    assert same == [fits] * len(same)
