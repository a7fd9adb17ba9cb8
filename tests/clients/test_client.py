"""Both clients with a real server."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from gradserve_client import (
    AsyncClient,
    Client,
    Conflict,
    GradserveError,
    InvalidInput,
    KeyReused,
    NotFound,
    NothingToAverage,
    PreconditionFailed,
    Receipt,
    StaleStep,
    StepGone,
    StepOpen,
    Taken,
    TooLarge,
)

from service.kernels import OPERATORS, Operator
from tests.clients.both import connected

SEVERAL = [op for op in OPERATORS.values() if len(op.outputs) > 1]


def example(op: Operator) -> dict[str, Any]:
    """Return the arrays of the operator's example; those of a group are a dict."""
    return nested(op.example_tensors)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors and groups of tensors."""
    given: dict[str, Any] = {}
    for name, one in flat.items():
        group, dot, member = name.partition(".")
        if dot:
            given.setdefault(group, {})[member] = one
        else:
            given[name] = one
    return given


def in_python(op: Operator) -> dict[str, Any]:
    """Return the attributes of the operator's example by the names of the method's arguments."""
    names = {one.name: one.parameter for one in op.attributes}
    return {names[name]: value for name, value in op.example_attributes.items()}


def as_lists(op: Operator, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays as lists, and a group as a list of them."""

    def converted(array: Any, default: str) -> Any:
        return array.tolist() if array.dtype == default else array

    defaults = {one.name: one.kind.default for one in op.inputs}
    return {
        name: [converted(each, defaults[name]) for each in one.values()]
        if isinstance(one, dict)
        else converted(one, defaults[name])
        for name, one in arrays.items()
    }


