"""Measure what the check of `wrap` costs: benchmarks/reports/check-cost-YYYY-MM-DD.md.

    python -m benchmarks.check_cost

A GAT of three layers trains on one rank with and without the check, on two graphs. The check follows
calls 1, 2, 4, 8, ... of each training mode, so its cost is told for the first call, for a followed call, and for a run
of 200 epochs. CPU seconds of the process, one thread.
"""

from __future__ import annotations

import datetime
import time
from statistics import median
from typing import Any

import torch
import torch_geometric.nn as gnn

import shardpass as sp
from benchmarks.graphs import make_graph
from benchmarks.machine import REPORTS, machine
from shardpass.testing import WholeGraph, shard_in_memory

GRAPHS = {"Cora's size": "powerlaw:2700:4", "30,000 nodes, 1.5 M edges": "dense:30000:50"}
CALLS, EPOCHS = 16, 200


def epochs(graph: Any, checks: bool) -> list[float]:
    """CPU seconds of each of the first epochs of a fresh model."""
    torch.manual_seed(0)
    model = sp.pyg.wrap(gnn.GAT(graph.x.size(1), 16, 3, 8, heads=4), graph.comm, check=checks)
    optimizer, seconds = torch.optim.Adam(model.parameters()), []
    for _ in range(CALLS):
        start = time.process_time()
        optimizer.zero_grad()
        sp.cross_entropy(model(graph.x, graph), graph.y, None, graph.comm).backward()
        sp.sync_gradients(model, graph.comm)
        optimizer.step()
        seconds.append(time.process_time() - start)
    return seconds


def line(name: str, spec: str) -> str:
    """The row of the table for a graph."""
    data = {name: torch.as_tensor(values) for name, values in make_graph(spec).items()}
    whole = WholeGraph(len(data["x"]), data["edge_index"], {"x": data["x"], "y": data["y"] % 8})
    graph = shard_in_memory(whole, torch.zeros(len(data["x"]), dtype=torch.int64), sp.connect("local"))
    epochs(graph, False)  # compiles
    runs = {checks: [epochs(graph, checks) for _ in range(3)] for checks in (False, True)}
    plain = median(second for run in runs[False] for second in run[1:])
    first = {checks: median(run[0] for run in runs[checks]) for checks in runs}
    followed = median(run[number - 1] for run in runs[True] for number in (2, 4, 8, 16)) - plain
    share = (first[True] - first[False] + followed * EPOCHS.bit_length() - followed) / (EPOCHS * plain)
    return f"| {name} | {plain * 1e3:.1f} | {first[True] - first[False]:.3f} | {followed * 1e3:.1f} | {share:.1%} |"


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    today = datetime.date.today().isoformat()
    head = [
        "graph",
        "an epoch, ms",
        "the first call takes longer by, s",
        "a followed epoch by, ms",
        f"of {EPOCHS} epochs",
    ]
    rows = [line(*item) for item in GRAPHS.items()]
    text = [f"# What the check costs, {today}", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head), *rows, ""]
    text += [f"- {name}: {value}" for name, value in machine().items()]
    (REPORTS / f"check-cost-{today}.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
