"""Accuracy over CPU seconds and over bytes sent: training on the whole graph beside sampled neighbourhoods.

    python -m benchmarks.worth_it amazon_computers.npz --model sage
    python -m benchmarks.worth_it amazon_computers.npz --model gat --ways "whole 1" "whole 4" "sampled ours"

A random split of 60, 20 and 20 percent of the nodes. Models and settings are those of "Classic GNNs are strong
baselines" (Luo et al., NeurIPS 2024) for amazon computers: layers with LayerNorm, ReLU and dropout, a linear map at the
end; Adam, learning rate 0.001, weight decay 5e-5. Ways: the whole graph on 1 or 4 ranks; PyG's NeighborLoader in one
process ("sampled pyg"; it needs pyg-lib or torch-sparse), and the sampler of this package ("sampled ours").
Each way has the better of two learning rates, by validation, and sampling the better of two fanouts too. It runs until
its CPU seconds, summed over ranks and without evaluation, are used up. All are evaluated by exact inference. The test
accuracy is that of the best validation so far. Writes a JSON file and a picture into the folder of reports.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from torch_geometric.utils import add_self_loops

import shardpass as sp
from benchmarks.machine import REPORTS, machine
from shardpass.data import read

Record = dict[str, Any]
SETTINGS: dict[str, tuple[Callable[[int, int], nn.Module], int, int, float]] = {
    "gcn": (GCNConv, 512, 3, 0.5),
    "sage": (SAGEConv, 64, 4, 0.3),
    "gat": (lambda i, o: GATConv(i, o, 1, concat=False, add_self_loops=False, bias=False), 64, 2, 0.5),
}
"""By name: the layer, its width, how many, and the dropout."""
FANOUTS, RATES, BATCH, POINTS = (5, 10), (0.001, 0.003), 512, 40
WAYS = ("whole 1", "whole 4", "sampled pyg", "sampled ours")


class Net(nn.Module):
    """Layers of a kind with LayerNorm, ReLU and dropout, and a linear map."""

    def __init__(self, kind: str, channels: int, classes: int) -> None:
        super().__init__()
        make, width, count, self.dropout = SETTINGS[kind]
        widths = [channels, *[width] * count]
        self.convs = nn.ModuleList(make(*pair) for pair in pairwise(widths))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in self.convs)
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Logits."""
        for conv, norm in zip(self.convs, self.norms):
            x = F.dropout(norm(conv(x, edge_index)).relu(), self.dropout, self.training)
        return self.last(x)


def graph_of(path: Path, seed: int) -> Data:
    """The graph with a self-loop at each node, and masks of a random split."""
    found: Any = read(path)
    fields, edges = found.node_fields["node"], found.edges[("node", "to", "node")]
    x, y = fields["x"].to_dense().float(), fields["y"].long()
    edge_index, _ = add_self_loops(torch.stack([edges.src, edges.dst]).long(), num_nodes=len(y))
    data, count = Data(x=x, y=y, edge_index=edge_index), len(y)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    for name, part in zip(("train", "val", "test"), order.tensor_split([int(0.6 * count), int(0.8 * count)])):
        data[f"{name}_mask"] = torch.zeros(count, dtype=torch.bool).index_fill_(0, part, True)
    return data


def train(comm: sp.Communicator, folder: str, kind: str, way: str, rate: float, fanout: int, seconds: float) -> Record:
    """The curve of one way: after each epoch that was evaluated, what it had cost and the accuracies."""
    torch.set_num_threads(1)
    graph: Any = sp.load(f"{folder}/parts", comm, sp.Options(share_memory=False))  # as between hosts
    torch.manual_seed(0)
    model = Net(kind, graph.num_features, graph.num_classes)
    exact = sp.pyg.wrap(model, comm) if way.startswith("whole") else sp.pyg.exact(model, comm)
    optimizer = torch.optim.Adam(exact.parameters(), lr=rate, weight_decay=5e-5)
    epoch = _epoch(comm, folder, kind, way, fanout, graph, model, exact, optimizer)
    used = [0.0, 0.0, 0.0]  # CPU seconds of all ranks, bytes sent, seconds
    curve: list[Record] = []
    epochs = 0
    while used[0] < seconds:
        before = [time.process_time(), float(comm.bytes_sent), time.perf_counter()]
        epoch()
        mine = [time.process_time() - before[0], comm.bytes_sent - before[1], time.perf_counter() - before[2]]
        every = comm.all_gather_object(mine, "cost")
        used = [used[0] + sum(c for c, *_ in every), used[1] + sum(b for _, b, _ in every), used[2] + mine[2]]
        epochs += 1
        if used[0] >= seconds * len(curve) / POINTS:
            with torch.no_grad():
                out = exact.eval()(graph.x, graph.edge_index)
                val, test = (sp.accuracy(out, graph.y, graph.node[f"{name}_mask"], comm) for name in ("val", "test"))
            exact.train()
            cost = dict(zip(("cpu", "bytes", "seconds"), used))
            curve.append({**cost, "epochs": epochs, "val": val, "test": test})
    return {"way": way, "rate": rate, "fanout": fanout, "curve": curve}


