"""The contract of every store: buffers, listings, and memory that callers share with the store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.buffers.changes import Add, Change, Create, Delete, Take, Zero
from service.buffers.names import BufferName
from service.buffers.perform import Outcome, Request
from service.buffers.record import Record
from service.buffers.restore import Restore
from service.buffers.store import Store
from service.errors import BufferExists, PreconditionFailed, StaleStep, StepGone, StepOpen, StoreFailed, UnknownBuffer
from tests.buffers.answers import ANSWERS, LOOKS, prepare
from tests.buffers.calls import LARGE, add, create, do, fails_alone, key, ones, spec, state, value
from tests.buffers.stores import PATIENCE, Clock, open_lmdb
from tests.kernels.equality import assert_same_bits
from tests.serving import wait_until

# ----- create -----


def test_a_new_buffer_is_zero(store: Store, clock: Clock) -> None:
    rules: dict[str, Any] = {"nonfinite": "reject", "quorum": 3, "keep": 2, "ttl_seconds": 60.0, "max_norm": 1.5}
    outcome = do(store, Create(name="a", spec=spec((2, 3), "float16", **rules)))
    form = {"name": "a", "shape": [2, 3], "dtype": "float16", "bytes": 12}
    unset = dict.fromkeys(
        ["deadline_seconds", "quorum_weight", "contributors", "closed_at", "deadline_at", "missing", "missing_since"]
    )
    unset |= {"run": None, "life": None}
    counts = {"step": 0, "version": 0, "count": 0, "weight": 0.0, "min_count": 1, "per_contributor": 1}
    times = {"created_at": clock.now, "updated_at": clock.now, "expires_at": clock.now + 60}
    expected = {**form, **rules, **unset, **counts, **times, "closed_steps": [], "contributors_in": {}}
    assert outcome == Outcome({"a": {**expected, "created": True}})
    assert store.record("a").as_json() == expected
    assert_same_bits(value(store, "a"), np.zeros((2, 3), np.float16))


def test_creating_a_buffer_again_changes_nothing(store: Store, clock: Clock) -> None:
    create(store, "a")
    add(store, "a", [1, 2])
    before = state(store)
    clock.advance(1)
    receipt = do(store, Create(name="a", spec=spec())).receipts["a"]
    assert receipt == {**store.record("a").as_json(), "created": False}
    assert state(store) == before


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (spec((3,)), "shape [2], not [3]"),
        (spec((2, 1)), "shape [2], not [2, 1]"),
        (spec(dtype="bfloat16"), "dtype 'float32', not 'bfloat16'"),
        (spec(nonfinite="reject"), "nonfinite 'allow', not 'reject'"),
        (spec(quorum=2), "quorum null, not 2"),
        (spec(keep=2), "keep 1, not 2"),
        (spec(ttl_seconds=1.5), "ttl_seconds null, not 1.5"),
        (spec((), keep=7), "shape [2], not [], keep 1, not 7"),
    ],
    ids=str,
)
def test_creating_a_buffer_again_with_another_spec_is_refused(namespace: Store, other: Any, what: str) -> None:
    create(namespace, "a")
    error = fails_alone(namespace, BufferExists, Create(name="a", spec=other))
    assert error.detail == f"There is a buffer 'a' with {what}"
    assert error.context == {"buffer": "a"}


@pytest.mark.parametrize(
    "change",
    [
        Add(name="a", gradient=ones(2)),
        Add(name="a", gradient=ones(2), do_update=False),
        Zero(name="a"),
        Take(name="a"),
        Delete(name="a"),
        Zero(name="a", match=frozenset({"*"})),
    ],
    ids=str,
)
def test_a_change_of_an_unknown_buffer_is_refused(namespace: Store, change: Change) -> None:
    error = fails_alone(namespace, UnknownBuffer, change)
    assert "'a'" in error.detail
    assert error.context == {"buffer": "a"}
    with pytest.raises(UnknownBuffer):
        namespace.record("a")
    create(namespace, "b")
    with pytest.raises(UnknownBuffer):
        namespace.read(["b", "a"])


def test_buffers_of_many_namespaces_are_looked_up_together(store: Store, clock: Clock) -> None:
    ann = store.within("ann")
    create(store, "a", "b")
    create(ann, "a")
    create(store, "short", ttl_seconds=10)
    add(ann, "a", 1.0)
    names = [BufferName("", "a"), BufferName("ann", "a"), BufferName("ann", "b"), BufferName("", "short")]
    found = store.look(names)
    assert found == {names[0]: store.record("a"), names[1]: ann.record("a"), names[3]: store.record("short")}
    clock.advance(11)
    assert store.look(names[::-1]).keys() == {*names[:2]}
    assert store.look([]) == {}


# ----- delete, restore, ttl -----


def test_a_deleted_buffer_is_gone_and_can_be_created_again(store: Store) -> None:
    create(store, "a", "b")
    add(store, "a", [1, 2])
    do(store, Take(name="a"))
    add(store, "a", [3, 4])
    receipt = do(store, Delete(name="a")).receipts["a"]
    assert (receipt["updated"], receipt["step"], receipt["count"]) == (True, 1, 1)
    with pytest.raises(UnknownBuffer):
        store.record("a")
    assert [record.name for record in store.records()] == ["b"]
    create(store, "a", shape=(3,), dtype="float64")
    assert_same_bits(value(store, "a"), np.zeros(3))
    with pytest.raises(StepOpen):
        store.read(["a"], 0)


def test_a_buffer_is_restored_as_it_was(store: Store, clock: Clock) -> None:
    rules = spec((2, 2), "float16", quorum=9, keep=2)
    saved = Record(BufferName("", "a"), rules, 0, 5.0, 6.0, step=4, version=30, count=3, weight=1.5)
    numbers = np.array([[-0.0, np.nan], [np.inf, 0.1]], np.float16)
    receipt = do(store, Restore(name="a", record=saved, value=numbers)).receipts["a"]
    assert (receipt["step"], receipt["version"], receipt["count"], receipt["weight"]) == (4, 30, 3, 1.5)
    assert replace(store.record("a"), id=0, value=None) == replace(saved, updated=clock.now)
    assert_same_bits(value(store, "a"), numbers)
    fails_alone(store, BufferExists, Restore(name="a", record=saved, value=numbers))


def test_an_expired_buffer_is_gone(store: Store, clock: Clock) -> None:
    create(store, "a", ttl_seconds=10.0)
    create(store, "b")
    clock.advance(9.75)
    add(store, "a", [1, 2])
    do(store, Take(name="a"))
    clock.advance(9.75)
    assert value(store, "a", 0).tolist() == [1, 2]
    assert len(store.records()) == 2
    clock.advance(0.25)
    with pytest.raises(UnknownBuffer):
        store.record("a")
    for step in (None, 0, 1):
        with pytest.raises(UnknownBuffer):
            store.read(["a"], step)
    assert [record.name for record in store.records()] == ["b"]
    for make in MATCHABLE[:4]:
        for more in [{}, {"match": frozenset({"*"})}]:
            fails_alone(store, UnknownBuffer, make(**more))
            fails_alone(store, UnknownBuffer, Add(name="b", gradient=ones(2)), make(**more))


def test_an_expired_buffer_can_be_created_again(store: Store, clock: Clock) -> None:
    create(store, "a", ttl_seconds=10.0)
    add(store, "a", [1, 2])
    clock.advance(10)
    receipt = do(store, Create(name="a", spec=spec((3,), "float64"))).receipts["a"]
    assert receipt["created"]
    assert receipt["created_at"] == clock.now
    assert_same_bits(value(store, "a"), np.zeros(3))
    clock.advance(1000)
    for _ in range(5):
        clock.advance(2)
        add(store, "a", ones(3))
    assert value(store, "a").tolist() == [5, 5, 5]


def test_reading_and_creating_again_do_not_postpone_expiry(store: Store, clock: Clock) -> None:
    create(store, "a", ttl_seconds=10.0)
    clock.advance(9)
    store.read(["a"])
    create(store, "a", ttl_seconds=10.0)
    add(store, "a", [1, 2], do_update=False)
    clock.advance(1)
    with pytest.raises(UnknownBuffer):
        store.record("a")


def test_every_change_postpones_expiry(store: Store, clock: Clock) -> None:
    create(store, "a", "other", ttl_seconds=10.0)
    for change in [Add(name="a", gradient=ones(2)), Zero(name="a"), Take(name="a")] * 3:
        clock.advance(9)
        do(store, change)
        assert store.record("a").expires == clock.now + 10


def test_a_closed_store_refuses_requests(store: Store) -> None:
    create(store, "a")
    store.close()
    with pytest.raises(StoreFailed, match="closed"):
        add(store, "a", [1, 2])


# ----- match -----


MATCHABLE: list[Callable[..., Change]] = [
    lambda **rest: Add(name="a", gradient=ones(2), **rest),
    lambda **rest: Zero(name="a", **rest),
    lambda **rest: Take(name="a", **rest),
    lambda **rest: Delete(name="a", **rest),
    lambda **rest: Create(name="a", spec=spec(), **rest),
]


@pytest.mark.parametrize("make", MATCHABLE, ids=["add", "zero", "take", "delete", "create"])
def test_a_change_needs_a_matching_etag(namespace: Store, make: Callable[..., Change]) -> None:
    create(namespace, "a")
    add(namespace, "a", [1, 2])
    for tags in [{'"0-0"'}, {'"1-1"', '"0-2"'}, set(), {"0-1"}]:
        error = fails_alone(namespace, PreconditionFailed, make(match=frozenset(tags)))
        assert error.detail.endswith("""but 'a' is at "0-1\"""")
    do(namespace, make(match=frozenset({'"7-7"', '"0-1"'})))
    create(namespace, "a")
    do(namespace, make(match=frozenset({"*"})))


