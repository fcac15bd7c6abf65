"""Mean test accuracy over seeds: plain PyG in one process beside the same model on sharded ranks.

    python benchmarks/accuracy.py cora.npz --model gcn --seeds 20 --ranks 2

Citation graphs as `.npz`; the standard two-layer models: GCN (16 hidden, dropout 0.5) and GAT (8 heads of 8, dropout
0.6), Adam with weight decay 5e-4, row-normalised features, 200 epochs. The test accuracy of the epoch with the best
validation accuracy is taken. Prints one JSON line per seed, then means, standard errors and the difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv

import shardpass as sp
from shardpass.data import read

EPOCHS = 200


class Net(nn.Module):
    """The two-layer models of the GCN (Kipf and Welling 2017) and GAT (Velickovic et al. 2018) papers."""

    def __init__(self, kind: str, channels: int, classes: int) -> None:
        super().__init__()
        self.dropout = 0.5 if kind == "gcn" else 0.6
        if kind == "gcn":
            self.first, self.second = GCNConv(channels, 16), GCNConv(16, classes)
        else:
            self.first = GATConv(channels, 8, heads=8, dropout=0.6)
            self.second = GATConv(64, classes, heads=1, concat=False, dropout=0.6)
        self.activation = F.relu if kind == "gcn" else F.elu

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        x = self.activation(self.first(x, edge_index))
        return self.second(F.dropout(x, self.dropout, self.training), edge_index)


def normalised(x: Tensor) -> Tensor:
    """Rows that sum to one."""
    return x / x.sum(1, keepdim=True).clamp(min=1)


def train_plain(kind: str, path: Path, seed: int) -> float:
    """Test accuracy of plain PyG in this process."""
    graph = read(path)
    fields = {
        name: torch.as_tensor(graph.node_fields["node"][name]) for name in ("y", "train_mask", "val_mask", "test_mask")
    }
    x = normalised(graph.node_fields["node"]["x"].to_dense())
    edges = graph.edges[("node", "to", "node")]
    edge_index = torch.stack([torch.as_tensor(edges.src), torch.as_tensor(edges.dst)]).long()
    y = fields["y"].long()
    torch.manual_seed(seed)
    model = Net(kind, x.size(1), int(y.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 if kind == "gcn" else 0.005, weight_decay=5e-4)
    best = (0.0, 0.0)
    for _ in range(EPOCHS):
        model.train()
        optimizer.zero_grad()
        out = model(x, edge_index)
        F.cross_entropy(out[fields["train_mask"]], y[fields["train_mask"]]).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = model(x, edge_index).argmax(1) == y
        scores = tuple(float(right[fields[m]].double().mean()) for m in ("val_mask", "test_mask"))
        best = max(best, scores, key=lambda pair: pair[0])
    return best[1]


def train_sharded(comm: sp.Communicator, kind: str, store: str, seed: int) -> float:
    """Test accuracy of the same model on sharded ranks."""
    torch.set_num_threads(1)
    graph = sp.load(store, comm)
    x = normalised(graph.x)
    sp.seed(seed, comm)
    model = sp.pyg.wrap(Net(kind, graph.num_features, graph.num_classes), comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 if kind == "gcn" else 0.005, weight_decay=5e-4)
    best = (0.0, 0.0)
    for _ in range(EPOCHS):
        model.train()
        optimizer.zero_grad()
        sp.cross_entropy(model(x, graph), graph.y, graph.train_mask, comm).backward()
        sp.sync_gradients(model, comm)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            out = model(x, graph)
        scores = tuple(sp.accuracy(out, graph.y, mask, comm) for mask in (graph.val_mask, graph.test_mask))
        best = max(best, scores, key=lambda pair: pair[0])
    return best[1]


def main() -> None:
    """Run the comparison of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("graph", type=Path)
    parser.add_argument("--model", choices=["gcn", "gat"], default="gcn")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=["threads", "processes"], default="threads")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"pyg": [], "shardpass": []}
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "parts")
        sp.partition(options.graph, store, options.ranks, "random")
        for seed in range(options.seeds):
            found["pyg"].append(train_plain(options.model, options.graph, seed))
            ranks = sp.spawn(train_sharded, options.ranks, options.backend, args=(options.model, store, seed))
            found["shardpass"].append(ranks[0])
            print(json.dumps({"seed": seed, **{name: round(100 * s[-1], 2) for name, s in found.items()}}), flush=True)
    means = {name: 100 * statistics.mean(scores) for name, scores in found.items()}
    errors = {name: 100 * statistics.stdev(scores) / len(scores) ** 0.5 for name, scores in found.items()}
    difference = means["shardpass"] - means["pyg"]
    error = (errors["pyg"] ** 2 + errors["shardpass"] ** 2) ** 0.5
    print(
        json.dumps(
            {
                "graph": options.graph.stem,
                "model": options.model,
                "ranks": options.ranks,
                "seeds": options.seeds,
                "mean": {name: round(mean, 2) for name, mean in means.items()},
                "standard_error": {name: round(e, 2) for name, e in errors.items()},
                "difference": round(difference, 2),
                "standard_error_of_difference": round(error, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
