"""Molecular dynamics by a sharded model: the trajectory of one process, whose energy drifts no more."""

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torch_geometric")

from torch_geometric.data import Data
from torch_geometric.nn.models.schnet import GaussianSmearing, InteractionBlock

import shardpass as sp

BOX, CUTOFF, SKIN, TIME_STEP = 4.0, 1.4, 0.3, 0.01
pytestmark = pytest.mark.long


class Potential(nn.Module):
    """The energy of each atom: pairs repel, and random weights add what depends on whole neighbourhoods."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.smear = nn.Parameter(torch.ones(8)), GaussianSmearing(0.0, CUTOFF, 8)
        self.blocks = nn.ModuleList(InteractionBlock(8, 8, 8, CUTOFF) for _ in range(2))
        self.out = nn.Linear(8, 1)

    def forward(self, pos: Tensor, edge_index: Tensor, edge_shift: Tensor) -> Tensor:
        src, dst = edge_index
        distance = (pos[src] - pos[dst] + edge_shift).norm(dim=-1).clamp(max=CUTOFF)  # pairs beyond do nothing
        h = self.start.expand(pos.size(0), -1)
        for block in self.blocks:
            h = h + block(h, edge_index, distance, self.smear(distance))
        pairs = 2 * (1 - (distance / CUTOFF) ** 2) ** 3
        repelled = torch.zeros_like(pos[:, 0]).index_add(0, dst, pairs)
        return repelled + self.out(h.tanh()).squeeze(-1)


def neighbours(pos: Tensor, velocity: Tensor) -> Data:
    """The atoms in a periodic box, with pairs that may come within the cutoff before there is a new list."""
    spans = pos[:, None] - pos[None]
    shifts = -BOX * (spans / BOX).round()
    near = ((spans + shifts).norm(dim=-1) < CUTOFF + SKIN).fill_diagonal_(False)
    return Data(pos=pos, velocity=velocity, edge_index=near.nonzero().T, edge_shift=shifts[near])


def start() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    lattice = torch.cartesian_prod(*[torch.arange(4.0)] * 3).double()
    return lattice + 0.1 * torch.rand(64, 3, generator=draws).double(), 0.5 * torch.randn(
        64, 3, generator=draws
    ).double()


def simulate(model: nn.Module, steps: int, comm: sp.Communicator | None = None) -> tuple[Tensor, Tensor]:
    """Places after the first 50 of `steps` by velocity Verlet, ``[num_atoms, 3]``, and the total energy after each."""
    whole, energies, early = start(), list[Tensor](), torch.empty(0)
    for step in range(steps):
        if step % 20 == 0:
            data = neighbours(*whole)
            graph = data if comm is None else sp.shard(data, comm, by="space")
            pos, velocity = graph.pos.clone(), graph.velocity.clone()
            edges = graph.edge_index if comm is None else graph
            force, _ = forces(model, pos, edges, graph.edge_shift)
        velocity = velocity + TIME_STEP / 2 * force
        pos = pos + TIME_STEP * velocity
        force, potential = forces(model, pos, edges, graph.edge_shift)
        velocity = velocity + TIME_STEP / 2 * force
        total = potential + velocity.square().sum(-1) / 2
        energies.append(total.sum() if comm is None else sp.sum(total, None, comm))
        if step % 20 == 19 or step == 49:
            whole = (pos, velocity) if comm is None else (graph.whole(pos).detach(), graph.whole(velocity).detach())
        if step == 49:
            early = whole[0]
    return early, torch.stack(energies)


def forces(model: nn.Module, pos: Tensor, edges: Tensor, edge_shift: Tensor) -> tuple[Tensor, Tensor]:
    pos = pos.detach().requires_grad_()
    energies = model(pos, edges, edge_shift)
    (slope,) = torch.autograd.grad(energies.sum(), pos)
    return -slope, energies.detach()


def test_a_thousand_steps_on_four_ranks_conserve_energy_as_one_process_does():
    models = []
    for _ in range(5):
        torch.manual_seed(0)
        models.append(Potential().double().eval())
    expected, energies = simulate(models[4], 1000)

    def work(comm):
        return simulate(sp.pyg.wrap(models[comm.rank], comm), 1000, comm)

    for places, found in sp.spawn(work, 4):
        torch.testing.assert_close(places, expected, rtol=0, atol=1e-8)
        torch.testing.assert_close(found[:50], energies[:50], rtol=0, atol=1e-8)
        drift, of_one = ((each - each[0]).abs().max() for each in (found, energies))
        assert drift < 1.1 * of_one
