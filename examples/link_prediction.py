"""Predict links on the whole graph with PyG's usual model, on one rank or on several.

python examples/link_prediction.py
mpirun -n 4 python examples/link_prediction.py
"""

import torch
import torch.nn.functional as F
from torch_geometric.nn import GCNConv

import shardpass as sp
from shardpass.cli.graphs import digits


class Net(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(channels, 64), GCNConv(64, 32)

    def forward(self, x, edge_index, edge_label_index):
        z = self.conv2(self.conv1(x, edge_index).relu(), edge_index)
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=-1)


def scores_and_labels(model, graph, positives, negatives):
    pairs = sp.node_ids(graph, torch.cat([positives, negatives], dim=1))  # ids of the whole graph, which index any rows
    return model(graph.x, graph, pairs), (torch.arange(pairs.size(1)) < positives.size(1)).float()


def main():
    comm = sp.connect()
    images, links = digits(), torch.from_numpy(digits()["edge_index"])
    links = links[:, links[0] < links[1]]
    with sp.seed(0, comm):
        test, train = links[:, torch.randperm(links.size(1))].tensor_split([1000], dim=1)
        model = Net(64)
    if comm.rank == 0:
        known = {"x": images["x"], "edge_index": torch.cat([train, train.flip(0)], dim=1)}
        sp.partition(known, "link-parts", parts=4, overwrite=True)
    comm.barrier()
    graph, model = sp.load("link-parts", comm), sp.pyg.wrap(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train, test = train[:, comm.rank :: comm.size], test[:, comm.rank :: comm.size]  # each rank scores other pairs
    for epoch in range(40):
        scores, labels = scores_and_labels(model, graph, train, sp.negative_sampling(graph, 0.5, seed=epoch))
        loss = sp.mean(F.binary_cross_entropy_with_logits(scores, labels, reduction="none"), None, comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        scores, labels = scores_and_labels(model, graph, test, sp.negative_sampling(graph, 1000, seed=40))
    area = sp.roc_auc(scores, labels, None, comm)
    if comm.rank == 0:
        print(f"loss {loss.item():.4f}, area under the ROC curve {area:.4f} on {comm.size} rank(s)")


if __name__ == "__main__":
    main()
