"""Uploads of graphs under kills: the graph and its weights come together, once, or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import onnx
import pytest

from service.buffers.lmdb.drafts import MOST_OF_GRAPH
from service.buffers.lmdb.slots import CHUNK_BYTES
from service.dtypes import Array
from tests.faults.mortal import Mortal
from tests.faults.servers import PATIENCE, Client, new_key

CLIENTS = 2

ROWS = 300
"""Rows of the weights of a model of 400 KB: LMDB has it outside its pages, PostgreSQL stages it."""

LARGE_ROWS = MOST_OF_GRAPH // (4 * ROWS) + ROWS
"""Rows of the weights of a model that two transactions of LMDB write."""


def weights(seed: int, rows: int) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, ROWS)).astype(np.float32)


def model(numbers: Array) -> bytes:
    """Return the model of `y = x @ numbers`."""
    x, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, size])
        for name, size in zip("xy", numbers.shape, strict=True)
    )
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [x], [y], [onnx.numpy_helper.from_array(numbers, "w")])
    opset = [onnx.helper.make_opsetid("", 17)]
    return bytes(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString())


def upload(name: str, numbers: Array) -> dict[str, Any]:
    """Return the request that uploads the model, and writes its weights into a buffer."""
    query, path = {"set": f"parameters:{name}.*"}, f"/v1/graphs/{name}"
    return {"method": "PUT", "path": path, "params": query, "content": model(numbers), "key": f"put {name}"}


def check(client: Client, name: str, numbers: Array, *, uploads: int = 1) -> None:
    """Check that the graph is there, and that each upload has written its weights once."""
    assert client.send("GET", f"/v1/graphs/{name}/model").content == model(numbers)
    receipts, values = client.values(f"{name}.w")
    assert receipts[f"{name}.w"]["version"] == uploads
    assert values[f"{name}.w"].tobytes() == numbers.tobytes()


def names(client: Client) -> list[str]:
    return [graph["name"] for graph in client.done("GET", "/v1/graphs")["graphs"]]


def test_an_upload_is_whole_or_absent_and_made_once(service: Mortal) -> None:
    """A server dies while two workers upload the same model with the same key."""
    own = "staged" if service.kind == "postgres" else "chunk"
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(service.server.url)) for _ in range(CLIENTS)]
        threads = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        expected = names(clients[0])
        for number, point in enumerate([own, *service.points]):
            name, numbers = f"m{new_key()}", weights(number, ROWS)
            service.order(point)
            asking = [threads.submit(client.send, **upload(name, numbers)) for client in clients]
            service.await_death()
            if service.other is not None and point != "committed":
                with Client(service.other.url) as other:
                    assert name not in names(other)
            service.revive()
            answers = [one.result(PATIENCE) for one in asking]
            assert [answer.status_code for answer in answers] == [201] * CLIENTS, answers[0].text
            assert len({answer.content for answer in answers}) == 1
            made = CLIENTS - sum("Idempotency-Replayed" in answer.headers for answer in answers)
            assert made == (point != "committed")
            check(clients[0], name, numbers)
            expected.append(name)
        assert names(clients[0]) == sorted(expected)


def test_a_graph_is_deleted_once(service: Mortal) -> None:
    """The answer to the deletion is lost, and others upload the model again before its client asks again."""
    name, numbers, key = f"d{new_key()}", weights(1, ROWS), new_key()
    with Client(service.server.url) as client:
        client.done(**upload(name, numbers))
        service.loses(client, "committed", "DELETE", f"/v1/graphs/{name}", key=key)
        assert name not in names(client)
        assert client.send(**upload(name, numbers) | {"key": new_key()}).status_code == 201
        again = client.send("DELETE", f"/v1/graphs/{name}", key=key)
        assert (again.status_code, again.headers["Idempotency-Replayed"]) == (204, "true")
        check(client, name, numbers, uploads=2)


@pytest.mark.parametrize("service", ["lmdb"], indirect=True)
def test_a_large_upload_dies_between_two_of_its_transactions(service: Mortal) -> None:
    name, numbers = f"l{new_key()}", weights(2, LARGE_ROWS)
    with Client(service.server.url) as client:
        with service.dying("chunk", MOST_OF_GRAPH // CHUNK_BYTES + 2), pytest.raises(httpx.TransportError):
            client.once(**upload(name, numbers))
        assert name not in names(client)
        assert client.send(**upload(name, numbers)).status_code == 201
        check(client, name, numbers)