def _epoch(
    comm: sp.Communicator, folder: str, kind: str, way: str, fanout: int, graph: Any, model: nn.Module,
    exact: nn.Module, optimizer: torch.optim.Optimizer,
) -> Callable[[], None]:  # fmt: skip
    """What trains for one epoch."""

    def whole() -> None:
        loss = sp.cross_entropy(exact(graph.x, graph.edge_index), graph.y, graph.train_mask, comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if way.startswith("whole"):
        return whole
    fanouts = [fanout] * SETTINGS[kind][2]
    if way == "sampled pyg":
        data = torch.load(f"{folder}/data.pt", weights_only=False)
        loader: Any = NeighborLoader(data, fanouts, data.train_mask, batch_size=BATCH, shuffle=True)
    else:
        loader = sp.pyg.NeighborLoader(graph, fanouts, graph.train_mask, batch_size=BATCH, shuffle=True)

    def sampled() -> None:
        for batch in loader:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return sampled


def best_of(curve: list[Record]) -> list[float]:
    """The test accuracy of the best validation so far, at each point."""
    found, best = [], (-1.0, 0.0)
    for point in curve:
        best = max(best, (point["val"], point["test"]), key=lambda pair: pair[0])
        found.append(best[1])
    return found


def reached(run: Record, accuracy: float, cost: str) -> str:
    """What `cost` it took to a test accuracy."""
    at = next((p[cost] for p, best in zip(run["curve"], best_of(run["curve"])) if best >= accuracy), None)
    return "never" if at is None else f"{at / (1e6 if cost == 'bytes' else 1):,.0f}"


def picture(runs: list[Record], path: Path, title: str) -> None:
    """Accuracy over CPU seconds, and over bytes where any were sent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axis, cost, words in zip(figure.subplots(1, 2, sharey=True), ("cpu", "bytes"), ("CPU seconds", "bytes sent")):
        for run in runs:
            if run["curve"][-1][cost]:
                axis.plot([p[cost] for p in run["curve"]], best_of(run["curve"]), label=run["way"])
        axis.set_xlabel(f"{words}, of all ranks")
        if axis.lines:
            axis.legend()
    figure.axes[0].set_ylabel("test accuracy")
    figure.suptitle(title)
    figure.savefig(path)


def report(name: str, kind: str, seconds: float, runs: list[Record]) -> str:
    """The table as Markdown."""
    top = max(best_of(run["curve"])[-1] for run in runs)
    lines = [
        f"| {name}, {kind} | learning rate | fan-out | epochs | accuracy | CPU s to {top - 0.01:.3f} | "
        f"CPU s to {top - 0.005:.3f} | MB sent to {top - 0.005:.3f} |",
        "|" + "---|" * 8,
    ]
    for run in runs:
        fanout = run["fanout"] if run["way"].startswith("sampled") else "-"
        costs = [reached(run, top - 0.01, "cpu"), *(reached(run, top - 0.005, cost) for cost in ("cpu", "bytes"))]
        cells = [
            run["way"],
            run["rate"],
            fanout,
            run["curve"][-1]["epochs"],
            f"{best_of(run['curve'])[-1]:.4f}",
            *costs,
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + f"\n\n{seconds:.0f} CPU seconds each.\n"


def runs_of(folder: str, data: Data, kind: str, ways: list[str], seconds: float) -> Iterator[Record]:
    """The curve of each way; of its settings, the one with the best validation."""
    torch.save(data, f"{folder}/data.pt")
    for way in ways:
        ranks = int(way.split()[1]) if way.startswith("whole") else 1
        sp.partition(data, f"{folder}/parts", ranks, "kaminpar", overwrite=True)
        settings = [*product(RATES, FANOUTS if way.startswith("sampled") else (0,))]
        tried = [
            sp.spawn(train, ranks, "processes", args=(folder, kind, way, *setting, seconds))[0] for setting in settings
        ]
        yield max(tried, key=lambda run: max(point["val"] for point in run["curve"]))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", type=Path)
    parser.add_argument("--model", choices=[*SETTINGS], default="sage")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=240.0, help="CPU seconds of each way")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    data = graph_of(args.graph, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for run in runs_of(folder, data, args.model, args.ways, args.seconds):
            runs.append(run)
            print(f"{run['way']}: {best_of(run['curve'])[-1]:.4f}", flush=True)
    name = f"worth-it-{args.graph.stem.replace('_', '-')}-{args.model}-{datetime.date.today()}"
    found = {"machine": machine(), "seconds": args.seconds, "seed": args.seed, "runs": runs}
    (REPORTS / f"{name}.json").write_text(json.dumps(found) + "\n")
    picture(runs, REPORTS / f"{name}.svg", f"{args.graph.stem}, {args.model}")
    print(report(args.graph.stem, args.model, args.seconds, runs))


if __name__ == "__main__":
    main()
