"""NVIDIA's own client, unmodified, sync and aio: it takes the service for Triton and each operator for a model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest
import tritonclient.http as triton  # type: ignore[import-untyped]
import tritonclient.http.aio as triton_aio  # type: ignore[import-untyped]
from tritonclient.utils import InferenceServerException  # type: ignore[import-untyped]

from service.dtypes import DTYPES, OPEN_INFERENCE, Array
from service.errors import GradserveError
from service.kernels import OPERATORS, Operator
from tests.cases import case
from tests.kernels.calls import CALLS
from tests.test_contract import EVERY, FLOATS, assert_same, example, parameters

Call: TypeAlias = Callable[..., Any]
"""Calls a method of a client, given its name and its arguments."""


def _sync(address: str, method: str, *args: Any, **kwargs: Any) -> Any:
    with triton.InferenceServerClient(address) as client:
        return getattr(client, method)(*args, **kwargs)


def _aio(address: str, method: str, *args: Any, **kwargs: Any) -> Any:
    async def call() -> Any:
        async with triton_aio.InferenceServerClient(address) as client:
            return await getattr(client, method)(*args, **kwargs)

    return asyncio.run(call())


@pytest.fixture(params=[_sync, _aio], ids=["sync", "aio"])
def call(request: pytest.FixtureRequest, url: str) -> Call:
    return partial(request.param, url.removeprefix("http://"))


def inputs(tensors: Mapping[str, Array], binary: bool = True) -> list[Any]:
    def one(name: str, tensor: Array) -> Any:
        described = triton.InferInput(name, tensor.shape, OPEN_INFERENCE[tensor.dtype])
        return described.set_data_from_numpy(tensor, binary_data=binary)

    return [one(name, tensor) for name, tensor in tensors.items()]


def outputs(names: Iterable[str], binary: bool = True) -> list[Any]:
    return [triton.InferRequestedOutput(name, binary_data=binary) for name in names]


def arrays(result: Any) -> dict[str, Array]:
    """Return the answer's tensors in order, after a check of each stated dtype."""
    listed = result.get_response()["outputs"]
    tensors = {one["name"]: result.as_numpy(one["name"]) for one in listed}
    assert [one["datatype"] for one in listed] == [OPEN_INFERENCE[tensor.dtype] for tensor in tensors.values()]
    return tensors


def run(call: Call, operator: Operator, tensors: Mapping[str, Array], **more: Any) -> dict[str, Array]:
    return arrays(call("infer", operator.name, inputs(tensors), **more))


def assert_in_bytes(result: Any, binary: bool) -> None:
    for one in result.get_response()["outputs"]:
        assert ("binary_data_size" in one.get("parameters", {})) is binary
        assert ("data" in one) is not binary


