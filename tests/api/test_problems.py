"""Every error over real HTTP: its code, and a detail that names the fault, the expected and the given value."""

from __future__ import annotations

import base64
import gc
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.errors import GradserveError, tree
from service.keys import add as add_key
from tests.serving import assert_problem, serving

Mistake = tuple[str, dict[str, Any], int, str, tuple[str, ...]]
GZIP, BROTLI = {"Content-Encoding": "gzip"}, {"Content-Encoding": "br"}
ONE = {"dY": 1, "X": 1}


def case(status: int, code: str, *words: str, op: str = "ReluGrad", **request: Any) -> Mistake:
    """Return an operator, a request, and the status, the code and words of the problem that it gets."""
    return op, request, status, code, words


EMPTY_GZIP = gzip.compress(b"{}")
MANY_NAMES = b"{" + b",".join(b'"%d":1' % k for k in range(200_000)) + b"}"
LARGE_INPUT = {"dY": {"shape": [1 << 40], "data": []}, "X": 1}
LARGE_OUTPUT = {"shape": [1 << 62, 1], "indices": [0], "grad": [[1]]}
PARAMETERS = "one of encoding, from, into, set, reduce, timeout, weight, step, contributor, life, axis"
FORM = "'application/x-www-form-urlencoded'"
MEMBERS = "dtype, shape, data, base64"
DEEP = b'{"X": 1, "dY": ' + b"[" * 65 + b"]" * 65 + b"}"
DEEP_OUTPUT = {"shape": [1] * 65, "indices": 0, "grad": 1}
NO_INDEX = {"shape": [3, 1], "indices": [[0, 3]], "grad": [[[1], [2]]]}

