"""The questions to the rules of operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from service.dtypes import Array
from tests.graphs.gradients.question import Question

RANDOM = np.random.default_rng(5)


def numbers(*shape: int, low: float = -2, high: float = 2) -> Array:
    """Different numbers that all floating dtypes have: odd multiples of 1/64 from near 0 on, so none is 0 or whole."""
    count = int(np.prod(shape))
    places = np.linspace(low * 16, high * 16, count + 2)[1:-1]
    return np.asarray(RANDOM.permutation((np.floor(places) + 0.5) / 16).reshape(shape))


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


MASK = np.array([[True, False, True], [False, True, True]])
X = numbers(2, 3)
POSITIVE = numbers(2, 3, low=0.25, high=2)
WITHIN = numbers(2, 3, low=-0.9, high=0.9)
CUBE = numbers(2, 3, 4)

QUESTIONS: dict[str, Question] = {}


def ask(op: str, function: Callable[..., Any], *inputs: Array | None, case: str = "", **options: Any) -> None:
    """Add a question. Options that are no field of `Question` are attributes."""
    fields = {name: options.pop(name) for name in [*options] if name in Question.__dataclass_fields__}
    name = f"{op} {case}".strip()
    assert name not in QUESTIONS, name
    QUESTIONS[name] = Question(op, function, inputs, options, **fields)


for _op in "Abs Neg Exp Erf Sin Cos Tan Sinh Cosh Tanh Sigmoid Relu Softplus Softsign Asinh Atan".split():
    ask(_op, getattr(torch, _op.lower().replace("asinh", "arcsinh"), None) or getattr(F, _op.lower()), X)
for _op in "Log Sqrt Reciprocal".split():
    ask(_op, getattr(torch, _op.lower()), POSITIVE)
for _op in "Asin Acos Atanh".split():
    ask(_op, getattr(torch, _op.lower()), WITHIN)
ask("Acosh", torch.acosh, POSITIVE + 1)
ask("Celu", lambda x: F.celu(x, 1.5), X, alpha=1.5)
ask("Elu", lambda x: F.elu(x, 1.5), X, alpha=1.5)
ask("Selu", F.selu, X, alpha=1.6732632423543772848170429916717, gamma=1.0507009873554804934193349852946)
ask("HardSigmoid", lambda x: torch.clamp(x / 6 + 0.5, 0, 1), 3 * X, alpha=1 / 6, beta=0.5)
ask("HardSwish", F.hardswish, 3 * X)
ask("LeakyRelu", lambda x: F.leaky_relu(x, 0.25), X, alpha=0.25)
ask("LeakyRelu", lambda x: F.leaky_relu(x, -0.25), X, alpha=-0.25, case="of a negative slope")
ask("Mish", F.mish, X)
ask("Shrink", lambda x: F.softshrink(x, 0.75), X, lambd=0.75, bias=0.75)
ask("ThresholdedRelu", lambda x: F.threshold(x, 0.75, 0), X, alpha=0.75)
ask("Gelu", F.gelu, X)
ask("Gelu", lambda x: F.gelu(x, approximate="tanh"), X, approximate="tanh", case="tanh")
ask("Gelu", F.gelu, X, domain="com.microsoft", case="of ONNX Runtime")
ask("BiasGelu", lambda x, b: F.gelu(x + b), X, numbers(3), domain="com.microsoft")
ask("FastGelu", lambda x: F.gelu(x, approximate="tanh"), X, domain="com.microsoft")
ask("FastGelu", lambda x, b: F.gelu(x + b, approximate="tanh"), X, numbers(3), domain="com.microsoft", case="with bias")
ask("QuickGelu", lambda x: x * torch.sigmoid(1.5 * x), X, alpha=1.5, domain="com.microsoft")
ask("Swish", lambda x: x * torch.sigmoid(1.5 * x), X, alpha=1.5, opset=24)
ask("PRelu", lambda x, s: torch.where(x > 0, x, x * s), CUBE, numbers(3, 1))
ask("PRelu", F.prelu, X, numbers(1), case="of one slope")

for _op, _function in {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div}.items():
    ask(_op, _function, X, POSITIVE)
    ask(_op, _function, CUBE, numbers(3, 1, low=0.5), case="broadcast behind")
    ask(_op, _function, numbers(1, 4), CUBE, case="broadcast in front")
    ask(_op, _function, CUBE, np.array(0.75), case="with a scalar")
    ask(_op, _function, CUBE, numbers(4, low=0.5), case="with a row")
ask("Pow", lambda x, _: x**3, X, np.array(3.0), frozen=[1], case="cube")
ask("Pow", torch.pow, POSITIVE, numbers(3))
ask("Pow", torch.pow, POSITIVE, ints(2, 0, 1), case="to integers")
ask("Pow", torch.pow, POSITIVE, np.array(0.5), frozen=[1], case="root")
ask("Pow", torch.pow, POSITIVE + 1, np.array(0.5), case="to a number")
ask("Mod", torch.fmod, CUBE, numbers(4, low=0.5), fmod=1)
ask("Max", torch.maximum, X, numbers(2, 3))
ask("Min", lambda a, b, c: torch.minimum(torch.minimum(a, b), c), X, numbers(3), numbers(2, 1), case="of three")
ask("Max", torch.maximum, X, np.array(0.0), case="with a scalar", frozen=[1])
ask("Sum", lambda a, b, c: a + b + c, X, numbers(3), numbers(2, 1))
ask("Mean", lambda a, b, c: (a + b + c) / 3, X, numbers(3), numbers(2, 1))
ask("Where", torch.where, MASK, X, numbers(3))
ask("Where", torch.where, MASK, np.array(0.5), X, case="with a scalar")
ask("Clip", torch.clamp, X, np.array(-0.5), np.array(0.75))
ask("Clip", lambda x, low, high: torch.clamp(x, max=high), X, None, np.array(0.75), case="above")
ask("Clip", lambda x, low: torch.clamp(x, min=low), X, np.array(-0.5), case="below")
ask("Identity", lambda x: x * 1, X)
ask("CastLike", lambda x, y: x * 1, X, numbers(1), frozen=[1])

ask("MatMul", torch.matmul, numbers(3, 4), numbers(4, 2))
ask("MatMul", torch.matmul, numbers(2, 3, 4), numbers(4, 2), case="with a layer's weights")
ask("MatMul", torch.matmul, numbers(2, 2, 3, 4), numbers(2, 1, 4, 2), case="of broadcast batches")
ask("MatMul", torch.matmul, numbers(3, 4), numbers(2, 4, 2), case="of one matrix with many")
ask("MatMul", torch.matmul, numbers(0, 4), numbers(2, 4, 2), case="of no rows with many")
ask("MatMul", torch.matmul, numbers(4), numbers(4), case="of vectors")
ask("MatMul", torch.matmul, numbers(4), numbers(4, 2), case="of a row")
ask("MatMul", torch.matmul, numbers(3, 4), numbers(4), case="with a column")
ask("MatMul", torch.matmul, numbers(4), numbers(2, 3, 4, 2), case="of a row with many")
ask("MatMul", torch.matmul, numbers(2, 3, 2, 4), numbers(4), case="of many with a column")
for _a in (0, 1):
    for _b in (0, 1):
        ask(
            "Gemm",
            lambda a, b, c, ta=_a, tb=_b: 0.5 * (a.T if ta else a) @ (b.T if tb else b) + 2 * c,
            numbers(4, 3) if _a else numbers(3, 4),
            numbers(2, 4) if _b else numbers(4, 2),
            numbers(2) if _a else numbers(3, 1),
            alpha=0.5,
            beta=2.0,
            transA=_a,
            transB=_b,
            case=f"{_a}{_b}",
        )
for _a in (0, 1):
    for _b in (0, 1):
        ask(
            "FusedMatMul",
            lambda a, b, ta=_a, tb=_b: 0.5 * (a.mT if ta else a) @ (b.mT if tb else b),
            numbers(2, 4, 3) if _a else numbers(3, 4),
            numbers(2, 4) if _b else numbers(2, 4, 2),
            domain="com.microsoft",
            alpha=0.5,
            transA=_a,
            transB=_b,
            case=f"{_a}{_b}",
        )
ask(
    "FusedMatMul",
    lambda a, b: a.permute(1, 2, 0) @ b.permute(1, 0, 2),
    *(numbers(4, 2, 3), numbers(4, 2, 5)),
    domain="com.microsoft",
    transA=1,
    transBatchA=1,
    transBatchB=1,
    case="of batches behind",
)
ask("FusedMatMul", torch.matmul, numbers(3, 4), numbers(4), domain="com.microsoft", transB=1, case="with a column")
ask("Gemm", torch.matmul, numbers(3, 4), numbers(4, 2), case="without C")
EQUATIONS: dict[str, list[tuple[int, ...]]] = {
    "ij,jk->ik": [(2, 3), (3, 4)],
    "bhid,bhjd->bhij": [(2, 2, 3, 2), (2, 2, 4, 2)],
    "i,j": [(3,), (2,)],
    "ba,ca": [(2, 3), (4, 3)],
    "ij->": [(2, 3)],
    "ij->j": [(2, 3)],
    "ii->i": [(3, 3)],
    "ii": [(3, 3)],
    "iij,jk->ik": [(2, 2, 3), (3, 4)],
    "...ij,...jk->...ik": [(2, 1, 2, 3), (4, 3, 2)],
    "...i,i->...": [(2, 3), (3,)],
    "i...,j->...ij": [(3, 2, 2), (2,)],
    "ij,jk,kl->il": [(2, 3), (3, 2), (2, 4)],
    "ij,kl->il": [(2, 3), (4, 2)],
    "b i d, b j d -> b i j": [(2, 2, 3), (2, 4, 3)],
}
for _equation, _shapes in EQUATIONS.items():
    ask(
        "Einsum",
        lambda *operands, equation=_equation: torch.einsum(equation, *operands),
        *(numbers(*shape) for shape in _shapes),
        equation=_equation,
        case=_equation,
    )

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ReduceSum": torch.sum,
    "ReduceMean": torch.mean,
    "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
    "ReduceProd": lambda x, axes, keep: (
        x.prod(axes[-1], keep).prod(axes[0], keep) if len(axes) > 1 else x.prod(*axes, keep)
    ),
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keep),
    "ReduceL2": lambda x, axes, keep: x.square().sum(axes, keep).sqrt(),
    "ReduceLogSum": lambda x, axes, keep: (x + 0).sum(axes, keep).log(),
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(axes, keep),
}
for _op, _function in REDUCTIONS.items():
    _data = numbers(2, 3, 4, low=0.25) if _op == "ReduceLogSum" else CUBE
    ask(_op, lambda x, a, f=_function: f(x, (1,), True), _data, ints(1), case="of one axis")
    ask(_op, lambda x, a, f=_function: f(x, (0, 2), False), _data, ints(-1, 0), keepdims=0, case="of two axes")
    ask(_op, lambda x, f=_function: f(x.reshape(-1), (0,), False), _data, keepdims=0, case="of all axes")
    if _op != "ReduceSum":
        _options: dict[str, Any] = {"axes": [1, -1], "keepdims": 1, "opset": 13, "case": "of opset 13"}
        ask(_op, lambda x, f=_function: f(x, (1, 2), True), _data, **_options)
ask("ReduceSum", lambda x, a: x * 1, CUBE, ints(), noop_with_empty_axes=1, case="of no axis")
ask("ReduceMax", lambda x: torch.amax(x), np.array([1.0, 2.0, 2.0]), keepdims=0, case="of equal numbers")
ask(
    "ReduceProd",
    lambda x, a: x.prod(1),
    np.array([[2.0, 0, 3], [0, 0, 2], [1, 2, 3]]),
    ints(1),
    keepdims=0,
    case="of zeros",
)
ask("CumSum", lambda x, a: x.cumsum(1), CUBE, np.array(1))
ask("CumSum", lambda x, a: x.flip(-1).cumsum(-1).flip(-1), CUBE, np.array(-1), reverse=1, case="in reverse")
ask("CumSum", lambda x, a: x.cumsum(0) - x, CUBE, np.array(0), exclusive=1, case="exclusive")
ZEROS = np.array([[2.0, 0, 3, 0, 0.5], [0, 0, 2, 1, 1], [1, 2, 3, -1, 0], [1, -2, 0.5, 2, 1]])


def shifted(x: Any) -> Any:
    """The product of the numbers before each number of a row."""
    return torch.cat([torch.ones_like(x[:, :1]), x[:, :-1].cumprod(1)], 1)


ask("CumProd", lambda x, a: x.cumprod(1), CUBE, np.array(1), opset=26)
ask("CumProd", lambda x, a: x.cumprod(-1), ZEROS, np.array(-1), opset=26, case="of zeros")
ask("CumProd", lambda x, a: shifted(x), ZEROS, np.array(1), exclusive=1, opset=26, case="exclusive")
ask("CumProd", lambda x, a: x.flip(1).cumprod(1).flip(1), ZEROS, np.array(1), reverse=1, opset=26, case="in reverse")
ask(
    "CumProd",
    lambda x, a: shifted(x.flip(1)).flip(1),
    ZEROS,
    np.array(1),
    exclusive=1,
    reverse=1,
    opset=26,
    case="in reverse and exclusive",
)
ask(
    "CumSum",
    lambda x, a: x.flip(1).cumsum(1).flip(1) - x,
    CUBE,
    np.array(1),
    exclusive=1,
    reverse=1,
    case="of the rest",
)
for _op, _function in {"Softmax": torch.softmax, "LogSoftmax": torch.log_softmax}.items():
    ask(_op, lambda x, f=_function: f(x, -1), CUBE)
    ask(_op, lambda x, f=_function: f(x, 1), CUBE, axis=1, case="of axis 1")

ask("Reshape", lambda x, s: x.reshape(4, 6), CUBE, ints(4, -1))
ask("Flatten", lambda x: x.flatten(1), CUBE)
ask("Squeeze", lambda x, a: x.squeeze(1), numbers(2, 1, 3), ints(1))
ask("Unsqueeze", lambda x, a: x[:, None, :, None], X, ints(1, -1))
ask("Transpose", lambda x: x.permute(2, 0, 1), CUBE, perm=[2, 0, 1])
ask("Transpose", lambda x: x.permute(2, 1, 0), CUBE, case="of all axes")
ask("Concat", lambda *x: torch.cat(x, 1), X, numbers(2, 1), numbers(2, 2), axis=1)
ask("Concat", lambda x: x * 1, X, axis=-1, case="of one")
ask("Split", lambda x, s: x.split([1, 0, 3], 2), CUBE, ints(1, 0, 3), axis=-1, outputs=3, reads=[0, 1, 2])
ask(
    "Split",
    lambda x, s: x.split([1, 3], 2)[1],
    CUBE,
    ints(1, 3),
    axis=2,
    outputs=2,
    reads=[1],
    case="a single output read",
)
ask("Split", lambda x: (x[:2], x[4:]), numbers(5), num_outputs=3, outputs=3, reads=[0, 2], case="of unequal parts")
ask("Expand", lambda x, s: x.expand(2, 3, 4), numbers(3, 1), ints(2, 1, 4))
ask("Tile", lambda x, r: x.tile(2, 3), X, ints(2, 3))
ask("Tile", lambda x, r: x.tile(1, 2, 1), CUBE, ints(1, 2, 1), case="of the middle")
ask("Pad", lambda x, p: F.pad(x, (1, 2, 0, 1)), X, ints(0, 1, 1, 2))
ask(
    "Pad",
    lambda x, p, c, a: F.pad(x, (1, 2), value=0.5),
    X,
    ints(1, 2),
    np.array(0.5),
    ints(-1),
    frozen=[2],
    case="of an axis",
)
for _mode, _name in {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}.items():
    ask(
        "Pad",
        lambda x, p, m=_name: F.pad(x, (2, 1), m),
        numbers(1, 2, 4),
        ints(0, 0, 2, 0, 0, 1),
        mode=_mode,
        case=_mode,
    )
ask("Pad", lambda x, p: F.pad(x, (-1, 2)), X, ints(0, -1, 0, 2), case="that cuts off")
ask("DepthToSpace", lambda x: F.pixel_shuffle(x, 2), numbers(1, 8, 2, 3), blocksize=2, mode="CRD", case="CRD")
ask(
    "SpaceToDepth",
    lambda x: x.reshape(1, 2, 2, 2, 3, 2).permute(0, 3, 5, 1, 2, 4).reshape(1, 8, 2, 3),
    numbers(1, 2, 4, 6),
    blocksize=2,
)
ask(
    "DepthToSpace",
    lambda x: x.reshape(1, 2, 2, 2, 2, 3).permute(0, 3, 4, 1, 5, 2).reshape(1, 2, 4, 6),
    numbers(1, 8, 2, 3),
    blocksize=2,
)
ask("Trilu", torch.triu, numbers(3, 4))
ask("Trilu", lambda x, k: x * 0, X, np.array(2**62), case="far beyond")
ask("SpaceToDepth", lambda x: x.reshape(0, 8, 2, 3), numbers(0, 2, 4, 6), blocksize=2, case="of nothing")
ask("Trilu", lambda x, k: torch.tril(x, 1), numbers(2, 3, 3), np.array(1), upper=0, case="lower")
ask("Gather", lambda x, i: x[i], numbers(4, 3), np.array([[0, 2], [-1, 0]]))
ask("Gather", lambda x, i: x[:, 1], CUBE, np.array(1), axis=1, case="of one")
ask("GatherElements", lambda x, i: x.gather(1, i % 3), X, np.array([[0, 0], [-1, 2]]), axis=1)
ask("GatherND", lambda x, i: x[[0, 1, 0], [2, -1, 2]], CUBE, np.array([[0, 2], [1, -1], [0, 2]]))
ask("GatherND", lambda x, i: x[[0, 1], [2, 0]], CUBE, np.array([[2], [0]]), batch_dims=1, case="of batches")
ask("Slice", lambda x, *_: x[:, 1:3, ::2], CUBE, ints(1, 0), ints(3, 9), ints(1, 2), ints(1, 2))
ask("Slice", lambda x, *_: x[:, :-1], CUBE, ints(0, 0), ints(9, -1), case="of the first axes")
ask("Slice", lambda x, *_: x.flip(2)[..., :3], CUBE, ints(-1), ints(-4), ints(2), ints(-1), case="backwards")
ask("TopK", lambda x, k: x.topk(2, 1).values, CUBE, ints(2), axis=1, outputs=2)
ask("TopK", lambda x, k: x.topk(2, -1, False).values, CUBE, ints(2), largest=0, case="of the smallest")
_rows, _updates = np.array([[0, 1], [1, 2]]), numbers(2, 4)
ask("ScatterND", lambda x, i, u: x.index_put((i[:, 0], i[:, 1]), u), CUBE, _rows, _updates)
ask(
    "ScatterND",
    lambda x, i, u: x.index_put((i[:, 0], i[:, 1]), u, accumulate=True),
    CUBE,
    np.array([[0, 1], [0, 1]]),
    _updates,
    reduction="add",
    case="add",
)
_places, _sources = np.array([[0, 2, 2], [1, 0, 1]]), numbers(2, 3)
ask(
    "ScatterElements",
    lambda x, i, u: x.scatter(1, i, u),
    numbers(3, 4),
    np.array([[0, 2, 1], [1, 0, 3]]),
    _sources,
    axis=1,
)
for _reduction, _name in {"add": "sum", "max": "amax", "min": "amin", "mul": "prod"}.items():
    ask(
        "ScatterElements",
        lambda x, i, u, r=_name: x.scatter_reduce(1, i, u, r),
        numbers(2, 3),
        _places,
        _sources,
        axis=1,
        reduction=_reduction,
        case=_reduction,
    )


def cached(cache: Any, update: Any, starts: Any, axis: int = 2) -> Any:
    """The cache with the update of each sample from its start on, and around the end."""
    places = (starts[:, None] + torch.arange(update.shape[axis])) % cache.shape[axis]
    moved = cache.movedim(axis, 1).index_put((torch.arange(len(cache))[:, None], places), update.movedim(axis, 1))
    return moved.movedim(1, axis)


CACHE, UPDATE = numbers(2, 3, 4, 2), numbers(2, 3, 2, 2)
OPSET_24: dict[str, Any] = {"opset": 24}
ask("TensorScatter", cached, CACHE, UPDATE, ints(0, 2), **OPSET_24)
ask("TensorScatter", lambda c, u: cached(c, u, torch.zeros(2, dtype=int)), CACHE, UPDATE, case="at 0", **OPSET_24)
ask("TensorScatter", cached, CACHE, UPDATE, ints(3, -6), mode="circular", case="circular", **OPSET_24)
ask("TensorScatter", partial(cached, axis=1), CUBE, CUBE[:, :2] + 1, ints(1, 0), axis=1, case="of an axis", **OPSET_24)

LABELS, WEIGHTS = np.array([2, 0, -1, 1]), numbers(3, low=0.25)
SCORES, IMAGE = numbers(4, 3), numbers(2, 3, 2, 2)
PIXELS = np.array([[[0, 2], [1, 1]], [[2, 7], [0, 1]]])
LOG_PROB = -numbers(4, 3, low=0.25)
for _reduction in ("mean", "sum", "none"):
    _case: dict[str, Any] = {"reduction": _reduction, "case": _reduction}
    ask(
        "SoftmaxCrossEntropyLoss",
        lambda x, y, r=_reduction: F.cross_entropy(x, y % 3, reduction=r),
        SCORES,
        LABELS % 3,
        **_case,
    )
    ask(
        "NegativeLogLikelihoodLoss",
        lambda x, y, r=_reduction: F.nll_loss(x, y % 3, reduction=r),
        LOG_PROB,
        LABELS % 3,
        **_case,
    )
    _case = {"reduction": _reduction, "case": f"{_reduction} of weights", "frozen": [2], "ignore_index": -1}
    ask(
        "SoftmaxCrossEntropyLoss",
        lambda x, y, w, r=_reduction: F.cross_entropy(x, y, w, ignore_index=-1, reduction=r),
        SCORES,
        LABELS,
        WEIGHTS,
        **_case,
    )
    ask(
        "NegativeLogLikelihoodLoss",
        lambda x, y, w, r=_reduction: F.nll_loss(x, y, w, ignore_index=-1, reduction=r),
        LOG_PROB,
        LABELS,
        WEIGHTS,
        **_case,
    )
    _case = {"reduction": _reduction, "case": f"{_reduction} of an image", "ignore_index": 7}
    ask(
        "NegativeLogLikelihoodLoss",
        lambda x, y, r=_reduction: F.nll_loss(x, y, ignore_index=7, reduction=r),
        IMAGE,
        PIXELS,
        **_case,
    )
ask(
    "SoftmaxCrossEntropyLoss",
    lambda x, y: (F.cross_entropy(x, y), F.log_softmax(x, 1)),
    SCORES,
    LABELS % 3,
    outputs=2,
    reads=[0, 1],
    case="and log_prob",
)


def attention(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **options)


def merge(heads: Any) -> Any:
    return heads.transpose(1, 2).flatten(2)


def split(tensor: Any, count: int) -> Any:
    return tensor.unflatten(2, (count, -1)).transpose(1, 2)


def capped(q: Any, k: Any, v: Any) -> Any:
    return (1.5 * torch.tanh(q @ k.transpose(-1, -2) * 0.75 / 1.5)).softmax(-1) @ v


QUERIES, KEYS, VALUES = numbers(1, 2, 3, 4), numbers(1, 2, 5, 4), numbers(1, 2, 5, 3)
SEEN = np.array([[True, False, True, True, False], [False] * 4 + [True], [True] * 5])
OPSET_23: dict[str, Any] = {"opset": 23}
ask("Attention", attention, QUERIES, KEYS, VALUES, **OPSET_23)
ask("Attention", attention, QUERIES, KEYS, VALUES, SEEN, case="with a mask", **OPSET_23)
ask("Attention", attention, QUERIES, KEYS, VALUES, numbers(2, 3, 5), case="with a bias", **OPSET_23)
ask("Attention", partial(attention, is_causal=True), QUERIES, KEYS, VALUES, is_causal=1, case="causal", **OPSET_23)
ask("Attention", attention, numbers(2, 4, 3, 2), numbers(2, 2, 5, 2), numbers(2, 2, 5, 2), case="of groups", **OPSET_23)
ask("Attention", capped, QUERIES, KEYS, VALUES, softcap=1.5, scale=0.75, case="with softcap", **OPSET_23)
ask(
    "Attention",
    lambda q, k, v: merge(attention(split(q, 4), split(k, 2), split(v, 2))),
    *(numbers(2, 3, 8), numbers(2, 5, 4), numbers(2, 5, 6)),
    **{"q_num_heads": 4, "kv_num_heads": 2, "case": "of three dimensions", **OPSET_23},
)


def fewer(q: Any, k: Any, v: Any, *others: Any, **options: Any) -> Any:
    """Attention to as many keys of each sample as the last tensor says."""
    pairs = ((q[n : n + 1], k[n : n + 1, :, :count], v[n : n + 1, :, :count]) for n, count in enumerate(others[-1]))
    return torch.cat([attention(*given, **options) for given in pairs])


SAMPLES = numbers(2, 2, 3, 4), numbers(2, 2, 5, 4), numbers(2, 2, 5, 3)
AT_24, AT_25 = {"opset": 24, "frozen": [6]}, {"opset": 25, "frozen": [6]}
LENGTHS = None, None, ints(2, 5)
ask("Attention", fewer, *SAMPLES, None, *LENGTHS, case="to as many keys as a sample has", **AT_24)
ask(
    "Attention",
    lambda q, k, v, mask, *_: attention(q, k[:, :, :3], v[:, :, :3], mask),
    *(QUERIES, KEYS, VALUES, numbers(2, 3, 3)),
    case="with a bias of the first keys",
    **OPSET_23,
)


def in_sight(q: Any, k: Any, v: Any, *others: Any, left: int = 99, right: int = 99) -> Any:
    """Attention of each query to the keys near its own place: the last query and the last key share one."""
    lengths = others[-1] if others else torch.tensor([q.shape[2]] * len(q))
    own, keys = torch.arange(q.shape[2])[:, None] + lengths[:, None, None] - q.shape[2], torch.arange(k.shape[2])
    seen = (keys <= own + right) & (keys >= own - left) & (keys < (lengths[:, None, None] if others else 99))
    return attention(q, k, v, seen[:, None])


LONG = None, None, ints(4, 5)
ask("Attention", partial(in_sight, right=0), *SAMPLES, None, *LONG, is_causal=1, case="causal at the end", **AT_24)
ask(
    "Attention",
    partial(in_sight, left=1, right=1),
    *SAMPLES,
    left_window_size=1,
    right_window_size=1,
    case="to a window",
    **AT_25,
)
ask(
    "Attention",
    partial(in_sight, left=2, right=0),
    *(*SAMPLES, None, *LONG),
    left_window_size=2,
    is_causal=1,
    case="to a window at the end",
    **AT_25,
)


def turned(x: Any, cos: Any, sin: Any, places: Any = None, *, size: int = 4, interleaved: bool = False) -> Any:
    """The pairs of x [batch, heads, length, size], turned."""
    cos, sin = ((one if places is None else one[places])[:, None] for one in (cos, sin))
    part = x[..., :size]
    first, second = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    both = first * cos - second * sin, first * sin + second * cos
    whole = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat([whole, x[..., size:]], -1)


TOKENS, PLACES = numbers(2, 3, 5, 4), np.array([[0, 1, 2, 3, 4], [3, 3, 0, 6, 1]])
ask("RotaryEmbedding", turned, TOKENS, numbers(2, 5, 2), numbers(2, 5, 2), **OPSET_23)
ask("RotaryEmbedding", turned, TOKENS, numbers(7, 2), numbers(7, 2), PLACES, case="of places", **OPSET_23)
ask(
    "RotaryEmbedding",
    partial(turned, size=2, interleaved=True),
    *(TOKENS, numbers(7, 1), numbers(7, 1), PLACES),
    rotary_embedding_dim=2,
    interleaved=1,
    case="of neighbours",
    **OPSET_23,
)
ask(
    "RotaryEmbedding",
    lambda x, cos, sin: merge(turned(split(x, 3), cos, sin)),
    *(numbers(2, 5, 12), numbers(2, 5, 2), numbers(2, 5, 2)),
    num_heads=3,
    case="of three dimensions",
    **OPSET_23,
)
