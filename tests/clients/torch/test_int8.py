"""The gradients of a PyTorch model in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gradserve_client import Client, InvalidInput
from gradserve_client.torch import GradientAccumulator


def layer() -> Any:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 64)


def push(worker: GradientAccumulator, model: Any, seed: int) -> None:
    loss_of(model, seed).backward()
    worker.push()


def loss_of(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randn(32, 64, generator=generator)).square().mean()


def test_training_ends_with_the_loss_of_float32(server: Client, run: str) -> None:
    losses = []
    for wire in (None, "int8"):
        model = layer()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        worker = GradientAccumulator(model, server, run=f"{run}{wire}", wire_dtype=wire)
        for _ in range(30):
            push(worker, model, 0)
            worker.pull()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss_of(model, 0).item())
    assert losses[0] < loss_of(layer(), 0).item() / 2
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_the_state_is_read_by_torch_load(server: Client, run: str, tmp_path: Path) -> None:
    model = layer()
    worker = GradientAccumulator(model, server, run=run, worker="w", wire_dtype="int8", pull_dtype="int8")
    push(worker, model, 1)
    worker.pull()
    torch.save(worker.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again = GradientAccumulator(model, server, run=run, worker="w", wire_dtype="int8", pull_dtype="int8")
    again.load_state_dict(state)
    residual, before = (one.state_dict()["residuals"][f"{run}.weight"] for one in (again, worker))
    assert residual.abs().max() > 0
    assert torch.equal(residual, before)
    assert again.step == 1


def test_another_dtype_is_refused(server: Client, run: str) -> None:
    for wire in ("int4", torch.int8):
        with pytest.raises(InvalidInput, match="wire_dtype"):
            GradientAccumulator(layer(), server, run=run, wire_dtype=wire)
    assert not server.buffers.list(run)
