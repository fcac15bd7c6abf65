"""Programs that take gradients for other reasons than to train: each gives what one process gives."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch_geometric")

from torch_geometric.nn import GATv2Conv, GCNConv, GINConv, SAGEConv
from torch_geometric.nn.models.visnet import ViS_MP, ViS_MP_Vertex

import shardpass as sp
from tests.frontends import force_models as models

from .how_much import one_each
from .model_cases import Visnet

DATA = models.structures()


pytestmark = pytest.mark.usefixtures("doubles")


class Net(nn.Module):
    """Rows of three numbers from rows of three numbers."""

    def __init__(self, first=lambda: GCNConv(3, 6), second=lambda: GCNConv(6, 3)):
        super().__init__()
        self.first, self.second = first(), second()

    def forward(self, x, edge_index, weight=None):
        extra = () if weight is None else (weight,)
        return self.second(torch.tanh(self.first(x, edge_index, *extra)), edge_index, *extra)


def net(first, second):
    return lambda: Net(lambda: first(3, 6), lambda: second(6, 3))


gin = lambda a, b: GINConv(nn.Sequential(nn.Linear(a, b), nn.Tanh()))  # noqa: E731


def mean(rows):
    """The mean over all nodes: this rank's part of it."""
    return rows.sum() / 40


def slope(value, by):
    return torch.autograd.grad(value, by, create_graph=True)[0]


def leaf(rows):
    return rows.clone().requires_grad_()


# ---- programs: (model, graph) -> (what has rows, a loss)


def saliency(model, graph):
    x = leaf(graph.pos)
    found = slope(model(x, graph.edge_index).square().sum(), x)
    return found, mean(found.abs())


def integrated_gradients(model, graph):
    found = 0
    for part in (0.25, 0.5, 0.75, 1.0):
        x = leaf(graph.pos * part)
        found = found + slope(model(x, graph.edge_index)[:, 0].sum(), x) * graph.pos / 4
    return found, mean(found.square())


def virtual_adversary(model, graph):
    """A step of power iteration towards the direction that changes predictions most (Miyato et al. 2018)."""
    known = model(graph.pos, graph.edge_index).log_softmax(1)
    direction = leaf(1e-2 * F.normalize(graph.y, dim=1))
    moved = model(graph.pos + direction, graph.edge_index).log_softmax(1)
    found = F.normalize(slope((known.exp() * (known - moved)).sum(), direction), dim=1)
    moved = model(graph.pos + 0.1 * found, graph.edge_index).log_softmax(1)
    return found, mean((known.exp() * (known - moved)).sum(1))


def ascending(model, graph):
    """Features move uphill while gradients add up (FLAG, Kong et al. 2022)."""
    moved, loss = leaf(torch.zeros_like(graph.pos)), 0
    for _ in range(3):
        step = mean((model(graph.pos + moved, graph.edge_index) - graph.y).square())
        loss = loss + step / 3
        moved = leaf((moved + 0.1 * torch.autograd.grad(step, moved, retain_graph=True)[0].sign()).detach())
    return moved, loss


def gradient_penalty(model, graph):
    """Of a critic's slope (Gulrajani et al. 2017)."""
    x = leaf(graph.pos)
    out = model(x, graph.edge_index)
    found = slope(out.sum(), x)
    return found, mean(out.sum(1)) + 10 * mean((found.norm(dim=1) - 1).square())


def sliced_scores(model, graph):
    """Sliced score matching (Song et al. 2019), of the third order with its gradient."""
    x = leaf(graph.pos)
    score = -slope(model(x, graph.edge_index).square().sum(), x)
    along = (score * graph.y).sum(1)
    found = slope(along.sum(), x)
    return found, mean((found * graph.y).sum(1) + along.square() / 2)


def descending(model, graph):
    """Positions relax along forces, and the loss of the last ones is differentiated through all steps."""
    x = leaf(graph.pos)
    for _ in range(3):
        x = x - 0.05 * slope(model(x, graph.edge_index).square().sum(), x)
    return x, mean((x - graph.y).square())


