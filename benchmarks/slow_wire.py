"""Epochs between three hosts of a slow network, with partial sums on the wire and without.

    python -m benchmarks.slow_wire                       # 100 Mbit/s, a graph like that of a shop's products
    python -m benchmarks.slow_wire --data FILE.npz --rate 1gbit

The hosts are network namespaces of this machine (`three_hosts.sh`), each with one rank, which talk by gloo. GCN and
GraphSAGE of three layers, 64 hidden, are trained on parts by METIS. Epochs with and without partial sums alternate;
the medians of their seconds, and the bytes that all ranks send in one, are printed with a bar.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv

import shardpass as sp
from shardpass.data import read

RANKS, HIDDEN, CLASSES, EPOCHS, BAR = 3, 64, 10, 8, 0.75
IN_EACH_HOST = """
rank=0
for holder in $NAMESPACES; do
    RANK=$rank LOCAL_RANK=0 nsenter -t $holder -n "$@" &
    rank=$((rank + 1))
done
wait
"""


class Net(nn.Module):
    """Three layers of a kind."""

    def __init__(self, kind: type[nn.Module], channels: int) -> None:
        super().__init__()
        widths = [channels, HIDDEN, HIDDEN, CLASSES]
        self.convs = nn.ModuleList([kind(*pair) for pair in pairwise(widths)])

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Logits."""
        for number, conv in enumerate(self.convs):
            x = conv(x.relu() if number else x, edge_index)
        return x


def write_store(file: str, path: str) -> None:
    """Partition the graph of an npz file, or one with the communities and hubs of a network of products."""
    if file:
        found = read(file)
        edges = found.edges[("node", "to", "node")]
        edge_index = torch.stack([torch.as_tensor(end).long() for end in (edges.src, edges.dst)])
        num_nodes = int(edge_index.max()) + 1
    else:
        num_nodes, num_edges, generator = 14_000, 240_000, torch.Generator().manual_seed(0)
        hub = (torch.rand(num_edges, generator=generator) ** 3 * 1_400).long()
        group = torch.randint(10, (num_edges,), generator=generator)
        away = torch.rand(num_edges, generator=generator) < 0.05
        ends = [torch.where(away, torch.randint(10, (num_edges,), generator=generator), group), group]
        other = torch.randint(1_400, (num_edges,), generator=generator)
        half = torch.stack([ends[0] * 1_400 + hub, ends[1] * 1_400 + other])
        edge_index = torch.cat([half, half.flip(0)], 1).unique(dim=1)
    torch.manual_seed(0)
    x, y = torch.randn(num_nodes, HIDDEN), torch.randint(CLASSES, (num_nodes,))
    sp.partition(Data(x=x, edge_index=edge_index, y=y, num_nodes=num_nodes), path, RANKS, "metis")


def train(path: str) -> None:
    """Train on one rank, and print the figures on rank 0."""
    torch.set_num_threads(1)
    comm = sp.connect("torch_distributed")
    graphs = {way: sp.load(path, comm, sp.Options(partial_sums=way, share_memory=False)) for way in (True, False)}
    for kind in (GCNConv, SAGEConv):
        epochs: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        runs = {}
        for way, graph in graphs.items():
            torch.manual_seed(0)
            model = sp.pyg.wrap(Net(kind, HIDDEN), comm)
            runs[way] = graph, model, torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(EPOCHS + 4):
            for way, (graph, model, optimizer) in runs.items():
                comm.barrier()
                start, before = time.perf_counter(), comm.bytes_sent
                optimizer.zero_grad()
                sp.cross_entropy(model(graph.x, graph.edge_index), graph.y, None, comm).backward()
                optimizer.step()
                comm.barrier()
                epochs[way].append((time.perf_counter() - start, sp.total(comm.bytes_sent - before, comm)))
        if comm.rank == 0:
            steady = {way: [epochs[way][number] for number in (5, 8, 9, 10, 11)] for way in epochs}  # not followed
            with_sums, without = ([median(one) for one in zip(*steady[way])] for way in (True, False))
            time_ratio, bytes_ratio = (one / other for one, other in zip(with_sums, without))
            print(
                f"{kind.__name__}: an epoch {with_sums[0]:.3f} s, {without[0]:.3f} without partial sums, "
                f"{time_ratio:.3f} times; {with_sums[1] / 1e6:.2f} MB, {without[1] / 1e6:.2f}, "
                f"{bytes_ratio:.3f} times. At most {BAR}: {'holds' if time_ratio <= BAR else 'does NOT hold'}.",
                flush=True,
            )


def main() -> None:
    """Write the store and start the hosts, or train in one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="an npz file with a graph")
    parser.add_argument("--rate", default="100mbit", help="how fast a host sends, as `tc` takes it; empty for no limit")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        return train(args.train)
    with tempfile.TemporaryDirectory() as folder:
        write_store(args.data, f"{folder}/store")
        hosts = Path(__file__).with_name("three_hosts.sh")
        rank = [sys.executable, "-m", "benchmarks.slow_wire", "--train", f"{folder}/store"]
        environment = {**os.environ, "RATE": args.rate, "LOST": "", "OMP_NUM_THREADS": "1"}
        command = ["unshare", "-rn", "bash", str(hosts), "bash", "-c", IN_EACH_HOST, "-", *rank]
        subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
