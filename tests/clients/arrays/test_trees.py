"""Trees of every kind: their names, what comes back, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import unquote

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from gradserve_client import Client, InvalidInput, Rows
from gradserve_client._arrays.tree import filled, flattened, leaves_of
from gradserve_client.arrays import GradientAccumulator
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import sparse

from tests.clients.arrays.training import LIBRARIES, exchange, same


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    kernel: Any
    bias: Any


NESTS = st.recursive(
    st.none() | st.integers().map(np.asarray),
    lambda nests: (
        st.lists(nests, max_size=3)
        | st.tuples(nests, nests)
        | st.builds(Pair, nests, nests)
        | st.builds(Layer, nests, nests)
        | st.dictionaries(st.text("ab", min_size=1, max_size=2), nests, max_size=3)
        | st.dictionaries(st.text("ab", min_size=1, max_size=2), nests, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


@given(NESTS)
def test_nests_are_taken_apart_as_jax_does_and_made_again(nest: Any) -> None:
    tree, leaves = flattened(nest)
    paths, _ = jax.tree_util.tree_flatten_with_path(nest)
    expected = {jax.tree_util.keystr(path, simple=True, separator=".") or "array": leaf for path, leaf in paths}
    assert leaves == expected
    again = filled(tree, leaves)
    assert jax.tree.structure(again) == jax.tree.structure(nest)
    assert all(one is other for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(nest), strict=True))
    assert leaves_of(tree, nest) == leaves
    assert leaves_of(tree, None) == {}


def names(server: Client, run: str) -> dict[str, str]:
    """Return the dtypes of the buffers by their names in the tree."""
    found = [(one.name.removeprefix(f"{run}."), one.dtype) for one in server.buffers.list(f"{run}.")]
    return {unquote(name.replace(":", "%")): dtype for name, dtype in found if "::" not in name}


def test_names_are_paths(server: Client, run: str) -> None:
    one = np.ones(1)
    tree = {
        "params/Dense_0/kernel": one,
        "größe": [one, (one, None)],
        "pair": Pair(one, one),
        "layer": Layer(one, None),
        7: defaultdict(None, {"x": one}),
        ("flat", 0, "bias"): one,
    }
    found = exchange(tree, tree, server, run)
    expected = "params/Dense_0/kernel größe.0 größe.1.0 pair.left pair.right layer.kernel 7.x flat.0.bias"
    assert {*names(server, run)} == {*expected.split()}
    assert [*found] == [*tree]
    for name in tree:
        assert jax.tree.structure(found[name]) == jax.tree.structure(tree[name])
        assert same(found[name], tree[name])


@LIBRARIES
def test_an_array_alone(server: Client, run: str, library: Any) -> None:
    assert same(exchange(library.zeros(2), library.ones(2), server, run), library.ones(2))
    assert {*names(server, run)} == {"array"}


def test_dtypes_and_shapes_are_kept(server: Client, run: str) -> None:
    fine = 1 + 2.0**-30
    dtypes = {"f2": np.float16, "bf": ml_dtypes.bfloat16, "f4": np.float32, "f8": np.float64}
    tree = {name: np.full((2, 3), 0.5, dtype) for name, dtype in dtypes.items()}
    tree |= {"c8": np.full(3, 1 - 2j, np.complex64), "c16": np.full((), fine * 1j), "alone": np.full((), fine)}
    tree |= {"none": np.ones((0, 3)), "turned": np.asfortranarray(np.arange(6.0).reshape(2, 3))}
    found = exchange(tree, tree, server, run)
    assert same(found, tree)
    assert {array.flags.writeable for array in found.values()} == {True}
    sums = {"f8": "float64", "c16": "float64", "alone": "float64", "none": "float64", "turned": "float64"}
    assert names(server, run) == {name: sums.get(name, "float32") for name in tree}
    swapped = exchange(np.ones(2, ">f8"), np.arange(2, dtype=">f8"), server, f"{run}-swapped")
    assert (swapped.dtype, swapped.tolist()) == (np.float64, [0, 1])


def test_jax_dtypes_are_kept(server: Client, run: str) -> None:
    with jax.enable_x64(True):
        dtypes = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.complex64)
        tree = [jnp.full((2, 3), 1 / 3, dtype) for dtype in dtypes]
        assert same(exchange(tree, tree, server, run), tree)


def test_gradients_may_be_narrower_than_their_arrays(server: Client, run: str) -> None:
    tree = {"f4": np.zeros(2, np.float32), "f8": np.zeros(2), "bf": jnp.zeros(2, jnp.bfloat16)}
    given = {"f4": jnp.ones(2, jnp.bfloat16), "f8": [1, 2.5], "bf": np.ones(2, np.float32)}
    found = exchange(tree, given, server, run)
    assert {name: (one.dtype.name, one.tolist()) for name, one in found.items()} == {
        "f4": ("float32", [1, 1]),
        "f8": ("float64", [1, 2.5]),
        "bf": ("bfloat16", [1, 1]),
    }


@pytest.mark.parametrize("unused", ["none", "zeros"])
def test_none_is_an_unused_array(server: Client, run: str, unused: Any) -> None:
    tree = {"a": np.zeros(1), "b": {"c": np.zeros(1), "d": np.zeros(1)}, "never": np.zeros(2)}
    worker = GradientAccumulator(tree, server, run=run, unused=unused)
    worker.push({"a": np.ones(1), "b": None, "never": None}, weight=3)
    worker.push({"a": None, "b": {"c": np.ones(1), "d": None}, "never": None})
    found = worker.pull()
    assert (found["a"].tolist(), found["b"]["c"].tolist()) == ([0.75], [0.25])
    rest = [found["b"]["d"], found["never"]]
    if unused == "none":
        assert rest == [None, None]
    else:
        assert [one.tolist() for one in rest] == [[0], [0, 0]]


@pytest.mark.parametrize("request_bytes", [None, 300])
def test_sparse_gradients(server: Client, run: str, request_bytes: int | None) -> None:
    tree = {"emb": np.zeros((40, 6), np.float32), "bias": np.zeros(6)}
    worker = GradientAccumulator(tree, server, run=run, request_bytes=request_bytes, reduce="sum")
    expected = np.zeros((40, 6), np.float32)
    for indices in ([5, -1, 5], [0, 31], []):
        rows = np.arange(6.0 * len(indices), dtype=np.float32).reshape(-1, 6)
        np.add.at(expected, np.array(indices, int), rows)
        worker.push({"emb": Rows(np.array(indices, int), rows), "bias": None})
    found = worker.pull()
    assert found["bias"] is None
    assert found["emb"].tolist() == expected.tolist()


def test_sharded_arrays_come_back_as_they_were(url: str, run: str) -> None:
    code = f"""
