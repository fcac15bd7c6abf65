"""A potential of copper, trained on energies, forces and stresses. The labels are those of a Morse potential, or ASE's.

    python examples/forces.py
    python examples/forces.py mace parity.svg    # a model like MACE; draws what it predicts against the labels
    mpirun -n 4 python examples/forces.py
    python examples/copper_labels.py copper.pt && python examples/forces.py copper.pt

Any number of ranks gives the same numbers.
"""

import sys

import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import MessagePassing, global_add_pool
from torch_geometric.nn.models.schnet import GaussianSmearing, InteractionBlock

import shardpass as sp

CUTOFF = 4.0


def morse(span, edge_index, num_atoms):
    """Energies of atoms by pairs, which make the labels."""
    pairs = 0.2 * (1 - torch.exp(2.6 - span.norm(dim=-1))).square() - 0.2
    return torch.zeros(num_atoms).index_add(0, edge_index[1], pairs / 2)


class SchNet(nn.Module):
    """Energies of atoms by PyG's blocks."""

    def __init__(self, width=16):
        super().__init__()
        self.start, self.smear = nn.Parameter(torch.ones(width)), GaussianSmearing(1.5, CUTOFF, 16)
        self.blocks = nn.ModuleList(InteractionBlock(width, 16, width, CUTOFF) for _ in range(2))
        self.out = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1, bias=False))
        nn.init.zeros_(self.out[-1].weight)  # training begins with energies of zero

    def forward(self, span, edge_index, num_atoms):
        distance = span.norm(dim=-1)
        h, smeared = self.start.expand(num_atoms, -1), self.smear(distance)
        for block in self.blocks:
            h = h + block(h, edge_index, distance, smeared)
        return self.out(h).squeeze(-1)


class ProductBlock(MessagePassing):
    """A step of MACE with scalars and vectors: products of the sums over neighbours hold terms of up to four atoms."""

    def __init__(self, width):
        super().__init__(aggr="add", node_dim=0)
        self.radial, self.source = nn.Linear(16, 3 * width), nn.Linear(width, 3 * width)
        self.scalars, self.vectors = nn.Linear(4 * width, width), nn.Linear(3 * width, width, bias=False)

    def forward(self, h, edge_index, towards, smeared):
        weight = self.radial(smeared)
        sums = self.propagate(edge_index, h=self.source(h[:, 0]), v=h[:, 1:], towards=towards, weight=weight) / 12
        a, v = sums[:, :1], sums[:, 1:]
        square = v.square().sum(1, keepdim=True)
        scalars = self.scalars(torch.cat([a, a * a, square, a * square], -1))
        return h + torch.cat([scalars, self.vectors(torch.cat([v, a * v, square * v], -1))], 1)

    def message(self, h_j, v_j, towards, weight):
        a, b, c = (h_j * weight).unsqueeze(1).chunk(3, -1)
        return torch.cat([a, b * v_j + c * towards.unsqueeze(-1)], 1)  # [num_edges, 1 + 3, width]


class Mace(SchNet):
    """Energies of atoms by products that turn with the crystal."""

    def __init__(self, width=16):
        super().__init__(width)
        self.blocks = nn.ModuleList(ProductBlock(width) for _ in range(2))

    def forward(self, span, edge_index, num_atoms):
        distance = span.norm(dim=-1)
        inside = (1 + torch.cos(torch.pi * distance / CUTOFF)).unsqueeze(-1)
        start = self.start.expand(num_atoms, 1, -1)
        h = torch.cat([start, span.new_zeros(num_atoms, 3, self.start.numel())], 1)
        for block in self.blocks:
            h = block(h, edge_index, span / distance.unsqueeze(-1), self.smear(distance) * inside)
        return self.out(h[:, 0]).squeeze(-1)


