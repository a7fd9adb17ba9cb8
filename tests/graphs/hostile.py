"""Models that are damaged: sound ones, as text, and changes of their bytes and of what the bytes mean."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import onnx
from onnx import TensorProto, helper, parser

from service.graphs.nodes import NODES

SOUND = {
    "sizes": """(float[N, 3] x, int64[2] s, int64[K] r, float f) => (y, z, a, b, c, d, e, g, h)
        <int64[1] one = {1}, int64[4] ends = {0, 1, 0, 1}, int64 depth = {4}, float[2] values = {0.0, 1.0},
         float[2] scales = {1.0, 2.0}, int64[2] back = {-1, 1}, int64[2] rows = {1, 2}, float start = {0.0}>
        { w = Expand(x, s)  y = Tile(x, s)  z = ConstantOfShape<value = float[1] {2.0}>(s)  a = Range(start, f, f)
          b = Pad<mode = "reflect">(x, ends)  c = Resize<mode = "linear">(x, , scales)  d = Reshape(x, back)
          e = OneHot<axis = -1>(r, depth, values)  p, q = Split<axis = 1>(x, rows)  g = Unsqueeze(p, one)
          t = Pad(w, ends, f)  h = ReduceSum(t) }""",
    "places": """(float[N, 4] x, int64[2, 2] i, float[2] u) => (y, z, a, b, c, d, e, g, h)
        <int64[2] first = {0, -1}, int64[2] last = {-9, 9}, int64[2] axes = {0, 1}, int64[2] steps = {-1, 2},
         int64 k = {1}, int64[1] two = {2}>
        { y = Gather<axis = 1>(x, i)  z = GatherND(x, i)  a = GatherElements<axis = 0>(x, i)
          b = ScatterND<reduction = "add">(x, i, u)  c = Slice(x, first, last, axes, steps)
          t, o = TopK<axis = 1>(x, two)
          d = CumSum<reverse = 1>(t, k)  e = Trilu<upper = 0>(x, k)  g = NonZero(x)
          h = ScatterElements<axis = 1>(x, o, t) }""",
    "layers": """(float[N, 4, 5, 6] x) => (y, z, a, b, c, d)
        <float[4, 4, 1, 1] w = {1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4}, float[4] v = {1, 2, 3, 4}>
        { y = Conv<pads = [1, 1, 1, 1], strides = [2, 1], dilations = [1, 2], group = 1>(x, w, v)
          t = ConvTranspose<strides = [2, 1], output_padding = [1, 0]>(y, w)
          z, i = MaxPool<kernel_shape = [2, 3], ceil_mode = 1, strides = [2, 2]>(t)
          a = AveragePool<kernel_shape = [3, 2], auto_pad = "SAME_UPPER">(z)
          b = BatchNormalization(a, v, v, v, v)  c = InstanceNormalization(b, v, v)
          n = Softmax<axis = 1>(c)  s = Shape(x)  d = Resize<mode = "nearest">(n, , , s) }""",
    "products": """(float[N, 4] x, int64[N] t) => (y, z, a, b, l)
        <float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}, float[3] v = {1, 2, 3}, float low = {-1.0}>
        { g = Gemm<alpha = 0.5, beta = 2.0>(x, w, v)  m = MatMul(x, w)  y = LayerNormalization<axis = -1>(g, v, v)
          z = Einsum<equation = "ij,ik->jk">(g, m)  q = Dropout(m)  r = Pow(q, v)  b = Concat<axis = 0>(y, r)
          a = Clip(g, low)  l, p = SoftmaxCrossEntropyLoss(g, t) }""",
    "loops": """(float[T, N, 2] x, int32[N] n) => (y, h, c, g)
        <float[2, 8, 2] w = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8,
                             1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8},
         float[1, 6, 2] v = {1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6}>
        { y, h, c = LSTM<hidden_size = 2, direction = "bidirectional">(x, w, w, , n)
          g, f = GRU<hidden_size = 2, linear_before_reset = 1>(x, v, v) }""",
    "elements": """(float[N, 3] x, float[3] u, bool[N, 1] m) => (y)
        { a = Add(x, u)  b = Where(m, a, x)  c = Max(a, b, u)  d = Cast<to = 11>(c)  e = Cast<to = 1>(d)
          f = ReduceMean<axes = [1], keepdims = 1>(e)  g = Div(e, f)  h = HardSigmoid<alpha = 0.3>(g)  i = Transpose(h)
          k = Not(m)  o = Cast<to = 1>(k)  y = MatMul(i, o) }""",
}
"""Models of a few nodes, in the text form of ONNX, without the head and the types of the outputs."""

INTEGERS = [
    0,
    1,
    2,
    3,
    5,
    -1,
    -2,
    64,
    100,
    1 << 20,
    1 << 31,
    -(1 << 31),
    1 << 40,
    (1 << 62) + 1,
    (1 << 63) - 1,
    -(1 << 63),
]
FLOATS = [0.0, -0.0, 1.0, -1.0, 1e30, -1e30, 1e-30, float("inf"), float("-inf"), float("nan")]
TEXTS = [
    "",
    "x",
    "y",
    "nonsense",
    "SAME_LOWER",
    "linear",
    "cubic",
    "wrap",
    "i,j->ij",
    "...i,...i",
    "ii->",
    "reverse",
    "Relu",
]
OPS = sorted(NODES)
OTHERS = ["If", "Loop", "Scan", "SequenceConstruct", "Optional", "StringNormalizer", "ImageDecoder", "Sequence", "é"]


def sound() -> dict[str, bytes]:
    """Return each model as bytes."""
    head = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g '
    models = {}
    for name, text in SOUND.items():
        start, _, outputs = text.partition("=> (")
        outputs, _, rest = outputs.partition(")")
        typed = ", ".join(f"float[] {one}" for one in outputs.split(", "))
        model = parser.parse_model(f"{head}{start}=> ({typed}){rest}")
        for output in model.graph.output:
            output.type.tensor_type.ClearField("shape")
        types = {one.name: one for one in onnx.shape_inference.infer_shapes(model).graph.output}
        for output in model.graph.output:
            output.type.tensor_type.elem_type = types[output.name].type.tensor_type.elem_type
        models[name] = model.SerializeToString()
    return models


def damaged(content: bytes, seed: int) -> tuple[bytes, str]:
    """Return the model with a few changes, and what they are."""
    rng = random.Random(seed)
    if rng.random() < 0.15:
        return _bytes(content, rng)
    model, story = onnx.load_model_from_string(content), []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change = rng.choice(CHANGES)
        try:
            change(model, rng)
        except (IndexError, ValueError, TypeError, OverflowError):  # protobuf refuses the value, or nothing is there
            continue
        story.append(change.__name__)
    return model.SerializeToString(), ", ".join(story)


def _bytes(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    data = bytearray(content)
    kinds = []
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        kind, at = rng.choice(["flip", "flip", "insert", "cut", "end", "copy", "zero"]), rng.randrange(len(data) or 1)
        size = rng.choice([1, 2, 8, 40])
        kinds.append(kind)
        if kind == "flip" and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "insert":
            data[at:at] = rng.choice([b"\xff" * 10, b"\x80" * size, rng.randbytes(size), b"\x0a\x7f"])
        elif kind == "cut":
            del data[at : at + size]
        elif kind == "end":
            del data[at:]
        elif kind == "copy":
            other = rng.randrange(len(data) or 1)
            data[at : at + size] = data[other : other + size]
        else:
            data[at : at + size] = bytes(size)
    return bytes(data), ", ".join(kinds)


def operator(model: Any, rng: random.Random) -> None:
    """Another operator in a node's place."""
    node = rng.choice(model.graph.node)
    node.domain, node.op_type = rng.choice(OPS) if rng.random() < 0.8 else ("", rng.choice(OTHERS))