import jax, jax.numpy as jnp
from gradserve_client import Client
from gradserve_client.arrays import GradientAccumulator
mesh = jax.make_mesh((4,), ("x",))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
tree = {{"w": jax.device_put(jnp.zeros((8, 2)), rows), "b": jnp.zeros(2)}}
with Client({url!r}) as server:
    gradients = GradientAccumulator(tree, server, run={run!r})
    gradients.push(jax.tree.map(jnp.ones_like, tree))
    found = gradients.pull()
assert found["w"].sharding == rows and not found["b"].committed
assert found["w"].sum() == 16
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=environment)


# ----- mistakes -----


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({}, "The tree has no array"),
        (None, "The tree has no array"),
        ({"a": [None, ()]}, "The tree has no array"),
        ({"a": 1.0}, "'a' is of type float, but must be a NumPy or JAX array"),
        ({"a": {"b": "text"}}, r"'a\.b' is of type str"),
        ({"a.b": np.ones(1), "a": {"b": np.ones(1)}}, r"Two arrays of the tree are named 'a\.b'"),
        ({1: np.ones(1), "1": np.ones(1)}, "named '1'|written alike"),
        ({"a": {1: [np.ones(1)], "1": {"x": np.ones(1)}}}, "'a' has two keys that are written alike"),
        ({"step": np.ones(1, np.int32)}, "'step' is int32, but must be one of float16.*complex128; None in its place"),
        ({"a": np.ones(1, object)}, "'a' is object"),
        ({"a": jnp.ones(1, jnp.float8_e4m3fn)}, "'a' is float8_e4m3fn"),
        ({"key": jax.random.key(0)}, "'key' is of type PRNGKeyArray"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_trees_that_cannot_be_accumulated(server: Client, tree: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        GradientAccumulator(tree, server, run="wrong")
    assert server.buffers.list("wrong") == []


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        (
            {"w": np.ones((2, 3))},
            r"The tree is of type dict with the keys \['w'\], but must have \['b', 'w'\]: give None",
        ),
        ({"w": np.ones((2, 3)), "b": None, "c": None}, r"with the keys \['b', 'c', 'w'\]"),
        (np.ones((2, 3)), r"The tree is of type ndarray with the keys \[\]"),
        ({"w": None, "b": np.ones(1)}, "'b' is of type ndarray, but its parameter is None"),
        ({"w": None, "b": None}, r"No array has a gradient.*push\(None, weight=0\)"),
        (None, "No array has a gradient"),
        ({"w": np.ones((3, 2)), "b": None}, r"The gradient of 'w' has the shape \[3, 2\], but must have \[2, 3\]"),
        ({"w": 1.0, "b": None}, r"The gradient of 'w' has the shape \[\]"),
        ({"w": np.ones((2, 3)), "b": None}, "'w' is float64, but the array is float32, and its sum would not keep"),
        ({"w": np.ones((2, 3), int), "b": None}, "'w' is int64, but the array is float32"),
        ({"w": jnp.ones((2, 3), jnp.complex64), "b": None}, "'w' is complex64, but the array is float32"),
        ({"w": {"x": np.ones(1)}, "b": None}, "The gradient of 'w' is of type dict, but must be an array, or Rows"),
        ({"w": scipy.sparse.csr_array(np.ones((2, 3))), "b": None}, "is of type csr_array, but must be.*Rows"),
        ({"w": Rows([2], np.ones((1, 3), np.float32)), "b": None}, "has indices beyond its 2 rows"),
        ({"w": Rows([1], np.ones((1, 4), np.float32)), "b": None}, r"shape \[1, 4\], but must have \[1, 3\]"),
        ({"w": np.ma.masked_less(np.ones((2, 3), np.float32), 2), "b": None}, "masked"),
        ({"w": [None, None], "b": None}, "The gradient of 'w' cannot be read as an array"),
        ({"w": [[1.0], [1.0, 2.0]], "b": None}, "The gradient of 'w' cannot be read as an array"),
    ],
)
def test_mistaken_gradients_are_refused(server: Client, run: str, gradients: Any, words: str) -> None:
    assert_refused(server, run, gradients, words)


