"""Tensors in shared memory: NVIDIA's own client, unmodified, and every fault of a region that a client can make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException  # type: ignore[import-untyped]
from tritonclient.utils import shared_memory as shm

from service.commands import preflight
from service.dtypes import OPEN_INFERENCE, Array
from service.host import shared_memory
from service.host.shared_memory import OBJECTS
from service.kernels import OPERATORS
from service.keys import add as add_key
from service.settings import Settings
from tests.api.test_triton_client import Call, _aio, _sync, arrays, inputs, outputs
from tests.cases import case
from tests.serving import in_flight, serving, wait_until
from tests.shared_objects import RELU, SHARED, Object, expected, new_key, numbers, region, register, relu, shared
from tests.test_contract import EVERY, FLOATS, assert_same, example, parameters

pytestmark = pytest.mark.skipif(not OBJECTS.is_dir(), reason="needs /dev/shm")

CUDA = "/v2/cudasharedmemory"

LIMITS: dict[str, Any] = {"threads": 2, "max_tensor_bytes": 32 << 20, "max_bytes_in_flight": 1 << 20}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(shared_memory=True, **LIMITS) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=30) as client:
        yield client
        client.post(f"{SHARED}/unregister").raise_for_status()


@pytest.fixture
def objects() -> Iterator[Callable[..., Object]]:
    """Yield a function that makes objects. They are removed at the end."""
    made: list[Object] = []

    def make(data: bytes = b"") -> Object:
        made.append(Object(data))
        return made[-1]

    yield make
    for one in made:
        one.path.unlink(missing_ok=True)


@pytest.fixture
def relu_region(http: httpx.Client, objects: Callable[..., Object]) -> tuple[Object, Array]:
    """Return an object, registered as r, with dY and X of 1,000 elements and room for dX. Return dX, too."""
    both = numbers(1000)
    made = objects(both.tobytes() + bytes(4000))
    register(http, "r", made.key, 12_000).raise_for_status()
    return made, expected(both)


def refused(answer: httpx.Response, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    for word in words:
        assert word in answer.json()["error"], answer.text


# ----- NVIDIA's client -----


@pytest.fixture(params=[_sync, _aio], ids=["sync", "aio"])
def call(request: pytest.FixtureRequest, url: str) -> Iterator[Call]:
    address = url.removeprefix("http://")
    yield lambda *args, **more: request.param(address, *args, **more)
    _sync(address, "unregister_system_shared_memory")


Regions: TypeAlias = Callable[[str, int], Any]


@pytest.fixture
def regions(call: Call) -> Iterator[Regions]:
    """Yield a function that makes a region with NVIDIA's module and registers it."""
    made: list[Any] = []

    def make(name: str, size: int) -> Any:
        key = new_key()
        made.append(shm.create_shared_memory_region(name, key, size))
        call("register_system_shared_memory", name, key, size)
        return made[-1]

    yield make
    for one in made:
        shm.destroy_shared_memory_region(one)


def test_the_client_registers_and_unregisters_regions(call: Call, regions: Regions) -> None:
    assert "system_shared_memory" in call("get_server_metadata")["extensions"]
    assert call("get_system_shared_memory_status") == []
    made = [regions("a", 100), regions("b cé", 200)]
    described = [
        {"name": name, "key": one._shm_key, "offset": 0, "byte_size": size}
        for name, one, size in (("a", made[0], 100), ("b cé", made[1], 200))
    ]
    assert call("get_system_shared_memory_status") == described
    assert call("get_system_shared_memory_status", "a") == described[:1]
    with pytest.raises(InferenceServerException, match="There is no region 'x'; register it first"):
        call("get_system_shared_memory_status", "x")
    with pytest.raises(InferenceServerException, match="There is a region 'a' already"):
        call("register_system_shared_memory", "a", made[0]._shm_key, 50)
    call("unregister_system_shared_memory", "x")
    call("unregister_system_shared_memory", "a")
    assert call("get_system_shared_memory_status") == described[1:]
    call("unregister_system_shared_memory")
    assert call("get_system_shared_memory_status") == []