def wires(model: Any, rng: random.Random) -> None:
    """Another tensor, or none, as an input of a node, or one more."""
    node, names = rng.choice(model.graph.node), [*_names(model), "", "nobody", "~0", "~seed"]
    if rng.random() < 0.3:
        node.input.append(rng.choice(names))
    else:
        node.input[rng.randrange(len(node.input))] = rng.choice(names)


def results(model: Any, rng: random.Random) -> None:
    """Another name of an output of a node, or one less or more."""
    node, kind = rng.choice(model.graph.node), rng.random()
    if kind < 0.3:
        node.output.append(rng.choice(["more", "", *_names(model)]))
    elif kind < 0.5:
        node.output.pop()
    else:
        node.output[rng.randrange(len(node.output))] = rng.choice(["", "more", *_names(model)])


def number(model: Any, rng: random.Random) -> None:
    """Another number in an attribute."""
    attribute = rng.choice([one for node in model.graph.node for one in node.attribute])
    value = helper.get_attribute_value(attribute)
    if isinstance(value, list) or type(value).__name__.startswith("Repeated"):
        value = [*value]
        if rng.random() < 0.3:
            value = value * rng.choice([0, 2, 1000]) or [1] * rng.choice([1, 70])
        else:
            value[rng.randrange(len(value))] = rng.choice(INTEGERS if isinstance(value[0], int) else FLOATS)
    else:
        value = rng.choice(TEXTS if isinstance(value, bytes) else FLOATS if isinstance(value, float) else INTEGERS)
    attribute.CopyFrom(helper.make_attribute(attribute.name, value, attr_type=attribute.type))


def attribute(model: Any, rng: random.Random) -> None:
    """An attribute less, more, or of another type."""
    node, kind = rng.choice(model.graph.node), rng.random()
    if kind < 0.3:
        del node.attribute[rng.randrange(len(node.attribute))]
        return
    names = [
        "axis",
        "axes",
        "keepdims",
        "to",
        "k",
        "p",
        "group",
        "strides",
        "pads",
        "hidden_size",
        "activations",
        "mode",
    ]
    names += [
        "reduction",
        "batch_dims",
        "layout",
        "direction",
        "clip",
        "ratio",
        "seed",
        "dtype",
        "value",
        "training_mode",
    ]
    values = [
        rng.choice(INTEGERS),
        rng.choice(FLOATS),
        rng.choice(TEXTS),
        [rng.choice(INTEGERS)] * rng.choice([1, 2, 4]),
    ]
    values += [model.graph, helper.make_tensor("t", TensorProto.INT64, [1], [rng.choice(INTEGERS)])]
    node.attribute.append(helper.make_attribute(rng.choice(names), rng.choice(values)))
    if kind > 0.9:
        node.attribute[-1].type = rng.randrange(15)


