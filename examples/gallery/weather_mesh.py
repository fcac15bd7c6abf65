# %% [markdown]
# # A mesh: weather and flow
#
# An encoder, processor and decoder on a mesh learn to step a field forward in time. This is the shape of MeshGraphNet and
# of the graph models that forecast weather. Here smoke drifts past a cylinder, and the model learns one time step.
#
# A fine mesh is what makes such models large: each layer keeps a row per edge. Sharded, a rank keeps the rows of its own
# edges alone, and the model's class stays as it is.
#
# ## The mesh and the truth
#
# The mesh is a Delaunay triangulation that is finer near the cylinder. The wind is the known flow around it. A finite volume
# scheme moves and spreads the smoke, and its states are the data.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.spatial import Delaunay
from torch_geometric.data import Data
from torch_geometric.nn import MLP, MessagePassing

import shardpass as sp

rng = np.random.default_rng(0)
points = rng.uniform([-2, -1.5], [4, 1.5], (1600, 2))
angles, radii = rng.uniform(0, 2 * np.pi, 600), 0.5 + 0.6 * rng.random(600) ** 2
points = np.concatenate([points, np.stack([radii * np.cos(angles), radii * np.sin(angles)], 1)])
points = points[(points**2).sum(1) >= 0.25]
triangles = Delaunay(points).simplices
triangles = triangles[(points[triangles].mean(1) ** 2).sum(1) > 0.25]  # none inside the cylinder
ends = np.concatenate([triangles[:, [a, b]] for a, b in ((0, 1), (1, 2), (2, 0))])
edges = np.unique(np.concatenate([ends, ends[:, ::-1]]), axis=0).T  # both directions, each once
src, dst = edges

x, y = points.T
r2 = x**2 + y**2
wind = np.stack([1 - 0.25 * (x**2 - y**2) / r2**2, -0.5 * x * y / r2**2], 1)
way = points[dst] - points[src]
length = np.linalg.norm(way, axis=1)
print(f"{len(points):,} nodes, {edges.shape[1]:,} directed edges, edges from {length.min():.3f} to {length.max():.2f} long")

# %%
blown = np.maximum(0, ((wind[src] + wind[dst]) / 2 * way).sum(1) / length)  # upwind: what flows from src to dst
rate = blown + 0.02 / length
rate /= np.bincount(dst, rate, len(points)).max()  # so that a step is stable


def step(smoke):
    return smoke + np.bincount(dst, rate * (smoke[src] - smoke[dst]), len(points))


def states(centre, steps):
    smoke = [np.exp(-((points - centre) ** 2).sum(1) / 0.08)]
    for _ in range(steps):
        now = smoke[-1]
        for _ in range(20):  # small steps of the solver in one of the model
            now = step(now)
        smoke.append(now)
    return np.stack(smoke, 1).astype(np.float32)


train = [states(centre, 12) for centre in ([-1.5, 0.3], [-1.3, -0.6], [-1.6, -0.1], [-1.0, 0.8])]
test = states([-1.4, 0.0], 12)
print(f"a step changes the smoke by {np.abs(np.diff(test)).mean() / test.mean():.0%} of its mean")

# %% [markdown]
# ## The model
#
# This is plain PyG. A message is the new state of its edge, and nodes take the sum of what arrives. Edges carry their direction
# and length, and each of six layers updates the edges too.

# %%
class Layer(MessagePassing):
    def __init__(self, width):
        super().__init__(aggr="sum")
        self.edge_mlp = MLP([3 * width, width, width], norm="layer_norm", norm_kwargs={"mode": "node"}, plain_last=False)
        self.node_mlp = MLP([2 * width, width, width], norm="layer_norm", norm_kwargs={"mode": "node"}, plain_last=False)

    def forward(self, h, edge_index, e):
        e = e + self.edge_updater(edge_index, h=h, e=e)
        return h + self.node_mlp(torch.cat([h, self.propagate(edge_index, e=e)], dim=1)), e

    def edge_update(self, h_i, h_j, e):
        return self.edge_mlp(torch.cat([h_i, h_j, e], dim=1))

    def message(self, e):
        return e


class MeshGraphNet(torch.nn.Module):
    def __init__(self, node_channels, edge_channels, width=32, layers=6):
        super().__init__()
        self.encode_nodes = MLP([node_channels, width, width], norm=None)
        self.encode_edges = MLP([edge_channels, width, width], norm=None)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(layers))
        self.decode = MLP([width, width, 1], norm=None)

    def forward(self, x, edge_index, edge_attr):
        h, e = self.encode_nodes(x), self.encode_edges(edge_attr)
        for layer in self.layers:
            h, e = layer(h, edge_index, e)
        return self.decode(h).squeeze(1)