CASES: dict[str, Mistake] = {
    "not JSON": case(400, "malformed_body", "line 1 column", content=b'{"dY": [1,'),
    "empty": case(400, "malformed_body", "not JSON", content=b""),
    "NaN bare": case(400, "malformed_body", '"NaN"', content=b'{"dY": [NaN]}'),
    "an array": case(400, "malformed_body", "not an object", json=[1]),
    "a name twice": case(400, "malformed_body", "two members", "'dY'", content=b'{"dY": 1, "dY": 2}'),
    "a null in a name": case(400, "malformed_body", "null character", content=b'{"dY\\u0000": 1}'),
    "a null in a member": case(400, "malformed_body", "'dY'", "null character", content=b'{"dY": {"data\\u0000": 1}}'),
    "many names": case(400, "malformed_body", "200000 members", "4096", content=MANY_NAMES),
    "not UTF-8": case(400, "malformed_body", "utf-8", content=b'{"dY": "\xff"}'),
    "too deep to read": case(400, "malformed_body", "nested", content=b'{"dY":' + b"[" * 200_000),
    "unknown operator": case(404, "unknown_operator", "'ReluGard'", "Did you mean ReluGrad?", op="ReluGard", json={}),
    "long unknown operator": case(404, "unknown_operator", "xxx...", op="x" * 5000, json={}),
    "Accept": case(406, "not_acceptable", "'image/png'", "application/json", json=ONE, headers={"Accept": "image/png"}),
    "body too large": case(413, "body_too_large", "3145728", "2097152", content=b" " * (3 << 20)),
    "input too large": case(
        413, "tensor_too_large", "dY", "[1099511627776]", "1048576", "GRADSERVE_MAX_TENSOR_BYTES", json=LARGE_INPUT
    ),
    "beyond an index": case(413, "tensor_too_large", "dY", json={"dY": {"shape": [0, 1 << 62], "data": []}, "X": 1}),
    "output too large": case(
        413, "tensor_too_large", "output", "[4611686018427387904, 1]", "1048576", op="GatherGrad", json=LARGE_OUTPUT
    ),
    "form data": case(415, "unsupported_media_type", FORM, "application/json", data={"dY": 1}),
    "coding": case(415, "unsupported_media_type", "'br'", "identity, gzip, deflate", content=b"", headers=BROTLI),
    "not compressed": case(400, "malformed_body", "gzip", "incorrect header", content=b"{}", headers=GZIP),
    "cut off": case(400, "malformed_body", "gzip", "ends too early", content=EMPTY_GZIP[:-1], headers=GZIP),
    "bytes after gzip": case(
        400, "malformed_body", "gzip", "bytes after its end", content=EMPTY_GZIP + b"{}", headers=GZIP
    ),
    "huge once inflated": case(
        413, "body_too_large", "decompressed", "2097152", content=gzip.compress(bytes(3 << 20)), headers=GZIP
    ),
    "attribute": case(
        422,
        "invalid_parameter",
        "axis is '1.5', but must be an integer",
        op="SoftmaxGrad",
        json={},
        params={"axis": "1.5"},
    ),
    "encoding": case(422, "invalid_parameter", "'list' or 'base64'", "'hex'", json={}, params={"encoding": "hex"}),
    "parameter twice": case(
        422, "invalid_parameter", "'axis'", "2 times", op="SoftmaxGrad", json={}, params=[("axis", "0"), ("axis", "1")]
    ),
    "unknown parameter": case(
        422, "unknown_parameter", "'Axis'", PARAMETERS, op="SoftmaxGrad", json={}, params={"Axis": 1}
    ),
    "patience": case(
        422, "invalid_parameter", "Request-Timeout", "'soon'", "seconds", json=ONE, headers={"Request-Timeout": "soon"}
    ),
    "If-Match": case(422, "invalid_parameter", "If-Match", "one buffer", json=ONE, headers={"If-Match": '"0-1"'}),
    "member": case(
        422, "invalid_tensor", "dY.name", "unknown", MEMBERS, json={"dY": {"data": 1, "name": "dY"}, "X": 1}
    ),
    "missing": case(422, "missing_tensor", "ReluGrad", "'X'", json={"dY": 1}),
    "unknown": case(422, "unknown_tensor", "'Y'", "dY, X", json={"dY": 1, "Y": 1}),
    "dtype": case(422, "dtype_mismatch", "dY is int64", "float32", json={"dY": {"dtype": "int64", "data": 1}, "X": 1}),
    "shape": case(422, "shape_mismatch", "X", "[1]", "dY", "[2]", json={"dY": [1, 2], "X": [1]}),
    "rank": case(422, "too_many_dimensions", "dY", "65", "64", content=DEEP),
    "output rank": case(422, "too_many_dimensions", "65", "64", op="GatherGrad", json=DEEP_OUTPUT),
    "axis": case(
        422,
        "axis_out_of_range",
        str(10**30),
        "[-1, 0]",
        "rank 1",
        op="SoftmaxGrad_13",
        json={"dY": [1], "Y": [1]},
        params={"axis": 10**30},
    ),
    "axis of a scalar": case(422, "axis_out_of_range", "scalar", op="SoftmaxGrad", json={"dY": 1, "Y": 1}),
    "index": case(422, "index_out_of_range", "indices[0][1] is 3", "[-3, 2]", op="GatherGrad", json=NO_INDEX),
}


@pytest.mark.parametrize("case", CASES)
def test_each_mistake_has_its_own_problem(client: httpx.Client, case: str) -> None:
    op, request, status, code, words = CASES[case]
    if "content" in request:
        request = {**request, "headers": {"Content-Type": "application/json", **request.get("headers", {})}}
    problem = assert_problem(client.post(f"/v1/ops/{op}", **request), status, code, *words)
    if code != "unknown_operator":
        assert problem.get("op") == (None if case == "patience" else op)
    assert len(problem["detail"]) < 400


