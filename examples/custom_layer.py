"""A layer of your own, with learnable parameters inside message(), sharded without a change.

    python examples/custom_layer.py

Runs it on the whole graph in one process, then on 4 ranks (threads), and compares outputs and gradients.
"""

import copy

import torch
from torch_geometric.nn import MessagePassing

import shardpass as sp
from shardpass.testing.graphs import awkward_graph, shard_in_memory


class GatedConv(MessagePassing):
    """Messages from j to i are gated by both ends and the edge: ``sigmoid(W [x_i, x_j, e]) * V x_j``."""

    def __init__(self, channels, edge_channels, out_channels):
        super().__init__(aggr=["sum", "mean"])
        self.gate = torch.nn.Linear(2 * channels + edge_channels, out_channels)
        self.value = torch.nn.Linear(channels, out_channels)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i, x_j, edge_attr):
        gate = torch.sigmoid(self.gate(torch.cat([x_i, x_j, edge_attr], dim=-1)))
        return self.scale * gate * self.value(x_j)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    graph = awkward_graph(channels=5, edge_channels=3)
    layer = GatedConv(5, 3, 4).double()
    whole = copy.deepcopy(layer)
    expected = whole(graph.node["x"], graph.edge_index, graph.edge["edge_attr"])
    expected.square().sum().backward()

    def rank(comm):
        part = shard_in_memory(graph, torch.arange(graph.num_nodes) % comm.size, comm)
        mine = sp.pyg.wrap(copy.deepcopy(layer), comm)
        out = mine(part.x, part, part.edge_attr)
        out.square().sum().backward()
        return sp.gather(part, out), [parameter.grad for parameter in mine.parameters()]

    output, gradients = sp.spawn(rank, 4)[0]
    pairs = [(output, expected.detach()), *((g, p.grad) for g, p in zip(gradients, whole.parameters()))]
    print(f"largest difference {max(float((a - b).abs().max()) for a, b in pairs):.1e} on 4 ranks")


if __name__ == "__main__":
    main()
