"""Layers whose messages and aggregates are tuples, as people write them for meshes and molecules."""

import torch
import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.utils import scatter


class ProcessorLayer(gnn.MessagePassing):  # MeshGraphNets, as Stanford's CS224W teaches it
    def __init__(self, node_dim=5, edge_dim=3):
        super().__init__()
        self.edge_mlp = nn.Sequential(nn.Linear(2 * node_dim + edge_dim, 8), nn.ReLU(), nn.Linear(8, edge_dim))
        self.node_mlp = nn.Sequential(
            nn.Linear(node_dim + edge_dim, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, node_dim)
        )

    def forward(self, x, edge_index, edge_attr, size=None):
        out, updated_edges = self.propagate(edge_index, x=x, edge_attr=edge_attr, size=size)
        return x + self.node_mlp(torch.cat([x, out], dim=1)), updated_edges

    def message(self, x_i, x_j, edge_attr):
        return self.edge_mlp(torch.cat([x_i, x_j, edge_attr], dim=1)) + edge_attr

    def aggregate(self, updated_edges, edge_index, dim_size=None):
        out = scatter(updated_edges, edge_index[0, :], dim=0, dim_size=dim_size, reduce="sum")
        return out, updated_edges


class OverTargets(ProcessorLayer):
    def aggregate(self, updated_edges, index, dim_size=None):
        return scatter(updated_edges, index, dim=0, dim_size=dim_size, reduce="sum"), updated_edges


class Flipped(OverTargets):
    def __init__(self):
        super().__init__()
        self.flow = "target_to_source"


class Product(ProcessorLayer):
    """Messages are a tuple too, and aggregate() takes rows of targets."""

    def message(self, x_i, x_j, edge_attr):
        return super().message(x_i, x_j, edge_attr), x_j

    def aggregate(self, inputs, index, x_i, dim_size=None):
        edges, x_j = inputs
        return scatter(edges * x_j[:, :3] * x_i[:, 2:], index, dim=0, dim_size=dim_size, reduce="mean"), edges


class MeshGraphNet(nn.Module):
    def __init__(self, layer=ProcessorLayer):
        super().__init__()
        self.processor, self.decoder = nn.ModuleList(layer() for _ in range(2)), nn.Linear(5, 2)

    def forward(self, data):
        x, edge_index, edge_attr = data.x, data.edge_index, data.edge_attr
        for layer in self.processor:
            x, edge_attr = layer(x, edge_index, edge_attr)
        return self.decoder(x)


class PaiNN(gnn.MessagePassing):
    """A message and an aggregate that are tuples."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.phi, self.w = nn.Sequential(nn.Linear(5, 5), nn.SiLU(), nn.Linear(5, 10)), nn.Linear(3, 10)

    def forward(self, x, edge_index, edge_attr):
        v = torch.stack([x, -x, x.square()], dim=-1)
        ds, dv = self.propagate(edge_index, s=x, v=v, edge_attr=edge_attr)
        return x + ds + (v + dv).norm(dim=-1)

    def message(self, s_j, v_j, edge_attr):
        ds, gate = torch.split(self.phi(s_j) * self.w(edge_attr), 5, dim=-1)
        return ds, gate.unsqueeze(-1) * v_j + edge_attr.unsqueeze(1)

    def aggregate(self, inputs, index, dim_size):
        ds, dv = inputs
        return scatter(ds, index, 0, dim_size=dim_size), scatter(dv, index, 0, dim_size=dim_size, reduce="mean")

    def update(self, aggregated):
        return aggregated


class GatedGCN(gnn.MessagePassing):
    """As GraphGPS writes it: the message is kept on the layer for ``update()``, and ``aggregate()`` knows all nodes."""

    def __init__(self):
        super().__init__(aggr="add")
        self.A, self.B, self.D, self.E = (nn.Linear(5, 5) for _ in range(4))
        self.C, self.back = nn.Linear(3, 5), nn.Linear(5, 3)
        self.bn_node_x, self.bn_edge_e = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    def forward(self, x, edge_index, e):
        x_in, e_in = x, e
        Ax, Bx, Ce, Dx, Ex = self.A(x), self.B(x), self.C(e), self.D(x), self.E(x)
        x, e = self.propagate(edge_index, Bx=Bx, Dx=Dx, Ex=Ex, Ce=Ce, e=e, Ax=Ax)
        x, e = self.bn_node_x(x).relu(), self.bn_edge_e(e).relu()
        return x_in + x, e_in + self.back(e)

    def message(self, Dx_i, Ex_j, Ce):
        e_ij = Dx_i + Ex_j + Ce
        self.e = e_ij
        return torch.sigmoid(e_ij)

    def aggregate(self, sigma_ij, index, Bx_j, Bx):
        dim_size = Bx.shape[0]
        numerator = scatter(sigma_ij * Bx_j, index, 0, dim_size, reduce="sum")
        return numerator / (scatter(sigma_ij, index, 0, dim_size, reduce="sum") + 1e-6)

    def update(self, aggr_out, Ax):
        x = Ax + aggr_out
        e_out = self.e
        del self.e
        return x, e_out