@EVERY
def test_every_tensor_may_be_in_shared_memory(call: Call, regions: Regions, operator: Any) -> None:
    given, wanted = regions("in", 4096), regions("out", 4096)
    for floats in FLOATS:
        shm.set_shared_memory_region(wanted, [np.zeros(4096, np.uint8)])
        with case(floats):
            assert_in_shared_memory(call, operator, example(operator, {"float": floats}), given, wanted)


def assert_in_shared_memory(call: Call, operator: Any, tensors: Mapping[str, Array], given: Any, wanted: Any) -> None:
    shm.set_shared_memory_region(given, [np.frombuffer(one.tobytes(), np.uint8) for one in tensors.values()], 3)
    described, offset = inputs(tensors), 3
    for one, tensor in zip(described, tensors.values(), strict=True):
        one.set_shared_memory("in", tensor.nbytes, offset)
        offset += tensor.nbytes
    expected = operator(tensors, operator.example_attributes)
    asked = outputs(expected)
    for number, one in enumerate(asked):
        one.set_shared_memory("out", 512, 512 * number)
    result = call("infer", operator.name, described, outputs=asked, parameters=parameters(operator))
    for number, (name, output) in enumerate(expected.items()):
        answered = {"name": name, "datatype": OPEN_INFERENCE[output.dtype], "shape": list(output.shape)}
        assert result.get_output(name) == answered  # as Triton answers: its C++ client takes no more
        written = shm.get_contents_as_numpy(wanted, np.uint8, [output.nbytes], 512 * number)
        assert written.tobytes() == output.tobytes()
        del written  # else the memory could not be unmapped


def test_tensors_of_one_request_may_be_in_shared_memory_in_bytes_and_in_json(call: Call, regions: Regions) -> None:
    operator = OPERATORS["InPlaceAccumulatorV2"]
    tensors = example(operator)
    name = "gradient"
    made = regions("r", 1000)
    shm.set_shared_memory_region(made, [tensors[name]])
    described = [
        *inputs({name: tensors[name]}),
        *inputs({key: one for key, one in tensors.items() if key != name}, binary=False),
    ]
    described[0].set_shared_memory("r", tensors[name].nbytes)
    asked = [*outputs(["accumulated_gradient"]), *outputs(["updated"], binary=False)]
    for binary in (True, False):
        described[1:] = inputs({key: one for key, one in tensors.items() if key != name}, binary=binary)
        answered = arrays(call("infer", operator.name, described, outputs=asked))
        assert_same(answered, {key: operator(tensors, {})[key] for key in answered})
    asked[0].set_shared_memory("r", 900, 100)
    result = call("infer", operator.name, described, outputs=asked)
    assert result.as_numpy("updated").tolist() == [True]
    output = operator(tensors, {})["accumulated_gradient"]
    written = shm.get_contents_as_numpy(made, np.uint8, [output.nbytes], 100)
    assert written.tobytes() == output.tobytes()
    del written


@pytest.mark.parametrize("elements", [1 << 8, 1 << 18, 1 << 21, 3 << 20])
def test_small_and_large_tensors(http: httpx.Client, objects: Callable[..., Object], elements: int) -> None:
    """The event loop reads the small ones, the thread pool the large ones."""
    both, size = numbers(elements), 4 * elements
    made = objects(both.tobytes() + bytes(size))
    register(http, "r", made.key, 3 * size).raise_for_status()
    for _ in range(3):
        answer = http.post(RELU, json=relu(elements))
        assert answer.status_code == 200, answer.text
        assert answer.json()["outputs"] == [{"name": "dX", "datatype": "FP32", "shape": [elements]}]
    assert np.array_equal(made.array(2 * size), expected(both))
    wait_until(lambda: in_flight(http.base_url, "_bytes") == 0)


def test_the_client_finds_no_region_of_cuda(call: Call, regions: Regions) -> None:
    """NVIDIA's examples and its perf_analyzer begin with these calls, also where there is no GPU."""
    regions("r", 100)
    call("unregister_cuda_shared_memory")
    call("unregister_cuda_shared_memory", "r")
    assert [one["name"] for one in call("get_system_shared_memory_status")] == ["r"]
    assert call("get_cuda_shared_memory_status") == []
    assert "cuda_shared_memory" not in call("get_server_metadata")["extensions"]
    with pytest.raises(InferenceServerException, match="There is no region 'r' of CUDA"):
        call("get_cuda_shared_memory_status", "r")
    with pytest.raises(InferenceServerException, match="This server has no CUDA; register 'r' at /v2/system"):
        call("register_cuda_shared_memory", "r", b"handle", 0, 100)


