"""Train a network on handwritten digits as one of several workers: RANK=0 WORLD_SIZE=3 python train.py.

RUN=digits and DEADLINE=4 may be set, too. The last is in seconds.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from gradserve_client import Client, KeyReused, StaleStep
from gradserve_client.torch import GradientAccumulator
from sklearn.datasets import load_digits

PAUSE_SECONDS = 0.5
"""Seconds that each step takes longer, so that a viewer can follow."""

rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
torch.manual_seed(0)  # the same weights in all workers
images, labels = (torch.from_numpy(each)[rank::workers] for each in load_digits(return_X_y=True))
images = images.float() / 16
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.4)

Path(f"rank{rank}.up").touch()
while len([*Path().glob("*.up")]) < workers:  # the deadline is short, so all begin together
    time.sleep(0.05)

with Client() as server:
    run, deadline = os.environ.get("RUN", "digits"), float(os.environ.get("DEADLINE", "4"))
    rules = {"deadline_seconds": deadline, "keep": 200}
    gradients = GradientAccumulator.from_env(model, server, run=run, loss=True, **rules)
    saved, parts = f"rank{rank}.pt", [model, optimizer, gradients]
    if os.path.exists(saved):
        for part, state in zip(parts, torch.load(saved), strict=True):
            part.load_state_dict(state)
    while gradients.step < 200:
        torch.save([part.state_dict() for part in parts], f"{saved}.new")
        os.replace(f"{saved}.new", saved)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        with suppress(StaleStep, KeyReused):  # late, or counted before a restart
            gradients.push(weight=len(images), loss=loss)
            time.sleep(PAUSE_SECONDS)
        pulled = gradients.pull()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {pulled.step:2}  loss {pulled.loss:.2f}  {pulled.count} of {workers} in", flush=True)
