"""Train a DGL GraphSAGE on sampled blocks of the handwritten digits, then infer exactly on the whole graph.

    python examples/sampling_dgl.py
    mpirun -n 4 python examples/sampling_dgl.py

What differs from a script for one process is marked with #."""

import os

import dgl
import torch
from dgl.nn import SAGEConv

import shardpass as sp
from shardpass.cli.graphs import digits


class SAGE(torch.nn.Module):
    def __init__(self, channels, hidden, classes):
        super().__init__()
        self.first, self.second = SAGEConv(channels, hidden, "mean"), SAGEConv(hidden, classes, "mean")

    def forward(self, blocks, x):
        return self.second(blocks[1], self.first(blocks[0], x).relu())


def main():
    torch.set_num_threads(1)
    comm = sp.connect()  #
    folder = "digits-parts"
    if comm.rank == 0 and not os.path.exists(folder):
        sp.partition(digits(), folder, parts=4)
    comm.barrier()  #
    graph = sp.load(folder, comm)  #
    with sp.seed(0, comm):  #
        model = SAGE(graph.num_features, 64, graph.num_classes)
    exact = sp.dgl.exact(model, comm)  # the same parameters, on the whole graph
    sampler = dgl.dataloading.NeighborSampler([5, 5])
    batch_size = 128 // comm.size  # so that steps are the same on any number of ranks
    loader = sp.dgl.DataLoader(graph, graph.train_mask, sampler, batch_size=batch_size, shuffle=True)  #
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(10):
        for _input_nodes, _output_nodes, blocks in loader:
            out = model(blocks, blocks[0].srcdata["x"])
            loss = sp.cross_entropy(out, blocks[-1].dstdata["y"], None, comm)  # the mean over all ranks' seeds
            optimizer.zero_grad()
            loss.backward()
            sp.sync_gradients(model, comm)  #
            optimizer.step()
    with torch.no_grad():
        accuracy = sp.accuracy(exact([graph, graph], graph.x), graph.y, graph.test_mask, comm)  #
    if comm.rank == 0:
        print(f"loss {loss.item():.4f}, test accuracy {accuracy:.4f} on {comm.size} rank(s)")


if __name__ == "__main__":
    main()
