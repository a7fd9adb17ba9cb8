"""The arguments that the client accepts as tensors, and those that it refuses."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import scipy.sparse
import torch
from gradserve_client import AsyncClient, Client, GradserveError, InvalidInput, Rows, ServerFailed
from gradserve_client._http.log import Log
from gradserve_client._http.outcomes import Answer
from gradserve_client._http.policy import RequestIds, Timeouts, steps_of
from gradserve_client._wire import answers
from gradserve_client._wire.calls import operators, run
from gradserve_client._wire.specs import on
from gradserve_client._wire.tensors import DTYPES, as_array, decode, encode
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from service.dtypes import Array

MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)


class OnlyDLPack:
    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **named: Any) -> Any:
        return self._array.__dlpack__(**named)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class OnlyArray:
    def __init__(self, array: Array) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self._array


class Labelled(np.ndarray[Any, np.dtype[Any]]):
    """A subclass, as libraries for physical units have."""


class Parameter(torch.Tensor):  # type: ignore[misc]
    """A subclass of a PyTorch tensor, as some libraries have."""


def read_only(array: Array) -> Array:
    array = array.copy()
    array.flags.writeable = False
    return array


ALIKE: dict[str, Any] = {
    "plain": MATRIX,
    "Fortran order": np.asfortranarray(MATRIX),
    "transposed": MATRIX.T.copy().T,
    "strided": np.repeat(np.repeat(MATRIX, 2, 0), 3, 1)[::2, ::3],
    "negative strides": MATRIX[::-1, ::-1].copy()[::-1, ::-1],
    "big-endian": MATRIX.astype(">f4"),
    "read-only": read_only(MATRIX),
    "unaligned": np.frombuffer(b"-" + MATRIX.tobytes(), np.float32, offset=1).reshape(2, 3),
    "subclass": MATRIX.view(Labelled),
    "masked nowhere": np.ma.MaskedArray(MATRIX, mask=False),
    "lists": MATRIX.tolist(),
    "integers": [[0, 1, 2], [3, 4, 5]],
    "tuples of arrays": (MATRIX[0], MATRIX[1]),
    "memory": MATRIX.data,
    "DLPack": OnlyDLPack(MATRIX),
    "__array__": OnlyArray(MATRIX),
    "torch": torch.from_numpy(MATRIX.copy()),
    "torch, requires grad": torch.from_numpy(MATRIX.copy()).requires_grad_(),
    "torch, of a graph": torch.from_numpy(MATRIX.copy()).requires_grad_() * 1,
    "torch, transposed": torch.from_numpy(MATRIX.T.copy()).T,
    "torch, sparse": torch.from_numpy(MATRIX.copy()).to_sparse().requires_grad_(),
    "torch, negated": torch.complex(torch.zeros(2, 3), torch.from_numpy(-MATRIX)).conj().imag,
    "torch, parameter": torch.nn.Parameter(torch.from_numpy(MATRIX.copy())),
    "torch, subclass": torch.from_numpy(MATRIX.copy()).requires_grad_().as_subclass(Parameter),
}


@pytest.mark.parametrize("form", ALIKE)
def test_every_kind_of_array_is_accepted(server: Any, form: str) -> None:
    tensor = ALIKE[form]
    found = server.ops.leaky_relu_grad(tensor, np.ones((2, 3), np.float32))
    assert type(found) is np.ndarray
    assert found.dtype == np.float32
    assert (found == MATRIX).all()
    assert found.flags.writeable
    found += 1
    again = server.ops.leaky_relu_grad(tensor, np.ones((2, 3), np.float32))
    assert (again == MATRIX).all()  # the argument is as it was, and the first answer is memory of its own


@pytest.mark.parametrize("form", ["Fortran order", "transposed", "strided", "negative strides", "torch, transposed"])
def test_every_layout_is_accumulated_as_it_reads(server: Any, form: str) -> None:
    buffer = server.buffers["w"]
    buffer.create((2, 3))
    buffer.accumulate(ALIKE[form])
    server.buffers.accumulate({"w": ALIKE[form]})
    assert buffer.take().value.tolist() == (2 * MATRIX).tolist()


@pytest.mark.parametrize(
    "tensor",
    [np.float32(3), np.array(3.0), 3.0, 3, np.zeros((0, 4)), np.zeros((2, 0)), [], [[], []], torch.tensor(3.0)],
    ids=repr,
)
def test_scalars_and_empty_tensors_keep_their_shape(server: Any, tensor: Any) -> None:
    found = server.ops.tanh_grad(tensor, tensor)
    assert found.shape == np.shape(tensor)
    assert found.dtype == (np.float64 if isinstance(tensor, np.ndarray) else np.float32)


@pytest.mark.parametrize("make", [np.asarray, lambda one: one[::-1][::-1], lambda one: one.reshape(2, 2, order="F")])
def test_bfloat16_arrays(server: Any, make: Any) -> None:
    tensor = make(np.array([1.5, -2, 3, 0.1], ml_dtypes.bfloat16))
    found = server.ops.relu_grad(tensor, np.ones_like(tensor))
    assert found.dtype == ml_dtypes.bfloat16
    assert found.tolist() == tensor.tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_dtypes_of_torch(server: Any, dtype: str) -> None:
    for tensor in (torch.arange(6).reshape(2, 3).T.to(getattr(torch, dtype)), torch.ones((), dtype=torch.bfloat16)):
        tensor.requires_grad_()
        found = server.ops.relu_grad(tensor, torch.ones_like(tensor))
        assert found.dtype.name == str(tensor.dtype).removeprefix("torch.")
        assert found.tolist() == tensor.tolist()


def test_the_dtypes_of_lists(server: Any) -> None:
    assert server.ops.gather_grad([3], [0, 2], [1, 2]).dtype == np.float32
    assert server.ops.in_place_accumulator([1], [2], [False]).tolist() == [1.0]
    server.buffers["w"].create((1,), dtype="float64")
    server.buffers["w"].accumulate([0.1])
    assert server.buffers["w"].value().tolist() == [0.1]  # not rounded to float32 on the way


REFUSED: dict[str, Any] = {
    "uint8": np.ones(2, np.uint8),
    "complex": np.ones(2, np.complex64),
    "object": np.array([1, None], object),
    "text": np.array(["1", "2"]),
    "texts": np.array(["1", "2"], np.dtypes.StringDType()),
    "long double": np.ones(2, np.longdouble),
    "times": np.zeros(2, "M8[s]"),
    "records": np.zeros(2, [("a", "f4")]),
    "masked": np.ma.MaskedArray([1.0, 2.0], mask=[False, True]),
    "masked in a list": [np.ma.MaskedArray([1.0, 2.0], mask=[False, True])],
    "float8": np.ones(2, ml_dtypes.float8_e5m2),
    "None": None,
    "None in a list": [1.0, None],
    "a text": "12",
    "a list of texts": ["1", "2"],
    "bytes": b"12",
    "complex numbers": [1j, 2],
    "ragged": [[1, 2], [3]],
    "too large": [1e300, -1e300],
    "a set": {1.0, 2.0},
    "torch, uint8": torch.ones(2, dtype=torch.uint8),
    "torch, complex": torch.ones(2, dtype=torch.complex64),
    "torch, elsewhere": torch.ones(2, device="meta"),
    "torch, in a list": [torch.ones(2, requires_grad=True)],
    "DLPack of another kind": OnlyDLPack(np.ones(2, np.complex64)),
}


@pytest.mark.parametrize("form", REFUSED)
def test_malformed_tensors_are_refused_by_name(server: Any, form: str) -> None:
    with pytest.raises(InvalidInput, match="dY"):
        server.ops.relu_grad(REFUSED[form], [1, 1])
    server.buffers["w"].create((2,))
    if form != "too large":  # in float64 it is not
        with pytest.raises(InvalidInput, match="^gradient "):
            server.buffers["w"].accumulate(REFUSED[form])
        with pytest.raises(InvalidInput, match="^w "):
            server.buffers.accumulate({"w": REFUSED[form]})
    assert server.buffers["w"].info().version == 0


class Bcoo:
    """A sparse array, as JAX has it."""

    def todense(self) -> Any:
        return np.eye(2)


WORDS: dict[str, tuple[Any, str]] = {
    "another dtype": (
        np.ones(2, np.complex128),
        r"is complex128, but must be one of float16, bfloat16, float32, float64$",
    ),
    "an integer": (np.ones(2, np.int64), r"is int64, but must be one of float16, bfloat16, float32, float64$"),
    "scipy": (scipy.sparse.eye_array(2), r"it is a sparse dia_array: give it as Rows\(indices, rows\), or its todense"),
    "JAX": (Bcoo(), r"it is a sparse Bcoo: give it as Rows\(indices, rows\)"),
    "a tree": ({"dense": {"kernel": np.ones(2)}}, r"it is a dict, but tensors do not nest.*such as 'layer.weight'"),
    "None": (None, "it is None: leave it out$"),
}


@pytest.mark.parametrize("form", WORDS)
def test_what_is_no_gradient_is_named_with_a_way_out(server: Any, form: str) -> None:
    gradient, words = WORDS[form]
    server.buffers["w"].create((2,))
    with pytest.raises(InvalidInput, match=f"^gradient .*{words}"):
        server.buffers["w"].accumulate(gradient)
    with pytest.raises(InvalidInput, match=f"^w .*{words}"):
        server.buffers.accumulate({"w": gradient})
    with pytest.raises(InvalidInput, match=f"^rows .*{words}"):
        Rows([0], gradient)


def test_many_gradients_without_names_are_refused(server: Any) -> None:
    """As lists of arrays, which other frameworks send."""
    with pytest.raises(InvalidInput, match="gradients is of type list, but must be a dict: gradients by the names of"):
        server.buffers.accumulate([np.ones(2), np.ones(3)])
    with pytest.raises(InvalidInput, match="specs is of type list, but must be a dict: specifications by the names"):
        server.buffers.create_many([{"shape": 2}])


@pytest.mark.parametrize("indices", [[1.5], [1 << 63], ["1"], [None]])
def test_indices_that_are_not_integers_are_refused(server: Any, indices: Any) -> None:
    with pytest.raises(InvalidInput, match="^indices "):
        server.ops.gather_grad([3], indices, [2])
    with pytest.raises(InvalidInput, match="^do_update "):
        server.ops.in_place_accumulator([1], [2], 0.5)


# ----- references -----


def fates(url: str) -> dict[str, tuple[str | list[str], tuple[int, ...]]]:
    """Return the URLs and the gradient's shape for each way that a call can end."""
    gone, too = "http://127.0.0.1:1", "http://127.0.0.1:2"
    return {
        "done": (url, (300, 300)),
        "broadcast": (url, (1, 300)),
        "refused": (url, (7,)),
        "too large": (url, (1000, 1000)),
        "not there": (gone, (300, 300)),
        "one of three there": ([url, gone, too], (300, 300)),
        "none of two there": ([gone, too], (300, 300)),
    }


