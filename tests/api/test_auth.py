"""API keys: which requests are authorized, the scopes of each key, and the buffers of each namespace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from service import __version__
from service.keys import KeyFile, add, load, remove
from tests.commands import called
from tests.serving import assert_problem, serving

ADD = {"gradient": [1.0, 2.0]}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def secrets(file: Path) -> dict[str, str]:
    everything = ["ops", "buffers:read", "buffers:write"]
    return {
        "ann": add(file, "ann", everything, "ann"),
        "anna": add(file, "anna", everything, "ann"),
        "bob": add(file, "bob", everything),
        "ops": add(file, "ops", ["ops"]),
        "reader": add(file, "reader", ["buffers:read", "ops"]),
        "writer": add(file, "writer", ["buffers:write", "ops"]),
        "admin": add(file, "admin", ["admin"]),
        "old": add(file, "old", everything, expires=1.0),
    }


@pytest.fixture(scope="module", params=["memory:", "lmdb:"])
def locked(
    request: pytest.FixtureRequest, file: Path, secrets: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    store = request.param + (str(tmp_path_factory.mktemp("store")) if request.param == "lmdb:" else "")
    with serving(keys=file, store=store, metrics_open="never") as url:
        yield url


def client(url: str, secret: str | None) -> httpx.Client:
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    return httpx.Client(base_url=url, headers=headers, timeout=30)


@pytest.fixture
def people(locked: str, secrets: dict[str, str]) -> Iterator[dict[str, httpx.Client]]:
    found = {name: client(locked, secret) for name, secret in secrets.items()}
    yield found
    for name in ("ann", "bob"):
        for one in found[name].get("/v1/buffers").json()["buffers"]:
            found[name].delete(f"/v1/buffers/{one['name']}")
    for one in found.values():
        one.close()


def test_a_mistyped_name_gets_one_of_the_namespace_that_the_key_may_read(people: dict[str, httpx.Client]) -> None:
    names = ["layer.weight", *(f"other{number}" for number in range(70))]
    people["ann"].post("/v1/buffers/create", json={"buffers": {name: {"shape": [2]} for name in names}})
    for mistyped in ("layer.wieght", "layr.weight", "layer_weight"):
        problem = assert_problem(people["anna"].get(f"/v1/buffers/{mistyped}"), 404, "unknown_buffer")
        assert problem["detail"].endswith("creates one. Did you mean 'layer.weight'?")
    for name in ("layer.bias", "w"):
        assert "mean" not in people["ann"].get(f"/v1/buffers/{name}").json()["detail"]
    assert "mean" not in people["bob"].get("/v1/buffers/layer.wieght").json()["detail"], "another namespace"
    people["bob"].put("/v1/buffers/layer.weight", json={"shape": [2]})
    for name, hint in (("writer", False), ("bob", True)):
        answer = people[name].post("/v1/buffers/layer.wieght/accumulate", json=ADD)
        assert ("Did you mean" in assert_problem(answer, 404, "unknown_buffer")["detail"]) == hint


PATHS = ["/v1/ops", "/v1/buffers", "/v1/buffers/a/value", "/v2", "/v2/models/ReluGrad", "/nothing", "/metrics"]


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer x", "Basic YTpi", "Bearer gs_000000000000_" + "A" * 43, "Bearer \xe9"]
)
@pytest.mark.parametrize("path", PATHS)
def test_a_request_without_a_valid_key_is_unauthorized(locked: str, path: str, header: str | None) -> None:
    headers = [] if header is None else [(b"Authorization", header.encode("latin-1"))]
    answer = httpx.get(f"{locked}{path}", headers=headers)
    assert answer.headers["www-authenticate"] == "Bearer"
    if path.startswith("/v2"):
        assert answer.status_code == 401
        assert "API key" in answer.json()["error"]
    else:
        assert_problem(answer, 401, "unauthorized", "API key")


def test_a_request_with_two_keys_is_unauthorized(locked: str, secrets: dict[str, str]) -> None:
    both = [("Authorization", f"Bearer {secrets[name]}") for name in ("ann", "bob")]
    assert_problem(httpx.get(f"{locked}/v1/ops", headers=both), 401, "unauthorized")


def test_a_large_body_without_a_key_is_refused(locked: str) -> None:
    """The connection goes on or ends; the client never hangs."""
    with httpx.Client(base_url=locked, timeout=30) as anyone:
        for _ in range(2):
            answer = anyone.post("/v1/buffers/a/accumulate", content=bytes(1 << 20))
            assert_problem(answer, 401, "unauthorized")


@pytest.mark.parametrize("path", ["/", "/v1/ops", "/v2", "/metrics"])
def test_the_methods_of_a_path_need_no_key(locked: str, path: str) -> None:
    """A load balancer asks for them, and everyone may read them in /openapi.json."""
    answer = httpx.options(f"{locked}{path}")
    assert (answer.status_code, answer.content) == (204, b"")


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/docs", "/openapi.json"])
def test_probes_and_documentation_need_no_key(locked: str, path: str) -> None:
    assert httpx.get(f"{locked}{path}").status_code == 200


def test_an_expired_key_is_unauthorized(people: dict[str, httpx.Client]) -> None:
    assert_problem(people["old"].get("/v1/ops"), 401, "unauthorized", "expired")


RELU = {"dY": [1, 2], "X": [1, -1]}


@pytest.mark.parametrize(
    ("who", "method", "path", "body", "needed"),
    [
        ("ops", "GET", "/v1/buffers", None, "buffers:read"),
        ("ops", "POST", "/v1/buffers/a/accumulate", ADD, "buffers:write"),
        ("ops", "POST", "/v1/ops/ReluGrad?into=dX:a", RELU, "buffers:write"),
        ("ops", "POST", "/v1/ops/ReluGrad?set=dX:a", RELU, "buffers:write"),
        ("ops", "POST", "/v1/ops/ReluGrad?from=X:a", {"dY": [1, 2]}, "buffers:read"),
        ("reader", "PUT", "/v1/buffers/b", {"shape": [2]}, "buffers:write"),
        ("reader", "POST", "/v1/buffers/create", {"buffers": {"b": {"shape": [2]}}}, "buffers:write"),
        ("reader", "DELETE", "/v1/buffers/a", None, "buffers:write"),
        ("reader", "POST", "/v1/buffers/a/zero", None, "buffers:write"),
        ("reader", "POST", "/v1/buffers/accumulate", {"a": [1, 2]}, "buffers:write"),
        ("reader", "POST", "/v1/ops/ReluGrad?into=dX:a", RELU, "buffers:write"),
        ("reader", "POST", "/v1/ops/ReluGrad?set=dX:a", RELU, "buffers:write"),
        ("writer", "GET", "/v1/buffers/a", None, "buffers:read"),
        ("writer", "GET", "/v1/buffers/a/value", None, "buffers:read"),
        ("writer", "POST", "/v1/buffers/value", {"names": ["a"]}, "buffers:read"),
        ("writer", "POST", "/v1/buffers/a/take", None, "buffers:read"),
        ("writer", "POST", "/v1/buffers/a/accumulate?return=value", ADD, "buffers:read"),
        ("writer", "POST", "/v1/buffers/accumulate?return=value", {"a": [1, 2]}, "buffers:read"),
        ("writer", "POST", "/v1/ops/ReluGrad?from=X:a", {"dY": [1, 2]}, "buffers:read"),
        ("reader", "PUT", "/v1/buffers/value", {"shape": [2]}, "buffers:write"),
        ("reader", "DELETE", "/v1/buffers/value", None, "buffers:write"),
        ("reader", "DELETE", "/v1/buffers/take", None, "buffers:write"),
        ("bob", "GET", "/metrics", None, "admin"),
    ],
)
def test_a_key_allows_its_scopes_only(
    people: dict[str, httpx.Client], who: str, method: str, path: str, body: Any, needed: str
) -> None:
    assert people["bob"].put("/v1/buffers/a", json={"shape": [2]}).status_code == 201
    answer = people[who].request(method, path, json=body)
    assert assert_problem(answer, 403, "forbidden", needed)["scope"] == needed
    assert people["admin"].request(method, path, json=body).status_code not in (401, 403)


WRITES = ("/v1/buffers/a/take", "/v1/buffers/value", "/v1/buffers/a/accumulate", "/v1/buffers/accumulate")
CLOSED = [*(("writer", "POST", path) for path in WRITES), ("ops", "GET", "/v1/buffers"), ("bob", "GET", "/metrics")]


@pytest.mark.parametrize(("who", "method", "path"), CLOSED)
def test_no_path_suffix_bypasses_the_scopes(people: dict[str, httpx.Client], who: str, method: str, path: str) -> None:
    assert people["bob"].put("/v1/buffers/a", json={"shape": [2]}).status_code == 201
    for end in ("%0A", "%0D", "%20", "%00", "/", "//", "%2F", ";", "%3F"):
        answer = people[who].request(method, path + end, json={"a": [1, 2]} if method == "POST" else None)
        assert answer.status_code in (403, 404, 405, 422), end
    assert people["bob"].get("/v1/buffers/a").json()["version"] == 0


def test_a_buffer_named_like_an_endpoint_needs_the_same_scope(people: dict[str, httpx.Client]) -> None:
    for name in ("take", "value", "zero", "accumulate"):
        assert people["writer"].put(f"/v1/buffers/{name}", json={"shape": [2]}).status_code == 201
        assert people["writer"].delete(f"/v1/buffers/{name}").status_code == 204


def test_every_key_may_read_the_limits(people: dict[str, httpx.Client]) -> None:
    for who in ("ops", "reader", "writer", "ann"):
        assert people[who].get("/v1/limits").status_code == 200


def test_v2_reports_a_missing_scope_in_its_own_form(people: dict[str, httpx.Client]) -> None:
    people["bob"].put("/v1/buffers/a", json={"shape": [2]})
    inputs = [{"name": name, "shape": [2], "datatype": "FP32", "data": [1, 2]} for name in ("dY", "X")]
    answer = people["ops"].post("/v2/models/ReluGrad/infer", json={"inputs": inputs, "parameters": {"into": "dX:a"}})
    assert answer.status_code == 403
    assert "buffers:write" in answer.json()["error"]
    assert people["bob"].get("/v1/buffers/a").json()["count"] == 0


# ----- namespaces -----


def test_namespaces_see_their_own_buffers(people: dict[str, httpx.Client]) -> None:
    ann, anna, bob = people["ann"], people["anna"], people["bob"]
    for person, shape in ((ann, [2]), (bob, [3])):
        assert person.put("/v1/buffers/w", json={"shape": shape}).json()["name"] == "w"
    assert ann.put("/v1/buffers/only.ann", json={"shape": []}).status_code == 201
    assert [one["name"] for one in anna.get("/v1/buffers").json()["buffers"]] == ["only.ann", "w"]
    assert [one["name"] for one in anna.get("/v1/buffers?prefix=o").json()["buffers"]] == ["only.ann"]
    page = ann.get("/v1/buffers?limit=1").json()
    assert page["next_cursor"] == "only.ann"
    assert [one["name"] for one in ann.get("/v1/buffers?cursor=only.ann").json()["buffers"]] == ["w"]
    assert [(one["name"], one["shape"]) for one in bob.get("/v1/buffers").json()["buffers"]] == [("w", [3])]
    problem = assert_problem(bob.get("/v1/buffers/only.ann"), 404, "unknown_buffer", "'only.ann'")
    assert problem["buffer"] == "only.ann"
    problem = assert_problem(ann.get("/v1/buffers/nothing"), 404, "unknown_buffer", "'nothing'")
    assert problem["buffer"] == "nothing"
    assert "~" not in json.dumps(problem)


def test_changes_are_made_in_the_namespace(people: dict[str, httpx.Client]) -> None:
    ann, anna, bob = people["ann"], people["anna"], people["bob"]
    for person in (ann, bob):
        person.put("/v1/buffers/w", json={"shape": [2], "quorum": 2})
    receipt = ann.post("/v1/buffers/w/accumulate", json=ADD).json()
    assert (receipt["name"], receipt["count"]) == ("w", 1)
    many = anna.post("/v1/buffers/accumulate?return=value", json={"w": [1, 1]}).json()["buffers"]
    assert (many["w"]["name"], many["w"]["closed"], many["w"]["value"]["data"]) == ("w", True, [2, 3])
    assert ann.get("/v1/buffers/w/value?step=0").json()["value"]["data"] == [2, 3]
    assert ann.post("/v1/buffers/value?prefix=w").json()["buffers"]["w"]["value"]["data"] == [0, 0]
    receipt = ann.post("/v1/ops/ReluGrad?into=dX:w", json=RELU).json()["dX"]
    assert (receipt["name"], receipt["count"]) == ("w", 1)
    assert ann.post("/v1/ops/ReluGrad?from=X:w", json={"dY": [5, 6]}).json()["dX"]["data"] == [5, 0]
    taken = ann.post("/v1/buffers/take?prefix=", json=None).json()["buffers"]
    assert taken["w"]["value"]["data"] == [1, 0]
    untouched = bob.get("/v1/buffers/w").json()
    assert (untouched["version"], untouched["count"]) == (0, 0)
    assert_problem(ann.post("/v1/buffers/w/accumulate?step=0", json=ADD), 409, "stale_step", "'w'")
    assert_problem(ann.put("/v1/buffers/w", json={"shape": [5]}), 409, "buffer_exists", "'w'")
    problem = assert_problem(ann.post("/v1/buffers/accumulate", json={"w": [1, 2, 3]}), 422, "shape_mismatch")
    assert problem["buffer"] == "w"
    answer = ann.get("/v1/buffers/w/value", headers={"Accept": "application/vnd.safetensors"})
    assert list(safetensors.numpy.load(answer.content)) == ["value"]
    assert b"~" not in answer.content.split(b"}}")[0]
    assert ann.delete("/v1/buffers/w").status_code == 204
    assert bob.get("/v1/buffers/w").status_code == 200


def test_each_namespace_has_its_own_idempotency_keys(people: dict[str, httpx.Client]) -> None:
    ann, anna, bob = people["ann"], people["anna"], people["bob"]
    for person in (ann, bob):
        person.put("/v1/buffers/k", json={"shape": [2]})
    key = {"Idempotency-Key": "the same"}
    assert [one.post("/v1/buffers/k/accumulate", json=ADD, headers=key).json()["count"] for one in (ann, bob)] == [1, 1]
    again = anna.post("/v1/buffers/k/accumulate", json=ADD, headers=key)
    assert (again.json()["count"], again.headers["idempotency-replayed"]) == (1, "true")
    assert again.json()["name"] == "k"
    into = {"Idempotency-Key": "another"}
    for replayed in (None, "true"):
        answer = ann.post("/v1/ops/ReluGrad?into=dX:k", json=RELU, headers=into)
        assert (answer.json()["dX"]["count"], answer.headers.get("idempotency-replayed")) == (2, replayed)
    assert bob.get("/v1/buffers/k").json()["count"] == 1


def test_a_receipt_in_an_error_names_the_buffer_without_its_namespace(people: dict[str, httpx.Client]) -> None:
    ann, key = people["ann"], {"Idempotency-Key": "taken"}
    ann.put("/v1/buffers/t", json={"shape": [2]})
    for path in ("/v1/buffers/t/take", "/v1/buffers/take?prefix=t"):
        key = {"Idempotency-Key": path}
        step = ann.post(path, headers=key).json()
        ann.post("/v1/buffers/t/take")
        problem = assert_problem(ann.post(path, headers=key), 410, "step_gone", "counted once")
        assert problem["receipts"]["t"]["name"] == "t", step


def test_errors_repeat_the_clients_text(people: dict[str, httpx.Client]) -> None:
    """The text looks like a full name inside the store."""
    ann = people["ann"]
    ann.put("/v1/buffers/w", json={"shape": [2]})
    key = {"Idempotency-Key": "step~ann/7"}
    assert ann.post("/v1/buffers/w/accumulate", json=ADD, headers=key).status_code == 200
    again = ann.post("/v1/buffers/w/zero", headers=key)
    assert_problem(again, 422, "idempotency_key_reused", "'step~ann/7'")
    other = ann.post("/v1/buffers/w/zero", headers={"If-Match": '"x~ann/y"'})
    assert_problem(other, 412, "precondition_failed", '"x~ann/y"')
    listed = ann.post("/v1/buffers/take?prefix=~ann/w")
    assert_problem(listed, 404, "unknown_buffer", "'~ann/w'")


@pytest.mark.parametrize("query", ["prefix=~", "prefix=~ann/", "cursor=~", "cursor=~ann/a", "cursor=zzz", "prefix=/"])
@pytest.mark.parametrize("who", ["ann", "bob"])
def test_no_query_lists_buffers_of_another_namespace(people: dict[str, httpx.Client], who: str, query: str) -> None:
    for name in ("ann", "bob"):
        people[name].put("/v1/buffers/w", json={"shape": [2]})
    assert people[who].get(f"/v1/buffers?{query}").json() == {"buffers": [], "next_cursor": None}


def test_each_namespace_has_its_own_statistics(people: dict[str, httpx.Client]) -> None:
    def runs(who: str) -> int:
        stats = people[who].get("/v2/models/TanhGrad/stats").json()["model_stats"]
        return int(stats[0]["inference_count"])

    before = runs("ann"), runs("bob")
    assert people["ann"].post("/v1/ops/TanhGrad", json={"dY": [1], "Y": [0]}).status_code == 200
    assert (runs("ann"), runs("anna"), runs("bob")) == (before[0] + 1, before[0] + 1, before[1])


def test_an_add_in_a_namespace_wakes_a_long_poll(people: dict[str, httpx.Client]) -> None:
    ann, anna = people["ann"], people["anna"]
    ann.put("/v1/buffers/p", json={"shape": [2], "quorum": 1})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ann.get, "/v1/buffers/p/value?step=0&timeout=20")
        anna.post("/v1/buffers/p/accumulate", json=ADD)
        assert waiting.result().json()["value"]["data"] == [1, 2]


# ----- the file -----


def test_the_server_reloads_a_changed_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    first = add(file, "first", ["ops"])
    with serving(keys=file) as url:

        def works(secret: str) -> bool:
            with client(url, secret) as one:
                return one.get("/v1/ops").status_code == 200

        assert works(first)
        second = add(file, "second", ["ops"])
        assert works(second)
        remove(file, "first")
        assert (works(first), works(second)) == (False, True)
        file.write_text("{")
        assert works(second)
        file.unlink()
        assert not works(second)


@pytest.mark.parametrize(
    ("member", "value"),
    [("expires", "2040-01-31"), ("digest", None), ("digest", "\u00e9"), ("scopes", "admin"), ("scopes", ["all"])],
)
def test_an_invalid_key_file_leaves_the_keys_as_they_were(tmp_path: Path, member: str, value: object) -> None:
    path = tmp_path / "keys.json"
    headers = {"Authorization": f"Bearer {add(path, 'ann', ['ops'])}"}
    with serving(keys=path) as url:
        assert httpx.get(f"{url}/v1/ops", headers=headers).status_code == 200
        document = json.loads(path.read_text())
        document["keys"][0][member] = value
        path.write_text(json.dumps(document))
        assert httpx.get(f"{url}/v1/ops", headers=headers).status_code == 200
        assert httpx.get(f"{url}/v1/buffers", headers=headers).status_code == 403
        path.write_text("[" * 100_000)
        assert httpx.get(f"{url}/v1/ops", headers=headers).status_code == 200


def test_each_new_fault_of_the_key_file_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.json"
    secret = add(path, "ann", ["ops"])
    good, keys = path.read_text(), KeyFile(path)
    for _ in range(2):
        path.write_text("{")
        for _ in range(3):
            keys.find(secret)
        path.write_text(good)
        assert keys.find(secret) is not None
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2


def test_changing_keys_keeps_owner_and_mode_of_the_file(tmp_path: Path) -> None:
    """The service may run as another user than the operator who changes its keys."""
    file, link = tmp_path / "keys.json", tmp_path / "link.json"
    add(file, "one", ["ops"])
    link.symlink_to(file)
    file.chmod(0o640)
    owner = (12345, 54321) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(file, *owner)
    add(link, "two", ["ops"])
    remove(link, "one")
    stat = file.stat()
    assert (stat.st_uid, stat.st_gid, stat.st_mode & 0o777) == (*owner, 0o640)
    assert link.is_symlink()
    assert [key.name for key in load(file)] == ["two"]


def test_the_key_file_holds_no_secret_and_is_private(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    secret = add(file, "one", ["ops"])
    assert secret.split("_", 2)[2] not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert load(file)[0].name == "one"


def test_the_command_adds_lists_and_removes_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / "keys.json")
    status, secret, _ = called("keys", "add", "ann", "--namespace", "team", "--expires", "90d", "--keys", file)
    assert status == 0
    assert secret.startswith("gs_")
    monkeypatch.setenv("GRADSERVE_KEYS", file)
    assert called("keys", "add", "bob", "--scopes", "ops")[0] == 0
    _, listed, _ = called("keys", "ls")
    assert [line.split()[0] for line in listed.splitlines()] == ["name", "ann", "bob"]
    assert secret.strip() not in listed
    assert "team" in listed
    assert "never" in listed
    assert called("keys", "rm", "ann")[0] == 0
    assert [key.name for key in load(Path(file))] == ["bob"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", "bob"), "already"),
        (("add", "a b"), "a b"),
        (("add", "x", "--scopes", "all"), "buffers:read"),
        (("add", "x", "--namespace", "a/b"), "a/b"),
        (("add", "x", "--expires", "soon"), "2027-01-31"),
        (("add", "x", "--expires", "2020-01-31"), "in the future"),
        (("add", "x", "--expires", "0d"), "in the future"),
        (("add", "x", "--expires", "nand"), "in the future"),
        (("add", "x", "--expires", "infd"), "in the future"),
        (("add", "x", "--expires", "9999999d"), "before the year 9999"),
        (("rm", "nobody"), "nobody"),
    ],
)
def test_the_command_refuses_wrong_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    file = tmp_path / "keys.json"
    monkeypatch.setenv("GRADSERVE_KEYS", str(file))
    add(file, "bob", ["ops"])
    before = file.read_text()
    status, _, complaint = called("keys", *arguments)
    assert status == (1 if arguments[1] in ("bob", "nobody") else 2)
    assert words in complaint
    assert "Traceback" not in complaint
    assert file.read_text() == before


def test_removing_a_key_creates_no_file(tmp_path: Path) -> None:
    complaint = f"gradserve: {tmp_path}/keys.json does not exist\n"
    assert called("keys", "rm", "x", "--keys", str(tmp_path / "keys.json")) == (1, "", complaint)
    assert not [*tmp_path.iterdir()]


def test_the_command_needs_a_key_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_KEYS", "")
    status, _, complaint = called("keys", "ls")
    assert status != 0
    assert "GRADSERVE_KEYS" in complaint


def test_a_server_does_not_start_without_a_valid_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.json").write_text("[]")
    monkeypatch.setenv("GRADSERVE_STORE", "memory:")
    for name, words in (("none.json", "gradserve keys add"), ("bad.json", "not a valid file of API keys")):
        monkeypatch.setenv("GRADSERVE_KEYS", str(tmp_path / name))
        status, _, complaint = called("serve", "--port", "0")
        assert status == 2
        assert words in complaint


def test_gradients_through_a_namespace_are_exact(people: dict[str, httpx.Client]) -> None:
    ann = people["ann"]
    ann.put("/v1/buffers/big", json={"shape": [100_000]})
    gradient = np.arange(100_000, dtype=np.float32)
    body = safetensors.numpy.save({"gradient": gradient})
    for _ in range(3):
        headers = {"Content-Type": "application/vnd.safetensors"}
        assert ann.post("/v1/buffers/big/accumulate", content=body, headers=headers).status_code == 200
    answer = ann.get("/v1/buffers/big/value", headers={"Accept": "application/vnd.safetensors"})
    assert (safetensors.numpy.load(answer.content)["value"] == 3 * gradient).all()


PRIVATE = [
    ("POST", "/v1/buffers/zero?prefix=x"),
    ("POST", "/v1/buffers/x/accumulate"),
    ("POST", "/v2/models/a/infer"),
    ("GET", "/v1/buffers"),
    ("GET", "/v1/service/events"),
    ("GET", "/v2/models/ReluGrad"),
    ("GET", "/metrics"),
]
FOREIGN = [
    {"Origin": "http://other.example", "Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Origin": "http://other.example"},
    {"Origin": "null"},
]


@pytest.mark.parametrize(("method", "path"), PRIVATE)
@pytest.mark.parametrize("headers", FOREIGN)
def test_without_keys_pages_of_other_sites_are_refused(
    client: httpx.Client, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = client.request(method, path, headers=headers, json=ADD)
    assert answer.status_code == 403
    assert "page of another website" in answer.text
    assert headers.get("Origin", "") in answer.text
    assert "Origin" not in headers or client.base_url.netloc.decode() in answer.text  # a proxy may have changed Host
    assert client.get("/", headers=headers).status_code == 200  # a page may have a link to this one


@pytest.mark.parametrize("site", ["same-origin", "none", None])
def test_without_keys_pages_of_this_site_and_programs_are_served(client: httpx.Client, site: str | None) -> None:
    own = {"Sec-Fetch-Site": site} if site else {"Origin": str(client.base_url).rstrip("/")}
    assert client.post("/v1/ops/ReluGrad", headers=own, json={"dY": [1], "X": [1]}).status_code == 200
    assert client.get("/v1/buffers", headers=own).status_code == 200


@pytest.mark.parametrize("headers", FOREIGN)
def test_with_a_key_other_sites_are_served(locked: str, secrets: dict[str, str], headers: dict[str, str]) -> None:
    key = {"Authorization": f"Bearer {secrets['ann']}"}
    answer = httpx.post(f"{locked}/v1/ops/ReluGrad", headers={**headers, **key}, json={"dY": [1], "X": [1]})
    assert answer.status_code == 200


@pytest.mark.parametrize("version", ["0.1.0", "0.3.0"])
def test_a_client_of_before_counts_nothing(http: httpx.Client, version: str) -> None:
    """Its words for a step and a run are others."""
    http.put("/v1/buffers/w", json={"shape": [2]}).raise_for_status()
    old = {"User-Agent": f"gradserve-client/{version}"}
    answer = http.post("/v1/buffers/w/accumulate", json=ADD, headers=old)
    assert_problem(answer, 400, "old_client", f"'gradserve-client/{version}'", f"gradserve {__version__}", "0.4.0")
    assert http.get("/v1/buffers/w").json()["count"] == 0
    assert http.get("/v2/health/live", headers=old).status_code == 200
    assert http.get("/v1/buffers", headers={"User-Agent": f"gradserve-client/{__version__}"}).status_code == 200
