"""KServe's own client, unmodified: it takes the service for a KServe server and each operator for a model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import httpx
import numpy as np
import pytest

from service.dtypes import OPEN_INFERENCE, Array
from service.kernels import OPERATORS, Operator
from tests.test_contract import EVERY, assert_same, example, parameters

pytestmark = pytest.mark.skipif(find_spec("kserve") is None, reason="kserve is not installed: make peers installs it")
# Its functions import it: each process of pytest would spend half a second on an import at the top.


def call(method: str, *args: Any, **kwargs: Any) -> Any:
    from kserve import InferenceRESTClient, RESTConfig

    async def ask() -> Any:
        client = InferenceRESTClient(RESTConfig(protocol="v2", retries=1))
        try:
            return await getattr(client, method)(*args, **kwargs)
        finally:
            await client.close()

    return asyncio.run(ask())


def run(url: str, operator: Operator, tensors: Mapping[str, Array], binary: bool, **more: Any) -> Any:
    from kserve import InferInput, InferRequest
    from kserve.protocol.infer_type import RequestedOutput

    inputs = []
    for name, tensor in tensors.items():
        described = InferInput(name, list(tensor.shape), OPEN_INFERENCE[tensor.dtype])
        described.set_data_from_numpy(tensor, binary_data=binary)
        inputs.append(described)
    wanted = [RequestedOutput(name, {"binary_data": binary}) for name in operator.output_names]
    request = InferRequest(operator.name, inputs, request_outputs=wanted, **more)
    return call("infer", url, request, model_name=operator.name)


def test_the_server_and_its_models_are_ready(url: str) -> None:
    assert call("is_server_live", url) is True
    assert call("is_server_ready", url) is True
    for name in OPERATORS:
        assert call("is_model_ready", url, name) is True


@EVERY
@pytest.mark.parametrize("binary", [True, False], ids=["bytes", "JSON"])
def test_every_operator_answers_the_client(url: str, operator: Operator, binary: bool) -> None:
    tensors = example(operator)
    answer = run(url, operator, tensors, binary, request_id="seven", parameters=parameters(operator))
    assert (answer.id, answer.model_name) == ("seven", operator.name)
    got = {one.name: one.as_numpy() for one in answer.outputs}
    assert_same(got, operator(tensors, operator.example_attributes))


def test_attributes_are_parameters(url: str) -> None:
    operator = OPERATORS["LeakyReluGrad"]
    tensors = example(operator)
    answer = run(url, operator, tensors, True, parameters={"alpha": 0.5})
    assert_same({"dX": answer.outputs[0].as_numpy()}, operator(tensors, {"alpha": 0.5}))


def test_a_mistake_raises_an_exception(url: str) -> None:
    operator = OPERATORS["ReluGrad"]
    with pytest.raises(httpx.HTTPStatusError, match="X") as raised:
        run(url, operator, {"dY": np.ones(2, np.float32)}, True)
    assert raised.value.response.status_code == 400
