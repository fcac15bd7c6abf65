"""R-GCN with DGL's HeteroGraphConv on a graph of several types, such as ACM (papers, authors, subjects).
    mpirun -n 4 python examples/dgl_rgcn.py acm_hetero.npz paper

In the file: ``edge_index/<src>__<rel>__<dst>``, ``x/<type>``, ``y/<type>``, masks; the type with labels is named."""

import sys
from dataclasses import replace

import torch
from dgl.nn import GraphConv, HeteroGraphConv

import shardpass as sp


class RGCN(torch.nn.Module):
    def __init__(self, graph, target):
        super().__init__()
        widths, names = graph.num_features, [relation for _, relation, _ in graph.edge_types]
        inputs = {k: torch.nn.Linear(n, 32) if n else sp.NodeEmbedding(graph, 32, k) for k, n in widths.items()}
        convs = ({r: GraphConv(32, 32, "right", allow_zero_in_degree=True) for r in names} for _ in range(2))
        self.inputs, self.layers = torch.nn.ModuleDict(inputs), torch.nn.ModuleList(HeteroGraphConv(c) for c in convs)
        self.target, self.output = target, torch.nn.Linear(32, graph[target].num_classes)

    def forward(self, g, x):
        hidden = {kind: layer(x[kind]).relu() if kind in x else layer() for kind, layer in self.inputs.items()}
        for layer in self.layers:
            found = layer(g, hidden)
            hidden = {kind: rows + found[kind].relu() for kind, rows in hidden.items()}
        return self.output(hidden[self.target])


def both_directions(graph):
    reverse = {(d, f"rev_{r}", s): sp.data.EdgeArrays(ends.dst, ends.src) for (s, r, d), ends in graph.edges.items()}
    return replace(graph, edges=graph.edges | reverse, edge_fields=graph.edge_fields | {k: {} for k in reverse})


def main(path, target):
    comm = sp.connect()
    if comm.rank == 0:
        sp.partition(both_directions(sp.data.read(path)), "rgcn-parts", parts=4, overwrite=True)
    comm.barrier()
    graph = sp.load("rgcn-parts", comm)
    nodes = graph[target]
    with sp.seed(0, comm):
        model = RGCN(graph, target)
    sp.dgl.wrap(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(60):
        loss = sp.cross_entropy(model(graph, graph.x_dict), nodes.y, nodes.train_mask, comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = sp.accuracy(model(graph, graph.x_dict), nodes.y, nodes.test_mask, comm)
    if comm.rank == 0:
        print(f"loss {loss.item():.4f}, test accuracy {accuracy:.4f} on {comm.size} rank(s)")


if __name__ == "__main__":
    main(*sys.argv[1:])
