"""Mean test accuracy of sampled training: DGL's own loader in one process, ours on 1, 2 and 4 ranks.

    python -m benchmarks.accuracy_sampling cora.npz --seeds 20 --epochs 20 --json cora.json
    python -m benchmarks.accuracy_sampling computers.npz --masks made_ --epochs 60

GraphSAGE of two layers (mean, 64 hidden, dropout 0.5), 5 and 5 neighbours, Adam, row-normalised features. A step has
the same number of seeds whatever the ranks, so an epoch has the same number of optimizer steps. Training is sampled;
accuracy is that of exact inference on the whole graph by the same model, every 5 epochs: the test accuracy where that
of validation is best. Ranks are processes, a thread each. Prints, in per cent, the mean over seeds, the standard
deviation, and the difference from DGL's loader with its standard error, sqrt(s_1^2 / n + s_2^2 / n); seeds are not
paired.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dgl
import torch
import torch.nn.functional as F
from dgl.nn import SAGEConv
from torch import Tensor, nn

import shardpass as sp
from benchmarks.accuracy import MASKS
from benchmarks.accuracy_dgl import as_dgl
from benchmarks.machine import revision

FANOUTS, EVERY = [5, 5], 5


class Net(nn.Module):
    """Two layers, each on a block of its own, or on the same graph."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(channels, 64, "mean"), SAGEConv(64, classes, "mean")

    def forward(self, blocks: Any, x: Tensor) -> Tensor:
        x = self.first(blocks[0], F.dropout(x, 0.5, self.training)).relu()
        return self.second(blocks[1], F.dropout(x, 0.5, self.training))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)


def train_dgl(g: Any, seed: int, masks: str, batch_size: int, epochs: int) -> float:
    """Test accuracy with DGL's loader in this process."""
    train, val, test = (g.ndata[masks + name].bool() for name in MASKS)
    torch.manual_seed(seed)
    dgl.seed(seed)
    model = Net(g.ndata["x"].size(1), int(g.ndata["y"].max()) + 1)
    optimizer, sampler = optimizer_of(model), dgl.dataloading.NeighborSampler(FANOUTS)
    loader = dgl.dataloading.DataLoader(g, train.nonzero().view(-1), sampler, batch_size=batch_size, shuffle=True)
    best = (0.0, 0.0)
    for epoch in range(1, epochs + 1):
        for _, _, blocks in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(blocks, blocks[0].srcdata["x"]), blocks[-1].dstdata["y"]).backward()
            optimizer.step()
        if epoch % EVERY == 0:
            model.eval()
            with torch.no_grad():
                right = model([g, g], g.ndata["x"]).argmax(1) == g.ndata["y"]
            scores = (float(right[val].double().mean()), float(right[test].double().mean()))
            best = max(best, scores, key=lambda pair: pair[0])
            model.train()
    return best[1]


def train_ours(
    comm: sp.Communicator, store: str, seeds: Sequence[int], masks: str, batch_size: int, epochs: int
) -> list[float]:
    """The same on ranks, for each seed."""
    torch.set_num_threads(1)
    graph = sp.load(store, comm)
    return [_train_ours(comm, graph, seed, masks, batch_size, epochs) for seed in seeds]


def _train_ours(
    comm: sp.Communicator, graph: sp.ShardedGraph, seed: int, masks: str, batch_size: int, epochs: int
) -> float:
    train, val, test = (graph.node[masks + name] for name in MASKS)
    with sp.seed(seed, comm):
        model = Net(graph.num_features, graph.num_classes)
    exact = sp.dgl.exact(model, comm)
    sampler = dgl.dataloading.NeighborSampler(FANOUTS, prefetch_node_feats=["x"], prefetch_labels=["y"])
    loader = sp.dgl.DataLoader(graph, train, sampler, batch_size // comm.size, shuffle=True, seed=seed)
    optimizer = optimizer_of(model)
    best = (0.0, 0.0)
    for epoch in range(1, epochs + 1):
        for _, _, blocks in loader:
            optimizer.zero_grad()
            out = model(blocks, blocks[0].srcdata["x"])
            sp.cross_entropy(out, blocks[-1].dstdata["y"], None, comm).backward()
            sp.sync_gradients(model, comm)
            optimizer.step()
        if epoch % EVERY == 0:
            with torch.no_grad():
                out = exact([graph, graph], graph.x)
            scores = (sp.accuracy(out, graph.y, val, comm), sp.accuracy(out, graph.y, test, comm))
            best = max(best, scores, key=lambda pair: pair[0])
    return best[1]


def compared(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Per case, in per cent: mean, standard deviation, difference from the first case and its standard error."""
    first = next(iter(found.values()))
    rows = {}
    for name, scores in found.items():
        variance, first_variance = (statistics.variance(s) if len(s) > 1 else float("nan") for s in (scores, first))
        rows[name] = {
            "mean": 100 * statistics.mean(scores),
            "std": 100 * variance**0.5,
            "difference": 100 * (statistics.mean(scores) - statistics.mean(first)),
            "standard error": 100 * (variance / len(scores) + first_variance / len(first)) ** 0.5,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("graph", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0, help="the seeds are this and the next ones")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--masks", default="", help="what the names of the three masks begin with")
    parser.add_argument("--json", type=Path, help="write the settings and the accuracy of every seed here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    g, seeds = as_dgl(given.graph), range(given.first_seed, given.first_seed + given.seeds)
    setting = given.masks, given.batch_size, given.epochs
    settings = {"graph": given.graph.stem, "epochs": given.epochs, "batch_size": given.batch_size}
    settings |= {"revision": revision()}
    found = {"DGL, one process": [train_dgl(g, seed, *setting) for seed in seeds]}
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "parts")
        sp.partition(g, store, max(given.ranks), "random")
        for ranks in given.ranks:
            every = sp.spawn(train_ours, ranks, "processes", args=(store, seeds, *setting))
            found[f"{ranks} rank(s)"] = every[0]
            rows = {name: {k: round(v, 2) for k, v in row.items()} for name, row in compared(found).items()}
            print(json.dumps({**settings, "per cent": rows}), flush=True)
            if given.json is not None:
                given.json.write_text(json.dumps({**settings, "accuracy": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