def refused(call: Call, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Return status and message of a call that must fail."""
    with pytest.raises(InferenceServerException) as raised:
        call(*args, **kwargs)
    return raised.value.status(), raised.value.message()


SIZE_ALLOWED = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # aiohttp warns beyond 1 MiB

# ----- the server and its models -----


def test_the_client_reads_the_servers_health_and_metadata(call: Call) -> None:
    assert call("is_server_live") is True
    assert call("is_server_ready") is True
    metadata = call("get_server_metadata")
    assert metadata["name"] == "gradserve"
    assert metadata["extensions"] == ["binary_tensor_data", "model_configuration", "statistics"]


def test_the_client_reads_the_model_repository(call: Call) -> None:
    index = call("get_model_repository_index")
    assert [one["name"] for one in index] == list(OPERATORS)
    assert {(one["version"], one["state"]) for one in index} == {("1", "READY")}
    for method in ("load_model", "unload_model"):  # the extension model_repository, which is not named
        status, message = refused(call, method, "ReluGrad")
        assert status == "404"
        assert "/v2/repository/models/ReluGrad" in message


@EVERY
def test_the_client_reads_each_models_metadata(call: Call, operator: Operator) -> None:
    for version in ("", "1"):
        with case("version", version):
            assert_described(call, operator, version)


def assert_described(call: Call, operator: Operator, version: str) -> None:
    assert call("is_model_ready", operator.name, version) is True
    metadata = call("get_model_metadata", operator.name, version)
    assert (metadata["name"], metadata["versions"]) == (operator.name, ["1"])
    for key, declared in (("inputs", operator.inputs), ("outputs", operator.outputs)):
        expected = [(one.name + ".*" * one.group, OPEN_INFERENCE[DTYPES[one.kind.default]]) for one in declared]
        assert [(one["name"], one["datatype"]) for one in metadata[key]] == expected
    config = call("get_model_config", operator.name, version)
    assert (config["name"], config["max_batch_size"]) == (operator.name, 0)
    assert [(one["name"], one["optional"]) for one in config["input"]] == [
        (one.name + ".*" * one.group, one.optional) for one in operator.inputs
    ]
    assert [one["data_type"] for one in config["output"]] == [f"TYPE_{one['datatype']}" for one in metadata["outputs"]]


def of_ranks(operator: Operator, ranks: Mapping[str, int]) -> dict[str, Array]:
    """Return tensors of one element each that the operator takes: floats as in the example, and integers 0 or 1."""
    given = example(operator)
    integers = [name for name, one in given.items() if one.dtype.kind == "i"]
    for numbers in itertools.product((0, 1), repeat=len(integers)):
        values = {name: one.flat[0] for name, one in given.items()} | dict(zip(integers, numbers, strict=True))
        tensors = {name: np.full((1,) * ranks[name], one, given[name].dtype) for name, one in values.items()}
        with suppress(GradserveError):
            operator(tensors, operator.example_attributes)
            return tensors
    raise AssertionError(f"{operator.name} takes no tensors of the ranks {ranks}")


@EVERY
def test_tensors_work_in_the_ranks_of_the_metadata(call: Call, operator: Operator) -> None:
    """NVIDIA's perf_analyzer sends no other rank."""
    metadata, config = call("get_model_metadata", operator.name), call("get_model_config", operator.name)
    ranks = {one["name"]: len(one["shape"]) for one in metadata["inputs"] + metadata["outputs"]}
    assert {one["name"]: len(one["dims"]) for one in config["input"] + config["output"]} == ranks
    tensors = example(operator)

    def rank(name: str) -> int:
        group, dot, _ = name.partition(".")
        return ranks[f"{group}.*" if dot else name]

    if any(tensor.ndim != rank(name) for name, tensor in tensors.items()):
        tensors = of_ranks(operator, {name: rank(name) for name in tensors})
    for name, output in run(call, operator, tensors, parameters=parameters(operator)).items():
        assert output.ndim == rank(name)


@pytest.mark.parametrize("version", ["", "1"])
def test_statistics_count_successes_and_failures(call: Call, version: str) -> None:
    def counts() -> tuple[int, int, int]:
        (model,) = call("get_inference_statistics", "TanhGrad", version)["model_stats"]
        stats = model["inference_stats"]
        assert (model["name"], model["version"]) == ("TanhGrad", "1")
        phases = ("queue", "compute_input", "compute_infer", "compute_output")
        assert stats["success"]["ns"] == sum(stats[phase]["ns"] for phase in phases)
        return model["inference_count"], stats["success"]["count"], stats["fail"]["count"]

    before, tensors = counts(), example(OPERATORS["TanhGrad"])
    run(call, OPERATORS["TanhGrad"], tensors)
    call("infer", "TanhGrad", inputs(tensors, binary=False))
    refused(call, "infer", "TanhGrad", inputs({"dY": tensors["dY"]}))
    assert counts() == (before[0] + 2, before[1] + 2, before[2] + 1)
    everything = call("get_inference_statistics")["model_stats"]
    assert [one["name"] for one in everything] == list(OPERATORS)


# ----- inference -----


@pytest.mark.parametrize("binary", [True, False], ids=["bytes", "JSON"])
@pytest.mark.parametrize("name", CALLS)
def test_attributes_are_request_parameters(call: Call, name: str, binary: bool) -> None:
    made = CALLS[name]((3, 5), np.float32)
    operator = OPERATORS[made.operator]
    tensors = dict(zip([one.name for one in operator.inputs], made.inputs, strict=False))
    asked = outputs(operator.output_names, binary)
    result = call("infer", operator.name, inputs(tensors, binary), outputs=asked, parameters=made.attributes)
    assert_same(arrays(result), operator(tensors, made.attributes))
    assert_in_bytes(result, binary)


@EVERY
def test_every_operator_answers_in_every_dtype(call: Call, operator: Operator) -> None:
    for dtype, integers in itertools.product(FLOATS, ("int32", "int64")):
        with case(dtype, integers):
            tensors = example(operator, {"float": dtype, "integer": integers})
            expected, given = operator(tensors, operator.example_attributes), {"parameters": parameters(operator)}
            assert_same(run(call, operator, tensors, **given), expected)
            if dtype != "bfloat16":
                asked = outputs(expected, binary=False)
                in_json = call("infer", operator.name, inputs(tensors, binary=False), outputs=asked, **given)
                assert_same(arrays(in_json), expected)


def test_one_request_may_mix_bytes_and_json(call: Call) -> None:
    tensors = example(OPERATORS["GatherGrad"])
    mixed = [*inputs({"shape": tensors["shape"]}, binary=False), *inputs({"indices": tensors["indices"]})]
    mixed += inputs({"grad": tensors["grad"]}, binary=False)
    assert_same(arrays(call("infer", "GatherGrad", mixed)), OPERATORS["GatherGrad"](tensors, {}))


def test_bfloat16_travels_in_bytes_only(call: Call) -> None:
    tensors = example(OPERATORS["ReluGrad"], {"float": "bfloat16"})
    asked = outputs(["dX"], binary=False)
    status, message = refused(call, "infer", "ReluGrad", inputs(tensors), outputs=asked)
    assert status == "400"
    assert "dX is BF16" in message
    assert "binary_data" in message


@pytest.mark.parametrize("binary", [True, False], ids=["bytes", "JSON"])
def test_nonfinite_numbers_are_answered_in_json(call: Call, binary: bool) -> None:
    dY, X = np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324]), np.ones(5)
    for request_id in ("1", 'é "NaN\\'):
        asked = outputs(["dX"], binary=False)
        result = call("infer", "ReluGrad", inputs({"dY": dY, "X": X}, binary), outputs=asked, request_id=request_id)
        assert_same(arrays(result), {"dX": dY})
        assert result.get_response()["id"] == request_id


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
@pytest.mark.parametrize("binary", [True, False], ids=["bytes", "JSON"])
def test_scalars_and_empty_tensors_keep_their_shape(call: Call, shape: tuple[int, ...], binary: bool) -> None:
    ones = np.ones(shape, np.float32)
    asked = outputs(["dX"], binary)
    result = call("infer", "ReluGrad", inputs({"dY": ones, "X": ones}, binary), outputs=asked)
    assert_same(arrays(result), {"dX": ones})