def hamiltonian(model, graph):
    """Two leapfrog steps of a learned Hamiltonian (Greydanus et al. 2019)."""
    q, p = leaf(graph.pos), leaf(graph.y)
    force = lambda q: -slope(model(q, graph.edge_index).square().sum(), q)  # noqa: E731
    for _ in range(2):
        p = p + 0.05 * force(q)
        q = q + 0.1 * p
        p = p + 0.05 * force(q)
    return q, mean(q.square() + p.square())


def divergence(model, graph):
    """Hutchinson's estimate, as in continuous flows."""
    x = leaf(graph.pos)
    probe = graph.y.sign()
    found = slope((model(x, graph.edge_index) * probe).sum(), x) * probe
    return found, mean(found.sum(1))


def energy_based(model, graph):
    """A classifier as an energy, with samples by Langevin steps (Grathwohl et al. 2020)."""
    energy = lambda x: -model(x, graph.edge_index).logsumexp(1)  # noqa: E731
    sample = leaf(graph.y)
    for _ in range(2):
        sample = leaf((sample - 0.1 * torch.autograd.grad(energy(sample).sum(), sample)[0]).detach())
    return sample, mean(energy(graph.pos) - energy(sample))


def attacked_edges(model, graph):
    """The slope by weights of edges, which an attack would change, and a penalty on it."""
    weight = leaf(graph.shifts[:, 0].sigmoid())
    loss = mean((model(graph.pos, graph.edge_index, weight) - graph.y).square())
    found = slope(loss, weight)
    return found, loss + found.square().sum()


class Potential(Visnet):
    """Energies by ViSNet's layers, of edges that are known."""

    def __init__(self, kind=ViS_MP):
        super().__init__(kind)
        self.kinds = nn.Embedding(6, 5)

    def forward(self, pos, edge_index, z):
        src, dst = edge_index
        span = pos[src] - pos[dst]
        length = span.norm(dim=1)
        return super().forward(self.kinds(z), edge_index, length, 3 * span / length.unsqueeze(1)).square().sum(1)


def visnet(model, graph):
    pos = leaf(graph.pos)
    energies = model(pos, graph.edge_index, graph.z)
    found = slope(energies.sum(), pos)
    return found, mean(energies.square()) + mean(found.square())


def visnet_by_vertices(model, graph):
    return visnet(model, graph)


PROGRAMS = {
    saliency: Net,
    integrated_gradients: net(SAGEConv, SAGEConv),
    virtual_adversary: net(GATv2Conv, GCNConv),
    ascending: net(gin, SAGEConv),
    gradient_penalty: net(gin, gin),
    sliced_scores: Net,
    descending: net(GATv2Conv, SAGEConv),
    hamiltonian: net(SAGEConv, GCNConv),
    divergence: net(GATv2Conv, GATv2Conv),
    energy_based: net(SAGEConv, gin),
    attacked_edges: Net,
    visnet: Potential,
    visnet_by_vertices: lambda: Potential(ViS_MP_Vertex),
}


BY_NAME = {program.__name__: program for program in PROGRAMS}


@pytest.mark.parametrize(("name", "way"), one_each(BY_NAME, [(3, "keep"), (4, "halo"), (1, "sar")]))
def test_program(name, way):
    program, (ranks, mode) = BY_NAME[name], way

    def made():
        torch.manual_seed(0)
        return PROGRAMS[program]().double()

    def work(comm):
        graph = sp.shard(DATA, comm, options=sp.Options(mode=mode, chunk_bytes=2000))
        model = sp.pyg.wrap(copies[comm.rank], comm)
        found, loss = program(model, graph)
        loss.backward()
        of = "edges" if program is attacked_edges else None
        return graph.whole(found.detach(), of), [parameter.grad for parameter in model.parameters()]

    copies, one = [made() for _ in range(ranks)], made()
    found, gradients = sp.spawn(work, ranks)[0]
    expected, loss = program(one, DATA)
    loss.backward()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-10)
    for mine, parameter in zip(gradients, one.parameters(), strict=True):
        assert (mine is None) == (parameter.grad is None)
        if mine is not None:
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-10, atol=1e-10)
