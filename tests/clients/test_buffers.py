"""The buffers in both clients: every method and argument, and waiting for steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gradserve_client import Client, Conflict, InvalidInput, NotFound, PreconditionFailed, StepOpen, TooManyBuffers
from gradserve_client._http import policy
from gradserve_client._wire import bulk, pushes

from tests.clients.both import connected
from tests.serving import serving

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@contextmanager
def after(seconds: float, url: str, change: Callable[[Client], object]) -> Iterator[None]:
    """Make a change with another client in a thread, some seconds after the block has begun."""

    def run() -> None:
        with Client(url) as other:
            change(other)

    timer = threading.Timer(seconds, run)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_create_with_every_argument(server: Any, key: str) -> None:
    made = server.buffers["w"].create(
        (2, 3),
        dtype="float64",
        quorum=2,
        keep=3,
        nonfinite="reject",
        ttl_seconds=1000,
        max_norm=2.5,
        idempotency_key=f"{key} made",
    )
    assert (made.name, made.shape, made.dtype, made.quorum, made.keep) == ("w", (2, 3), "float64", 2, 3)
    assert (made.nonfinite, made.ttl_seconds, made.bytes, made.closed_steps) == ("reject", 1000.0, 48, ())
    with pytest.raises(InvalidInput, match="max_norm") as caught:
        server.buffers["w"].accumulate(3.0)
    assert (caught.value.code, caught.value.context["max_norm"], made.max_norm) == ("norm_too_large", 2.5, 2.5)
    assert (made.step, made.version, made.count, made.weight) == (0, 0, 0, 0.0)
    assert server.buffers["w"].info() == made
    with pytest.raises(Conflict):
        server.buffers["w"].create((2, 3))


def test_too_many_buffers_are_refused(kind: str) -> None:
    with serving(max_buffers=1) as url, connected(kind, url) as server:
        server.buffers["a"].create(2)
        with pytest.raises(TooManyBuffers, match="GRADSERVE_MAX_BUFFERS") as caught:
            server.buffers["b"].create(2)
        assert isinstance(caught.value, Conflict)
        assert (caught.value.context["limit"], caught.value.context["count"], caught.value.attempts) == (1, 1, 1)
        server.buffers["a"].delete()
        assert server.buffers["b"].create(2).shape == (2,)


@pytest.mark.parametrize("shape", [3, (3,), [3], np.int64(3), np.array([3]), np.array(3), (np.int32(3),)], ids=repr)
def test_a_shape_may_be_written_in_many_ways(server: Any, shape: Any) -> None:
    assert server.buffers["w"].create(shape, quorum=np.int64(2), keep=np.int8(1)).shape == (3,)


@pytest.mark.parametrize("shape", [2.5, (2.5,), "3", (None,)])
def test_a_shape_of_other_than_integers_is_refused(server: Any, shape: Any) -> None:
    with pytest.raises(InvalidInput, match="^shape is .*, but must be an integer"):
        server.buffers["w"].create(shape)


def test_exist_ok_false_refuses_an_existing_buffer(server: Any, key: str) -> None:
    buffer = server.buffers["w"]
    for replayed in (False, True):
        assert buffer.create((3,), exist_ok=False, idempotency_key=key).shape == (3,), replayed
    with pytest.raises(PreconditionFailed, match="'w' exists"):
        buffer.create((3,), exist_ok=False)
    buffer.create((3,))
    with pytest.raises(InvalidInput, match="nonfinite"):
        buffer.create((3,), nonfinite={1})


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", np.float64, np.dtype("f2"), ml_dtypes.bfloat16, BFLOAT16]
)
def test_dtypes_by_name_and_class(server: Any, dtype: Any) -> None:
    buffer = server.buffers["w"]
    buffer.create((1,), dtype=dtype)
    buffer.accumulate([1.5])
    expected = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    assert buffer.value().dtype == expected
    assert buffer.value(dtype=dtype).dtype == expected
    assert server.buffers.value(["w"], dtype="float64")["w"].dtype == np.float64
    assert buffer.take(dtype="bfloat16").value.dtype == BFLOAT16


@pytest.mark.parametrize("dtype", ["float", "nonsense", "int64", object, "complex64", np.uint8])
def test_a_dtype_of_no_buffer_is_refused(server: Any, dtype: Any) -> None:
    if dtype == "float":  # which is NumPy's name for float64
        assert server.buffers["w"].create((1,), dtype=dtype).dtype == "float64"
        return
    with pytest.raises(InvalidInput):
        server.buffers["w"].create((1,), dtype=dtype)


def test_accumulate_with_every_argument(server: Any, key: str) -> None:
    buffer = server.buffers["w"]
    made = buffer.create((2,))
    receipt = buffer.accumulate(
        [1, 2], weight=2, step=0, return_value=True, if_match=made.etag, idempotency_key=f"{key} a"
    )
    assert receipt.value.tolist() == [2.0, 4.0]
    assert (receipt.updated, receipt.closed, receipt.replayed, receipt.count) == (True, False, False, 1)
    assert buffer.accumulate(3).value is None
    assert buffer.value().tolist() == [5.0, 7.0]
    skipped = buffer.accumulate([9, 9], do_update=np.False_)
    assert (skipped.updated, skipped.count) == (False, 2)
    replaced = buffer.accumulate([1, 1], overwrite=np.True_, weight=np.float32(0.5))
    assert (replaced.count, replaced.weight) == (1, 0.5)
    assert buffer.value().tolist() == [0.5, 0.5]


def test_tags_follow_every_change(server: Any) -> None:
    buffer = server.buffers["w"]
    changes: list[Callable[[], Any]] = [
        lambda: buffer.create((2,), quorum=2),
        lambda: buffer.accumulate([1, 2]),
        lambda: buffer.accumulate([1, 2]),  # closes
        lambda: buffer.zero(),
        lambda: buffer.accumulate([1, 2], do_update=False),
        lambda: buffer.take(),
        lambda: buffer.zero(),
        lambda: server.buffers.accumulate({"w": [1, 2]})["w"],
        lambda: server.buffers.take(["w"])["w"],
        lambda: server.ops.relu_grad([1, 2], [1, 1], into="w"),
    ]
    old = '"0-99"'
    for change in changes:
        tag = change().etag
        assert tag == buffer.info().etag
        with pytest.raises(PreconditionFailed):
            buffer.accumulate([1, 2], if_match=old)
        assert buffer.accumulate([1, 2], if_match=tag, do_update=False).etag == tag
        old = tag if tag == buffer.zero(if_match=tag).etag else old
    with pytest.raises(PreconditionFailed):
        buffer.delete(if_match=old)
    with pytest.raises(PreconditionFailed):
        buffer.take(if_match=old)
    assert buffer.take(if_match="*").closed
    buffer.delete(if_match=buffer.info().etag)


def test_take_zero_and_delete(server: Any, key: str) -> None:
    buffer = server.buffers["w"]
    buffer.create((2,), keep=2)
    buffer.accumulate([2, 4], weight=2)
    taken = buffer.take(min_count=1, reduce="mean", dtype="float64", idempotency_key=f"{key} t")
    assert taken.value.tolist() == [2.0, 4.0]
    assert (taken.closed, taken.step, taken.count, taken.weight, taken.value.dtype) == (True, 0, 1, 2.0, np.float64)
    again = buffer.take(min_count=1, reduce="mean", dtype="float64", idempotency_key=f"{key} t")
    assert again.replayed
    assert again == taken.__class__(**{**taken.__dict__, "replayed": True})
    assert again.value.tolist() == [2.0, 4.0]
    assert buffer.value(step=0, reduce="mean").tolist() == [2.0, 4.0]
    buffer.accumulate([1, 1])
    zeroed = buffer.zero(idempotency_key=f"{key} z")
    assert (zeroed.step, zeroed.count) == (2, 0)
    assert buffer.zero(idempotency_key=f"{key} z").replayed
    buffer.delete(idempotency_key=f"{key} d")
    buffer.delete(idempotency_key=f"{key} d")
    with pytest.raises(NotFound):
        buffer.delete()


def test_many_are_created_at_once(server: Any, key: str) -> None:
    rules = {"dtype": np.float64, "quorum": np.int64(3), "keep": 2, "nonfinite": "reject", "ttl_seconds": 60}
    server.buffers["old"].create(3)
    specs = {"new": {"shape": (2, 3), "max_norm": 2, **rules}, "old": {"shape": 3}}
    made = server.buffers.create_many(specs, idempotency_key=key)
    assert [*made] == ["new", "old"]
    assert made == {name: server.buffers[name].info() for name in made}
    assert (made["new"].dtype, made["new"].quorum, made["new"].max_norm) == ("float64", 3, 2.0)
    assert server.buffers.create_many(specs) == made
    with pytest.raises(Conflict, match="'new'") as caught:
        server.buffers.create_many({"another": {"shape": 1}, "new": {"shape": 1}, "old": {"shape": 1}})
    assert caught.value.context["buffers"] == ["new", "old"]
    assert [one.name for one in server.buffers.list()] == ["new", "old"]


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ({}, "specs is empty"),
        ({"a": {}}, "'a': missing .* 'shape'"),
        ({"a": {"shape": 1, "qourum": 2}}, "'a': .*'qourum'"),
        ({"a": {"shape": 1, "exist_ok": False}}, "'a': .*'exist_ok'"),
        ({"a": {"shape": 1.5}}, "shape is 1.5"),
        ({"a": 3}, "'a': .*mapping"),
        ({"a b": {"shape": 1}}, "'a b'"),
    ],
)
def test_mistaken_specifications_are_refused(server: Any, specs: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        server.buffers.create_many(specs)


def test_many_at_once(server: Any, key: str) -> None:
    for name in ("a.1", "a.2", "b"):
        server.buffers[name].create((1,), dtype="float64")
    receipts = server.buffers.accumulate({"a.1": [1], "b": np.float32(2)}, weight=2, step=0, idempotency_key=f"{key} k")
    assert {name: (one.count, one.weight) for name, one in receipts.items()} == {"a.1": (1, 2.0), "b": (1, 2.0)}
    replayed = server.buffers.accumulate({"a.1": [1], "b": np.float32(2)}, weight=2, step=0, idempotency_key=f"{key} k")
    assert all(one.replayed for one in replayed.values())
    with pytest.raises(NotFound):
        server.buffers.accumulate({"a.1": [1], "none": [1]})
    values = server.buffers.value(["a.1", "a.2", "b"])
    assert {name: one.tolist() for name, one in values.items()} == {"a.1": [2.0], "a.2": [0.0], "b": [4.0]}
    assert server.buffers.value(("b",), reduce="mean", dtype="float32")["b"].tolist() == [2.0]
    assert server.buffers.value(prefix="a.").keys() == {"a.1", "a.2"}
    assert not server.buffers.accumulate({"a.1": [9]}, do_update=False)["a.1"].updated
    assert server.buffers.accumulate({"a.1": [9]}, overwrite=True)["a.1"].count == 1
    taken = server.buffers.take(prefix="a.")
    assert {name: one.value.tolist() for name, one in taken.items()} == {"a.1": [9.0], "a.2": [0.0]}
    assert server.buffers.value({"a.1"}, step=0)["a.1"].tolist() == [9.0]
    assert {name: one.step for name, one in server.buffers.zero(prefix="a.").items()} == {"a.1": 2, "a.2": 2}
    assert server.buffers.zero(["b"], idempotency_key=f"{key} z")["b"].step == 1
    assert server.buffers.zero(["b"], idempotency_key=f"{key} z")["b"].replayed


@pytest.mark.parametrize("which", [{}, {"names": ["a"], "prefix": "a"}, {"names": "abc"}])
def test_names_and_prefix_exclude_each_other(server: Any, which: dict[str, Any]) -> None:
    for method in (server.buffers.value, server.buffers.take, server.buffers.zero):
        with pytest.raises(InvalidInput):
            method(**which)


def test_a_long_list_has_pages(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "PAGE_BUFFERS", 3)
    names = [f"page.{number:04}" for number in range(10)]
    for name in names:
        server.buffers[name].create(())
    assert [one.name for one in server.buffers.list("page.")] == names
    assert [one.name for one in server.buffers.list("page.0009")] == ["page.0009"]
    assert server.buffers.list("none") == []


# ----- waiting -----


@pytest.fixture
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "LONGEST_POLL", 0.1)


@pytest.mark.usefixtures("short_polls")
def test_value_waits_until_the_step_closes(server: Any, url: str) -> None:
    server.buffers["w"].create((1,), quorum=1)
    with after(0.3, url, lambda other: other.buffers["w"].accumulate([7])):
        assert server.buffers["w"].value(step=0, timeout=20).tolist() == [7.0]
    with after(0.3, url, lambda other: other.buffers["w"].accumulate([8])):
        assert server.buffers.value(["w"], step=1, timeout=20)["w"].tolist() == [8.0]


@pytest.mark.usefixtures("short_polls")
def test_take_waits_for_gradients(server: Any, url: str, key: str) -> None:
    server.buffers["w"].create((1,))
    with after(0.3, url, lambda other: other.buffers["w"].accumulate([7])):
        taken = server.buffers["w"].take(min_count=1, timeout=20, idempotency_key=f"{key} t")
    assert (taken.value.tolist(), taken.step, taken.replayed) == ([7.0], 0, False)
    with after(0.3, url, lambda other: other.buffers["w"].accumulate([8])):
        assert server.buffers.take(["w"], min_count=1, timeout=20)["w"].value.tolist() == [8.0]


@pytest.mark.parametrize("poll", [0.1, 20.0])
def test_waiting_ends_at_the_timeout(server: Any, monkeypatch: pytest.MonkeyPatch, poll: float) -> None:
    monkeypatch.setattr(policy, "LONGEST_POLL", poll)
    server.buffers["w"].create((1,))
    server.buffers["w"].accumulate([1])
    with pytest.raises(StepOpen) as caught:
        server.buffers["w"].value(step=0, timeout=0.3)
    assert (caught.value.code, caught.value.context["step"]) == ("step_open", 0)
    assert (caught.value.attempts > 1) is (poll < 0.3)
    with pytest.raises(StepOpen) as caught:
        server.buffers["w"].take(min_count=2, timeout=0.3)
    assert (caught.value.code, caught.value.context["count"]) == ("too_few_gradients", 1)


def test_waiting_does_not_count_as_silence(url: str, kind: str) -> None:
    from tests.clients.both import connected

    with connected(kind, url, timeout=2, attempt_timeout=2) as server:
        server.buffers["quiet"].create((1,))
        with after(2.5, url, lambda other: other.buffers["quiet"].accumulate([7])):
            assert server.buffers["quiet"].take(min_count=1, timeout=15).value.tolist() == [7.0]


def test_tensors_are_set_and_read_back(server: Any, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors: dict[str, Any] = {
        "w": np.array([[1, 2]], np.float32),
        "b": np.float64(3),
        "h": np.arange(4).astype(BFLOAT16),
    }
    server.buffers["m.p.w"].create((1, 2), quorum=5)
    server.buffers["m.p.w"].accumulate([[9, 9]])
    for _ in range(2):
        receipts = server.buffers.set(tensors, prefix="m.p.", idempotency_key=key)
        assert {name: (one.count, one.weight) for name, one in receipts.items()} == {
            f"m.p.{name}": (1, 1) for name in tensors
        }
    assert receipts["m.p.b"].replayed
    found = server.buffers.value(prefix="m.p.")
    assert found.keys() == receipts.keys()
    for name, value in tensors.items():
        assert (found[f"m.p.{name}"].dtype, found[f"m.p.{name}"].tolist()) == (value.dtype, value.tolist())
    assert server.buffers["m.p.w"].info().quorum == 5
    monkeypatch.setattr(pushes, "PART_BYTES", 16)
    assert server.buffers.set({"w": [[3, 4]], "b": 5, "h": [1, 2, 3, 4]}, prefix="m.p.").keys() == receipts.keys()
    assert server.buffers["m.p.h"].value().tolist() == [1, 2, 3, 4]
    with pytest.raises(InvalidInput, match="shape"):
        server.buffers.set({"w": [1, 2, 3], "new": [1]}, prefix="m.p.")
    for wrong in ({"a b": [1]}, {"w": np.array([[1, 2]])}, {}):
        with pytest.raises(InvalidInput):
            server.buffers.set(wrong, prefix="m.p.")
