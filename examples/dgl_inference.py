"""Inference over a whole graph, on 4 ranks, with a model that was trained elsewhere by plain DGL.

python examples/dgl_inference.py
"""

import copy

import dgl
import torch
from dgl.nn import GraphConv

import shardpass as sp
from shardpass.cli.graphs import digits


class GCN(torch.nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.first, self.second = GraphConv(channels, 32), GraphConv(32, classes)

    def forward(self, g, x):
        return self.second(g, self.first(g, x).relu())


def train_elsewhere(g):
    """A few epochs of ordinary DGL, in one process, on the whole graph."""
    model = GCN(64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(model(g, g.ndata["x"]), g.ndata["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main():
    torch.manual_seed(0)
    arrays = {name: torch.as_tensor(value) for name, value in digits().items()}
    g = dgl.graph(tuple(arrays.pop("edge_index")), num_nodes=len(arrays["x"]))
    g.ndata.update(arrays)
    model = train_elsewhere(g)
    expected = model(g, g.ndata["x"]).detach()
    sp.partition(g, "inference-parts", parts=4, overwrite=True)

    def rank(comm):
        graph, mine = sp.load("inference-parts", comm), sp.dgl.wrap(copy.deepcopy(model), comm)
        with torch.inference_mode():
            return sp.gather(graph, mine(graph, graph.x))

    found = sp.spawn(rank, 4)[0]
    print(f"largest difference {float((found - expected).abs().max()):.1e} on 4 ranks")


if __name__ == "__main__":
    main()