TENSORS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "ragged": ([[1, 2], [3]], ("dY[1] has 1 elements", "neighbours have 2")),
    "a list among numbers": ([1, [2]], ("dY[1] is a list",)),
    "a number among lists": ([[1], 2], ("dY[1] is 2", "lists")),
    "deep": ([[[1], [2]], [[3], 4]], ("dY[1][1] is 4",)),
    "null": ([[1, None]], ("dY[0][1] is null",)),
    "null alone": (None, ("dY is null",)),
    "a boolean": ([1, True], ("dY[1] is true", "number")),
    "an object": ([{"a": 1}], ("dY[0] is an object",)),
    "a string": ([1, "nan"], ("dY[1] is 'nan'", '"NaN"')),
    "out of float32": ([[1e39]], ("dY[0][0] is 1e+39", "float32")),
    "out of float16": ({"dtype": "float16", "data": [65520]}, ("dY[0] is 65520", "float16")),
    "out of float64": ({"dtype": "float64", "data": [10**400]}, ("dY[0] is 1000", "float64")),
    "another shape": ({"shape": [2, 2], "data": [1, 2, 3, 4]}, ("dY", "[4]", "[2, 2]")),
    "a negative dimension": ({"shape": [-1], "data": [1]}, ("dY.shape.0", "-1")),
    "a list for a dimension": ({"shape": [[1]], "data": [1]}, ("dY.shape.0", "integer", "[]")),
    "a fractional dimension": ({"shape": [1.5], "data": [1]}, ("dY.shape.0", "1.5")),
    "a dimension beyond 64 bits": ({"shape": [10**30], "data": [1]}, ("dY.shape.0",)),
    "an unknown dtype": ({"dtype": "float8", "data": [1]}, ("dY.dtype", "'float8'", "'bfloat16'")),
    "an unknown member": ({"data": [1], "unit": "m"}, ("dY.unit",)),
    "no data": ({"dtype": "float32"}, ("dY", "data or base64")),
    "both": ({"data": [1], "base64": "", "shape": [0]}, ("dY", "data or base64")),
    "base64 without a shape": ({"base64": "AACAPw=="}, ("dY", "shape")),
    "bad base64": ({"base64": "AAC*Pw==", "shape": [1]}, ("dY.base64", "alphabet")),
    "unpadded base64": ({"base64": "AACAPw", "shape": [1]}, ("dY.base64", "padded")),
    "base64 in lines": (
        {"base64": base64.encodebytes(bytes(800)).decode(), "shape": [200]},
        ("dY.base64", "line breaks"),
    ),
    "base64 in long lines": (
        {"base64": "\r\n".join(["A" * 1000] * 8), "shape": [1500]},
        ("dY.base64 has line breaks", "alphabet"),
    ),
    "base64 with a line's end": ({"base64": "AACAPw==\n", "shape": [1]}, ("dY.base64", "line breaks")),
    "base64 with blanks": ({"base64": "AACA Pw==" * 9, "shape": [1]}, ("dY.base64", "blanks")),
    "base64 of a URL": (
        {"base64": "data:application/octet-stream;base64,AACAPw==", "shape": [1]},
        ("dY.base64 has a prefix like data:...;base64,", "alphabet"),
    ),
    "base64 for URLs": ({"base64": "AAC_Pw==", "shape": [1]}, ("dY.base64", "- or _")),
    "long base64 for URLs": ({"base64": "AAC-" * 9, "shape": [1]}, ("dY.base64", "- or _")),
    "too few bytes": ({"base64": "AACAPw==", "shape": [2]}, ("dY.base64 holds 4 bytes", "takes 8")),
    "far too many bytes": ({"base64": "AACA" * 100, "shape": [1]}, ("dY.base64 holds 300 bytes", "takes 4")),
    "base64 of another type": ({"base64": 5, "shape": [1]}, ("dY.base64", "string", "5")),
}