class Potential(nn.Module):
    """Energies of crystals, forces on atoms and stresses, of a model of the energies of atoms."""

    def __init__(self, energies):
        super().__init__()
        self.energies = energies

    def forward(self, pos, edge_index, edge_shift, batch, volume):
        src, dst = edge_index
        pos, strain = pos.detach().requires_grad_(), torch.zeros(len(volume), 3, 3, requires_grad=True)
        span = pos[src] - pos[dst] + edge_shift
        even = (strain + strain.transpose(1, 2)) / 2
        span = span + (span.unsqueeze(1) @ even[batch[dst]]).squeeze(1)
        energies = global_add_pool(self.energies(span, edge_index, pos.size(0)), batch, len(volume))
        slope, virial = torch.autograd.grad(energies.sum(), [pos, strain], create_graph=self.training)
        return energies, -slope, virial / volume.view(-1, 1, 1)


def crystal(number):
    """32 atoms in a strained cell, displaced, with their neighbours over its boundaries."""
    draws = torch.Generator().manual_seed(number)
    cell = 7.2 * (torch.eye(3) + 0.02 * torch.randn(3, 3, generator=draws))
    corners = torch.cartesian_prod(*[torch.arange(0, 1, 0.5)] * 3)
    base = torch.tensor([[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]]) / 4
    pos = (corners[:, None] + base).view(-1, 3) @ cell + 0.1 * torch.randn(32, 3, generator=draws)
    shifts = torch.cartesian_prod(*[torch.arange(-1.0, 2)] * 3) @ cell
    distance = (pos[:, None, None] - pos[None, :, None] + shifts).norm(dim=-1)
    src, dst, image = ((distance < CUTOFF) & (distance > 0)).nonzero().T
    return Data(pos=pos, edge_index=torch.stack([src, dst]), edge_shift=shifts[image], volume=cell.det().view(1))


def labelled():
    """Crystals as one graph, from a file of ``copper_labels.py`` or with labels by a Morse potential."""
    paths = [argument for argument in sys.argv[1:] if argument.endswith(".pt")]
    if paths:
        data = Batch.from_data_list([Data(**numbers) for numbers in torch.load(paths[0])])
    else:
        data = Batch.from_data_list([crystal(number) for number in range(4)])
        given = data.pos, data.edge_index, data.edge_shift, data.batch, data.volume
        data.energy, data.force, data.stress = (found.detach() for found in Potential(morse)(*given))
    data.energy = data.energy - data.energy.mean()
    return data


def train(comm, data, kind, steps):
    """The labels and predictions of energies, forces and stresses, after training."""
    graph = sp.shard(data, comm)
    with sp.seed(0, comm):
        model = Potential(kind())
    model = sp.pyg.wrap(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        energies, forces, stresses = model(graph.pos, graph, graph.edge_shift, graph.batch, graph.volume)
        loss = sp.mean((forces - graph.force).square(), None, comm)
        alike = ((energies - graph.energy) / 16).square().mean() + 100 * (stresses - graph.stress).square().mean()
        loss = loss + sp.replicated(alike, comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    predicted = energies, graph.whole(forces), stresses
    labels = data.energy, data.force, data.stress
    return {name: (a, b.detach()) for name, a, b in zip(("energies", "forces", "stresses"), labels, predicted)}


def draw(path, found):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    for ax, (name, (labels, predicted)) in zip(figure.subplots(1, 3), found.items()):
        ax.scatter(labels, predicted, s=4)
        ax.axline((0, 0), slope=1, color="gray", linewidth=0.5)
        ax.set(title=name, xlabel="label", ylabel="predicted")
    figure.savefig(path, dpi=80)


def main():
    torch.set_default_dtype(torch.float64)
    comm = sp.connect()
    found = train(comm, labelled(), Mace if "mace" in sys.argv else SchNet, 50)
    if comm.rank == 0:
        for name, (labels, predicted) in found.items():
            error, spread = (predicted - labels).square().mean().sqrt(), labels.square().mean().sqrt()
            print(f"{name}: error {error:.6f}, size {spread:.6f}, on {comm.size} rank{'s' * (comm.size > 1)}")
        for path in sys.argv[1:]:
            if path.endswith((".svg", ".png")):
                draw(path, found)


if __name__ == "__main__":
    main()