def test_sparse_arrays_of_jax_are_refused(server: Client, run: str) -> None:
    """One is made here: JAX compiles for it, and each process of pytest would if it were a parameter."""
    made = sparse.BCOO.fromdense(jnp.ones((2, 3)))
    assert_refused(server, run, {"w": made, "b": None}, "is of type BCOO, but must be.*Rows")


def assert_refused(server: Client, run: str, gradients: Any, words: str) -> None:
    worker = GradientAccumulator({"w": np.zeros((2, 3), np.float32), "b": None}, server, run=run)
    with pytest.raises(InvalidInput, match=words):
        worker.push(gradients)
    assert server.buffers[f"{run}.w"].info().count == 0


def test_a_push_inside_a_compiled_function_is_refused(server: Client, run: str) -> None:
    worker = GradientAccumulator(jnp.zeros(2), server, run=run)
    with pytest.raises(InvalidInput, match="'array' cannot be read as an array.*traced array"):
        jax.jit(worker.push)(jnp.ones(2))


def test_real_gradients_of_complex_arrays_are_refused(server: Client, run: str) -> None:
    worker = GradientAccumulator(np.zeros(2, np.complex64), server, run=run)
    with pytest.raises(InvalidInput, match="'array' is float32, but the array is complex64"):
        worker.push(np.ones(2, np.float32))
    with pytest.raises(InvalidInput, match="it holds complex128, not float32"):
        worker.push([1j, 2j])
    assert worker.push(np.array([1j, 2j], np.complex64)).count == 1
    assert worker.pull().tolist() == [1j, 2j]


def test_rows_of_a_number_are_refused(server: Client, run: str) -> None:
    worker = GradientAccumulator(np.zeros(()), server, run=run)
    with pytest.raises(InvalidInput, match="The gradient of 'array' cannot be read as an array"):
        worker.push(Rows([0], [1.0]))
