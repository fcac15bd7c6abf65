"""Train an unmodified PyG model on a graph of two node types: handwritten digits, and the pixels that are lit in them.

python examples/hetero.py
mpirun -n 4 python examples/hetero.py
"""

import torch
from torch_geometric.nn import HeteroConv, HeteroDictLinear, Linear, SAGEConv

import shardpass as sp
from shardpass.cli.graphs import digits


class Model(torch.nn.Module):
    def __init__(self, widths, edge_types, classes):
        super().__init__()
        self.inputs, self.outputs = HeteroDictLinear(widths, 32), Linear(32, classes)
        self.layers = torch.nn.ModuleList(HeteroConv({k: SAGEConv((32, 32), 32) for k in edge_types}) for _ in range(2))

    def forward(self, x_dict, edge_index_dict):
        hidden = self.inputs(x_dict)
        for layer in self.layers:
            hidden = layer({kind: x.relu() for kind, x in hidden.items()}, edge_index_dict)
        return self.outputs(hidden["image"].relu())


def images_and_pixels():
    images = digits()
    near, (image, pixel) = images.pop("edge_index"), (images["x"] > 0.5).nonzero()
    nodes = {"image": images, "pixel": {"x": torch.eye(64)}}
    edges = {("image", "near", "image"): near, ("image", "lights", "pixel"): (image, pixel)}
    edges["pixel", "lit_in", "image"] = (pixel, image)
    return nodes | {kind: {"edge_index": ends} for kind, ends in edges.items()}


def main():
    comm = sp.connect()
    if comm.rank == 0:
        sp.partition(images_and_pixels(), "pixel-parts", parts=4, overwrite=True)
    comm.barrier()
    graph = sp.load("pixel-parts", comm)
    images = graph["image"]  # own nodes of this type
    with sp.seed(0, comm):
        model = Model(graph.num_features, graph.edge_types, images.num_classes)
    sp.pyg.wrap(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(30):
        logits = model(graph.x_dict, graph)  # graph, where edge_index_dict went
        loss = sp.cross_entropy(logits, images.y, images.train_mask, comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = sp.accuracy(logits, images.y, images.test_mask, comm)
    if comm.rank == 0:
        print(f"loss {loss.item():.4f}, test accuracy {accuracy:.4f} on {comm.size} rank(s)")


if __name__ == "__main__":
    main()
