"""An ordinary PyG script, a GAT on one graph in one process, which the demo runs for comparison.

    python plain_pyg.py GRAPH.npz HIDDEN HEADS EPOCHS LR

Prints one JSON line per epoch and one at the end, as ``shardpass train --log -`` does. Only the meter of memory, which
should be the same in both programs, is shardpass's.
"""

import json
import sys
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from shardpass.cli.memory import PeakMeter


def main(path: str, hidden: int, heads: int, epochs: int, lr: float) -> None:
    """Train and print."""
    from torch_geometric.nn.models import GAT

    with np.load(path) as arrays:
        graph: dict[str, Any] = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    x, y, edge_index = graph["x"], graph["y"], graph["edge_index"].long()
    torch.manual_seed(0)
    model = GAT(x.size(1), hidden, 2, int(y.max()) + 1, heads=heads)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    meter = PeakMeter()
    record: dict[str, Any] = {}
    for epoch in range(1, epochs + 1):
        start = perf_counter()
        model.train()
        loss = F.cross_entropy(model(x, edge_index)[graph["train_mask"]], y[graph["train_mask"]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record = {"event": "epoch", "epoch": epoch, "loss": loss.item(), "seconds": perf_counter() - start}
        del loss
        if epoch == epochs:
            model.eval()
            with torch.no_grad():
                right = model(x, edge_index).argmax(1) == y
            record["test"] = right[graph["test_mask"]].double().mean().item()
        print(json.dumps(record), flush=True)
    print(json.dumps({**record, "event": "summary", "peak_bytes": [meter.peak()]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
