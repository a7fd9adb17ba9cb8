"""A model that is much larger than what a server may hold for requests."""

from __future__ import annotations

import os
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
    with Server(tmp_path / "store", max_bytes_in_flight=in_flight, store_bytes=4 * total) as process:
        most = 0

        class Watching(httpx.HTTPTransport):
            def handle_request(self, request: httpx.Request) -> httpx.Response:
                nonlocal most
                response = super().handle_request(request)
                most = max(most, anonymous_bytes(process.process.pid))
                return response

        with Client(process.url, transport=Watching(), timeout=300, attempt_timeout=120) as server:
            model = torch.nn.ParameterList([torch.zeros(total // 16) for _ in range(4)])
            gradients = GradientAccumulator(model, server, prefix="large.", request_bytes=request)
            first = most  # after one request as large as those of the push
            for parameter in model:
                parameter.grad = torch.full_like(parameter, 0.5)
            gradients.push(weight=2)
            gradients.pull()
            assert all(parameter.grad.eq(0.5).all() for parameter in model)
    assert most - first < in_flight + MOST_BYTES_OF_VALUES < total
