"""Gradients in 8 bits with error feedback: what travels, what is added to the next push, and when."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from gradserve_client import Client, ConnectionFailed, InvalidInput, Rows, StaleStep
from gradserve_client._wire.codes import decoded, encoded
from gradserve_client.arrays import GradientAccumulator

from service.codecs.codes import decode, encode
from service.dtypes import Array
from tests.clients.torch.training import Watched

SIZE = 3000
"""Numbers of an array: eleven whole blocks, and a short one."""


def gradients(seed: int, size: int = SIZE) -> Array:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def rounded(numbers: Array) -> Array:
    """Return what the server gets of numbers."""
    with np.errstate(all="ignore"):
        return decode(*encode(numbers.astype(np.float32).reshape(-1))).reshape(numbers.shape)


def worker(server: Client, run: str, model: Any = None, **more: Any) -> GradientAccumulator:
    model = np.zeros(SIZE, np.float32) if model is None else model
    return GradientAccumulator(model, server, run=run, **{"wire_dtype": "int8", "pull_dtype": None, **more})


def test_rounding_is_made_good_in_the_next_push(server: Client, run: str) -> None:
    one, left, total = worker(server, run, reduce="sum"), np.zeros(SIZE, np.float32), np.zeros(SIZE)
    for step in range(20):
        one.push(gradients(step))
        sent = rounded(gradients(step) + left)
        left = gradients(step) + left - sent
        found = server.buffers[f"{run}.array"].value()
        assert np.array_equal(found, sent)
        total += found
        one.pull()
    exact = sum(gradients(step).astype(np.float64) for step in range(20))
    assert np.abs(total + left - exact).max() < 1e-4
    assert np.abs(total - exact).max() < np.abs(exact).max() / 50


def test_what_is_cut_off_counts_by_weight_and_scale(server: Client, run: str) -> None:
    one, left, total = worker(server, run, reduce="sum"), np.zeros(SIZE, np.float32), np.zeros(SIZE)
    for step, (weight, scale) in enumerate([(2.0, 1.0), (8.0, 1.0), (1.0, 1024.0), (4.0, 2.0)]):
        one.push(scale * gradients(step), weight=weight, scale=scale)
        total += server.buffers[f"{run}.array"].value().astype(np.float64) / scale
        one.pull()
        left = one.state_dict()["residuals"][f"{run}.array"]
    exact = sum(w * gradients(step).astype(np.float64) for step, w in enumerate([2, 8, 1, 4]))
    assert np.abs(total + left - exact).max() < 1e-4


def test_a_push_has_a_quarter_of_the_bytes(url: str, run: str) -> None:
    sizes = []
    for wire in (None, "int8"):
        transport = Watched()
        with Client(url, transport=transport) as server:
            one = worker(server, f"{run}{wire}", np.zeros(200_000, np.float32), wire_dtype=wire)
            transport.sent.clear()
            one.push(gradients(1, 200_000))
            sizes.append(sum(size for _, size in transport.sent))
    assert sizes[1] / sizes[0] < 0.26


@pytest.mark.parametrize("pull", [None, "int8"])
def test_a_mean_travels_in_half_precision_or_in_8_bits(url: str, run: str, pull: str | None) -> None:
    transport = Watched()
    with Client(url, transport=transport) as server:
        one = worker(server, run, pull_dtype=pull)
        one.push(gradients(1), weight=4)
        sent = rounded(gradients(1))
        transport.answered.clear()
        found = one.pull()
    assert found.dtype == np.float32
    if pull == "int8":
        assert np.array_equal(found, rounded(sent))
        assert sum(transport.answered) < 1.2 * SIZE + 1500
    else:
        assert np.allclose(found, sent, rtol=2**-8)
        assert sum(transport.answered) < 2.2 * SIZE + 1500


def test_workers_with_and_without_codes_share_a_run(server: Client, run: str) -> None:
    half = worker(server, run, wire_dtype="bfloat16", quorum=2)
    coded = worker(server, run, quorum=2)
    half.push(np.ones(SIZE, np.float32))
    coded.push(np.full(SIZE, 3, np.float32))
    for one in (half, coded):
        assert np.allclose(one.pull(), 2, rtol=2**-7)


def test_small_sparse_and_infinite_gradients_travel_in_full(server: Client, run: str) -> None:
    model = {
        "small": np.zeros(1000, np.float32),
        "rows": np.zeros((500, 4), np.float32),
        "large": np.zeros(SIZE, np.float32),
    }
    one, large = worker(server, run, model, reduce="sum"), gradients(2)
    large[7] = np.inf
    small = gradients(3, 1000)
    one.push({"small": small, "rows": Rows([3, 499], np.array([[0.1, 0.2, 0.3, 0.4]] * 2, np.float32)), "large": large})
    found = {name: server.buffers[f"{run}.{name}"].value() for name in model}
    assert np.array_equal(found["small"], small)
    assert np.array_equal(found["rows"][3], np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    assert np.array_equal(found["large"], large)
    assert one.state_dict()["residuals"] == {}
    assert np.isinf(one.pull()["large"][7])


def test_a_lost_answer_is_asked_again_with_the_same_bytes(url: str, run: str) -> None:
    transport, bodies = Watched(), list[bytes]()
    with Client(url, transport=transport, max_retries=2) as server:
        one = worker(server, run, reduce="sum")
        one.push(gradients(1))
        before = one.state_dict()["residuals"]
        send = transport.handle_request

        def noted(request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("accumulate"):
                bodies.append(request.read())
            return send(request)

        transport.handle_request = noted  # type: ignore[method-assign]
        transport.losing = True
        with pytest.raises(ConnectionFailed):
            one.push(gradients(2))
        assert same(one.state_dict()["residuals"], before)
        transport.losing = False
        assert one.push(gradients(2)).replayed
    assert len({*bodies}) == 1
    assert len(bodies) == 4
    assert not same(one.state_dict()["residuals"], before)


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_a_late_push_leaves_what_was_cut_off_before(server: Client, run: str) -> None:
    one = worker(server, run, quorum=1, keep=2)
    other = worker(server, run, quorum=1, keep=2, worker="other")
    one.push(gradients(1))
    one.pull()
    before = one.state_dict()["residuals"]
    other.pull()
    other.push(gradients(2))
    with pytest.raises(StaleStep):
        one.push(gradients(3))
    assert same(one.state_dict()["residuals"], before)


def test_a_restarted_worker_goes_on_with_the_same_bits(server: Client, run: str) -> None:
    values = []
    for kind in ("whole", "restarted"):
        one = worker(server, f"{run}{kind}", worker="w", reduce="sum")
        for step in range(4):
            if kind == "restarted" and step == 2:
                state = one.state_dict()
                one = worker(server, f"{run}{kind}", worker="w", reduce="sum")
                one.load_state_dict(state)
            one.push(gradients(step))
            values.append(server.buffers[f"{run}{kind}.array"].value())
            one.pull()
    for whole, again in zip(values[:4], values[4:], strict=True):
        assert np.array_equal(whole, again)


def test_a_push_in_a_thread_keeps_the_order(server: Client, run: str) -> None:
    one, other = worker(server, f"{run}a", reduce="sum"), worker(server, f"{run}b", reduce="sum")
    for step in range(3):
        one.push(gradients(step), wait=False)
        other.push(gradients(step))
        one.pull()
        other.pull()
    assert np.array_equal(*(each.state_dict()["residuals"][f"{each.prefix}array"] for each in (one, other)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_and_tensors_travel_in_8_bits(server: Client, run: str, dtype: str) -> None:
    tensors = {"large": gradients(1).astype(dtype).reshape(3, -1), "small": np.arange(5, dtype=dtype)}
    server.buffers.set(tensors, prefix=f"{run}.", wire_dtype="int8")
    stored = server.buffers.value(prefix=f"{run}.")
    assert np.array_equal(stored[f"{run}.large"], rounded(tensors["large"]))
    assert np.array_equal(stored[f"{run}.small"], tensors["small"])
    several = server.buffers.value(prefix=f"{run}.", wire_dtype="int8")
    for name, value in stored.items():
        one = server.buffers[name].value(wire_dtype="int8")
        assert one.dtype == np.float32
        assert np.array_equal(one, rounded(value))
        assert np.array_equal(several[name], one)
    with pytest.raises(InvalidInput, match="float32"):
        server.buffers[f"{run}.large"].value(wire_dtype="int8", dtype="float16")


def test_both_encoders_have_the_same_bits() -> None:
    for seed in range(20):
        numbers = gradients(seed, 1000 + 37 * seed) * np.float32(10.0) ** (seed - 30)
        coded = encoded(numbers)
        for one, other in zip((coded.codes, coded.scales), encode(numbers), strict=True):
            assert one.tobytes() == other.tobytes()
        assert np.array_equal(decoded(coded), rounded(numbers))


def test_other_dtypes_are_refused(server: Client, run: str) -> None:
    for more, name in (({"wire_dtype": "int4"}, "wire_dtype"), ({"pull_dtype": "int4"}, "pull_dtype")):
        with pytest.raises(InvalidInput, match=name):
            worker(server, run, **more)
