"""Calls an operator, and another with groups of tensors, fills and takes a buffer, and tells an error by its code."""

from __future__ import annotations

import os

from gradserve_api import Client
from gradserve_api.api.buffers import accumulate, create_buffer, take
from gradserve_api.api.operators import relu_grad, sgd_optimizer_v2
from gradserve_api.models import (
    ErrorCode,
    FloatList,
    FloatTensorAnswer,
    GradientBody,
    Metadata,
    NewBuffer,
    Problem,
    Receipt,
    ReluGradAnswer,
    ReluGradRequest,
    SGDOptimizerV2Answer,
    SGDOptimizerV2Request,
    SGDOptimizerV2RequestGradients,
    SGDOptimizerV2RequestWeights,
)


def fault(problem: Problem) -> str:
    match problem.code:
        case ErrorCode.SHAPE_MISMATCH:
            return f"{problem.code} of {problem.tensor}"
        case ErrorCode.BUSY | ErrorCode.NOT_READY:
            return "try again"
        case _:
            return str(problem.detail)


def show(name: str, tensor: object) -> None:
    assert isinstance(tensor, FloatTensorAnswer)
    print(name, *(int(number) for number in tensor.data))  # noqa: T201


client = Client(os.environ["GRADSERVE_URL"])
answer = relu_grad.sync(client=client, body=ReluGradRequest(d_y=[1, 2], x=[0.5, -1]))
assert isinstance(answer, ReluGradAnswer)
show("relu", answer.d_x)

weights, gradients = SGDOptimizerV2RequestWeights(), SGDOptimizerV2RequestGradients()
weights["fc.bias"], gradients["fc.bias"] = [3], [1]
step = SGDOptimizerV2Request(lr=1, weights=weights, gradients=gradients)
stepped = sgd_optimizer_v2.sync(client=client, body=step)
assert isinstance(stepped, SGDOptimizerV2Answer)
show("step", stepped.updated_weights["fc.bias"])

assert isinstance(create_buffer.sync("python", client=client, body=NewBuffer(shape=[2])), Metadata)
for _ in range(2):
    body = GradientBody(gradient=[1, 2])
    receipt = accumulate.sync("python", client=client, body=body, idempotency_key="python 0")
    assert isinstance(receipt, Receipt)
    assert receipt.count == 1, "a retry counts twice"
accumulate.sync("python", client=client, body=GradientBody(gradient=FloatList(data=[3, 4])))
receipt = take.sync("python", client=client, min_count=2)
assert isinstance(receipt, Receipt)
show("take", receipt.value)

refusal = relu_grad.sync(client=client, body=ReluGradRequest(d_y=[1, 2], x=[1]))
assert isinstance(refusal, Problem)
print("error", fault(refusal))  # noqa: T201
