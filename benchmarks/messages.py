"""Measure message functions that no closed form matches, beside plain PyG: CPU seconds of an epoch, one thread.

    python -m benchmarks.messages --nodes 50000 --degree 31 --layers EdgeConv GINEConv

Two layers of 64 channels train on one rank; PyG trains the same model on the same graph in the same process, in turn,
and the best of the epochs counts. The bar is four times PyG's speed, or 1.5 times the floor: the time that the linear
maps inside the message take alone, in chunks that stay in cache, since SAR runs a message function twice forward (once
to add up, once for gradients) and once backward.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as gnn
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import shardpass as sp
from benchmarks.graphs import dense_edges
from shardpass.testing import WholeGraph, shard_in_memory

WIDTH, CHUNK_BYTES = 64, 1 << 20
WITH_EDGES = ("GINEConv", "CGConv")


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def _layers(degrees: Tensor) -> dict[str, Callable[[], nn.Module]]:
    aggregators, scalers = ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"]
    return {
        "PNAConv": lambda: gnn.PNAConv(WIDTH, WIDTH, aggregators, scalers, degrees),
        "EdgeConv": lambda: gnn.EdgeConv(_mlp(2 * WIDTH)),
        "GENConv": lambda: gnn.GENConv(WIDTH, WIDTH),
        "CGConv": lambda: gnn.CGConv(WIDTH, WIDTH),
        "GINEConv": lambda: gnn.GINEConv(_mlp(WIDTH)),
        "ResGatedGraphConv": lambda: gnn.ResGatedGraphConv(WIDTH, WIDTH),
    }


def _maps_of_messages(name: str) -> nn.Module | None:
    """The linear maps that a layer applies to each edge, from both ends (and the edge) to a message."""
    if name == "EdgeConv":
        return _mlp(2 * WIDTH)
    if name == "CGConv":
        return nn.Linear(3 * WIDTH, 2 * WIDTH)  # lin_f and lin_s side by side
    return nn.Linear(2 * WIDTH, WIDTH) if name == "PNAConv" else None


class Model(nn.Module):
    """Two layers of one kind."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, x: Tensor, edge_index: Any, *edges: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index, *edges).relu(), edge_index, *edges)


def _seconds(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def _floor(maps: nn.Module, num_edges: int) -> float:
    """CPU seconds of the linear maps of two layers: forward twice and backward once over all edges."""
    width = next(maps.parameters()).shape[1]
    chunk = CHUNK_BYTES // (4 * width)
    rows = torch.randn(chunk, width, requires_grad=True)
    grad = torch.ones_like(maps(rows))

    def once() -> None:
        with torch.no_grad():
            maps(rows)
        torch.autograd.grad(maps(rows), [rows, *maps.parameters()], grad)

    once()
    count = max(1, min(100, num_edges // chunk))
    return _seconds(lambda: [once() for _ in range(count)]) * num_edges / chunk / count * 2


def _epoch(model: nn.Module, x: Tensor, *graph: Any) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad()
        model(x, *graph).square().mean().backward()

    return run


def measure(name: str, edge_index: Tensor, num_nodes: int, epochs: int) -> list[str]:
    """The row of the table for one layer."""
    comm, num_edges = sp.connect("local"), edge_index.size(1)
    x, e = torch.randn(num_nodes, WIDTH), torch.randn(num_edges, WIDTH if name in WITH_EDGES else 1)
    whole = WholeGraph(num_nodes, edge_index, {"x": x}, {"e": e})
    graph = shard_in_memory(whole, torch.zeros(num_nodes, dtype=torch.int64), comm)
    torch.manual_seed(0)
    plain = Model(_layers(torch.bincount(torch.bincount(edge_index[1], minlength=num_nodes)))[name])
    sharded = sp.pyg.wrap(copy.deepcopy(plain), comm)
    own_edges = (graph.edge["e"],) if name in WITH_EDGES else ()
    edges = (e,) if name in WITH_EDGES else ()
    x = x.requires_grad_()
    runs = {
        "shardpass": _epoch(sharded, graph.x.clone().requires_grad_(), graph, *own_edges),
        "PyG": _epoch(plain, x, edge_index, *edges),
    }
    best = {kind: float("inf") for kind in runs}
    for number in range(epochs + 1):  # the first one compiles
        for kind, run in runs.items():
            taken = _seconds(run)
            best[kind] = min(best[kind], taken) if number else best[kind]
    maps = _maps_of_messages(name)
    floor = _floor(maps, num_edges) if maps is not None else 0.0
    ratio, above = best["PyG"] / best["shardpass"], best["shardpass"] / floor if floor else float("inf")
    verdict = "holds" if ratio >= 4 or above <= 1.5 else "does not hold"
    shown = f"{floor:.2f}", f"{above:.2f}" if floor else "-"
    return [name, f"{best['PyG']:.2f}", f"{best['shardpass']:.2f}", f"{ratio:.1f}", *shown, verdict]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--degree", type=int, default=31)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--layers", nargs="*", default=list(_layers(torch.ones(1))), help="names of PyG's layers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    edge_index = torch.as_tensor(dense_edges(args.nodes, args.degree)).long()
    table = Table("layer", "PyG, s", "shardpass, s", "times faster", "floor, s", "of the floor", "bar")
    for name in args.layers:
        table.add_row(*measure(name, edge_index, args.nodes, args.epochs))
    Console().print(table)


if __name__ == "__main__":
    main()