def test_a_missing_buffer_matches_no_etag(store: Store) -> None:
    fails_alone(store, PreconditionFailed, Create(name="a", spec=spec(), match=frozenset({"*"})))


def test_every_change_makes_a_new_etag(store: Store) -> None:
    create(store, "a", keep=3)
    tags = [store.record("a").etag]
    for change in [Add(name="a", gradient=ones(2)), Zero(name="a"), Add(name="a", gradient=ones(2)), Take(name="a")]:
        do(store, change)
        (snapshot,) = store.read(["a"])
        record = store.record("a")
        assert {snapshot.etag, record.etag} < record.tags
        tags.append(record.etag)
    assert tags == ['"0-0"', '"0-1"', '"1-2"', '"1-3"', '"2-4"']


# ----- listing -----


LISTED = ["A", "a", "a-b", "a.b", "a.c", "aa", "b", "b:1", "z_", "layers.0.weight", "layers.1.weight", "layers.10.bias"]


def test_a_listing_has_the_names_in_order(listed: Store) -> None:
    prefixes = ["", "a", "a.", "layers.", "layers.1", "z", "zz", "0", "b", "B", "~", "~ann/", "~z/", "/", "é"]
    afters = ["", "A", "a", "a.b", "a.bb", "layers.0.weight", "z_", "~", "~an/", "~ann/b", "0"]
    for prefix, after, limit in itertools.product(prefixes, afters, (None, 0, 1, 2, 100)):
        names = [name for name in sorted(LISTED) if name.startswith(prefix) and name > after]
        assert [record.name for record in listed.records(prefix, after, limit)] == names[:limit]


