"""The loss curve of a two-layer GCN on sharded ranks beside that of plain PyG in one process: float64, no dropout.

    python benchmarks/loss_curve.py cora.npz
    mpirun -n 4 python benchmarks/loss_curve.py cora.npz
    torchrun --nproc-per-node 3 benchmarks/loss_curve.py cora.npz

Rank 0 prints the first and last loss and the largest relative difference over 100 epochs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCN

import shardpass as sp
from shardpass.data import read

EPOCHS = 100


def model_of(channels: int, classes: int) -> nn.Module:
    """Every rank, and plain PyG, begin with the same parameters."""
    torch.manual_seed(0)
    model: nn.Module = GCN(channels, 16, 2, classes).double()
    return model


def trained(model: nn.Module, loss_of: Callable[[], Tensor], step: Callable[[], None]) -> list[float]:
    """The losses of all epochs."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4), []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        step()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def plain(path: Path) -> list[float]:
    """Plain PyG on the whole graph."""
    graph = read(path)
    fields: Any = graph.node_fields["node"]
    x, y, mask = fields["x"].to_dense().double(), fields["y"].long(), fields["train_mask"]
    edges = graph.edges[("node", "to", "node")]
    edge_index = torch.stack([edges.src, edges.dst]).long()
    model = model_of(x.size(1), int(y.max()) + 1)
    return trained(model, lambda: F.cross_entropy(model(x, edge_index)[mask], y[mask]), lambda: None)


def sharded(comm: sp.Communicator, store: str) -> list[float]:
    """The same on sharded ranks."""
    graph = sp.load(store, comm)
    x, y = graph.x.double(), graph.y.long()
    model = sp.pyg.wrap(model_of(graph.num_features, graph.num_classes), comm)
    return trained(
        model,
        lambda: sp.cross_entropy(model(x, graph), y, graph.train_mask, comm),
        lambda: sp.sync_gradients(model, comm),
    )


def main() -> None:
    """Run the comparison of the command line."""
    path, comm = Path(sys.argv[1]), sp.connect()
    with tempfile.TemporaryDirectory() as folder:
        store = comm.all_gather_object(str(Path(folder) / "parts"))[0]
        if comm.rank == 0:
            sp.partition(path, store, comm.size, "random")
        comm.barrier("partitioned")
        losses = sharded(comm, store)
        if comm.rank == 0:
            expected = plain(path)
            gap = max(abs(a - b) / abs(b) for a, b in zip(losses, expected))
            print(json.dumps({"ranks": comm.size, "first": losses[0], "last": losses[-1], "largest_gap": gap}))
        comm.barrier("done")


if __name__ == "__main__":
    main()