@pytest.mark.parametrize("case", TENSORS)
def test_each_invalid_tensor_is_named_with_its_place(client: httpx.Client, case: str) -> None:
    tensor, words = TENSORS[case]
    answer = client.post("/v1/ops/ReluGrad", json={"dY": tensor, "X": [1]})
    problem = assert_problem(answer, 422, "invalid_tensor", *words)
    assert (problem["op"], problem["tensor"]) == ("ReluGrad", "dY")


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([0.5], ("indices[0] is 0.5", "integer")),
        (["NaN"], ("indices[0] is 'NaN'", "integer")),
        ([1 << 63], ("indices[0] is 9223372036854775808",)),
        ({"dtype": "int32", "data": [1 << 31]}, ("indices[0] is 2147483648", "int32")),
    ],
)
def test_indices_must_be_integers(client: httpx.Client, indices: Any, words: tuple[str, ...]) -> None:
    answer = client.post("/v1/ops/GatherGrad", json={"shape": [3, 1], "indices": indices, "grad": [[1]]})
    assert_problem(answer, 422, "invalid_tensor", *words)


@pytest.mark.parametrize("flag", [1, [], "true", {"dtype": "bool", "shape": [1], "base64": "Ag=="}])
def test_flags_must_be_booleans(client: httpx.Client, flag: Any) -> None:
    answer = client.post("/v1/ops/InPlaceAccumulator", json={"gradient_buffer": 1, "gradient": 1, "do_update": flag})
    assert_problem(answer, 422, "invalid_tensor", "do_update")


def test_the_shape_of_gather_must_not_be_negative(client: httpx.Client) -> None:
    answer = client.post("/v1/ops/GatherGrad", json={"shape": [3, -1], "indices": [0], "grad": [[1]]})
    assert_problem(answer, 422, "invalid_tensor", "shape[1] is -1")


def test_unknown_paths_and_methods_are_refused(client: httpx.Client) -> None:
    assert_problem(client.get("/v1/nothing"), 404, "not_found", "/v1/nothing")
    assert_problem(client.get("/v1/ops/Nothing"), 404, "unknown_operator", "Nothing")
    answer = client.put("/v1/ops/ReluGrad", json={})
    assert_problem(answer, 405, "method_not_allowed", "PUT", "GET, HEAD, POST")
    assert answer.headers["allow"] == "GET, HEAD, POST"


NEAR = {
    "/health": "/v2/health/live or /v2/health/ready",
    "/healthz": "/v2/health/live or /v2/health/ready",
    "/buffers": "/v1/buffers",
    "/v1": "/v1/buffers or ",
    "/v1/": "/v1/buffers or ",
}


@pytest.mark.parametrize("path", NEAR)
def test_a_path_that_is_a_part_of_others_names_them(client: httpx.Client, path: str) -> None:
    assert_problem(client.get(path), 404, "not_found", path, f"Did you mean {NEAR[path]}")


OPTIONS = {
    "/": ("GET, HEAD", None),
    "/v1/ops/ReluGrad": ("GET, HEAD, POST", None),
    "/v1/buffers/b?note=1": ("DELETE, GET, HEAD, PATCH, PUT", "application/json, application/merge-patch+json"),
    "/v2/models/ReluGrad/infer": ("POST", None),
    "/v2/health/ready": ("GET, HEAD", None),
}


@pytest.mark.parametrize("path", OPTIONS)
def test_a_path_tells_its_methods(client: httpx.Client, path: str) -> None:
    """HAProxy's `option httpchk` asks `OPTIONS /` to find whether the server works."""
    answer = client.options(path)
    assert (answer.status_code, answer.content) == (204, b"")
    assert (answer.headers["allow"], answer.headers.get("accept-patch")) == OPTIONS[path]
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_an_unknown_path_has_no_methods(client: httpx.Client) -> None:
    assert_problem(client.options("/v1/nothing"), 404, "not_found", "/v1/nothing")


