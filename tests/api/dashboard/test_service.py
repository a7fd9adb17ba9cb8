"""The service view: the caller, the settings in force, and samples that say what the service did."""

from __future__ import annotations

import gc
import itertools
import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import psycopg
import pytest

from service.api.dashboard import history
from service.api.dashboard.sample import StoreState, percentiles, sample_of
from service.api.telemetry.metrics import SECONDS, WORKERS, Metrics
from service.keys import add
from service.settings import Settings
from tests.faults.servers import Server
from tests.serving import assert_problem, serving, wait_until

Samples = list[dict[str, Any]]

PATHS = ("/v1/service", "/v1/service/history")


class OneClock:
    """Replaces the module `time`: both clocks show the moment of the last look at `monotonic`."""

    def __init__(self) -> None:
        self._ahead, self._last = time.time() - time.monotonic(), 0.0

    def monotonic(self) -> float:
        self._last = time.monotonic()
        return self._last

    def time(self) -> float:
        return self._last + self._ahead


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers of this process take a sample every 50 ms, by one clock.

    A busy machine may pause between a look at one clock and at another. Lengths and rates would not fit together then.
    """
    monkeypatch.setattr(history, "STEP_SECONDS", 0.05)
    monkeypatch.setattr(history, "time", OneClock())


@pytest.fixture
def url() -> Iterator[str]:
    with serving() as url:
        yield url


def samples_of(url: str) -> Samples:
    answer = httpx.get(f"{url}/v1/service/history").raise_for_status().json()
    assert answer["step_seconds"] == 2
    found: Samples = answer["samples"]
    return found


def counted(samples: Samples, kind: str, name: str | None = None) -> int:
    """Return the count of a rate over all steps but the first, whose length the samples do not say."""
    steps = itertools.pairwise(samples)
    total = 0.0
    for start, end in steps:
        total += (end["at"] - start["at"]) * (end[kind] if name is None else end[kind].get(name, 0))
    return round(total)


# ----- the caller -----


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def secrets(keys: Path) -> dict[str, str]:
    return {
        "root": add(keys, "root", ["admin"]),
        "ann": add(keys, "ann", ["buffers:read", "ops"], "team"),
        "writer": add(keys, "writer", ["buffers:write"]),
    }


@pytest.fixture
def locked(keys: Path, secrets: dict[str, str]) -> Iterator[str]:
    with serving(keys=keys, metrics_open="always") as url:
        yield url


def asking(secrets: dict[str, str], name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secrets[name]}"}


def test_without_keys_the_caller_is_anonymous_and_may_do_all(url: str) -> None:
    scopes = ["admin", "buffers:read", "buffers:write", "graphs:write", "ops", "shared_memory"]
    expected = {"name": "anonymous", "namespace": "", "scopes": scopes, "keys": False}
    assert httpx.get(f"{url}/v1/caller").json() == expected


@pytest.mark.parametrize(
    ("name", "namespace", "scopes"),
    [
        ("root", "", ["admin", "buffers:read", "buffers:write", "graphs:write", "ops", "shared_memory"]),
        ("ann", "team", ["buffers:read", "ops"]),
        ("writer", "", ["buffers:write"]),
    ],
)
def test_any_key_may_ask_who_the_caller_is(
    locked: str, secrets: dict[str, str], name: str, namespace: str, scopes: list[str]
) -> None:
    answer = httpx.get(f"{locked}/v1/caller", headers=asking(secrets, name))
    assert answer.json() == {"name": name, "namespace": namespace, "scopes": scopes, "keys": True}


def test_the_service_view_needs_an_admin(locked: str, secrets: dict[str, str]) -> None:
    """GRADSERVE_METRICS_OPEN opens the metrics alone: the settings are not for everyone."""
    assert httpx.get(f"{locked}/metrics").status_code == 200
    for path in PATHS:
        assert_problem(httpx.get(f"{locked}{path}"), 401, "unauthorized")
        answer = httpx.get(f"{locked}{path}", headers=asking(secrets, "ann"))
        assert assert_problem(answer, 403, "forbidden")["scope"] == "admin"
        assert httpx.head(f"{locked}{path}", headers=asking(secrets, "root")).status_code == 200


# ----- the service -----


def test_the_service_tells_its_settings_and_limits(tmp_path: Path) -> None:
    before = time.time()
    store = f"lmdb:{tmp_path}/store"
    with serving(store=store, max_buffers=7, store_bytes=1 << 30) as url:
        httpx.put(f"{url}/v1/buffers/a", json={"shape": [2]}).raise_for_status()
        told = httpx.get(f"{url}/v1/service").json()
        limits = httpx.get(f"{url}/v1/limits").json()
        described = httpx.get(f"{url}/openapi.json").json()["components"]["schemas"]["Limits"]["properties"]
    settings = told["settings"]
    own = [name for name in limits if f"GRADSERVE_{name.upper()}" not in settings]
    meanings = {name: {"value": limits[name], "meaning": described[name]["description"]} for name in own}
    assert told["limits"] == meanings != {}
    fields = Settings.model_fields
    assert {f"GRADSERVE_{name.upper()}": field.description for name, field in fields.items()} == {
        name: one["meaning"] for name, one in settings.items()
    }
    expected = {"MAX_BUFFERS": 7, "STORE_BYTES": 1 << 30, "STORE": store, "KEYS": None, "METRICS_OPEN": "loopback"}
    assert {name: settings[f"GRADSERVE_{name}"]["value"] for name in expected} == expected
    assert (told["name"], told["workers"], told["replicas"]) == ("gradserve", 1, None)
    assert before <= told["started_at"] <= time.time()
    assert (told["store"]["url"], told["store"]["limit_bytes"], told["store"]["buffers"]) == (store, 1 << 30, 1)
    assert told["store"]["bytes"] > 0


def test_no_answer_shows_the_password_of_the_database(postgres_url: str) -> None:
    schema = f"test_{uuid.uuid4().hex}"
    secret = postgres_url.replace("@", ":s3?cret@", 1) if "@" in postgres_url else f"{postgres_url}?password=s3?cret"
    with serving(store=secret, postgres_schema=schema) as url:
        wait_until(lambda: bool(samples_of(url)) and samples_of(url)[-1]["database"] != {})
        answers = [httpx.get(f"{url}{path}").text for path in ("/v1/caller", *PATHS)]
        assert "cret" not in "".join(answers)
        told = json.loads(answers[1])
        assert "***" in told["store"]["url"] == told["settings"]["GRADSERVE_STORE"]["value"]
        assert told["replicas"] == 1
        for name, replicas in (("gradserve other 7@elsewhere", 1), (f"gradserve {schema[:24]} 7@elsewhere", 2)):
            with psycopg.connect(postgres_url, application_name=name):
                assert httpx.get(f"{url}/v1/service").json()["replicas"] == replicas
        assert samples_of(url)[-1]["database"]["connections"] > 3


# ----- samples -----


def test_rates_are_those_of_the_requests(url: str) -> None:
    wait_until(lambda: bool(samples_of(url)))
    body = b'{"gradient": [1, 2]}'
    with httpx.Client(base_url=url, headers={"Content-Type": "application/json"}) as client:
        client.put("/v1/buffers/a", content=b'{"shape": [2]}')
        for _ in range(40):
            client.post("/v1/buffers/a/accumulate", content=body)
        for _ in range(7):
            client.get("/v1/buffers/none/value")
        client.get("/nothing")
    wait_until(lambda: counted(samples_of(url), "requests", "accumulate") >= 40)
    wait_until(lambda: counted(samples_of(url), "errors", "not_found") >= 1)
    wait_until(lambda: samples_of(url)[-1]["buffers"] == 1)
    found = samples_of(url)
    assert counted(found, "requests", "accumulate") == 40
    assert counted(found, "requests", "value") == counted(found, "errors", "unknown_buffer") == 7
    assert counted(found, "errors", "not_found") == 1
    assert counted(found, "commits") == 41
    assert counted(found, "received_bytes") == 40 * len(body) + len(b'{"shape": [2]}')
    assert counted(found, "sent_bytes") > 1000
    assert {code for one in found for code in one["errors"]} == {"unknown_buffer", "not_found"}
    assert (found[-1]["workers"], found[-1]["in_flight"], found[-1]["waiting"]) == (1, 0, 0)
    assert found[-1]["store_limit_bytes"] == Settings.model_fields["store_bytes"].default
    busy = [one for one in found if one["requests"]]
    assert all(0 < one["seconds"]["p50"] <= one["seconds"]["p95"] <= one["seconds"]["p99"] for one in busy)
    assert "store" in {phase for one in busy for phase in one["phases"]}
    idle = [one for one in found if not one["requests"]]
    assert all((one["seconds"], one["phases"], one["errors"], one["commits"]) == (None, {}, {}, 0) for one in idle)


def test_files_of_the_pages_count_alone_and_in_no_percentile(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ["/", "/page/app.css", "/page/nothing", "/docs", "/docs/swagger-ui.css", "/openapi.json"]
    alone: Samples = []
    asked, sample = 0, Mock(side_effect=sample_of)
    monkeypatch.setattr(history, "sample_of", sample)

    def wait_for_sample() -> None:
        sample.reset_mock()
        wait_until(lambda: sample.called)

    def are_alone() -> bool:
        """Ask for the files, and return whether a step had no other requests: a busy machine needs several tries."""
        nonlocal asked
        wait_for_sample()
        asked += len([httpx.get(f"{url}{path}") for path in paths])
        wait_for_sample()
        alone[:] = [one for one in samples_of(url) if one["requests"].keys() == {"page"}]
        return bool(alone)

    wait_until(are_alone)
    wait_until(lambda: counted(samples_of(url), "requests", "page") >= asked)
    assert counted(samples_of(url), "requests", "page") == asked
    assert {one["seconds"] for one in alone} == {None}


def test_the_history_keeps_the_newest_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT_SAMPLES", 3)
    with serving() as url:
        wait_until(lambda: len(samples_of(url)) == 3)
        first = samples_of(url)[0]["at"]
        wait_until(lambda: samples_of(url)[0]["at"] > first)
        found = samples_of(url)
    assert len(found) == 3
    assert [one["at"] for one in found] == sorted(one["at"] for one in found)


def test_since_leaves_out_the_steps_that_the_caller_has(url: str) -> None:
    wait_until(lambda: len(samples_of(url)) >= 5)
    found = samples_of(url)[:5]
    for place, known in enumerate(found):
        later = found[place + 1 :]
        for moment in (known["at"], known["at"] - 0.01):  # another process may have been a moment earlier
            answer = httpx.get(f"{url}/v1/service/history", params={"since": moment}).json()
            assert answer["samples"][: len(later)] == later
    assert httpx.get(f"{url}/v1/service/history?since=4e9").json()["samples"] == []
    for wrong, code in (("since=nan", "invalid_parameter"), ("after=1", "unknown_parameter")):
        assert_problem(httpx.get(f"{url}/v1/service/history?{wrong}"), 422, code)


def test_a_store_that_fails_does_not_end_the_samples(tmp_path: Path) -> None:
    with serving(store=f"lmdb:{tmp_path}/store") as url:
        wait_until(lambda: bool(samples_of(url)))
        for file in (tmp_path / "store").iterdir():
            file.unlink()
        assert httpx.put(f"{url}/v1/buffers/a", json={"shape": [2]}).status_code == 503
        wait_until(lambda: counted(samples_of(url), "errors", "store_failed") == 1)


def test_workers_are_sampled_together(tmp_path: Path) -> None:
    """These processes take their samples every two seconds."""
    with Server(tmp_path / "store", workers=2) as server:
        wait_until(lambda: len(samples_of(server.url)) > 0)
        for _ in range(30):  # each on a new connection, which either process may accept
            assert httpx.get(f"{server.url}/v1/buffers/none/value").status_code == 404
        wait_until(lambda: counted(samples_of(server.url), "requests", "value") == 30)
        wait_until(lambda: counted(samples_of(server.url), "errors", "unknown_buffer") == 30)
        assert samples_of(server.url)[-1]["workers"] == 2
        started = {httpx.get(f"{server.url}/v1/service").json()["started_at"] for _ in range(6)}
        assert len(started) == 1


def test_no_rate_is_negative_when_the_table_of_a_process_goes(tmp_path: Path) -> None:
    metrics, other = Metrics(tmp_path / "shared"), Metrics(tmp_path / "shared")
    metrics.set(WORKERS, 1)
    other.set(WORKERS, 1)
    metrics.committed(1, 0.1)
    other.committed(1, 0.1)
    before = metrics.totals()
    assert before.numbers[WORKERS.name][()][0] == 2
    del other  # as if its process had ended: what it has counted stays
    gc.collect()
    metrics.committed(1, 0.1)
    same = sample_of(before, metrics.totals(), 2.0, 0.0, StoreState(1))
    assert (same.commits, same.workers) == (0.5, 1)
    for file in (tmp_path / "shared").iterdir():
        file.unlink()
    gone = sample_of(before, metrics.totals(), 2.0, 0.0, StoreState(1))
    assert (gone.commits, gone.workers) == (0, 0)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, None),
        ({0: 10}, (0.00005, 0.000095, 0.000099)),
        ({4: 100}, (0.0065, 0.00965, 0.00993)),  # from 3 ms to 10 ms
        ({4: 50, 8: 50}, (0.01, 0.93, 0.986)),
        ({12: 4}, (30.0, 30.0, 30.0)),
    ],
)
def test_percentiles_are_interpolated_within_buckets(
    counts: dict[int, int], expected: tuple[float, float, float] | None
) -> None:
    found = percentiles([counts.get(place, 0) for place in range(len(SECONDS) + 1)])
    assert (None if found is None else (found.p50, found.p95, found.p99)) == expected
