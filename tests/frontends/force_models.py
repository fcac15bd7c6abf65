"""A potential as PyG's SchNet is one, whose energies are differentiated in the ways that their users know."""

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import global_add_pool
from torch_geometric.nn.models.schnet import GaussianSmearing, InteractionBlock


def structures() -> Data:
    """40 atoms of two structures, with edges within each and shifts over the boundary of a cell."""
    draws = torch.Generator().manual_seed(1)
    pos = torch.rand(40, 3, generator=draws, dtype=torch.float64) * 4
    batch = (torch.arange(40) >= 25).long()
    near = (torch.cdist(pos, pos) < 1.8) & (batch[:, None] == batch) & ~torch.eye(40, dtype=torch.bool)
    edge_index = near.nonzero().T.contiguous()
    return Data(
        z=torch.randint(1, 5, (40,), generator=draws),
        pos=pos,
        y=torch.randn(40, 3, generator=draws, dtype=torch.float64),
        shifts=torch.randn(edge_index.size(1), 3, generator=draws, dtype=torch.float64) * 0.05,
        batch=batch,
        edge_index=edge_index,
        num_nodes=40,
    )


class Energies(nn.Module):
    """The energy of each atom, ``[num_atoms, 1]``."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.smear = nn.Embedding(6, 8), GaussianSmearing(0.0, 2.5, 10)
        self.blocks = nn.ModuleList([InteractionBlock(8, 10, 8, 2.5) for _ in range(2)])
        self.out = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, z: Tensor, pos: Tensor, edge_index: Tensor, shifts: Tensor) -> Tensor:
        row, col = edge_index
        distances = (pos[row] - pos[col] + shifts).norm(dim=-1)
        rows, smeared = self.kinds(z), self.smear(distances)
        for block in self.blocks:
            rows = rows + block(rows, edge_index, distances, smeared)
        found: Tensor = self.out(rows)
        return found


class Inside(nn.Module):
    """Energies, and forces that forward takes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.energies = Energies()

    def forward(self, z: Tensor, pos: Tensor, edge_index: Tensor, shifts: Tensor, batch: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            pos.requires_grad_(True)
            energies = self.energies(z, pos, edge_index, shifts)
            (slope,) = torch.autograd.grad(energies.sum(), pos, create_graph=self.training)
        return {"energies": energies, "forces": -slope}


class OfTotals(Inside):
    """The gradient is that of the totals of structures, as in MACE and NequIP."""

    def forward(self, z: Tensor, pos: Tensor, edge_index: Tensor, shifts: Tensor, batch: Tensor) -> dict[str, Tensor]:
        pos.requires_grad_(True)
        totals = global_add_pool(self.energies(z, pos, edge_index, shifts), batch, 2)
        (slope,) = torch.autograd.grad([totals], [pos], [torch.ones_like(totals)], create_graph=self.training)
        return {"totals": totals, "forces": -slope}


class Stresses(Inside):
    """The gradient by a strain of each cell as well."""

    def forward(self, z: Tensor, pos: Tensor, edge_index: Tensor, shifts: Tensor, batch: Tensor) -> dict[str, Tensor]:
        pos.requires_grad_(True)
        strain = torch.zeros(2, 3, 3, dtype=pos.dtype, requires_grad=True)
        strain = strain + pos.sum() * 0.0  # as MACE does
        even = (strain + strain.transpose(1, 2)) / 2
        strained = pos + torch.bmm(pos.unsqueeze(1), even[batch]).squeeze(1)
        shifts = shifts + torch.bmm(shifts.unsqueeze(1), even[batch[edge_index[0]]]).squeeze(1)
        totals = global_add_pool(self.energies(z, strained, edge_index, shifts), batch, 2)
        slope, stress = torch.autograd.grad(totals.sum(), [pos, strain], create_graph=self.training)
        return {"totals": totals, "forces": -slope, "stress": stress}


class OneStrain(Inside):
    """A sum over own atoms, differentiated by one strain for all of them."""

    def forward(self, z: Tensor, pos: Tensor, edge_index: Tensor, shifts: Tensor, batch: Tensor) -> dict[str, Tensor]:
        pos.requires_grad_(True)
        strain = torch.zeros(3, 3, dtype=pos.dtype, requires_grad=True)
        even = (strain + strain.T) / 2
        energies = self.energies(z, pos + pos @ even, edge_index, shifts + shifts @ even)
        slope, stress = torch.autograd.grad(energies.sum(), [pos, strain], create_graph=self.training)
        return {"energies": energies, "forces": -slope, "stress": stress}


class Penalised(Inside):
    """A gradient by a weight, within forward: the step of an inner loop."""

    def forward(self, z: Tensor, pos: Tensor, edge_index: Tensor, shifts: Tensor, batch: Tensor) -> dict[str, Tensor]:
        first = self.energies(z, pos, edge_index, shifts)
        weight = self.energies.out[2].weight
        (slope,) = torch.autograd.grad(first.square().sum(), weight, create_graph=True)
        hidden = self.energies.out[:2](self.energies.kinds(z))
        return {"energies": nn.functional.linear(hidden, weight - 0.1 * slope)}