def test_every_error_code_has_a_test() -> None:
    met = {case[3] for case in CASES.values()} | {"invalid_tensor", "not_found", "method_not_allowed"}
    tested = {
        "test_health.py": "not_ready internal",
        "test_body.py": "request_timeout",
        "http/test_heads.py": "head_too_large",
        "test_buffers.py": "unknown_buffer buffer_exists precondition_failed store_full store_failed",
        "test_buffers_steps.py": "stale_step step_open step_gone too_few_gradients invalid_request",
        "test_buffers_rules.py": "duplicate_contributor",
        "test_buffers_values.py": "nothing_to_average nonfinite_gradient norm_too_large",
        "test_admission.py": "too_many_tensors busy expired",
        "test_limits.py": "too_many_buffers",
        "test_auth.py": "unauthorized forbidden old_client",
        "test_room.py": "keys_full pushes_full",
        "test_idempotency.py": "idempotency_key_reused",
        "../faults/test_damage.py": "buffer_corrupt",
        "../buffers/test_contract_sets.py": "source_changed",
        "../buffers/test_contract_graphs.py": "graph_exists too_many_graphs unknown_graph graph_corrupt",
        "test_graph_endpoints.py": "graphs_not_installed graph_too_slow invalid_graph",
        "test_runs.py": "unknown_run run_exists run_ended run_replaced worker_replaced",
        "test_shared_memory.py": "unknown_region region_exists region_unusable too_many_regions",
    }
    elsewhere = {code: path for path, codes in tested.items() for code in codes.split()}
    abstract = {"conflict"}
    assert {error.code for error in tree()} == met | elsewhere.keys() | abstract
    for code, path in elsewhere.items():
        assert f'"{code}"' in (Path(__file__).parent / path).read_text(), code


@pytest.mark.parametrize("case", ["input too large", "beyond an index", "rank"])
def test_a_problem_names_the_tensor_beyond_a_limit(client: httpx.Client, case: str) -> None:
    operator, request, status, code, _ = CASES[case]
    assert assert_problem(client.post(f"/v1/ops/{operator}", **request), status, code)["tensor"] == "dY"


@pytest.mark.parametrize("case", ["output too large", "output rank"])
def test_a_problem_names_no_tensor_for_an_output_beyond_a_limit(client: httpx.Client, case: str) -> None:
    operator, request, status, code, _ = CASES[case]
    assert "tensor" not in assert_problem(client.post(f"/v1/ops/{operator}", **request), status, code)


def test_every_error_class_is_documented() -> None:
    for error in tree():
        assert error.title()
        assert error.__doc__ != GradserveError.__doc__ or error is GradserveError


BAD = b"[1" * 200_000
DEFLATED: dict[str, Any] = {"content": gzip.compress(BAD), "headers": {"Content-Encoding": "gzip"}}
LATE: dict[str, tuple[str, dict[str, Any]]] = {
    "operator": ("/v1/ops/ReluGrad", {"content": BAD}),
    "model": ("/v2/models/ReluGrad/infer", {"content": BAD}),
    "compressed": ("/v2/models/ReluGrad/infer", DEFLATED),
    "accumulate": ("/v1/buffers/held/accumulate", {"content": BAD}),
    "store": ("/v1/buffers/held/accumulate", {"json": {"gradient": [0.0] * 100_000}}),
}


@pytest.fixture(scope="module", params=["", "team"])
def holding(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Yield a client in a namespace, with a buffer `held`. A namespace with a name needs a key."""
    path = tmp_path_factory.mktemp("holding")
    settings: dict[str, Any] = {"store": f"lmdb:{path / 'store'}", "store_bytes": 1 << 26}
    headers = {}
    if request.param:
        settings["keys"] = path / "keys.json"
        secret = add_key(settings["keys"], "one", ["ops", "buffers:read", "buffers:write"], request.param)
        headers = {"Authorization": f"Bearer {secret}"}
    with serving(**settings) as url, httpx.Client(base_url=url, headers=headers, timeout=30) as client:
        client.put("/v1/buffers/held", json={"shape": [2]}).raise_for_status()
        yield client


@pytest.mark.parametrize("what", LATE)
def test_an_error_holds_nothing_in_a_cycle(holding: httpx.Client, what: str) -> None:
    """A reference cycle would hold the request's body until the garbage collector runs."""
    path, content = LATE[what]
    gc.freeze()  # the collector looks at new objects only
    gc.disable()
    try:
        for _ in range(3):
            assert holding.post(path, **content).status_code in (400, 422)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [one for one in gc.garbage if isinstance(one, GradserveError)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()