def tensor(model: Any, rng: random.Random) -> None:
    """Other numbers, another shape, another dtype, or another place of an initializer."""
    one, kind = rng.choice(model.graph.initializer), rng.random()
    if kind < 0.5:
        field = one.int64_data or one.float_data
        field[rng.randrange(len(field))] = rng.choice(INTEGERS if one.int64_data else FLOATS)
    elif kind < 0.7:
        one.dims[rng.randrange(len(one.dims))] = rng.choice(INTEGERS)
    elif kind < 0.8:
        one.dims.extend([rng.choice(INTEGERS)] * rng.choice([1, 3, 80]))
    elif kind < 0.9:
        one.data_type = rng.randrange(24)
    elif kind < 0.95:
        one.data_location = TensorProto.EXTERNAL
    else:
        one.name = rng.choice(_names(model))


def ports(model: Any, rng: random.Random) -> None:
    """Another name, dtype, shape or kind of an input or output of the graph, or one less or twice."""
    place = rng.choice([model.graph.input, model.graph.output])
    one, kind = place[rng.randrange(len(place))], rng.random()
    if kind < 0.2:
        one.name = rng.choice([*_names(model), "", "~0", "a.b", "parameters.w", "loss", "é", "a" * 300])
    elif kind < 0.4:
        one.type.tensor_type.elem_type = rng.randrange(24)
    elif kind < 0.6:
        one.type.tensor_type.shape.dim.add().dim_value = rng.choice(INTEGERS)
    elif kind < 0.7:
        one.type.sequence_type.elem_type.tensor_type.elem_type = 1
    elif kind < 0.85:
        place.append(one)
    else:
        place.remove(one)


def order(model: Any, rng: random.Random) -> None:
    """The nodes in another order, one less, one twice, or a cycle."""
    nodes, kind = [*model.graph.node], rng.random()
    if kind < 0.3:
        rng.shuffle(nodes)
    elif kind < 0.6:
        nodes.pop(rng.randrange(len(nodes)))
    elif kind < 0.8:
        nodes.append(rng.choice(nodes))
    else:
        nodes[0].input[0] = nodes[-1].output[0]
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def head(model: Any, rng: random.Random) -> None:
    """Another opset or domain, functions, sparse tensors, or no graph."""
    kind = rng.random()
    if kind < 0.4:
        model.opset_import[0].version = rng.choice([*range(12, 29), *INTEGERS])
    elif kind < 0.5:
        model.opset_import[rng.randrange(2)].domain = rng.choice(
            ["", "ai.onnx", "ai.onnx.ml", "com.microsoft", "other"]
        )
    elif kind < 0.6:
        del model.opset_import[rng.randrange(2)]
    elif kind < 0.7:
        domain = rng.choice(model.graph.node).domain
        model.functions.append(
            helper.make_function(domain, "f", ["x"], ["y"], [*model.graph.node], [*model.opset_import])
        )
    elif kind < 0.8:
        model.graph.sparse_initializer.add().values.name = "x"
    elif kind < 0.85:
        model.ClearField("graph")
    else:
        model.graph.node[0].domain = rng.choice(["ai.onnx", "ai.onnx.ml", "other", "com.microsoft"])


def deep(model: Any, rng: random.Random) -> None:
    """Graphs in graphs, in an attribute of a node."""
    for _ in range(rng.choice([1, 3, 9])):  # protobuf itself reads no more than 33 in all
        inner = onnx.GraphProto()
        inner.CopyFrom(model.graph)
        node = helper.make_node(rng.choice(["If", "Loop", "Relu"]), ["x"], ["deep"])
        node.attribute.append(helper.make_attribute("body", inner))
        del model.graph.node[:]
        model.graph.node.append(node)


def weight_names(model: Any, rng: random.Random) -> None:
    """Another name of an initializer, wherever it stands."""
    one, new = rng.choice(model.graph.initializer), rng.choice(["a/b:0", "é", "x" * 300, "a b[1]", "~seed", "w.w", ""])
    old, one.name = one.name, new
    for node in model.graph.node:
        for k, name in enumerate(node.input):
            if name == old:
                node.input[k] = new


CHANGES: list[Callable[[Any, random.Random], None]] = [
    *[number, tensor] * 5,
    *[operator, wires, attribute, ports] * 2,
    *[results, order, head, deep, weight_names],
]


def _names(model: Any) -> list[str]:
    made = [name for node in model.graph.node for name in (*node.input, *node.output)]
    return [*made, *(one.name for one in (*model.graph.input, *model.graph.initializer))]
