"""Gradients of gradients through sharded models: forces, stresses and their training equal those of one process."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

from torch_geometric.nn import EquilibriumAggregation, MessagePassing

import shardpass as sp
from shardpass.errors import RefusedError
from tests.frontends import force_models as models

DATA = models.structures()
ROWS = ("energies", "forces")
RANKS_AND_MODES = [(1, "sar"), (3, "sar"), (3, "halo"), (4, "keep")]


pytestmark = pytest.mark.usefixtures("doubles")


def made(kind) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def loss_of(found, graph, comm, forces=True):
    """The mean over atoms, and what every rank has alike counted once."""
    loss = found["forces"].sub(graph.y).square().sum() / 40 if forces and "forces" in found else 0.0
    for name in ("energies",) if "energies" in found else ():
        loss = loss + found[name].square().sum() / 40
    for name in {"totals", "stress"}.intersection(found):
        alike = found[name].square().sum() / 50
        loss = loss + (alike if comm is None else sp.replicated(alike, comm))
    return loss


def trained(model, graph, comm=None):
    """What the model gives, and the gradients of its parameters."""
    found = model(graph.z, graph.pos.clone(), graph.edge_index, graph.shifts, graph.batch)
    loss_of(found, graph, comm).backward()
    return found, [parameter.grad for parameter in model.parameters()]


def assert_same(own, whole):
    """Raise unless what one rank has found is what one process finds."""
    found, gradients = own
    expected, of_one = whole
    assert {*found} == {*expected}
    for name, rows in expected.items():
        torch.testing.assert_close(found[name], rows.detach(), rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(gradients, of_one, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def on_ranks(run, kind, ranks, mode="sar", **options):
    """What ``run(model, graph, comm)`` gives on rank 0, with rows in the order of the data."""
    copies = [made(kind) for _ in range(ranks)]

    def work(comm):
        graph = sp.shard(DATA, comm, options=sp.Options(mode=mode, chunk_bytes=2000, **options))
        found, gradients = run(sp.pyg.wrap(copies[comm.rank], comm), graph, comm)
        whole = {name: graph.whole(found[name].detach()) if name in ROWS else found[name].detach() for name in found}
        return whole, gradients

    return sp.spawn(work, ranks)[0]


@pytest.mark.parametrize(("ranks", "mode"), RANKS_AND_MODES)
@pytest.mark.parametrize("kind", [models.Inside, models.OfTotals, models.Stresses, models.OneStrain, models.Penalised])
def test_gradients_within_a_model(kind, ranks, mode):
    assert_same(on_ranks(trained, kind, ranks, mode), trained(made(kind), DATA))


def by_script(model, graph, comm=None, strained=False):
    """Forces that the training script takes of energies, and their stress."""
    pos = graph.pos.clone().requires_grad_()
    strain = torch.zeros(3, 3, requires_grad=True)
    energies = model(graph.z, pos + pos @ strain if strained else pos, graph.edge_index, graph.shifts)
    by = [pos, strain] if strained else [pos]
    slopes = torch.autograd.grad(energies.sum(), by, create_graph=True)
    found = {"energies": energies, "forces": -slopes[0]}
    if strained:
        found["stress"] = slopes[1] if comm is None else sp.all_reduce_sum(slopes[1], comm)
    return found


@pytest.mark.parametrize(("ranks", "mode"), RANKS_AND_MODES)
@pytest.mark.parametrize("strained", [False, True])
def test_gradients_in_the_script(strained, ranks, mode):
    def run(model, graph, comm=None):
        found = by_script(model, graph, comm, strained)
        loss_of(found, graph, comm).backward()
        return found, [parameter.grad for parameter in model.parameters()]

    assert_same(on_ranks(run, models.Energies, ranks, mode), run(made(models.Energies), DATA))


def test_gradients_in_the_script_of_a_model_that_is_not_checked():
    def work(comm):
        graph = sp.shard(DATA, comm)
        model = sp.pyg.wrap(copies[comm.rank], comm, check=False)
        return graph.whole(by_script(model, graph, comm)["forces"].detach())

    copies = [made(models.Energies) for _ in range(3)]
    expected = by_script(made(models.Energies), DATA)["forces"]
    torch.testing.assert_close(sp.spawn(work, 3)[0], expected.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_loss_that_reaches_the_forces_on_one_rank_alone(ranks):
    def run(model, graph, comm=None):
        found = by_script(model, graph, comm)
        chosen = torch.arange(40) < 5 if comm is None else graph.own(torch.arange(40)) < 5
        found["forces"][chosen].square().sum().backward()
        return found, [parameter.grad for parameter in model.parameters()]

    found, whole = on_ranks(run, models.Energies, ranks), run(made(models.Energies), DATA)
    assert_same(found, whole)


@pytest.mark.parametrize("ranks", [1, 3])
def test_twice_through_one_graph_and_added_up(ranks):
    def run(model, graph, comm=None):
        found = by_script(model, graph, comm)
        loss = loss_of(found, graph, comm)
        loss.backward(retain_graph=True)
        loss.backward()
        loss_of(by_script(model, graph, comm), graph, comm).backward()
        return found, [parameter.grad for parameter in model.parameters()]

    assert_same(on_ranks(run, models.Energies, ranks), run(made(models.Energies), DATA))


@pytest.mark.parametrize("ranks", [1, 3])
def test_forces_in_evaluation(ranks):
    def run(model, graph, comm=None):
        trained(model, graph, comm)
        model.eval()
        with torch.no_grad():
            found = model(graph.z, graph.pos.clone(), graph.edge_index, graph.shifts, graph.batch)
        assert not found["forces"].requires_grad
        return found, [parameter.grad for parameter in model.parameters()]

    assert_same(on_ranks(run, models.Inside, ranks), run(made(models.Inside), DATA))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_product_of_the_hessian_and_its_slope(ranks):
    """Third order: the gradient of a Hessian-vector product."""

    def run(model, graph, comm=None):
        pos = graph.pos.clone().requires_grad_()
        energies = model(graph.z, pos, graph.edge_index, graph.shifts)
        (slope,) = torch.autograd.grad(energies.sum(), pos, create_graph=True)
        (product,) = torch.autograd.grad((slope * graph.y).sum(), pos, create_graph=True)
        found = {"energies": energies, "forces": product}
        loss_of(found, graph, comm).backward()
        return found, [parameter.grad for parameter in model.parameters()]

    assert_same(on_ranks(run, models.Energies, ranks), run(made(models.Energies), DATA))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_of_an_inner_loop(ranks):
    """Meta-learning: the loss after a step of descent, differentiated by the parameters before it."""

    def run(model, graph, comm=None):
        named = dict(model.named_parameters())
        given = graph.z, graph.pos, graph.edge_index, graph.shifts
        inner = model(*given).sub(graph.y[:, :1]).square().sum() / 40
        slopes = torch.autograd.grad(inner, [*named.values()], create_graph=True, allow_unused=True)
        stepped = {
            name: value if slope is None else value - 0.01 * slope
            for (name, value), slope in zip(named.items(), slopes)
        }
        energies = torch.func.functional_call(model, stepped, given)
        energies.square().sum().div(40).backward()
        return {"energies": energies}, [parameter.grad for parameter in named.values()]

    assert_same(on_ranks(run, models.Energies, ranks), run(made(models.Energies), DATA))


@pytest.mark.parametrize("ranks", [1, 3])
def test_parts_that_are_computed_again_in_backward(ranks):
    class Again(models.Energies):
        def forward(self, *args):
            return torch.utils.checkpoint.checkpoint(super().forward, *args, use_reentrant=False)

    def run(model, graph, comm=None):
        found = by_script(model, graph, comm)
        loss_of(found, graph, comm).backward()
        return found, [parameter.grad for parameter in model.parameters()]

    assert_same(on_ranks(run, Again, ranks), run(made(Again), DATA))


@pytest.mark.parametrize("ranks", [1, 3])
def test_four_steps_of_training(ranks):
    def run(model, graph, comm=None):
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(4):
            optimizer.zero_grad()
            found, _ = trained(model, graph, comm)
            optimizer.step()
        return found, [parameter.detach() for parameter in model.parameters()]

    kind = models.Stresses
    assert_same(on_ranks(run, kind, ranks), run(made(kind), DATA))


def test_first_order_gradients_are_the_same_bits_before_and_after_forces():
    def work(comm):
        graph = sp.shard(DATA, comm)
        model = sp.pyg.wrap(copy.deepcopy(made(models.Energies)), comm)
        found = []
        for forces in (False, True, False):
            model.zero_grad()
            if forces:
                loss_of(by_script(model, graph, comm), graph, comm).backward()
                continue
            energies = model(graph.z, graph.pos, graph.edge_index, graph.shifts)
            energies.square().sum().backward()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
        return [torch.equal(one, other) for one, other in zip(*found)]

    assert all(map(all, sp.spawn(work, 3)))


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_aggregation_that_descends_along_gradients(ranks):
    def kind():
        return EquilibriumAggregation(3, 4, [6])

    def run(model, graph, comm=None):
        out = model(graph.pos, graph.batch)
        alike = out.square().sum()
        (alike if comm is None else sp.replicated(alike, comm)).backward()
        return {"totals": out}, [p.grad for n, p in model.named_parameters() if "bias" not in n or "layers.0" in n]

    found, gradients = on_ranks(run, kind, ranks)
    expected, of_one = run(made(kind), DATA)
    torch.testing.assert_close(found, {"totals": expected["totals"].detach()}, rtol=1e-6, atol=1e-6)  # PyG's float32
    torch.testing.assert_close(gradients, of_one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("checks", [True, False])
def test_gradients_in_a_call_that_is_not_followed_are_refused(checks):
    """Nobody would know what they have to be summed over."""

    class Later(models.OfTotals):
        calls = 0

        def forward(self, *args):
            self.calls += 1
            return super().forward(*args) if self.calls == 3 or not checks else self.energies(*args[:-1])

    copies = [made(Later) for _ in range(3)]

    def work(comm):
        graph = sp.shard(DATA, comm)
        model = sp.pyg.wrap(copies[comm.rank], comm, check=checks)
        for _ in range(3):
            model(graph.z, graph.pos.clone(), graph.edge_index, graph.shifts, graph.batch)

    with pytest.raises(RefusedError, match=r"forward takes gradients in a call .* not followed.*first call"):
        sp.spawn(work, 3)


class Pairs(MessagePassing):
    """Rows of eight numbers travel."""

    def __init__(self):
        super().__init__()
        self.first, self.mix = nn.Linear(3, 8), nn.Linear(8, 8)

    def forward(self, pos, edge_index):
        return self.propagate(edge_index, h=self.first(pos)).square().sum(-1)

    def message(self, h_i, h_j):
        return self.mix(h_j.tanh()) * h_i


@pytest.mark.parametrize(("mode", "walks"), [("sar", 3), ("keep", 2), ("halo", 2)])
def test_bytes_of_a_step_with_forces(mode, walks):
    """Rows are fetched for the gradient, which is returned; backward does both the other way round."""

    def work(comm):
        graph = sp.shard(DATA, comm, options=sp.Options(mode=mode, share_memory=False))
        model, sent = sp.pyg.wrap(made(Pairs), comm), []
        for forces in (False, True):
            for _ in range(2):  # the check of the first call sends more
                pos, before = graph.pos.clone().requires_grad_(), comm.bytes_sent
                energies = model(pos, graph)
                loss = energies.square().sum()
                if forces:
                    loss = loss + torch.autograd.grad(energies.sum(), pos, create_graph=True)[0].square().sum()
                loss.backward()
            sent.append(comm.bytes_sent - before)
        return sent, graph.edge_index.plan.schedule.counts

    found = sp.spawn(work, 3)
    row = sum(map(sum, found[0][1])) * 8 * 8
    assert [sum(sent[i] for sent, _ in found) for i in (0, 1)] == [walks * row, (walks + 4) * row]