@EVERY
def test_a_subset_of_the_outputs_is_answered_in_the_asked_order(call: Call, operator: Operator) -> None:
    tensors, names = example(operator), operator.output_names
    whole = operator(tensors, operator.example_attributes)
    for subset in (names[::-1], names[-1:]):
        result = run(call, operator, tensors, outputs=outputs(subset), parameters=parameters(operator))
        expected = [one for name in subset for one in whole if name in (one, one.partition(".")[0])]
        assert_same(result, {name: whole[name] for name in expected})


def test_each_output_has_its_own_form(call: Call) -> None:
    operator = OPERATORS["InPlaceAccumulatorV2"]
    asked = [*outputs(["accumulated_gradient"]), *outputs(["updated"], binary=False)]
    result = call("infer", operator.name, inputs(example(operator)), outputs=asked)
    assert [list(one) for one in result.get_response()["outputs"]] == [
        ["name", "datatype", "shape", "parameters"],
        ["name", "datatype", "shape", "data"],
    ]
    assert result.as_numpy("updated").tolist() == [True]


def test_the_request_id_comes_back(call: Call) -> None:
    result = call("infer", "ReluGrad", inputs(example(OPERATORS["ReluGrad"])), request_id="é 1", model_version="1")
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("é 1", "ReluGrad", "1")


def test_settings_of_a_scheduler_change_nothing(call: Call) -> None:
    operator = OPERATORS["ReluGrad"]
    scheduling = {"sequence_id": 5, "sequence_start": True, "sequence_end": True, "priority": 1, "timeout": 1000}
    tensors = example(operator)
    assert_same(run(call, operator, tensors, **scheduling), operator(tensors, {}))


def test_a_list_parameter_is_a_string_with_commas(call: Call) -> None:
    operator = OPERATORS["GRUTraining"]
    tensors, names = example(operator), ["SIGMOID", "Tanh"]
    result = run(call, operator, tensors, parameters={"activations": "SIGMOID,Tanh", "linear_before_reset": 1})
    assert_same(result, operator(tensors, {"activations": names, "linear_before_reset": 1}))


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False], ids=["bytes", "JSON"])
def test_requests_and_answers_may_be_compressed(call: Call, coding: str, binary: bool) -> None:
    tensor = np.arange(5000, dtype=np.float32)
    tensors, asked = {"dY": tensor, "X": tensor}, outputs(["dX"], binary)
    for ways in ({"request"}, {"response"}, {"request", "response"}):
        codings = {f"{way}_compression_algorithm": coding for way in ways}
        result = call("infer", "ReluGrad", inputs(tensors, binary), outputs=asked, **codings)
        assert_same(arrays(result), {"dX": tensor})


