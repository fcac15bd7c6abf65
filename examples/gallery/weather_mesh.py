# %% [markdown]
# # A mesh: weather and flow
#
# An encoder, processor and decoder on a mesh learn to step a field forward in time. This is the shape of MeshGraphNet
# and of the graph models that forecast weather. Here smoke drifts past a cylinder, and the model learns one time
# step.
#
# A fine mesh is what makes such models large: each layer keeps a row per edge. Sharded, a rank keeps the rows of its
# own edges alone, and the model's class stays as it is.
#
# ## The mesh and the truth
#
# The mesh is a Delaunay triangulation that is finer near the cylinder. The wind is the known flow around it. A finite
# volume scheme moves and spreads the smoke, and its states are the data.

# %%
import sys

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.spatial import Delaunay
from torch.nn import LayerNorm, Linear, ReLU, Sequential
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import shardpass as sp

spacing, epochs = (float(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 1 else (0.17, 5)
rng = np.random.default_rng(0)
grid = np.stack(np.meshgrid(np.arange(-2, 4, spacing), np.arange(-1.5, 1.6, spacing)), -1).reshape(-1, 2)
grid += rng.uniform(-0.3, 0.3, grid.shape) * spacing
radius, angle = np.meshgrid(0.5 * 1.15 ** np.arange(6), np.arange(0, 2 * np.pi, np.pi / 20))
rings = np.stack([radius * np.cos(angle + radius), radius * np.sin(angle + radius)], -1).reshape(-1, 2)
points = np.concatenate([grid[np.linalg.norm(grid, axis=1) > 1.1], rings])

triangles = Delaunay(points).simplices
triangles = triangles[np.linalg.norm(points[triangles].mean(1), axis=1) > 0.5]  # none inside the cylinder
sides = np.concatenate([triangles[:, pair] for pair in ([0, 1], [1, 2], [2, 0])])
edge_index = np.unique(np.concatenate([sides, sides[:, ::-1]]), axis=0).T.astype(np.int64)  # both directions, each once
src, dst = edge_index
way = points[dst] - points[src]
length = np.linalg.norm(way, axis=1)
print(f"{len(points):,} nodes, {len(src):,} directed edges")

# %%
x, y = points.T
r2 = x**2 + y**2
wind = np.stack([1 - 0.25 * (x**2 - y**2) / r2**2, -0.5 * x * y / r2**2], 1)
upwind = np.maximum(0, ((wind[src] + wind[dst]) / 2 * way).sum(1)) / length**2  # what the wind carries from src to dst
rate = 0.01 * (upwind + 0.01 / length**2)
rate /= max(1, 2 * np.bincount(dst, rate).max())  # so that a finer mesh is stable too


def states(steps=8):
    centres = rng.uniform([-2, -1.5], [4, 1.5], (10, 2))  # of ten puffs of smoke
    smoke = [np.exp(-((points[:, None] - centres) ** 2).sum(2) / 0.15).sum(1)]
    for _ in range(steps):
        now = smoke[-1]
        for _ in range(20):  # small steps of the solver in one of the model
            now = now + np.bincount(dst, rate * (now[src] - now[dst]), len(now))
        smoke.append(now)
    return np.stack(smoke, 1).astype(np.float32)


train, test = np.stack([states() for _ in range(4)], 1), states()

# %% [markdown]
# ## The model
#
# This is plain PyG. Each layer first updates the edges. A message is then the difference of its ends, weighted by the
# edge, as in a finite difference. Edges carry their direction, their length and the wind along them.


# %%
def mlp(channels, width, out=None):
    layers = [Linear(channels, width), ReLU(), Linear(width, out or width)]
    return Sequential(*layers) if out else Sequential(*layers, LayerNorm(width))


class Layer(MessagePassing):
    def __init__(self, width):
        super().__init__(aggr="mean")
        self.edge_mlp, self.node_mlp, self.weigh = mlp(3 * width, width), mlp(2 * width, width), Linear(width, width)

    def forward(self, h, edge_index, e):
        e = e + self.edge_updater(edge_index, h=h, e=e)
        flow = self.propagate(edge_index, h=h, weight=self.weigh(e))
        return h + self.node_mlp(torch.cat([h, flow], dim=1)), e

    def edge_update(self, h_i, h_j, e):
        return self.edge_mlp(torch.cat([h_i, h_j, e], dim=1))

    def message(self, h_i, h_j, weight):
        return weight * (h_j - h_i)


class MeshGraphNet(torch.nn.Module):
    def __init__(self, node_channels, edge_channels, width=32, layers=3):
        super().__init__()
        self.encode_nodes, self.encode_edges = mlp(node_channels, width), mlp(edge_channels, width)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(layers))
        self.decode = mlp(width, width, out=1)

    def forward(self, x, edge_index, edge_attr):
        h, e = self.encode_nodes(x), self.encode_edges(edge_attr)
        for layer in self.layers:
            h, e = layer(h, edge_index, e)
        return self.decode(h).squeeze(1)


# %% [markdown]
# ## Train on two ranks
#
# The states are node fields, so they are cut with the mesh. `sp.partition` writes the parts once. Each rank then
# loads its own nodes, and the edges that end in them.
#
# The graph goes where `edge_index` went. `sp.mean` is the mean error over the nodes of all ranks.
# All else is the loop that you know.

# %%
against = ((wind[src] + wind[dst]) / 2 * way).sum(1, keepdims=True)
data = Data(
    edge_index=torch.from_numpy(edge_index),
    edge_attr=torch.from_numpy(np.hstack([way, length[:, None], against]) / length.mean()).float(),
    wind=torch.from_numpy(wind).float(),
    train=torch.from_numpy(train),
    test=torch.from_numpy(test),
)
data.num_nodes = len(points)
sp.partition(data, "mesh-parts", parts=2, overwrite=True)
mean, spread = float(train.mean()), float(train.std())
change = float(np.diff(train).std())  # what the model predicts has variance 1
samples = [(run, t) for run in range(4) for t in range(8)]


def inputs(smoke, wind):
    return torch.cat([(smoke[:, None] - mean) / spread, wind], dim=1)


def fit(comm):
    torch.set_num_threads(1)  # the ranks are threads here: one core each
    graph = sp.load("mesh-parts", comm)
    with sp.seed(0, comm):  # the same initial weights on every rank
        model = MeshGraphNet(3, 4)
    sp.pyg.wrap(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=epochs * len(samples))
    losses = []
    for _ in range(epochs):
        for run, t in samples:
            smoke = graph.node["train"][:, run]
            out = model(inputs(smoke[:, t], graph.node["wind"]), graph, graph.edge_attr)
            target = (smoke[:, t + 1] - smoke[:, t]) / change
            loss = sp.mean((out - target).square(), None, comm)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    rolled = [graph.node["test"][:, 0]]
    with torch.no_grad():
        for _ in range(8):  # each state is made of the predicted one before
            out = model(inputs(rolled[-1], graph.node["wind"]), graph, graph.edge_attr)
            rolled.append(rolled[-1] + change * out)
    return losses, sp.gather(graph, torch.stack(rolled, 1)), graph.num_own_edges


(losses, rolled, own_edges), _ = sp.spawn(fit, 2)
print(f"rank 0 has {own_edges:,} of {len(src):,} edges")
last = np.mean(losses[-len(samples) :])
print(f"error of one step: {losses[0]:.2f} at first, {last:.2f} in the last epoch; 1 is to predict no change")

# %% [markdown]
# ## Is it the same model?
#
# Yes. Here are the first steps of plain PyG, in one process, on the whole mesh.

# %%
torch.manual_seed(0)
model = MeshGraphNet(3, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=epochs * len(samples))
plain = []
for run, t in samples[:8]:
    out = model(inputs(data.train[:, run, t], data.wind), data.edge_index, data.edge_attr)
    loss = (out - (data.train[:, run, t + 1] - data.train[:, run, t]) / change).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    plain.append(loss.item())
gap = max(abs(a - b) for a, b in zip(plain, losses))
print(f"largest difference of the losses of 8 steps: {gap:.1e}")
assert gap < 1e-4

# %% [markdown]
# ## Look at the forecast
#
# The model saw neither these puffs nor a forecast of its own. It starts from the first state alone and goes eight
# steps.

# %%
errors = np.sqrt(((rolled.numpy() - test) ** 2).mean(0))
still = np.sqrt(((test[:, :1] - test) ** 2).mean(0))
print(f"error after 8 steps: {errors[8]:.3f}; if the smoke stood still: {still[8]:.3f}")
assert errors[8] < 0.5 * still[8]

fig, axes = plt.subplots(1, 3, figsize=(11, 2.8), layout="constrained")
for ax, field, title in zip(axes, (test[:, 8], rolled[:, 8]), ("truth, step 8", "model, step 8")):
    drawn = ax.tripcolor(*points.T, triangles, field, vmin=0, vmax=1.2, cmap="viridis", rasterized=True)
    ax.set(title=title, aspect="equal", xticks=[], yticks=[])
fig.colorbar(drawn, ax=axes[:2], shrink=0.8, label="smoke")
axes[2].plot(still, "--", label="standing still")
axes[2].plot(errors, label="model")
axes[2].set(xlabel="step", ylabel="root mean square error", ylim=0)
axes[2].legend()
title = "Smoke behind a cylinder after eight steps, true and forecast, and the error of the forecast by step"
fig.savefig("weather_mesh.svg", metadata={"Title": title, "Date": None}, dpi=90)

# %% [markdown]
# ## Largest size tested
#
# 16,811 nodes and 100,730 edges on two ranks, for 32 steps: `python examples/gallery/weather_mesh.py 0.03 1`. The
# first eight losses differ from those of plain PyG by 1.2e-7 at most.
