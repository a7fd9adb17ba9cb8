"""A model that is much larger than what a server may hold for requests."""

from __future__ import annotations

import os
import random
from pathlib import Path

import httpx
import torch
from gradserve_client import Client
from gradserve_client.torch import GradientAccumulator

from service.buffers.lmdb.caches import MOST_BYTES_OF_VALUES
from tests.faults.servers import LONG, Server


def anonymous_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def test_a_large_model_within_the_servers_memory(tmp_path: Path) -> None:
    """The server's memory stays near what it may hold for requests, whatever the size of the model.

    128 MB take 32 requests. With GRADSERVE_FAULTS=long, GRADSERVE_LARGE_MB (2048) travel in requests of 64 MB.
    """
    total = int(os.environ.get("GRADSERVE_LARGE_MB", "2048")) << 20 if LONG else 128 << 20
    request = 64 << 20 if LONG else 4 << 20
    in_flight = 8 * request
    with Server(tmp_path / "store", max_bytes_in_flight=in_flight, store_bytes=5 * total) as process:
        most = 0

        class Watching(httpx.HTTPTransport):
            def handle_request(self, request: httpx.Request) -> httpx.Response:
                nonlocal most
                response = super().handle_request(request)
                most = max(most, anonymous_bytes(process.process.pid))
                return response

        with Client(process.url, transport=Watching(), timeout=300, attempt_timeout=120) as server:
            model = torch.nn.ParameterList([torch.zeros(total // 16) for _ in range(4)])
            gradients = GradientAccumulator(model, server, run="large", request_bytes=request)
            first = most  # after one request as large as those of the push
            for parameter in model:
                parameter.grad = torch.full_like(parameter, 0.5)
            gradients.push(weight=2)
            gradients.pull()
            assert all(parameter.grad.eq(0.5).all() for parameter in model)
    assert most - first < in_flight + MOST_BYTES_OF_VALUES < total


def test_a_server_that_is_killed_within_a_split_push_counts_it_once(tmp_path: Path) -> None:
    """In each request's buffers, wherever the kill falls. The push goes on when the server is back."""
    kills = 20 if LONG else 2
    with Server(tmp_path / "store", max_body_bytes=1 << 20) as process, Client(process.url, timeout=120) as server:
        model = torch.nn.ParameterList([torch.zeros(1 << 16) for _ in range(24)])
        gradients = GradientAccumulator(model, server, run="large", quorum=1, request_bytes=1 << 19)
        for number in range(kills):
            for parameter in model:
                parameter.grad = torch.full_like(parameter, number + 1.0)
            before = sum(info.version for info in server.buffers.list("large."))
            gradients.push(wait=False)
            wanted = before + random.Random(number).randrange(24)
            while sum(info.version for info in server.buffers.list("large.")) < wanted:
                pass
            process.restart()
            assert gradients.pull().count == 1
            assert all(parameter.grad.eq(number + 1).all() for parameter in model)
            buffers = [info for info in server.buffers.list("large.") if not info.name.endswith("::start")]
            assert {(info.step, info.version) for info in buffers} == {(number + 1, number + 1)}