# ----- off, keys, memory -----


def every_use(http: httpx.Client, key: str) -> Iterator[httpx.Response]:
    """Call each endpoint of shared memory, and name the region r in an input and in an output."""
    for path in ("status", "region/r/status"):
        yield http.get(f"{SHARED}/{path}")
    yield register(http, "s", key, 96)
    for path in ("region/r/unregister", "unregister"):
        yield http.post(f"{SHARED}/{path}")
    for path in ("status", "region/r/status"):
        yield http.get(f"{CUDA}/{path}")
    for path in ("region/r/register", "region/r/unregister", "unregister"):
        yield http.post(f"{CUDA}/{path}", json={"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 4})
    for request in (relu(8), {"inputs": [], "outputs": relu(8)["outputs"]}):
        yield http.post(RELU, json=request)


def test_it_is_off_unless_the_setting_says_otherwise(objects: Callable[..., Object]) -> None:
    made = objects(bytes(100))
    with serving() as url, httpx.Client(base_url=url) as http:
        assert "system_shared_memory" not in http.get("/v2").json()["extensions"]
        for answer in every_use(http, made.key):
            refused(answer, 404, "GRADSERVE_SHARED_MEMORY=true")


def test_a_system_without_shared_memory_is_found_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    preflight.check(Settings(port=0, shared_memory=True))
    monkeypatch.setattr(preflight, "OBJECTS", tmp_path / "none")
    preflight.check(Settings(port=0))
    with pytest.raises(preflight.UsageError, match="GRADSERVE_SHARED_MEMORY needs .*none"):
        preflight.check(Settings(port=0, shared_memory=True))


def test_a_key_needs_a_scope_and_sees_the_regions_of_its_namespace(
    tmp_path: Path, objects: Callable[..., Object]
) -> None:
    file, both = tmp_path / "keys", numbers(8)
    made = objects(both.tobytes() + bytes(32))
    secrets = {
        "one": add_key(file, "one", ["ops", "shared_memory"], "one"),
        "other": add_key(file, "other", ["ops", "shared_memory"], "other"),
        "plain": add_key(file, "plain", ["ops", "buffers:read", "buffers:write"], "one"),
        "only": add_key(file, "only", ["shared_memory"], "one"),
    }
    with serving(shared_memory=True, keys=file) as url:
        https = {
            name: httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secret}"})
            for name, secret in secrets.items()
        }
        register(https["one"], "r", made.key, 96).raise_for_status()
        assert https["one"].post(RELU, json=relu(8)).status_code == 200
        assert np.array_equal(made.array(64), expected(both))
        for answer in every_use(https["plain"], made.key):
            refused(answer, 403, "the request needs shared_memory")
        refused(https["only"].post(RELU, json=relu(8)), 403, "needs ops")
        refused(https["other"].post(RELU, json=relu(8)), 404, "dY: There is no region 'r'")
        assert https["other"].get(f"{SHARED}/status").json() == []
        https["other"].post(f"{SHARED}/unregister").raise_for_status()
        register(https["other"], "r", made.key, 96).raise_for_status()
        https["other"].post(f"{SHARED}/region/r/unregister").raise_for_status()
        assert [one["name"] for one in https["only"].get(f"{SHARED}/status").json()] == ["r"]
        for client in https.values():
            client.close()


def test_memory_for_inputs_is_counted_before_it_is_there(http: httpx.Client, objects: Callable[..., Object]) -> None:
    made = objects()
    os.truncate(made.path, 32 << 20)
    register(http, "r", made.key, 32 << 20).raise_for_status()
    many = [shared(f"i{number}", 8 << 20) for number in range(5)]
    refused(http.post(RELU, json={"inputs": many}), 413, "needs 167772160 more, but may hold 134217728")
    refused(http.post(RELU, json={"inputs": [shared("dY", 9 << 20)]}), 413, "GRADSERVE_MAX_TENSOR_BYTES")
    wait_until(lambda: in_flight(http.base_url, "_bytes") == 0)


def test_a_request_waits_its_turn_while_others_hold_the_memory(objects: Callable[..., Object]) -> None:
    made = objects(bytes(3 << 20))
    with serving(shared_memory=True, max_bytes_in_flight=3 << 20) as url, httpx.Client(base_url=url) as http:
        register(http, "r", made.key, 3 << 20).raise_for_status()
        with half_sent(url, 2 << 20):
            wait_until(lambda: in_flight(url, "_bytes") >= 1 << 20)
            refused(http.post(RELU, json=relu(1 << 18)), 429, "GRADSERVE_MAX_BYTES_IN_FLIGHT")
        wait_until(lambda: in_flight(url, "_bytes") == 0)
        assert http.post(RELU, json=relu(1 << 18)).status_code == 200


@contextmanager
def half_sent(url: str, size: int) -> Iterator[None]:
    """Hold a connection that has sent half of a body of this size."""
    import http.client

    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.putrequest("POST", RELU)
    connection.putheader("Content-Length", str(size))
    connection.endheaders(bytes(size // 2))
    yield
    connection.close()


# ----- faults of regions -----


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"byte_size": 4}, ("key is missing",)),
        ({"key": "/a"}, ("byte_size is missing",)),
        ({"key": 1, "byte_size": 4}, ("key",)),
        ({"key": "/a", "byte_size": 0}, ("byte_size", "greater than or equal to 1")),
        ({"key": "/a", "byte_size": 4.0}, ("byte_size", "integer")),
        ({"key": "/a", "byte_size": 1 << 63}, ("byte_size", "9223372036854775808")),
        ({"key": "/a", "byte_size": 4, "offset": -1}, ("offset", "-1")),
        ({"key": "/a", "byte_size": 4, "more": 1}, ("'more' is unknown", "key, offset, byte_size")),
        ({"key": "/a/../b", "byte_size": 4}, ("key is '/a/../b'", "a slash, then a letter")),
        ({"key": "/gradserve-none", "byte_size": 4}, ("cannot open the object /gradserve-none", "No such file")),
        ([1], ("",)),
    ],
)
def test_each_mistake_in_a_region_is_named(http: httpx.Client, body: Any, words: tuple[str, ...]) -> None:
    refused(http.post(f"{SHARED}/region/r/register", json=body), 400, *words)
    assert http.get(f"{SHARED}/status").json() == []