@SIZE_ALLOWED
def test_an_answer_of_several_pieces_is_whole(call: Call) -> None:
    tensor = np.arange(-100_000, 100_000, dtype=np.float32) / 8
    for binary, size in ((True, tensor.size), (False, 60_000)):
        tensors = {"dY": tensor[:size], "X": tensor[:size]}
        result = call("infer", "ReluGrad", inputs(tensors, binary), outputs=outputs(["dX"], binary))
        assert_same(arrays(result), OPERATORS["ReluGrad"](tensors, {}))


def test_one_connection_serves_many_requests(url: str) -> None:
    operator = OPERATORS["SigmoidGrad"]
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:
        for size in (1, 100_000, 0, 20_000, 70_000, 3):
            tensors = {"dY": np.ones(size, np.float32), "Y": np.full(size, 0.25, np.float32)}
            assert_same(arrays(client.infer(operator.name, inputs(tensors))), operator(tensors, {}))


# ----- mistakes -----

F32 = np.ones(2, np.float32)
RELU = {"dY": F32, "X": F32}

DATATYPES = {dtype.name: name for dtype, name in OPEN_INFERENCE.items()} | {"uint8": "UINT8"}

MISTAKES: dict[str, tuple[str, Mapping[str, Array], dict[str, Any], str, tuple[str, ...]]] = {
    "model": ("ReluGard", RELU, {}, "404", ("'ReluGard'", "Did you mean ReluGrad?")),
    "version": ("ReluGrad", RELU, {"model_version": "2"}, "404", ("ReluGrad", "version 1", "'2'")),
    "output": ("ReluGrad", RELU, {"outputs": outputs(["dY"])}, "400", ("ReluGrad", "'dY'", "dX")),
    "input": ("ReluGrad", {**RELU, "Y": F32}, {}, "400", ("ReluGrad", "'Y'", "dY, X")),
    "missing": ("ReluGrad", {"dY": F32}, {}, "400", ("ReluGrad", "'X'")),
    "dtype": ("ReluGrad", {"dY": F32.astype(np.int64), "X": F32}, {}, "400", ("dY is int64", "float32")),
    "dtypes that differ": ("ReluGrad", {"dY": F32.astype(np.float16), "X": F32}, {}, "400", ("X is float32", "dY")),
    "datatype": ("ReluGrad", {"dY": F32.astype(np.uint8), "X": F32}, {}, "400", ("dY.datatype", "'UINT8'", "FP32")),
    "shape": ("ReluGrad", {"dY": F32, "X": F32[:1]}, {}, "400", ("X", "[1]", "[2]")),
    "attribute": ("SoftmaxGrad", {"dY": F32, "Y": F32}, {"parameters": {"axis": "x"}}, "400", ("axis", "'x'")),
    "unknown attribute": ("ReluGrad", RELU, {"parameters": {"axis": 1}}, "400", ("parameter 'axis'",)),
    "size": ("ReluGrad", dict.fromkeys(("dY", "X"), np.ones(300_000, np.float32)), {}, "413", ("body", "2097152")),
}


@SIZE_ALLOWED
@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_raises_an_exception_with_its_message(call: Call, mistake: str) -> None:
    model, tensors, more, status, words = MISTAKES[mistake]
    described = [triton.InferInput(name, one.shape, DATATYPES[one.dtype.name]) for name, one in tensors.items()]
    filled = [one.set_data_from_numpy(tensor) for one, tensor in zip(described, tensors.values(), strict=True)]
    came, message = refused(call, "infer", model, filled, **more)
    assert came == status
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("version", ["", "1"])
def test_an_unknown_model_is_not_ready(call: Call, version: str) -> None:
    assert call("is_model_ready", "ReluGard", version) is False
    assert call("is_model_ready", "ReluGrad", "2") is False
    for method in ("get_model_metadata", "get_model_config", "get_inference_statistics"):
        status, message = refused(call, method, "ReluGard", version)
        assert status == "404"
        assert "'ReluGard'" in message


def test_shared_memory_is_off_by_default(call: Call) -> None:
    dY = triton.InferInput("dY", [2], "FP32").set_shared_memory("region", 8)
    status, message = refused(call, "infer", "ReluGrad", [dY, *inputs({"X": F32})])
    assert status == "404"
    assert "GRADSERVE_SHARED_MEMORY" in message
