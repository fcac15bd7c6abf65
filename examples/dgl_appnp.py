"""Predict then propagate: an MLP whose predictions are smoothed by personalised PageRank (APPNP), with DGL.

python examples/dgl_appnp.py
torchrun --nproc-per-node 2 examples/dgl_appnp.py
"""

import torch
from dgl.nn import APPNPConv

import shardpass as sp
from shardpass.cli.graphs import digits


class APPNP(torch.nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.mlp = torch.nn.Sequential(torch.nn.Linear(channels, 64), torch.nn.ReLU(), torch.nn.Linear(64, classes))
        self.propagate = APPNPConv(k=10, alpha=0.1)

    def forward(self, g, x):
        return self.propagate(g, self.mlp(x))


def main():
    comm = sp.connect()
    if comm.rank == 0:
        sp.partition(digits(), "appnp-parts", parts=2, overwrite=True)
    comm.barrier()
    graph = sp.load("appnp-parts", comm)
    with sp.seed(0, comm):
        model = APPNP(graph.num_features, graph.num_classes)
    sp.dgl.wrap(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(40):
        logits = model(graph, graph.x)
        loss = sp.cross_entropy(logits, graph.y, graph.train_mask, comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = sp.accuracy(logits, graph.y, graph.test_mask, comm)
    if comm.rank == 0:
        print(f"loss {loss.item():.4f}, test accuracy {accuracy:.4f} on {comm.size} rank(s)")


if __name__ == "__main__":
    main()
