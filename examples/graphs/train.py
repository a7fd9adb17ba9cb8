"""Train a graph as one of several workers: python train.py URL MODEL.onnx DATA.json RUN RANK WORKERS STEPS."""

import json
import sys
from pathlib import Path

from gradserve_client import Client

url, model, data, run, *numbers = sys.argv[1:]
rank, workers, steps = map(int, numbers)
rows = json.loads(Path(data).read_text())

with Client(url, timeout=600) as server:
    server.graphs.put(run, model, loss="SoftmaxCrossEntropyLoss")
    graph = server.graphs[run].join(run, worker=f"rank{rank}", quorum=workers)
    for step in range(graph.start(), steps):
        starts = {name: (step * workers + rank) * 32 % len(all_rows) for name, all_rows in rows.items()}
        batch = {name: rows[name][start : start + 32] for name, start in starts.items()}
        print(step, graph.forward_backward(batch, weight=32).loss, flush=True)
        graph.optim_step("AdamWOptimizer", lr=0.01)
    graph.save(f"{run}.safetensors")
