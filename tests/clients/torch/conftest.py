from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gradserve_client import Client


@pytest.fixture(scope="module")
def server(url: str) -> Iterator[Client]:
    with Client(url) as server:
        yield server


@pytest.fixture(params=[1, 3], ids=["one server", "three servers"])
def one_or_three(request: pytest.FixtureRequest, urls: list[str]) -> Iterator[Client]:
    """A client of one server or of several."""
    with Client(urls[: request.param], timeout=20) as server:
        yield server


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def run() -> str:
    """A new name of a run."""
    return uuid.uuid4().hex