@pytest.mark.parametrize("fate", fates(""))
@pytest.mark.parametrize("make", [AsyncClient, Client])
def test_no_argument_stays_in_memory(url: str, fate: str, make: Any) -> None:
    import asyncio

    address, shape = fates(url)[fate]
    with Client(url) as server:
        server.buffers["kept"].create((300, 300))

    async def call(gradient: Array) -> None:
        found = make(address, timeout=0.3)
        try:
            if type(address) is str:
                added = found.buffers["kept"].accumulate(gradient)
            else:
                added = found.buffers.accumulate({f"kept{number}": gradient for number in range(9)})
            if make is AsyncClient:
                await added
        except GradserveError:
            pass
        await found.close() if make is AsyncClient else found.close()

    gradient = np.ones(shape)
    kept = weakref.ref(gradient)
    gc.disable()  # for cycles would keep it, too, until some time later
    try:
        asyncio.run(call(gradient))
        del gradient
        assert kept() is None
    finally:
        gc.enable()
        with Client(url) as server:
            server.buffers["kept"].delete()


# ----- the format -----

DTYPE = st.sampled_from([dtype for name, dtype in DTYPES.items() if name != "BF16"])
SOME = arrays.arrays(DTYPE, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
NAMES = st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__")


@given(tensors=st.dictionaries(NAMES, SOME, max_size=4), flip=st.booleans())
@settings(max_examples=150)
def test_the_format_is_that_of_safetensors(tensors: dict[str, Array], flip: bool) -> None:
    given = {name: as_array(one.T if flip else one, name) for name, one in tensors.items()}
    body = b"".join(encode(given))
    theirs = safetensors.numpy.load(body)
    ours, _ = decode(bytearray(body))
    back, _ = decode(bytearray(safetensors.numpy.save({name: np.array(one, order="C") for name, one in given.items()})))
    for found in (theirs, ours, back):
        assert found.keys() == given.keys()
        for name, one in given.items():
            assert (found[name].dtype, found[name].shape) == (one.dtype, one.shape)
            assert found[name].tobytes() == one.tobytes()
    assert all(one.flags.writeable for one in ours.values())


GOOD = b"".join(encode({"value": np.arange(3, dtype=np.float32), "flag": np.array([True])}))
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
PLACES = st.lists(st.integers(-9, 40) | JUNK, max_size=3) | JUNK
ENTRY = st.fixed_dictionaries({"dtype": st.sampled_from(["F32", "X8"]), "shape": PLACES, "data_offsets": PLACES}) | JUNK
HEADER = st.dictionaries(st.sampled_from(["value", "a", "__metadata__"]), ENTRY, max_size=2) | JUNK


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Draw a file with some wrong bytes, or with a header of nonsense."""
    if draw(st.booleans()):
        text = json.dumps(draw(HEADER)).encode()
        return len(text).to_bytes(8, "little") + text + bytes(draw(st.integers(0, 16)))
    body = bytearray(GOOD)
    for _ in range(draw(st.integers(1, 3))):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    return bytes(body[: draw(st.integers(0, len(body)))])


CALLS: list[Any] = [run("ReluGrad", {}, {}), on("w", "POST", "/take", answers.taken, key="mine"), operators()]


@given(body=damaged() | st.binary(max_size=40) | JUNK.map(lambda one: json.dumps(one).encode()))
@settings(max_examples=500)
def test_a_damaged_answer_raises_server_failed(body: bytes) -> None:
    for call in CALLS:
        steps = steps_of(call, Timeouts(10, 10, 0), RequestIds(), Log("here"), "asked")
        next(steps)
        with pytest.raises((StopIteration, ServerFailed)) as ended:
            steps.send(Answer(200, httpx.Headers(), bytearray(body)))
        if isinstance(ended.value, ServerFailed):
            found = (ended.value.status, ended.value.request_id, ended.value.idempotency_key)
            assert found == (200, "asked", call.key)
        else:
            assert isinstance(ended.value, StopIteration)
            assert isinstance(ended.value.value, dict | list)