def test_tensors_outside_their_region_are_refused(http: httpx.Client, relu_region: tuple[Object, Array]) -> None:
    made, dX = relu_region
    before = made.path.read_bytes()
    for request, words in (
        ({"inputs": [shared("dY", 1000), shared("X", 1000, 8001)]}, ("X: ", "from byte 8001 to 12001")),
        ({"inputs": [shared("dY", 3001), shared("X", 3001)]}, ("dY: ", "has 12000 bytes", "to 12004")),
        ({"inputs": [shared("dY", 1, (1 << 63) - 1)]}, ("dY: ", "do not reach")),
        (
            {**relu(1000), "outputs": [{"name": "dX", "parameters": region("r", 4000, 8001)}]},
            ("dX: ", "from byte 8001 to 12001"),
        ),
        (
            {**relu(1000), "outputs": [{"name": "dX", "parameters": region("r", 3999, 8000)}]},
            ("dX takes 4000 bytes, but its shared_memory_byte_size is 3999",),
        ),
        (
            {"inputs": [{**shared("dY", 1000), "shape": [999]}]},
            ("dY.shared_memory_byte_size holds 4000 bytes", "[999] takes 3996"),
        ),
        ({"inputs": [{**shared("dY", 1000), "datatype": "FP64"}]}, ("float64 of shape [1000] takes 8000",)),
        ({"inputs": [shared("dY", 1000, datatype="BYTES")]}, ("dY.datatype is 'BYTES'", "FP32")),
        ({"inputs": [{**shared("dY", 4000, datatype="BOOL"), "shape": [16000]}]}, ("dY: ", "do not reach")),
        ({"inputs": [{**shared("dY", 1000, datatype="BOOL"), "shape": [4000]}]}, ("dY", "neither 0 nor 1")),
    ):
        refused(http.post(RELU, json=request), 400, *words)
    assert made.path.read_bytes() == before
    assert http.post(RELU, json=relu(1000)).status_code == 200
    assert np.array_equal(made.array(8000), dX)