def assert_same_outputs(op: Operator, found: Any, expected: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Check the result of a method: a group is a dict, or, if its inputs are none, a list."""
    results, outputs = [found] if len(op.outputs) == 1 else found, nested(expected)
    for output, result in zip(op.outputs, results, strict=True):
        wanted = outputs[output.name]
        if not output.group:
            assert_same(result, wanted)
            continue
        is_dict = output.like is not None and isinstance(given[output.like], dict)
        assert isinstance(result, dict if is_dict else list)
        assert not is_dict or list(result) == list(wanted)
        for one, array in zip(result.values() if isinstance(result, dict) else result, wanted.values(), strict=True):
            assert_same(one, array)


def assert_same(found: Any, expected: Any) -> None:
    assert isinstance(found, np.ndarray)
    assert found.flags.writeable
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


# ----- operators -----


@pytest.mark.parametrize("op", OPERATORS.values(), ids=OPERATORS)
def test_every_operator_by_its_method_and_by_its_name(server: Any, op: Operator) -> None:
    arrays, attributes = example(op), op.example_attributes
    expected = op(op.example_tensors, attributes)
    method, named_in_python = getattr(server.ops, op.kernel.__name__), in_python(op)
    defaults = {one.name: one.default for one in op.attributes if not one.required}
    for given in (arrays, as_lists(op, arrays)):
        assert_same_outputs(op, method(**given, **named_in_python), expected, given)
    for given in (arrays, op.example_tensors):
        named = server.run(op.name, given, {**defaults, **attributes})
        assert named.keys() == expected.keys()
        for name, one in named.items():
            assert_same(one, expected[name])
    named = server.run(op.name, as_lists(op, arrays), attributes)
    assert nested(named).keys() == nested(expected).keys()
    for name, one in named.items():
        assert op.has_groups or one.tobytes() == expected[name].tobytes()


@pytest.mark.parametrize("op", SEVERAL, ids=[op.name for op in SEVERAL])
def test_only_the_requested_outputs_come(server: Any, op: Operator) -> None:
    wanted = op.output_names[-1:]
    attributes, expected = op.example_attributes, op(op.example_tensors, op.example_attributes)
    found = getattr(server.ops, op.kernel.__name__)(**example(op), **in_python(op), outputs=wanted)
    assert found.keys() == set(wanted)
    flat = {name: one for name, one in expected.items() if name.partition(".")[0] in wanted}
    if not op.outputs[-1].group:
        assert_same(found[wanted[0]], expected[wanted[0]])
    assert server.run(op.name, example(op), attributes, outputs=wanted).keys() == flat.keys()
    assert server.run(op.name, example(op), attributes, outputs=wanted[0]).keys() == flat.keys()  # one name


def test_attributes_reach_the_kernel(server: Any) -> None:
    Y = np.array([[0.25, 0.75], [0.5, 0.5]], np.float32)
    dY = np.array([[1, 2], [3, 4]], np.float32)
    for axis in (0, 1, -1, np.int64(0)):
        expected = OPERATORS["SoftmaxGrad_13"]({"dY": dY, "Y": Y}, {"axis": int(axis)})["dX"]
        assert_same(server.ops.softmax_grad_13(dY, Y, axis=axis), expected)
    expected = OPERATORS["LeakyReluGrad"]({"dY": dY, "Y": -Y}, {"alpha": 1e-7})["dX"]
    assert_same(server.ops.leaky_relu_grad(dY, -Y, alpha=1e-7), expected)
    gru = example(OPERATORS["GRUTraining"])
    attributes: dict[str, Any] = {"activations": ["SIGMOID", "tanh"], "direction": "reverse", "linear_before_reset": 1}
    for name, one in OPERATORS["GRUTraining"](gru, attributes).items():
        assert_same(getattr(server.ops.gru_training(**gru, **attributes), name), one)


def test_into_adds_and_gives_a_receipt(server: Any, key: str) -> None:
    server.buffers["w"].create((2,))
    for count, into in enumerate(["w", server.buffers["w"]], 1):
        receipt = server.ops.relu_grad([1, 2], [1, -1], into=into, weight=3, step=0)
        assert isinstance(receipt, Receipt)
        assert (receipt.name, receipt.count, receipt.weight) == ("w", count, 3.0 * count)
    assert server.buffers["w"].value().tolist() == [6.0, 0.0]
    with pytest.raises(StaleStep):
        server.ops.relu_grad([1, 2], [1, -1], into="w", step=7)
    server.ops.relu_grad([1, 2], [1, 1], into="w", idempotency_key=f"{key} mine")
    assert server.ops.relu_grad([1, 2], [1, 1], into="w", idempotency_key=f"{key} mine").replayed
    assert server.buffers["w"].value().tolist() == [7.0, 2.0]


def test_an_operator_with_an_input_weight_adds_with_a_weight_by_its_name(server: Any) -> None:
    loss = OPERATORS["SparseSoftmaxCrossEntropyGrad"]
    arrays = example(loss)
    expected = loss(arrays, {})["d_logits"]
    server.buffers["logits"].create(expected.shape)
    assert server.ops.sparse_softmax_cross_entropy_grad(**arrays, into="logits", step=0).weight == 1
    server.run(loss.name, arrays, into={"d_logits": "logits"}, weight=2)
    np.testing.assert_allclose(server.buffers["logits"].value(), 3 * expected, rtol=1e-6)


def test_optional_inputs_may_be_omitted(server: Any) -> None:
    gru = OPERATORS["GRUGrad"]
    arrays = {name: array for name, array in example(gru).items() if name not in ("B", "SL", "H0")}
    assert_same(server.ops.gru_grad(**arrays).dX, gru(arrays, {})["dX"])
    del arrays["ZRH"]
    with pytest.raises(InvalidInput, match="ZRH") as caught:
        server.ops.gru_grad(**arrays)
    assert caught.value.code == "missing_tensor"


def test_into_for_one_of_several_outputs(server: Any) -> None:
    gru = OPERATORS["GRUGrad"]
    arrays, expected = example(gru), gru(example(gru), {})
    server.buffers["gru.W"].create(expected["dW"].shape)
    found = server.ops.gru_grad(**arrays, into={"dW": "gru.W"}, weight=2)
    assert found["dW"].count == 1
    assert_same(found["dX"], expected["dX"])
    assert_same(server.buffers["gru.W"].value(), 2 * expected["dW"])
    found = server.run("GRUGrad", arrays, outputs=["dW", "dX"], into={"dW": server.buffers["gru.W"]})
    assert found.keys() == {"dW", "dX"}
    assert found["dW"].count == 2


def test_a_buffer_as_an_input_is_read_on_the_server(server: Any) -> None:
    acts = server.buffers["acts"]
    acts.create((2,))
    acts.accumulate([1, -1])
    assert server.ops.relu_grad([5, 6], acts).tolist() == [5.0, 0.0]
    assert server.run("ReluGrad", {"dY": acts, "X": acts})["dX"].tolist() == [1.0, 0.0]
    with pytest.raises(NotFound) as caught:
        server.ops.relu_grad([5, 6], server.buffers["none"])
    assert caught.value.code == "unknown_buffer"


GROUPS: dict[str, Any] = {
    "weights": {"fc.weight": [[1.0, 2.0]], "fc.bias": [3.0]},
    "gradients": {"fc.bias": [1.0], "fc.weight": [[2.0, 4.0]]},
}


def test_members_of_groups_may_be_buffers(server: Any, key: str) -> None:
    bias = server.buffers["fc.bias"]
    bias.create((1,))
    bias.accumulate([7.0])
    weights = {**GROUPS["weights"], "fc.bias": bias}
    found = server.ops.sgd_optimizer_v2(1.0, weights, GROUPS["gradients"]).updated_weights
    assert {name: one.tolist() for name, one in found.items()} == {"fc.weight": [[-1, -2]], "fc.bias": [6]}
    found = server.ops.sgd_optimizer_v2(1.0, [bias], [[1.0]]).updated_weights
    assert [one.tolist() for one in found] == [[6.0]]
    found = server.ops.sgd_optimizer_v2(1.0, [[float(one)] for one in range(11)], [[0.0]] * 11).updated_weights
    assert [one.item() for one in found] == [*range(11)]
    named = server.run("SGDOptimizerV2", {"lr": 1.0, "weights.w": bias, "gradients": {"w": [2.0]}})
    assert named["updated_weights.w"].tolist() == [5.0]
    into = {"updated_weights": {"fc.bias": bias}}
    for _ in range(2):
        found = server.ops.sgd_optimizer_v2(0.5, **GROUPS, into=into, idempotency_key=key)
    assert found["updated_weights"]["fc.bias"].replayed
    assert found["updated_weights"]["fc.weight"].tolist() == [[0.0, 0.0]]
    assert bias.value().tolist() == [9.5]
    flat = {"updated_weights.fc.bias": "fc.bias"}
    found = server.run("SGDOptimizerV2", {"lr": 0.5, **GROUPS}, outputs=["updated_weights.fc.bias"], into=flat)
    assert found["updated_weights.fc.bias"].count == 3
    assert found.keys() == flat.keys()


def test_mistakes_in_groups_are_named(server: Any) -> None:
    step = server.ops.sgd_optimizer_v2
    for weights, words in [
        ({"fc.bias": ["x"]}, "weights.fc.bias cannot be read as an array"),
        ({"fc.bias": None}, "weights.fc.bias cannot be read as an array: it is None"),
        ([[1.0], "x"], "weights.1 cannot be read as an array"),
        ({"fc.bias": [1.0]}, "fc.weight"),
        (np.ones(2), "'weights' is no tensor of the group weights"),
        ({}, "weights"),
    ]:
        with pytest.raises(InvalidInput, match=re.escape(words)):
            step(0.5, weights, GROUPS["gradients"])
    with pytest.raises(InvalidInput, match="no output 'updated_weights.more' here"):
        step(0.5, **GROUPS, outputs=["updated_weights.more"])


def test_the_operators_are_described(server: Any) -> None:
    found = {one.name: one for one in server.operators()}
    assert found.keys() == OPERATORS.keys()
    gather = found["GatherGrad"]
    assert [one.default_dtype for one in gather.inputs] == ["int64", "int64", "float32"]
    assert (gather.attributes, gather.required) == ({"axis": 0}, ())
    assert [one.group for one in found["SGDOptimizerV2"].inputs] == [False, True, True, False, True]
    for op in OPERATORS.values():
        assert found[op.name].required == tuple(one.name for one in op.attributes if one.required)
    assert server.is_ready()


# ----- errors -----


def failing() -> dict[str, tuple[Any, type[GradserveError], int, str]]:
    """Return failing calls with their error, status and code. The buffer w has shape (2,), and is in step 1."""
    return {
        "shape": (lambda s: s.ops.relu_grad([1, 2], [1]), InvalidInput, 422, "shape_mismatch"),
        "operator": (lambda s: s.run("NoSuchGrad", {"dY": [1]}), NotFound, 404, "unknown_operator"),
        "tensor": (lambda s: s.run("ReluGrad", {"dY": [1], "Z": [1]}), InvalidInput, 422, "unknown_tensor"),
        "attribute": (lambda s: s.run("ReluGrad", {"dY": [1], "X": [1]}, {"b": 1}), InvalidInput, 422, ""),
        "buffer": (lambda s: s.buffers["none"].accumulate([1, 2]), NotFound, 404, "unknown_buffer"),
        "differs": (lambda s: s.buffers["w"].create((3,)), Conflict, 409, "buffer_exists"),
        "stale": (lambda s: s.buffers["w"].accumulate([1, 2], step=0), StaleStep, 409, "stale_step"),
        "open": (lambda s: s.buffers["w"].value(step=1), StepOpen, 409, "step_open"),
        "few": (lambda s: s.buffers["w"].take(min_count=9), StepOpen, 409, "too_few_gradients"),
        "mean": (lambda s: s.buffers["w"].value(reduce="mean"), NothingToAverage, 409, "nothing_to_average"),
        "gone": (lambda s: s.buffers["gone"].value(step=0), StepGone, 410, "step_gone"),
        "match": (lambda s: s.buffers["w"].zero(if_match='"8-8"'), PreconditionFailed, 412, "precondition_failed"),
        "body": (lambda s: s.buffers["w"].accumulate(np.zeros(1 << 19)), TooLarge, 413, "body_too_large"),
        "large": (lambda s: s.buffers["l"].create((1 << 30,)), TooLarge, 413, "tensor_too_large"),
    }


def test_malformed_arguments_are_refused(server: Any) -> None:
    for weight in (10**400, "much"):
        with pytest.raises(InvalidInput, match="^weight cannot be a float"):
            server.buffers["w"].accumulate([1], weight=weight)
    for key in ("", " a", "a ", "ä", "aäb", "a\n", "a" * 256, 5):
        with pytest.raises(InvalidInput, match="^idempotency_key is"):
            server.buffers["w"].accumulate([1], idempotency_key=key)
    for name in ("from", "into", "outputs", "weight", "step", "contributor"):
        with pytest.raises(InvalidInput, match=f"^{name} is not an attribute"):
            server.run("ReluGrad", {"dY": [1], "X": [1]}, {name: "dX:w"})
    with pytest.raises(InvalidInput, match="^activations is empty"):
        server.ops.gru_training([[[1.0]]], [[[1.0]] * 3], [[[1.0]] * 3], activations=[])


@pytest.mark.parametrize("case", failing())
def test_errors_by_what_they_mean(server: Any, case: str) -> None:
    server.buffers["w"].create((2,))
    server.buffers["w"].zero()
    server.buffers["gone"].create((1,))
    for _ in range(2):
        server.buffers["gone"].accumulate([1])
        server.buffers["gone"].take()
    call, kind, status, code = failing()[case]
    with pytest.raises(kind) as caught:
        call(server)
    error = caught.value
    assert type(error) is kind
    assert (error.status, error.attempts) == (status, 1)
    assert error.code == code or not code
    assert error.request_id
    assert error.detail == str(error) != ""
    assert (error.idempotency_key is None) is (
        case in {"shape", "operator", "tensor", "attribute", "open", "mean", "gone"}
    )


def test_a_key_fits_a_single_request(server: Any, key: str) -> None:
    server.buffers["w"].create((2,))
    server.buffers["w"].accumulate([1, 2], idempotency_key=f"{key} once")
    with pytest.raises(KeyReused) as caught:
        server.buffers["w"].accumulate([1, 3], idempotency_key=f"{key} once")
    assert (caught.value.status, caught.value.idempotency_key) == (422, f"{key} once")
    assert server.buffers["w"].info().count == 1


def test_errors_are_also_python_errors(server: Any) -> None:
    with pytest.raises(LookupError):
        server.buffers["none"].info()
    with pytest.raises(ValueError, match="shape"):
        server.ops.relu_grad([1, 2], [1])
    with pytest.raises(NotFound) as caught:
        server.buffers["none"].info()
    assert caught.value.context["buffer"] == "none"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ä", "a\n", "x" * 201, "a?b", "%2e"])
def test_malformed_names_reach_no_other_path(server: Any, name: str) -> None:
    server.buffers["gradient"].create((2,))
    calls: list[Callable[[], Any]] = [
        lambda: server.buffers[name].accumulate([1, 2]),
        lambda: server.buffers[name].delete(),
        lambda: server.ops.relu_grad([1, 2], [1, 1], into=name),
        lambda: server.buffers.zero([name]),
    ]
    for call in calls:
        with pytest.raises(InvalidInput):
            call()
    with pytest.raises(NotFound):
        server.run(f"../buffers/{name}", {"gradient": [1, 2]})
    assert server.buffers["gradient"].info().version == 0


def test_a_number_of_seconds_may_be_numpys(server: Any) -> None:
    server.buffers["w"].create((2,))
    for timeout in (np.int64(1), np.float32(0.5)):
        assert server.buffers["w"].take(timeout=timeout).closed


def test_seconds_may_be_numpys(kind: str, url: str) -> None:
    with connected(kind, url, timeout=np.float32(30), attempt_timeout=np.int64(20)) as server:
        assert server.is_ready()


@pytest.mark.parametrize("timeout", [math.inf, math.nan, -1, None, 10**400])
def test_a_timeout_that_is_not_a_number_of_seconds_is_refused(server: Any, timeout: float) -> None:
    server.buffers["w"].create((2,))
    with pytest.raises(InvalidInput, match="timeout"):
        server.buffers["w"].take(min_count=1, timeout=timeout)


def test_taken_is_a_receipt_with_a_value(server: Any) -> None:
    server.buffers["w"].create((2,))
    taken = server.buffers["w"].take()
    assert isinstance(taken, Taken)
    assert_same(taken.value, np.zeros(2, np.float32))


def test_parameters_of_into_are_refused_without_it(server: Any) -> None:
    for more in ({"weight": 1.0}, {"weight": 2}, {"step": 0}):
        with pytest.raises(InvalidInput, match=f"{next(iter(more))} is only for outputs that into= adds to a buffer"):
            server.ops.relu_grad([1], [1], **more)


def test_arguments_of_wrong_types_are_refused(server: Any) -> None:
    a = server.buffers["a"]
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("weight", lambda: a.accumulate([1], weight=np.array([1, 2]))),
        ("if_match", lambda: a.zero(if_match=3)),
        ("prefix", lambda: server.buffers.list(None)),
        ("sent", lambda: server.buffers.list("\ud800")),
        ("must be an integer", lambda: a.create((3.0,))),
        ("must be an integer", lambda: a.create(2, keep="1")),
        ("must be an integer", lambda: a.create([2], quorum=1.5)),
        ("^ttl_seconds cannot be a float", lambda: a.create(2, ttl_seconds="long")),
        *(("is not a buffer name", server.buffers[name].zero) for name in (5, None, b"a")),
    ]
    for words, call in calls:
        with pytest.raises(InvalidInput, match=words):
            call()
    with pytest.raises(NotFound):
        server.run(3, {})


def test_the_buffers_are_not_a_sequence(url: str) -> None:
    """Otherwise Python would ask for the buffers 0, 1, 2, ... without end."""
    for buffers in (Client(url).buffers, AsyncClient(url).buffers):
        with pytest.raises(TypeError):
            list(buffers)  # type: ignore[call-overload]
        with pytest.raises(TypeError):
            "a" in buffers  # type: ignore[misc]  # noqa: B015


def test_a_closed_client_makes_no_calls(kind: str, url: str) -> None:
    with connected(kind, url) as server:
        server.close()
        for call in (server.operators, server.is_ready):
            with pytest.raises(InvalidInput, match="closed"):
                call()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_client_is_not_copied(url: str, copied: Callable[[Any], Any]) -> None:
    for client in (Client(url), AsyncClient(url)):
        for one in (client, client.buffers["a"], client.ops):
            with pytest.raises(TypeError, match="make one in each process"):
                copied(one)


def test_the_api_key_is_sent(kind: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput), connected(kind, url, api_key="schlüssel"):
        pass
    monkeypatch.setenv("GRADSERVE_URL", url)
    monkeypatch.delenv("GRADSERVE_API_KEY", raising=False)
    with connected(kind, "") as server:
        assert server.url == url
        assert server.is_ready()


def test_a_step_reads_a_closed_step_and_writes_over_buffers(server: Any, key: str) -> None:
    server.buffers.set({"w": [1, 2], "b": [3]}, prefix="m.p.")
    server.buffers.create_many({"m.g.w": {"shape": 2, "quorum": 2}, "m.g.b": {"shape": 1, "quorum": 2}})
    inputs = {"lr": 0.5, "weights": server.buffers["m.p.*"], "gradients": server.buffers["m.g.*@0"]}

    def step(**more: Any) -> Any:
        into = {"updated_weights": "m.p.*"}
        given: Any = {"set": into, "reduce": "mean", "outputs": ["update_completed"], **more}
        return server.run("SGDOptimizerV2", inputs, idempotency_key=key, **given)

    server.buffers.accumulate({"m.g.w": [2, 2], "m.g.b": [2]})
    with pytest.raises(StepOpen):
        step()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(step, timeout=20)
        server.buffers.accumulate({"m.g.w": [4, 0], "m.g.b": [2]})
        found = waiting.result(30)
    assert (found["updated_weights.w"].version, found["updated_weights.w"].replayed) == (2, False)
    assert step(timeout=20)["updated_weights.w"].replayed
    values = server.buffers.value(prefix="m.p.")
    assert {name: value.tolist() for name, value in values.items()} == {"m.p.b": [2], "m.p.w": [-0.5, 1.5]}
    for wrong in ({"updated_weights": "m p.*"}, {"updated_weights": "**"}):
        with pytest.raises(InvalidInput, match="buffer name"):
            step(set=wrong)
