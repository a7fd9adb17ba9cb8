import os

import torch
from gradserve_client import Client
from gradserve_client.torch import GradientAccumulator

rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)  # all workers begin with the same weights
X = torch.randn(64, 3)[rank::workers]  # and each has rows of its own
y = X @ torch.tensor([[1.0], [-2.0], [0.5]])
model = torch.nn.Linear(3, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0005)

with (
    Client("http://127.0.0.1:8000") as server,
    GradientAccumulator.from_env(model, server, run="line", optimizer=optimizer, loss=True) as gradients,
):
    while gradients.step < 10_000:
        loss = (model(X) - y).square().mean()
        loss.backward()
        gradients.push(weight=len(X), loss=loss)
        mean = gradients.pull()
        optimizer.step()
        optimizer.zero_grad()
        if gradients.step % 25 == 0:
            print(f"step {gradients.step}  loss {mean.loss:.4f}  {mean.count} of {workers} in", flush=True)
print(f"rank{rank}", model.weight.detach().numpy().round(1))
