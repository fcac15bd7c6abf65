"""Train unmodified DGL models, GraphSAGE then GAT, on the handwritten digits of scikit-learn, on one rank or several.

    python examples/train_dgl.py
    mpirun -n 4 python examples/train_dgl.py

What differs from a script for one process is marked with #."""

import os

import torch
from dgl.nn import GATConv, SAGEConv

import shardpass as sp
from shardpass.cli.graphs import digits


class SAGE(torch.nn.Module):
    def __init__(self, channels, hidden, classes):
        super().__init__()
        self.first, self.second = SAGEConv(channels, hidden, "mean"), SAGEConv(hidden, classes, "mean")

    def forward(self, g, x):
        return self.second(g, self.first(g, x).relu())


class GAT(torch.nn.Module):
    def __init__(self, channels, hidden, classes):
        super().__init__()
        self.first, self.second = GATConv(channels, hidden // 8, 8), GATConv(hidden, classes, 1)

    def forward(self, g, x):
        return self.second(g, self.first(g, x).flatten(1).relu()).mean(1)


def main():
    torch.set_num_threads(1)
    comm = sp.connect()  #
    folder = "digits-parts"
    if comm.rank == 0 and not os.path.exists(folder):
        sp.partition(digits(), folder, parts=4)  # a DGLGraph, or the .json of a DGL partition, can be given as well
    comm.barrier()  #
    graph = sp.load(folder, comm)  #
    for Model in (SAGE, GAT):
        with sp.seed(0, comm):  #
            model = Model(graph.num_features, 64, graph.num_classes)
        sp.dgl.wrap(model, comm)  #
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(40):
            loss = sp.cross_entropy(model(graph, graph.x), graph.y, graph.train_mask, comm)  # graph: the DGLGraph
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = sp.accuracy(model(graph, graph.x), graph.y, graph.test_mask, comm)  #
        if comm.rank == 0:
            print(f"{Model.__name__}: loss {loss.item():.4f}, test accuracy {accuracy:.4f} on {comm.size} rank(s)")


if __name__ == "__main__":
    main()