@pytest.fixture(scope="module", params=["", "ann"])
def listed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A namespace with buffers of these names and some expired buffers. Other namespaces have other buffers."""
    clock, namespace = Clock(), request.param
    store: Store = open_lmdb(tmp_path_factory.mktemp("listed"), clock)
    for other in {"", "an", "ann", "anna", "z"} - {namespace}:
        create(store.within(other), "a.others", "z")
    store = store.within(namespace)
    for name in LISTED:
        create(store, name)
        create(store, name + "0", ttl_seconds=1.0)
    clock.advance(1)
    yield store
    store.close()


def test_a_listing_is_paged(listed: Store) -> None:
    names: list[str] = []
    while page := listed.records(after=names[-1] if names else "", limit=5):
        names += [record.name for record in page]
    assert names == sorted(LISTED)


def test_an_empty_store_lists_nothing(store: Store) -> None:
    assert store.records() == store.records("a", "b", 3) == []
    assert store.read([]) == []


def test_names_may_have_two_hundred_characters(store: Store) -> None:
    name = "n" * 200
    create(store, name, ttl_seconds=5.0)
    add(store, name, [1, 2])
    assert [record.name for record in store.records("n" * 199)] == [name]


# ----- no shared memory -----


@pytest.mark.parametrize("overwrite", [False, True])
def test_changing_a_gradient_after_its_add_changes_no_value(store: Store, overwrite: bool) -> None:
    create(store, "a", shape=(LARGE,))
    gradient = ones(LARGE)
    add(store, "a", gradient, overwrite=overwrite)
    gradient[:] = 7
    assert value(store, "a").tolist() == [1.0] * LARGE
    assert (gradient == 7).all()


def test_an_add_leaves_its_gradient_unchanged(store: Store) -> None:
    create(store, "a", shape=(3,))
    gradient = np.array([1, 2, 3], np.float32)
    gradient.setflags(write=False)
    add(store, "a", gradient, weight=3.0, overwrite=True)
    add(store, "a", gradient, weight=3.0)
    assert gradient.tolist() == [1, 2, 3]


def test_changing_a_returned_value_changes_no_buffer(store: Store) -> None:
    create(store, "a")
    adding = Add(name="a", gradient=ones(2), want_value=True)
    do(store, adding).values["a"][:] = 7
    value(store, "a")[:] = 7
    assert value(store, "a").tolist() == [1, 1]
    take = Take(name="a")
    do(store, take, key=key()).values["a"][:] = 7
    do(store, take, key=key()).values["a"][:] = 7
    value(store, "a", 0)[:] = 7
    assert value(store, "a", 0).tolist() == do(store, take, key=key()).values["a"].tolist() == [1, 1]
    value(store, "a")[:] = 7
    assert value(store, "a").tolist() == [0, 0]


def test_changing_a_receipt_changes_no_stored_receipt(store: Store) -> None:
    changes = [Create(name="a", spec=spec())]
    expected = do(store, *changes).receipts["a"]
    do(store, Delete(name="a"))
    first = do(store, *changes, key=key()).receipts["a"]
    assert first == expected
    for _ in range(3):
        first["shape"].append(9)
        first["count"] = 9
        known = store.recall(key(), ["a"])
        assert known is not None
        assert known.receipts == {"a": expected}
        known.receipts["a"]["count"] = 9
        first = do(store, *changes, key=key()).receipts["a"]
        assert first == expected


def test_a_snapshot_does_not_change_with_its_buffer(store: Store) -> None:
    create(store, "a")
    add(store, "a", [1, 2])
    (snapshot,) = store.read(["a"])
    add(store, "a", [1, 2])
    do(store, Delete(name="a"))
    assert snapshot.value.tolist() == [1, 2]
    assert snapshot.receipt()["count"] == 1


# ----- generation -----


def test_every_change_makes_a_new_generation(store: Store) -> None:
    seen = [store.generation()]
    for change in [
        Create(name="a", spec=spec()),
        Add(name="a", gradient=ones(2)),
        Add(name="a", gradient=ones(2)),
        Add(name="a", gradient=ones(2), overwrite=True),
        Zero(name="a"),
        Zero(name="a"),
        Take(name="a"),
        Delete(name="a"),
    ]:
        do(store, change)
        seen.append(store.generation())
    assert len(set(seen)) == len(seen)


def test_the_generation_stays_while_nothing_changes(store: Store) -> None:
    """With PostgreSQL, a connection that the store has just opened counts as a change."""
    create(store, "a")

    def stays() -> bool:
        before = store.generation()
        store.read(["a"])
        store.records()
        fails_alone(store, StaleStep, Add(name="a", gradient=ones(2), step=3))
        return store.generation() == before

    wait_until(stays)


# ----- threads -----


def test_concurrent_adds_sum_exactly(store: Store) -> None:
    """Eight threads add integers to shared buffers, and send each key twice."""
    names = ["all", "even", "odd", *(f"own{number}" for number in range(8))]
    create(store, *names, shape=(1000,))

    def work(number: int) -> None:
        parity = ["even", "odd"][number % 2]
        for turn in range(50):
            gradient = np.full(1000, number + 1, np.float32)
            changes = [Add(name=name, gradient=gradient) for name in ("all", parity, f"own{number}")]
            used = key(f"{number}-{turn}") if turn % 5 == 0 else None
            outcomes = [do(store, *changes, key=used) for _ in range(1 if used is None else 2)]
            assert [one.replayed for one in outcomes] == [False, True][: len(outcomes)]
            assert (value(store, "all") % 1 == 0).all()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8), timeout=PATIENCE))
    expected = {
        "all": (400, 50 * 36),
        "even": (200, 50 * 16),
        "odd": (200, 50 * 20),
        **{f"own{number}": (50, 50 * (number + 1)) for number in range(8)},
    }
    for name, (count, total) in expected.items():
        record = store.record(name)
        assert (record.count, record.version, record.weight) == (count, count, count)
        assert (value(store, name) == total).all()


def test_a_read_of_many_buffers_is_of_one_moment(store: Store) -> None:
    create(store, "a", "b", shape=(20_000,))
    gradient = ones(20_000)
    waiting: list[Future[Outcome]] = []
    done = threading.Event()

    def work() -> None:
        for _ in range(60):
            waiting.append(store.submit(Request([Add(name=name, gradient=gradient) for name in ("a", "b")])))
        for one in waiting:
            one.result(PATIENCE)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        first, second = store.read(["a", "b"])
        assert first.record.count == second.record.count
        assert (first.value == first.record.count).all()
        assert (second.value == second.record.count).all()
    thread.join(PATIENCE)
    assert value(store, "a")[0] == 60


# ----- what answers say -----


def test_every_method_of_a_store_is_a_look_or_answers() -> None:
    """`tests/faults/test_fence.py` asks for each answer while the standby is cut off: it must know them all."""
    methods = {name for name, method in vars(Store).items() if callable(method) and not name.startswith("_")}
    assert methods == LOOKS | {what.split()[0] for what in ANSWERS}


@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer_changes_nothing(namespace: Store, what: str) -> None:
    prepare(namespace)
    before = state(namespace)
    assert ANSWERS[what](namespace) == ANSWERS[what](namespace)
    assert state(namespace) == before


def test_a_durable_buffer_is_as_it_is_looked_at(store: Store) -> None:
    create(store, "a", "b", keep=1)
    for _ in range(2):
        do(store, Take(name="a"))
    assert store.durable(["b", "a"]) == [store.record("b"), store.record("a")]
    assert store.durable(["a"], 1) == [store.record("a")]
    assert store.durable([]) == []
    for names, step, error in ((["a", "c"], None, UnknownBuffer), (["a", "b"], 1, StepOpen), (["a"], 0, StepGone)):
        with pytest.raises(error):
            store.durable(names, step)
