"""Mean test accuracy over seeds: DGL in one process beside the same DGL model on ranks, from DGL's own partition.

    python -m benchmarks.accuracy_dgl cora.npz --model sage --seeds 5 --ranks 4
    mpirun -n 4 python -m benchmarks.accuracy_dgl computers.npz --model gat --masks made_

The graph is cut by `dgl.distributed.partition_graph`, whose directory `shardpass.partition` reads. Two layers:
GraphSAGE (mean, 64 hidden, dropout 0.5) or GAT (4 heads of 16, dropout 0.5); Adam, row-normalised features, 100 epochs;
the test accuracy of the epoch with the best validation accuracy. Under a launcher the ranks are its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import dgl
import torch
import torch.nn.functional as F
from dgl.nn import GATConv, SAGEConv
from torch import Tensor, nn

import shardpass as sp
from benchmarks.accuracy import MASKS, normalised, summary
from shardpass.data import read

EPOCHS = 100


class Net(nn.Module):
    """Two layers of GraphSAGE or GAT."""

    def __init__(self, kind: str, channels: int, classes: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "sage":
            self.first, self.second = SAGEConv(channels, 64, "mean"), SAGEConv(64, classes, "mean")
        else:
            loose = {"allow_zero_in_degree": True}
            self.first, self.second = GATConv(channels, 16, 4, **loose), GATConv(64, classes, 1, **loose)

    def forward(self, g: Any, x: Tensor) -> Tensor:
        x = self.first(g, F.dropout(x, 0.5, self.training)).flatten(1).relu()
        x = self.second(g, F.dropout(x, 0.5, self.training))
        return x if self.kind == "sage" else x.mean(1)


def as_dgl(path: Path) -> Any:
    """The graph of an `.npz` as a DGLGraph."""
    raw = read(path).validate()
    ends = raw.edges[("node", "to", "node")]
    g = dgl.graph((ends.src.long(), ends.dst.long()), num_nodes=raw.num_nodes["node"])
    fields = raw.node_fields["node"]
    x = fields["x"] if isinstance(fields["x"], Tensor) else fields["x"].to_dense()
    g.ndata.update({name: torch.as_tensor(value) for name, value in fields.items() if name != "x"})
    g.ndata.update(x=normalised(x.float()), y=torch.as_tensor(fields["y"]).long())
    return g


def best_of(model: nn.Module, step: Any, scores: Any) -> float:
    """Test accuracy of the epoch with the best validation accuracy."""
    best = (0.0, 0.0)
    for _ in range(EPOCHS):
        model.train()
        step()
        model.eval()
        with torch.no_grad():
            best = max(best, scores(), key=lambda pair: pair[0])
    return best[1]


def train_plain(g: Any, kind: str, seed: int, masks: str) -> float:
    """Test accuracy of DGL in this process."""
    x, y = g.ndata["x"], g.ndata["y"]
    train, val, test = (g.ndata[masks + name].bool() for name in MASKS)
    torch.manual_seed(seed)
    model = Net(kind, x.size(1), int(y.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(g, x)[train], y[train]).backward()
        optimizer.step()

    def scores() -> tuple[float, float]:
        right = model(g, x).argmax(1) == y
        return float(right[val].double().mean()), float(right[test].double().mean())

    return best_of(model, step, scores)


def train_sharded(comm: sp.Communicator, kind: str, store: str, seed: int, masks: str) -> float:
    """Test accuracy of the same model on sharded ranks."""
    torch.set_num_threads(1)
    graph = sp.load(store, comm)
    x, y = graph.x, graph.y
    train, val, test = (graph.node[masks + name] for name in MASKS)
    sp.seed(seed, comm)
    model = sp.dgl.wrap(Net(kind, graph.num_features, graph.num_classes), comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step() -> None:
        optimizer.zero_grad()
        sp.cross_entropy(model(graph, x), y, train, comm).backward()
        optimizer.step()

    def scores() -> tuple[float, float]:
        out = model(graph, x)
        return sp.accuracy(out, y, val, comm), sp.accuracy(out, y, test, comm)

    return best_of(model, step, scores)


def compare(comm: sp.Communicator, options: argparse.Namespace, folder: Path) -> None:
    """Run all seeds; rank 0 prints."""
    launched = comm.size > 1
    ranks = comm.size if launched else options.ranks
    store = comm.all_gather_object(str(folder / "parts"))[0]
    if comm.rank == 0:
        g = as_dgl(options.graph)
        dgl.distributed.partition_graph(g, "graph", ranks, str(folder / "dgl"), part_method="metis")
        sp.partition(folder / "dgl" / "graph.json", store)
    comm.barrier("partitioned")
    found: dict[str, list[float]] = {"dgl": [], "shardpass": []}
    for seed in range(options.seeds):
        arguments = (options.model, store, seed, options.masks)
        if comm.rank == 0:
            found["dgl"].append(train_plain(g, options.model, seed, options.masks))
        comm.barrier("plain DGL")
        if launched:
            found["shardpass"].append(train_sharded(comm, *arguments))
        else:
            found["shardpass"].append(sp.spawn(train_sharded, ranks, args=arguments)[0])
        if comm.rank == 0:
            print(json.dumps({"seed": seed, **{name: round(100 * s[-1], 2) for name, s in found.items()}}), flush=True)
    if comm.rank == 0:
        about = {"graph": options.graph.stem, "model": options.model, "ranks": ranks, "seeds": options.seeds}
        print(json.dumps(summary(found, **about)))


def main() -> None:
    """Run the comparison of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("graph", type=Path)
    parser.add_argument("--model", choices=["sage", "gat"], default="sage")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4, help="without a launcher")
    parser.add_argument("--masks", default="", help="what the names of the three masks begin with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        compare(sp.connect(), options, Path(folder))


if __name__ == "__main__":
    main()