def test_an_output_cannot_be_in_two_places(http: httpx.Client, relu_region: tuple[Object, Array]) -> None:
    http.put("/v1/buffers/b", json={"shape": [1000]}).raise_for_status()
    request = relu(1000, parameters={"into": "dX:b"})
    refused(http.post(RELU, json=request), 400, "dX goes to a buffer, so it cannot go to shared memory, too")
    assert http.get("/v1/buffers/b").json()["count"] == 0
    http.delete("/v1/buffers/b").raise_for_status()


def test_a_region_under_a_name_that_is_taken_is_refused(http: httpx.Client, relu_region: tuple[Object, Array]) -> None:
    made, _ = relu_region
    refused(register(http, "r", made.key, 12_000), 409, "There is a region 'r' already")
    refused(http.post(RELU, json={"inputs": [shared("dY", 8, into="s")]}), 404, "dY: There is no region 's'")


def test_errors_are_counted_by_code(
    http: httpx.Client, relu_region: tuple[Object, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = relu_region

    def counted(code: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if f'errors_total{{code="{code}"}}' in line)

    def register_too_many() -> None:
        monkeypatch.setattr(shared_memory, "MAX_REGIONS", 1)
        register(http, "two", made.key, 1)

    for code, fail in (
        ("unknown_region", lambda: http.get(f"{SHARED}/region/none/status")),
        ("region_exists", lambda: register(http, "r", made.key, 1)),
        ("region_unusable", lambda: register(http, "two", made.key, 1 << 30)),
        ("too_many_regions", register_too_many),
    ):
        before = counted(code)
        fail()
        assert counted(code) == before + 1, code


def test_a_truncated_region_gives_an_error(http: httpx.Client, relu_region: tuple[Object, Array]) -> None:
    made, dX = relu_region
    os.truncate(made.path, 7000)
    refused(http.post(RELU, json={"inputs": relu(1000)["inputs"]}), 400, "X: ", "has 7000 bytes", "needs 8000")
    refused(http.post(RELU, json=relu(1000)), 400, "X: ", "needs 8000")
    os.truncate(made.path, 11_000)
    refused(http.post(RELU, json=relu(1000)), 400, "dX: ", "has 11000 bytes", "needs 12000")
    os.truncate(made.path, 12_000)
    assert http.post(RELU, json=relu(1000)).status_code == 200


def test_removed_renamed_and_replaced_objects_give_an_error(
    http: httpx.Client, relu_region: tuple[Object, Array], objects: Callable[..., Object]
) -> None:
    made, dX = relu_region
    aside, other = made.path.with_name(f"{made.path.name}-aside"), objects(bytes(12_000))
    made.path.rename(aside)
    try:
        refused(http.post(RELU, json=relu(1000)), 400, "dY: ", "cannot open", "No such file")
        made.path.symlink_to(aside)
        refused(http.post(RELU, json=relu(1000)), 400, "It is a link")
        made.path.unlink()
        other.path.rename(made.path)
        refused(http.post(RELU, json=relu(1000)), 400, f"Another object has the key {made.key}")
        assert made.path.read_bytes() == bytes(12_000)
        aside.replace(made.path)
        assert http.post(RELU, json=relu(1000)).status_code == 200
        assert np.array_equal(made.array(8000), dX)
    finally:
        aside.unlink(missing_ok=True)


DYING = """
import os, socket, sys
host, port, request = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
with socket.create_connection((host, port)) as connection:
    connection.sendall(request)
    os.kill(os.getpid(), 9)
"""


def answered(url: str) -> float:
    """Return the number of infer requests that have their answer, or no client for it."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith('gradserve_requests_total{route="infer"'))


def test_the_server_lives_if_the_client_dies_while_its_region_is_read(
    http: httpx.Client, url: str, objects: Callable[..., Object]
) -> None:
    elements = 4 << 20
    made = objects(numbers(elements).tobytes() + bytes(4 * elements))
    register(http, "r", made.key, 12 * elements).raise_for_status()
    body = json.dumps(relu(elements))
    request = f"POST {RELU} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    host, port = url.removeprefix("http://").split(":")
    before = answered(url)
    for _ in range(5):
        subprocess.run([sys.executable, "-c", DYING, host, port, request], check=False)
        made.path.unlink(missing_ok=True)  # as the resource tracker of a Python client does
    wait_until(lambda: answered(url) == before + 5)  # the server may read a request after its client's end
    wait_until(lambda: in_flight(url, "_bytes") == 0)
    refused(http.post(RELU, json=relu(elements)), 400, "cannot open")


def test_a_region_may_be_unregistered_at_any_time(http: httpx.Client, objects: Callable[..., Object], url: str) -> None:
    elements = 3 << 20
    both = numbers(elements)
    made, ended = objects(both.tobytes() + bytes(4 * elements)), threading.Event()

    def toggle() -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            while not ended.is_set():
                client.post(f"{SHARED}/region/r/unregister").raise_for_status()
                register(client, "r", made.key, 12 * elements)

    with ThreadPoolExecutor(1) as pool:
        toggling = pool.submit(toggle)
        try:
            for _ in range(30):
                answer = http.post(RELU, json=relu(elements))
                if answer.status_code == 200:
                    assert np.array_equal(made.array(8 * elements), expected(both))
                else:
                    refused(answer, 404, "There is no region 'r'")
        finally:
            ended.set()
        toggling.result()


# ----- buffers -----


def test_gradients_from_shared_memory_count_once(http: httpx.Client, relu_region: tuple[Object, Array]) -> None:
    """The fingerprint of a request has the bytes of the region, not only the name."""
    made, dX = relu_region
    http.put("/v1/buffers/b", json={"shape": [1000]}).raise_for_status()
    request = {"inputs": relu(1000)["inputs"], "parameters": {"into": "dX:b"}}
    for key, replayed in (("k", None), ("k", "true"), ("l", None)):
        answer = http.post(RELU, json=request, headers={"Idempotency-Key": key}).raise_for_status()
        assert answer.headers.get("Idempotency-Replayed") == replayed
    assert http.get("/v1/buffers/b").json()["count"] == 2
    value = np.array(http.get("/v1/buffers/b/value").json()["value"]["data"], np.float32)
    assert np.array_equal(value, 2 * dX)
    with made.path.open("r+b") as file:
        file.write(b"\1")
    answer = http.post(RELU, json=request, headers={"Idempotency-Key": "l"})
    refused(answer, 400, "Idempotency-Key")
    assert http.get("/v1/buffers/b").json()["count"] == 2
    http.delete("/v1/buffers/b").raise_for_status()


def test_an_output_goes_to_shared_memory_beside_one_that_is_added(
    http: httpx.Client, objects: Callable[..., Object]
) -> None:
    """An output that cannot be written changes no buffer."""
    operator = OPERATORS["InPlaceAccumulatorV2"]
    made = objects(bytes(100))
    register(http, "r", made.key, 100).raise_for_status()
    tensors = example(operator)
    shape = list(tensors["gradient_buffer"].shape)
    http.put("/v1/buffers/b", json={"shape": shape}).raise_for_status()
    listed = [
        {"name": n, "shape": list(a.shape), "datatype": OPEN_INFERENCE[a.dtype], "data": a.reshape(-1).tolist()}
        for n, a in tensors.items()
    ]
    request: dict[str, Any] = {
        "inputs": listed,
        "outputs": [{"name": "updated", "parameters": region("r", 1, 7)}, {"name": "accumulated_gradient"}],
        "parameters": {"into": "accumulated_gradient:b"},
    }
    path = f"/v2/models/{operator.name}/infer"
    whole = http.post(path, json=request)
    assert whole.status_code == 200, whole.text
    answer = whole.json()
    assert [one["name"] for one in answer["outputs"]] == ["updated"]
    assert "receipts" in answer["parameters"]
    assert made.path.read_bytes() == bytes(7) + b"\1" + bytes(92)
    request["outputs"][0]["parameters"] = region("r", 0)
    refused(http.post(path, json=request), 400, "updated takes 1 bytes, but its shared_memory_byte_size is 0")
    assert http.get("/v1/buffers/b").json()["count"] == 1
    http.delete("/v1/buffers/b").raise_for_status()
