"""Statistics of buffers over HTTP: equal to what NumPy says of the values that clients read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from service.api.dashboard import buffers, statistics
from service.api.dashboard.statistics import BURST_ELEMENTS, RATE_ELEMENTS, Budget
from service.api.dashboard.summary import Summary, heat_map, summarize
from service.dtypes import DTYPES, FLOATS, Array
from service.keys import add as add_key
from tests.api.calls import add, as_file, create, fresh, metadata, naming, ok, post, read
from tests.serving import assert_problem, in_flight, serving, wait_until

NUMBERS = ["size", "nan", "infinite", "zeros", "min", "max", "mean", "norm"]


def statistics_of(http: httpx.Client, name: str, **params: Any) -> dict[str, Any]:
    """Return the statistics of one buffer."""
    answer: dict[str, Any] = ok(http.get(f"/v1/buffers/{name}/statistics", params=params))
    return answer


def table(http: httpx.Client, *names: str, **params: Any) -> dict[str, Any]:
    """Return the statistics of many buffers by name."""
    body = naming(*names) if names else None
    answer: dict[str, Any] = ok(http.post("/v1/buffers/statistics", json=body, params=params))["statistics"]
    return answer


def filled(http: httpx.Client, gradient: Any, name: str | None = None, **rules: Any) -> str:
    """Create a buffer whose sum is the gradient, and return its name."""
    array = np.asarray(gradient, np.float32) if isinstance(gradient, list | float) else gradient
    name = create(http, name, array.shape, **rules)
    answer = http.post(f"/v1/buffers/{name}/accumulate", **as_file({"gradient": array}))
    assert answer.status_code == 200, answer.text
    return name


def expected(value: Array) -> dict[str, Any]:
    """Return what NumPy says of a value in float64."""
    wide = value.astype(np.float64).reshape(-1)
    finite = wide[np.isfinite(wide)]
    counts = [wide.size, np.isnan(wide).sum(), np.isinf(wide).sum(), (wide == 0).sum()]
    if not finite.size:
        return dict(zip(NUMBERS, [*counts, None, None, None, None], strict=True))
    numbers = [finite.min(), finite.max(), finite.mean(), np.sqrt(np.square(finite).sum())]
    return dict(zip(NUMBERS, [*counts, *numbers], strict=True))


VALUES = [
    np.random.default_rng(0).normal(size=(40, 30)),
    np.array([np.nan, 1.0, -2.0, np.inf, 0.0, -np.inf]),
    np.array(3.0),
    np.zeros((0, 4)),
    np.array([np.nan, np.inf]),
]


@pytest.mark.parametrize("dtype", FLOATS.dtypes)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value.shape}")
def test_statistics_are_those_of_the_value_that_clients_read(http: httpx.Client, value: Array, dtype: str) -> None:
    name = create(http, shape=value.shape, dtype=dtype)
    http.post(f"/v1/buffers/{name}/accumulate", **as_file({"gradient": value}))
    value_read = read(http, name)
    assert value_read.dtype == DTYPES[dtype]
    answer = statistics_of(http, name)
    for one, number in expected(value_read).items():
        assert answer[one] == (None if number is None else pytest.approx(number, rel=1e-12, abs=1e-12)), one
    histogram = answer["histogram"]
    assert len(histogram["counts"]) == len(histogram["bounds"]) + 1
    assert sum(histogram["counts"]) == answer["size"] - answer["nan"] - answer["infinite"] - answer["zeros"]
    (short,) = table(http, name).values()
    assert short == {one: answer[one] for one in short}
    assert {"step", "version", "count", "weight", *NUMBERS} == short.keys()


def test_a_buffer_without_adds_has_zeros(http: httpx.Client) -> None:
    name = create(http, shape=(2, 3))
    answer = statistics_of(http, name, heat_map=4)
    assert [answer[one] for one in NUMBERS] == [6, 0, 0, 6, 0.0, 0.0, 0.0, 0.0]
    assert (answer["version"], answer["histogram"]) == (0, {"bounds": [], "counts": [0]})
    assert answer["heat_map"] == {"rows": 2, "columns": 3, "values": [[0.0] * 3] * 2}
    assert table(http, name)[name]["zeros"] == 6


def test_a_change_makes_new_statistics(http: httpx.Client) -> None:
    name = filled(http, [3.0, 4.0])
    assert (statistics_of(http, name)["norm"], table(http, name)[name]["norm"]) == (5.0, 5.0)
    add(http, name, [3.0, 4.0])
    assert (statistics_of(http, name)["norm"], statistics_of(http, name)["version"]) == (10.0, 2)
    add(http, name, [3.0, 4.0], weight=2)
    (short,) = table(http, name).values()
    assert (short["norm"], short["version"], short["count"], short["weight"]) == (20.0, 3, 3, 4.0)
    post(http, name, "zero")
    assert statistics_of(http, name)["norm"] == table(http, name)[name]["norm"] == 0.0


def test_a_new_buffer_has_nothing_of_an_earlier_one(http: httpx.Client) -> None:
    name = filled(http, [3.0, 4.0])
    post(http, name, "take")
    assert [one["norm"] for one in statistics_of(http, name)["steps"]] == [5.0]
    http.delete(f"/v1/buffers/{name}")
    filled(http, [1.0, 0.0], name)
    answer = statistics_of(http, name)
    assert (answer["norm"], answer["steps"]) == (1.0, [])


# ----- steps -----


def test_the_steps_are_those_that_the_buffer_keeps(http: httpx.Client) -> None:
    name, found = create(http, quorum=2, keep=2), []
    for number in range(4):
        add(http, name, [3.0 * number, 4.0 * number])
        add(http, name, ["Infinity", "NaN"] if number == 1 else 0, weight=3)
        found.append(statistics_of(http, name)["steps"])
    assert metadata(http, name)["closed_steps"] == [2, 3]
    assert [[one["step"] for one in steps] for steps in found] == [[0], [0, 1], [1, 2], [2, 3]]
    assert [one["norm"] for one in (*found[1], *found[3])] == [0.0, None, 10.0, 15.0]
    assert [one["nonfinite"] for one in (*found[1], *found[3])] == [0, 2, 0, 0]
    assert [one["mean"] for one in (*found[1], *found[3])] == [0.0, None, 7.0, 10.5]
    assert {(one["count"], one["weight"], one["closed_by"]) for one in found[3]} == {(2, 4.0, "quorum")}


def test_closed_steps_since_one_say_what_is_not_finite(http: httpx.Client) -> None:
    name = create(http, quorum=1, keep=4)
    for gradient in ([1, 2], ["NaN", 1], ["Infinity", "NaN"], [1, "-Infinity"]):
        add(http, name, gradient)
    steps = statistics_of(http, name, since=1)["steps"]
    assert [(one["step"], one["nonfinite"], one["nan"]) for one in steps] == [(1, 1, 1), (2, 2, 1), (3, 1, 0)]
    assert statistics_of(http, name, since=4)["steps"] == []


def test_closed_steps_of_a_large_buffer_are_computed_by_and_by(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "STEPS_ELEMENTS", 5)
    name = create(http, keep=5)
    for number in range(5):
        add(http, name, [3.0 * number, 4.0 * number])
        post(http, name, "take")
    found = [[one["step"] for one in statistics_of(http, name)["steps"]] for _ in range(4)]
    assert found == [[3, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_a_closed_step_has_statistics_of_its_own(http: httpx.Client) -> None:
    name = filled(http, [[3.0, 4.0]])
    post(http, name, "take")
    add(http, name, [[6.0, 8.0]])
    answer = statistics_of(http, name, step=0, heat_map=2)
    assert (answer["step"], answer["norm"], answer["heat_map"]["values"]) == (0, 5.0, [[3.0, 4.0]])
    assert statistics_of(http, name, step=0)["norm"] == 5.0
    answer = statistics_of(http, name, heat_map=2)
    assert (answer["step"], answer["norm"], answer["heat_map"]["values"]) == (1, 10.0, [[6.0, 8.0]])
    path = f"/v1/buffers/{name}/statistics"
    assert_problem(http.get(path, params={"step": 1}), 409, "step_open")
    post(http, name, "take")
    assert_problem(http.get(path, params={"step": 0}), 410, "step_gone")
    assert [one["norm"] for one in statistics_of(http, name)["steps"]] == [10.0]


def test_the_last_closed_step_is_found_without_its_number(http: httpx.Client) -> None:
    name = filled(http, [[3.0, 4.0]])
    path = f"/v1/buffers/{name}/statistics"
    answer = statistics_of(http, name, closed=True)
    assert (answer["step"], answer["count"], answer["norm"]) == (0, 1, 5.0)  # none has closed: the running sum
    post(http, name, "take")
    add(http, name, [[6.0, 8.0]])
    for _ in range(2):
        answer = statistics_of(http, name, closed=True, heat_map=2)
        assert (answer["step"], answer["norm"], answer["heat_map"]["values"]) == (0, 5.0, [[3.0, 4.0]])
    assert_problem(http.get(path, params={"closed": True, "step": 0}), 422, "invalid_parameter", "excludes step")


def test_the_last_closed_step_is_read_however_fast_steps_close(http: httpx.Client) -> None:
    name, stop = filled(http, [[3.0, 4.0]]), threading.Event()
    post(http, name, "take")
    found: list[dict[str, Any]] = []

    def train() -> None:
        with httpx.Client(base_url=http.base_url) as other:
            while not stop.is_set():
                add(other, name, [[3.0, 4.0]])
                post(other, name, "take")

    def is_read() -> bool:
        found.append(statistics_of(http, name, closed=True))
        return len(found) >= 50 and len({one["step"] for one in found}) > 5

    worker = threading.Thread(target=train)
    worker.start()
    try:
        wait_until(is_read)
    finally:
        stop.set()
        worker.join()
    assert {(one["count"], one["norm"]) for one in found} == {(1, 5.0)}


# ----- the heat map -----


@pytest.mark.parametrize("shape", [(100, 70), (9,), (), (2, 50, 3)], ids=str)
def test_a_heat_map_has_the_means_of_cells(http: httpx.Client, shape: tuple[int, ...]) -> None:
    value = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    if shape == (9,):
        value[4] = np.nan
    name = filled(http, value)
    picture = statistics_of(http, name, heat_map=64)["heat_map"]
    rows, columns = min(64, int(np.prod(shape[:-1]))), min(64, shape[-1] if shape else 1)
    assert (picture["rows"], picture["columns"]) == (rows, columns)
    np.testing.assert_array_equal(np.array(picture["values"], np.float64), heat_map(value, 64))
    assert (shape == (9,)) == (None in picture["values"][0])
    (cell,) = statistics_of(http, name, heat_map=1)["heat_map"]["values"][0]
    assert cell == pytest.approx(np.nanmean(value.astype(np.float64)), rel=1e-12)
    assert "heat_map" not in statistics_of(http, name)


# ----- many buffers -----


def test_buffers_are_named_or_have_a_prefix(http: httpx.Client) -> None:
    prefix = f"{fresh('tree')}."
    names = [filled(http, [float(number)], f"{prefix}{number}") for number in range(3)]
    assert {name: one["max"] for name, one in table(http, prefix=prefix).items()} == dict(
        zip(names, [0.0, 1.0, 2.0], strict=True)
    )
    assert [*table(http, names[2], names[0])] == [names[2], names[0]]
    path = "/v1/buffers/statistics"
    assert_problem(http.post(path, json=naming(names[0], f"{prefix}none")), 404, "unknown_buffer")
    assert_problem(http.post(path, params={"prefix": f"{prefix}none"}), 404, "unknown_buffer")
    assert_problem(http.post(path), 422, "invalid_request")
    assert_problem(http.post(path, json=naming(names[0]), params={"prefix": prefix}), 422, "invalid_request")
    assert_problem(http.post(path, json=naming(names[0], names[0])), 422, "invalid_request")
    assert_problem(http.post(path, json=naming("a/b")), 422, "invalid_parameter")
    assert_problem(http.post(path, json=naming(names[0]), params={"step": 1}), 422, "unknown_parameter")


def test_a_table_has_the_last_closed_steps_if_asked(http: httpx.Client) -> None:
    ran, never = filled(http, [3.0, 4.0]), filled(http, [1.0, 0.0])
    post(http, ran, "take")
    add(http, ran, [30.0, 40.0])
    for _ in range(2):
        found = table(http, ran, never, closed=True)
        assert [(one["step"], one["version"], one["norm"]) for one in found.values()] == [(0, 2, 5.0), (0, 1, 1.0)]
    assert {one: found[ran][one] for one in NUMBERS} == {
        one: statistics_of(http, ran, closed=True)[one] for one in NUMBERS
    }
    running = table(http, ran, never)
    assert [(one["step"], one["norm"]) for one in running.values()] == [(1, 50.0), (0, 1.0)]
    post(http, ran, "take")
    assert [(one["step"], one["norm"]) for one in table(http, ran, closed=True).values()] == [(1, 50.0)]
    path = "/v1/buffers/statistics"
    assert_problem(http.post(path, json=naming(ran), params={"closed": "x"}), 422, "invalid_parameter", "closed")


@pytest.mark.parametrize(
    "params", [{"heat_map": 0}, {"heat_map": 257}, {"heat_map": "x"}, {"step": -1}, {"since": -1}, {"cells": 3}]
)
def test_wrong_parameters_are_refused(http: httpx.Client, params: dict[str, Any]) -> None:
    name, code = create(http), "unknown_parameter" if "cells" in params else "invalid_parameter"
    assert_problem(http.get(f"/v1/buffers/{name}/statistics", params=params), 422, code, next(iter(params)))
    assert_problem(http.get(f"/v1/buffers/{fresh()}/statistics"), 404, "unknown_buffer")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """Yield a client of a server that computes ten elements at once for tables, and then 4,000 a second."""
    monkeypatch.setattr(statistics, "BURST_ELEMENTS", 10)
    monkeypatch.setattr(statistics, "RATE_ELEMENTS", 4000)
    with serving(threads=2) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def test_a_table_is_filled_by_and_by(slow: httpx.Client) -> None:
    names = [filled(slow, np.ones(300, np.float32), f"slow.{number}") for number in range(4)]
    first = table(slow, prefix="slow.")
    assert [one for one in first.values() if one is None]
    wait_until(lambda: all(table(slow, *names).values()))
    for name in names:
        add(slow, name, 1.0)
    seen: list[list[tuple[int, float]]] = [[]]

    def has(version: int) -> bool:
        seen.append(sorted((one["version"], one["max"]) for one in table(slow, *names).values()))
        return (version, float(version)) in seen[-1]

    wait_until(lambda: has(2))
    assert seen[-1] == [(1, 1.0)] * 3 + [(2, 2.0)], "those that wait have their earlier state"
    wait_until(lambda: not has(1))
    add(slow, names[3], 1.0)
    assert statistics_of(slow, names[3])["max"] == 3.0


def test_a_table_of_closed_steps_is_filled_by_and_by_and_computes_each_once(
    slow: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[float] = []

    def counted(value: Array) -> Summary:
        computed.append(float(value[0]))
        return summarize(value)

    monkeypatch.setattr(statistics, "summarize", counted)
    names = [filled(slow, np.full(300, number, np.float32), f"slow.{number}") for number in (1, 2, 3)]
    seen: list[list[float]] = [[]]

    def are(norms: list[float]) -> bool:
        answers = table(slow, *names, closed=True).values()
        seen.append([0.0 if one is None else one["max"] for one in answers])
        return seen[-1] == norms

    for name in names:
        post(slow, name, "take")
        add(slow, name, 5.0)
    wait_until(lambda: are([1.0, 2.0, 3.0]))
    assert [0.0] in [each[2:] for each in seen], "those that wait are null"
    for name in names:
        post(slow, name, "take")  # keep is 1: the steps that are known are gone
    seen.clear()
    wait_until(lambda: are([5.0, 5.0, 5.0]))
    assert {each[2] for each in seen} == {3.0, 5.0}, "those that wait have the step that was last"
    assert table(slow, prefix="slow.", closed=True)[names[0]]["step"] == 1
    assert computed == [1.0, 2.0, 3.0, 5.0, 5.0, 5.0]


def test_requests_at_once_compute_once(
    http: httpx.Client, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []

    def counted(value: Array) -> Summary:
        computed.append(value.size)
        return summarize(value)

    monkeypatch.setattr(statistics, "summarize", counted)
    name = filled(http, np.ones((500, 500), np.float32))
    answers = list(pool.map(lambda _: statistics_of(http, name)["norm"], range(10)))
    assert answers == [500.0] * 10
    assert len(computed) == 1
    add(http, name, 1.0)
    answers = list(pool.map(lambda _: table(http, name)[name]["norm"], range(10)))
    assert answers == [1000.0] * 10
    assert len(computed) == 2
    post(http, name, "take")
    answers = list(pool.map(lambda _: statistics_of(http, name, closed=True)["norm"], range(10)))
    assert answers == [1000.0] * 10
    assert len(computed) == 3


def test_the_memory_of_a_value_is_reserved_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    going = threading.Event()

    def held(value: Array) -> Summary:
        assert going.wait(30)
        return summarize(value)

    monkeypatch.setattr(statistics, "summarize", held)
    with serving(threads=2) as url, httpx.Client(base_url=url, timeout=30) as client, ThreadPoolExecutor(1) as pool:
        name = filled(client, np.ones(1 << 18, np.float32))
        asked = pool.submit(statistics_of, client, name)
        try:
            wait_until(lambda: in_flight(url, "_bytes") >= 1 << 20)
        finally:
            going.set()
        assert asked.result()["norm"] == 512.0
        wait_until(lambda: in_flight(url, "_bytes") == 0)


# ----- what is kept, and how much is computed -----


def test_a_budget_fills_with_time() -> None:
    now = 60.0
    budget = Budget(lambda: now)
    assert budget.allows()
    budget.spend(BURST_ELEMENTS + RATE_ELEMENTS)
    assert not budget.allows()
    now += 1.5
    assert budget.allows()
    budget.spend(RATE_ELEMENTS)
    assert not budget.allows()
    now += 3600
    assert budget.allows()
    budget.spend(BURST_ELEMENTS)
    assert not budget.allows()


# ----- keys -----


def test_keys_need_the_scope_and_see_their_namespace(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    given = {
        "reader": add_key(file, "reader", ["buffers:read"]),
        "writer": add_key(file, "writer", ["buffers:write"]),
        "other": add_key(file, "other", ["buffers:read", "buffers:write"], "team"),
        "admin": add_key(file, "admin", ["admin"]),
    }
    with serving(keys=file) as url, httpx.Client(base_url=url, timeout=30) as client:
        heads = {name: {"Authorization": f"Bearer {secret}"} for name, secret in given.items()}
        client.put("/v1/buffers/w", json={"shape": [2]}, headers=heads["writer"]).raise_for_status()
        add(client, "w", [3.0, 4.0], headers=heads["writer"])
        one = {name: client.get("/v1/buffers/w/statistics", headers=head) for name, head in heads.items()}
        asked = naming("w")
        many = {name: client.post("/v1/buffers/statistics", json=asked, headers=head) for name, head in heads.items()}
        for answers in (one, many):
            assert_problem(answers["writer"], 403, "forbidden")
            assert_problem(answers["other"], 404, "unknown_buffer")
            assert answers["reader"].status_code == answers["admin"].status_code == 200
        assert one["reader"].json()["norm"] == 5.0
        client.put("/v1/buffers/w", json={"shape": [2]}, headers=heads["other"]).raise_for_status()
        own = client.get("/v1/buffers/w/statistics", headers=heads["other"]).json()
        assert own["norm"] == 0.0
        assert_problem(client.get("/v1/buffers/w/statistics"), 401, "unauthorized")
