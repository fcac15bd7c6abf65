"""MeshGraphNets (Pfaff et al., 2021): learns how heat spreads on a mesh, and rolls it out over 20 steps.

    python examples/meshgraphnets.py heat.svg    # draws the last step
    mpirun -n 2 python examples/meshgraphnets.py

Any number of ranks gives the same numbers. Compare ``examples/custom_layer.py`` for one layer alone.
"""

import sys
from itertools import pairwise

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import shardpass as sp


def mlp(*sizes, normed=True):
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())][:-1]
    return nn.Sequential(*layers, *[nn.LayerNorm(sizes[-1])] * normed)


class Processor(MessagePassing):
    """Updates edges from both their ends, then nodes by the sum of their edges."""

    def __init__(self, width):
        super().__init__(aggr="add")
        self.edge, self.node = mlp(3 * width, width, width), mlp(2 * width, width, width)

    def forward(self, x, edge_index, edge_attr):
        edge_attr = edge_attr + self.edge_updater(edge_index, x=x, edge_attr=edge_attr)
        sums = self.propagate(edge_index, edge_attr=edge_attr)
        return x + self.node(torch.cat([x, sums], -1)), edge_attr

    def edge_update(self, x_i, x_j, edge_attr):
        return self.edge(torch.cat([x_i, x_j, edge_attr], -1))

    def message(self, edge_attr):
        return edge_attr


class MeshGraphNet(nn.Module):
    def __init__(self, node_channels, edge_channels, out_channels, width=16, steps=2):
        super().__init__()
        self.nodes, self.edges = mlp(node_channels, width, width), mlp(edge_channels, width, width)
        self.processors = nn.ModuleList(Processor(width) for _ in range(steps))
        self.decoder = mlp(width, width, out_channels, normed=False)

    def forward(self, x, edge_index, edge_attr):
        x, edge_attr = self.nodes(x), self.edges(edge_attr)
        for processor in self.processors:
            x, edge_attr = processor(x, edge_index, edge_attr)
        return self.decoder(x)


def heat_on_a_mesh(side, times):
    """A grid of triangles whose border is cold, with the heat at all times and the relative position of edges' ends."""
    points = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    ways = torch.tensor([[0, 1], [1, 0], [1, 1], [0, -1], [-1, 0], [-1, -1]])
    ends = points[:, None] + ways
    kept = ((ends >= 0) & (ends < side)).all(-1)
    src, way = kept.nonzero().T
    dst = ends[kept] @ torch.tensor([side, 1])
    is_border = ((points == 0) | (points == side - 1)).any(-1).double()
    heat = [torch.exp(-((points / side - 0.4) ** 2).sum(-1) / 0.05) * (1 - is_border)]
    for _ in range(times):
        flow = torch.zeros_like(heat[-1]).index_add(0, dst, heat[-1][src] - heat[-1][dst])
        heat.append((heat[-1] + 0.1 * flow) * (1 - is_border))
    attributes = torch.cat([ways, ways.double().norm(dim=-1, keepdim=True)], -1)[way]
    edges, pos = torch.stack([src, dst]), points.double()
    return Data(heat=torch.stack(heat, 1), is_border=is_border, pos=pos, edge_index=edges, edge_attr=attributes)


def step(model, heat, mesh):
    change = model(torch.stack([heat, mesh.is_border], -1), mesh, mesh.edge_attr)
    return heat + change.squeeze(-1) * (1 - mesh.is_border)


def rollout(model, mesh, steps):
    heat = [mesh.heat[:, 0]]
    for _ in range(steps):
        heat.append(step(model, heat[-1], mesh))
    return torch.stack(heat, 1)


def draw(path, pos, heat, found):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots(1, 3)
    for ax, field, title in zip(axes, (heat, found, (found - heat).abs()), ("solver", "model", "difference")):
        drawn = ax.tripcolor(*pos.T, field, vmin=0, vmax=heat.max(), shading="gouraud", rasterized=True)
        ax.set(title=title, aspect="equal", xticks=[], yticks=[])
    figure.colorbar(drawn, ax=axes, shrink=0.8, label="heat")
    title = "Heat on a mesh after 20 steps: of the solver, of the model, and the difference"
    figure.savefig(path, metadata={"Title": title, "Date": None}, dpi=60)


def main():
    torch.set_default_dtype(torch.float64)
    comm = sp.connect()
    mesh = sp.shard(heat_on_a_mesh(10, 20), comm)
    with sp.seed(0, comm):
        model = sp.pyg.wrap(MeshGraphNet(2, 3, 1), comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(54):
        time = epoch % 18
        heat = mesh.heat[:, time]
        for _ in range(3):  # backpropagation goes through three steps
            heat = step(model, heat, mesh)
        loss = sp.mean((heat - mesh.heat[:, time + 3]).square(), None, comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        rolled = rollout(model, mesh, 20)
        error = sp.mean((rolled - mesh.heat).square(), None, comm).sqrt()
        still = sp.mean((mesh.heat[:, :1] - mesh.heat).square(), None, comm).sqrt()
        whole = [mesh.whole(rows) for rows in (mesh.pos, mesh.heat[:, -1], rolled[:, -1])]
    if comm.rank == 0 and len(sys.argv) > 1:
        draw(sys.argv[1], *whole)
    if comm.rank == 0:
        ranks = f"{comm.size} rank{'s' * (comm.size > 1)}"
        print(f"error {error:.6f} over 20 steps, {still:.6f} if nothing changed, on {ranks}")


if __name__ == "__main__":
    main()
