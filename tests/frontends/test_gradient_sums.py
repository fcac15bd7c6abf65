"""Training steps as people write them, with and without shardpass: gradients are whole wherever they are looked at.

Scalers, L-BFGS, SAM, teachers, averages and frozen layers are in `one_script.py`.
"""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.errors import DivergenceError
from shardpass.testing import run, shard_in_memory

from .how_much import ONE_OR_THREE
from .inside_model import GRAPH, OWNERS
from .on_ranks import on_ranks

STEPS = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = gnn.SAGEConv(6, 8), gnn.GCNConv(8, 8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.lstm, self.unused = nn.LSTM(4, 4, batch_first=True), nn.Linear(3, 3)
        self.rate = nn.Parameter(torch.ones(()))
        self.tied = self.head[0].weight

    def forward(self, x, edges):
        return self.decode(self.encode(x, edges))

    def encode(self, x, edges):
        h = self.last(self.first(x, edges).relu(), edges)
        return h + self.lstm(h.view(-1, 2, 4))[0].reshape(-1, 8)

    def decode(self, z):
        return self.head(z) + F.linear(z, self.tied)


def _models():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().double(), gnn.SGConv(6, 8).double()


MODELS = _models()  # ranks that are threads draw from one generator


class Task:
    """A model, what it is given, and the loss: over the nodes of all ranks, in one process or in several."""

    def __init__(self, comm=None):
        self.comm, (self.model, self.other) = comm, copy.deepcopy(MODELS)
        if comm is None:
            self.graph, fields = GRAPH.edge_index, GRAPH.node
        else:
            self.graph = shard_in_memory(GRAPH, OWNERS[comm.size], comm)
            fields = {name: getattr(self.graph, name) for name in ("x", "y", "m")}
            self.model, self.other = sp.pyg.wrap(self.model, comm), sp.pyg.wrap(self.other, comm)
        self.x, self.y, self.m = (fields[name] for name in ("x", "y", "m"))
        self.parameters = [*self.model.parameters()]

    def optimizer(self, kind=torch.optim.AdamW, **options):
        return kind(self.parameters, **({"lr": 0.01} | options))

    def out(self):
        return self.model(self.x, self.graph)

    def loss(self, out, mask=True):
        mask = self.m if mask else None
        if self.comm is None:
            return F.cross_entropy(out, self.y) if mask is None else F.cross_entropy(out[mask], self.y[mask])
        return sp.cross_entropy(out, self.y, mask, self.comm)

    def no_sync(self):
        return contextlib.nullcontext() if self.comm is None else sp.no_sync(self.model)


def simple(task, step=lambda task, optimizer: None, after=lambda task: None, loss=None, **options):
    optimizer = task.optimizer(**options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = task.loss(task.out()) if loss is None else loss(task)
        value.backward()
        after(task)
        step(task, optimizer)
        optimizer.step()
        yield value.detach()


def penalties(task):
    return 0.01 * sum(p.square().sum() for p in task.parameters)


def declared(task):
    return penalties(task) if task.comm is None else sp.replicated(penalties(task), task.comm)


def parts(task):
    z = task.model.encode(task.x, task.graph)
    return task.loss(task.model.decode(z)) + task.loss(task.model.head(z), mask=False)


def two_models(task):
    return task.loss(task.out() + task.other(task.x, task.graph)) + task.loss(task.other(task.x, task.graph))


def accumulated(task, waits):
    optimizer = task.optimizer()
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        for number in range(3):
            with task.no_sync() if waits and number < 2 else contextlib.nullcontext():
                task.loss(task.out(), mask=number != 1).backward()
        optimizer.step()
        yield task.loss(task.out()).detach()


def dropped(task):
    optimizer = task.optimizer()
    with task.no_sync():
        task.loss(task.out(), mask=False).backward()
    optimizer.zero_grad()
    yield from simple(task)


def by_grad(task):
    optimizer = task.optimizer()
    for _ in range(STEPS):
        gradients = torch.autograd.grad(task.loss(task.out()), task.parameters, allow_unused=True)
        for parameter, gradient in zip(task.parameters, gradients):
            parameter.grad = gradient
        optimizer.step()
        yield task.loss(task.out()).detach()


def twice(task):
    optimizer = task.optimizer()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = task.loss(task.out())
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def _step(optimizer, _):
    optimizer.step()
    optimizer.zero_grad()


def in_backward(task):
    for parameter in task.parameters:
        optimizer = torch.optim.AdamW([parameter], lr=0.01)
        parameter.register_post_accumulate_grad_hook(partial(_step, optimizer))
    for _ in range(STEPS):
        loss = task.loss(task.out())
        loss.backward()
        yield loss.detach()


def hooked(task):
    task.model.head[0].weight.register_hook(lambda g: g / g.norm())
    task.model.first.lin_l.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    yield from simple(task, kind=torch.optim.SGD, lr=0.5)


LOOPS = {
    "simple": simple,
    "clipped": lambda task: simple(task, lambda t, o: nn.utils.clip_grad_norm_(t.parameters, 0.05)),
    "a penalty": lambda task: simple(task, loss=lambda t: t.loss(t.out()) + penalties(t)),
    "a penalty said to be replicated": lambda task: simple(task, loss=lambda t: t.loss(t.out()) + declared(t)),
    "a learned weight": lambda task: simple(
        task, loss=lambda t: (-t.model.rate).exp() * t.loss(t.out()) + t.model.rate + t.loss(t.out()).sqrt()
    ),
    "parts of the model": lambda task: simple(task, loss=parts),
    "two models": lambda task: simple(task, loss=two_models),
    "accumulated": lambda task: accumulated(task, False),
    "accumulated, summed once": lambda task: accumulated(task, True),
    "dropped while it waits": dropped,
    "by autograd.grad": by_grad,
    "backward twice": twice,
    "an optimizer in backward": in_backward,
    "hooks of parameters": hooked,
}


def trained(name, comm=None):
    task = Task(comm)
    losses = list(LOOPS[name](task))
    return losses, [p.detach().clone() for p in (*task.parameters, *task.other.parameters())]


@pytest.mark.parametrize("ranks", ONE_OR_THREE)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_gives_what_it_gives_in_one_process(name, ranks):
    losses, parameters = trained(name)
    for found in run(lambda comm: trained(name, comm), ranks):
        torch.testing.assert_close(found[0], losses, rtol=0, atol=1e-10)
        torch.testing.assert_close(found[1], parameters, rtol=0, atol=1e-10)


@on_ranks(3)
def test_a_rank_whose_loss_reaches_some_parameters_only(comm):
    """What no rank reaches keeps no gradient, and is not decayed; what one rank reaches has it on all."""
    task = Task(comm)
    z = task.model.encode(task.x, task.graph)
    rows = task.model.decode(z) if comm.rank == 1 else z + 0 * task.model.decode(z.detach())
    sp.sum(rows, None, comm).backward()
    unused, bias = [p.grad for p in task.model.unused.parameters()], task.model.head[2].bias.grad
    assert unused == [None, None] and bias.sum() > 0


@on_ranks(3)
def test_a_parameter_that_meets_rows_outside_of_the_model_is_found_where_nothing_is_followed(comm):
    with pytest.raises(DivergenceError, match="is not the same on rank 0"):
        task = Task(comm)
        task.model = sp.pyg.wrap(copy.deepcopy(MODELS[0]), comm, check=False)
        task.parameters = [*task.model.parameters()]
        optimizer = task.optimizer(torch.optim.SGD, lr=0.5)
        for _ in range(6):
            optimizer.zero_grad()
            task.loss(task.model.encode(task.x, task.graph) @ task.model.tied).backward()
            optimizer.step()


@on_ranks(3)
def test_an_infinite_gradient_of_own_rows_stops_all_ranks(comm):
    graph = shard_in_memory(GRAPH, OWNERS[comm.size], comm)

    class Table(nn.Module):
        spoilt = False

        def __init__(self):
            super().__init__()
            self.table, self.conv = sp.NodeEmbedding(graph, 4), gnn.SAGEConv(4, 8)

        def forward(self, edges):
            rows = self.table.weight * 1.0
            if self.spoilt:
                rows.register_hook(lambda g: g * (float("inf") if comm.rank == 1 else 1.0))
            return self.conv(rows, edges)

    model = sp.pyg.wrap(Table().double(), comm, check=False)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", 8.0)
    scales = []
    for epoch in range(3):
        model.spoilt = epoch == 1
        optimizer.zero_grad()
        scaler.scale(sp.cross_entropy(model(graph), graph.y, graph.m, comm)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 4.0, 4.0]
