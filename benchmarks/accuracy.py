"""Mean test accuracy over seeds: plain PyG in one process beside the same model on sharded ranks.

    python benchmarks/accuracy.py cora.npz --model gcn --seeds 20 --ranks 2
    mpirun -n 4 python benchmarks/accuracy.py computers.npz --model deep --seeds 5 --masks made_

Graphs as `.npz`. The two-layer models of the citation graphs: GCN (16 hidden, dropout 0.5) and GAT (8 heads of 8,
dropout 0.6); and deep: three GCN layers of 64 with BatchNorm and dropout 0.5. Adam with weight decay 5e-4,
row-normalised features, 200 epochs (100 for deep). The test accuracy of the epoch with the best validation accuracy is
taken. Prints one JSON line per seed, then means, standard errors and the difference. Under a launcher the ranks are its
own, and rank 0 trains plain PyG while the others wait.
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
from torch_geometric.nn import GCN, GATConv, GCNConv

import shardpass as sp
from shardpass.data import read

MASKS = ("train_mask", "val_mask", "test_mask")


def build(kind: str, channels: int, classes: int) -> nn.Module:
    """The model of that name."""
    if kind == "deep":
        return GCN(channels, 64, 3, classes, dropout=0.5, norm="batch_norm")
    return Net(kind, channels, classes)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Adam, with the learning rate of the model's paper."""
    return torch.optim.Adam(model.parameters(), lr=0.005 if kind == "gat" else 0.01, weight_decay=5e-4)


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


def train_plain(kind: str, path: Path, seed: int, masks: str) -> float:
    """Test accuracy of plain PyG in this process."""
    graph = read(path)
    stored = graph.node_fields["node"]
    train, val, test = (torch.as_tensor(stored[masks + name]) for name in MASKS)
    x, y = normalised(stored["x"].to_dense()), torch.as_tensor(stored["y"]).long()
    edges = graph.edges[("node", "to", "node")]
    edge_index = torch.stack([torch.as_tensor(edges.src), torch.as_tensor(edges.dst)]).long()
    torch.manual_seed(seed)
    model = build(kind, x.size(1), int(y.max()) + 1)
    optimizer = optimizer_of(kind, model)
    best = (0.0, 0.0)
    for _ in range(epochs_of(kind)):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x, edge_index)[train], y[train]).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = model(x, edge_index).argmax(1) == y
        scores = (float(right[val].double().mean()), float(right[test].double().mean()))
        best = max(best, scores, key=lambda pair: pair[0])
    return best[1]


def train_sharded(comm: sp.Communicator, kind: str, store: str, seed: int, masks: str) -> float:
    """Test accuracy of the same model on sharded ranks."""
    torch.set_num_threads(1)
    graph = sp.load(store, comm)
    x, y = normalised(graph.x), graph.y.long()
    train, val, test = (graph.node[masks + name] for name in MASKS)
    sp.seed(seed, comm)
    model = sp.pyg.wrap(build(kind, graph.num_features, graph.num_classes), comm)
    optimizer = optimizer_of(kind, model)
    best = (0.0, 0.0)
    for _ in range(epochs_of(kind)):
        model.train()
        optimizer.zero_grad()
        sp.cross_entropy(model(x, graph), y, train, comm).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            out = model(x, graph)
        scores = (sp.accuracy(out, y, val, comm), sp.accuracy(out, y, test, comm))
        best = max(best, scores, key=lambda pair: pair[0])
    return best[1]


def epochs_of(kind: str) -> int:
    """How long a model trains."""
    return 100 if kind == "deep" else 200


def summary(found: dict[str, list[float]], **about: Any) -> dict[str, Any]:
    """Means and standard errors in per cent, and the difference."""
    means = {name: 100 * statistics.mean(scores) for name, scores in found.items()}
    plain = next(name for name in found if name != "shardpass")
    errors = {name: 100 * statistics.stdev(scores) / len(scores) ** 0.5 for name, scores in found.items()}
    return {
        **about,
        "mean": {name: round(mean, 2) for name, mean in means.items()},
        "standard_error": {name: round(e, 2) for name, e in errors.items()},
        "difference": round(means["shardpass"] - means[plain], 2),
        "standard_error_of_difference": round(sum(error**2 for error in errors.values()) ** 0.5, 2),
    }


def compare(comm: sp.Communicator, options: argparse.Namespace, folder: str) -> None:
    """Run all seeds; rank 0 prints."""
    launched = comm.size > 1
    ranks = comm.size if launched else options.ranks
    store = comm.all_gather_object(str(Path(folder) / "parts"))[0]
    if comm.rank == 0:
        sp.partition(options.graph, store, ranks, "random")
    found: dict[str, list[float]] = {"pyg": [], "shardpass": []}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        arguments = (options.model, store, seed, options.masks)
        if comm.rank == 0:
            found["pyg"].append(train_plain(options.model, options.graph, seed, options.masks))
        comm.barrier("plain PyG")
        if launched:
            found["shardpass"].append(train_sharded(comm, *arguments))
        else:
            found["shardpass"].append(sp.spawn(train_sharded, ranks, options.backend, args=arguments)[0])
        if comm.rank == 0:
            print(json.dumps({"seed": seed, **{name: round(100 * s[-1], 2) for name, s in found.items()}}), flush=True)
    if comm.rank == 0:
        about = {"graph": options.graph.stem, "model": options.model, "ranks": ranks, "seeds": options.seeds}
        print(json.dumps(summary(found, **about)))


def main() -> None:
    """Run the comparison of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("graph", type=Path)
    parser.add_argument("--model", choices=["gcn", "gat", "deep"], default="gcn")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2, help="without a launcher")
    parser.add_argument("--backend", choices=["threads", "processes"], default="threads", help="without a launcher")
    parser.add_argument("--masks", default="", help="what the names of the three masks begin with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        compare(sp.connect(), options, folder)


if __name__ == "__main__":
    main()
