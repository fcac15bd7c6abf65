"""A big graph in one process: two lines change a script of PyG, and a step needs less memory.

    python examples/one_device.py                # on the GPU, where there is one
    python examples/one_device.py 1000000 30     # nodes, and edges for each
    python examples/one_device.py 20000 20 cpu

A GAT is trained on a random graph, sharded in memory and with PyG alone, from the same weights.
"""

import sys
import time

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GAT

import shardpass as sp
from shardpass.cli.memory import PeakMeter


def random_graph(nodes, degree, device):
    draws = torch.Generator().manual_seed(0)
    edges = torch.randint(0, nodes, (2, nodes * degree), generator=draws)
    x, y = torch.randn(nodes, 32, generator=draws), torch.randint(0, 8, (nodes,), generator=draws)
    return Data(x=x, y=y, edge_index=edges).to(device)


def new_model(device):
    torch.manual_seed(0)
    return GAT(32, 64, num_layers=2, out_channels=8, heads=4).to(device)


def steps(name, model, x, edges, y):
    """Train for four steps, and print the last loss, the time of the fastest step and the peak of memory."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    best = float("inf")
    for number in range(4):
        if number == 1:  # the first step compiles
            meter = PeakMeter()
            if x.is_cuda:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        loss = F.cross_entropy(model(x, edges), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()  # which waits for the GPU
        best = min(best, time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() - before if x.is_cuda else meter.peak()
    print(f"{name}: loss {value:.4f}, {best:.2f} s a step, {peak / 2**20:.0f} MiB at its peak")


def main():
    found = "cuda" if torch.cuda.is_available() else "cpu"
    nodes, degree, device = (*sys.argv[1:], *("20000", "20", found)[len(sys.argv) - 1 :])
    data = random_graph(int(nodes), int(degree), device)

    graph = sp.shard(data)
    model = sp.pyg.wrap(new_model(device))
    steps("shardpass", model, graph.x, graph, graph.y)
    del graph, model

    steps("PyG", new_model(device), data.x, data.edge_index, data.y)


if __name__ == "__main__":
    main()
