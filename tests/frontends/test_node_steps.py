"""Layers whose node function is written down in one call and repeated in the next: as exact in the third call."""

import gc
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("torch_geometric")

from torch_geometric import nn as gnn

import shardpass as sp
from shardpass.core.aggregation.node_steps import NodeSteps, NodeStepsWriter
from shardpass.errors import RefusedError
from shardpass.testing.graphs import assignments, awkward_graph, shard_in_memory

from .how_much import one_each

GRAPH = awkward_graph(channels=6)
DEGREES = torch.bincount(torch.bincount(GRAPH.edge_index[1], minlength=GRAPH.num_nodes))
PNA = ["mean", "max", "std"], ["identity", "attenuation"], DEGREES
LAYERS = {
    "sum": lambda: gnn.GraphConv(6, 6),
    "mean": lambda: gnn.SAGEConv(6, 6),
    "largest": lambda: gnn.SAGEConv(6, 6, aggr="max"),
    "several": lambda: gnn.SAGEConv(6, 6, aggr=["mean", "std", "min"]),
    "learned": lambda: gnn.SAGEConv(6, 6, aggr=gnn.SoftmaxAggregation(learn=True)),
    "scaled": lambda: gnn.PNAConv(6, 6, *PNA),
    "attention": lambda: gnn.TransformerConv(6, 3, heads=2),
}
COUNT = 5


class Changing(torch.nn.Module):
    """Writes into what its layer returned, which must not reach what the engine keeps."""

    def __init__(self, make):
        super().__init__()
        self.layer = make()

    def forward(self, x, edge_index):
        return self.layer(x, edge_index).mul_(2)


def steps(model, x, edge_index, total):
    """The losses of some steps, with other features in each, and the gradients of the last one."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 1e-3), []
    for number in range(COUNT):
        optimizer.zero_grad()
        model.train(number % 2 == 0)
        loss = total(torch.tanh(model(x * (1 + number / 10), edge_index)).square())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.grad.clone() for parameter in model.parameters()]


def of_rank(comm, make, state):
    graph = shard_in_memory(GRAPH, assignments(GRAPH.num_nodes, comm.size, GRAPH.edge_index)["random"], comm)
    model = Changing(make).double()
    model.load_state_dict(state)
    sp.pyg.wrap(model, comm)
    return steps(model, graph.x, graph, lambda rows: sp.sum(rows, None, comm).sum())


@pytest.mark.parametrize(("name", "size"), one_each(LAYERS, (3, 1)))
def test_many_calls(name, size):
    torch.manual_seed(0)
    model = Changing(LAYERS[name]).double()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    losses, gradients = steps(model, GRAPH.node["x"], GRAPH.edge_index, torch.sum)
    for found, of_parameters in sp.spawn(of_rank, size, args=(LAYERS[name], state)):
        assert found == pytest.approx(losses, rel=1e-10)
        for one, other in zip(of_parameters, gradients):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@contextmanager
def cycles():
    """Has, at its end, the tensors that were left to Python's search for cycles."""
    found = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += [[*one.shape] for one in gc.garbage if isinstance(one, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_tensors_are_freed_at_once(few_objects):
    """A cycle that holds them would raise the peak until Python looks for it."""
    comm = sp.connect("local")
    graph = shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.int64), comm)
    models = [sp.pyg.wrap(Changing(make).double(), comm) for make in LAYERS.values()]

    def steps_of_all(count):
        for model in models * count:
            sp.sum(model(graph.x, graph).square(), None, comm).sum().backward()

    steps_of_all(4)  # the fourth call is followed; the next three are ordinary ones
    with cycles() as left:
        steps_of_all(3)
    assert left == []


def written(function, made_up, lasting):
    """The steps of a function of one reduction, as far as they are known."""
    writer, rows = NodeStepsWriter(lasting, 1), torch.ones(4, 2)
    writer.begin(made_up)
    writer.note_reduction(0, (rows, 0), {}, rows)

    class Noted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            writer.note(func, func.__name__, args, kwargs or {}, out)
            return out

    with Noted():
        result = function(rows)
    return writer.finish(result)


WEIGHT, OTHER = torch.full((2,), 3.0), torch.full((4, 2), 5.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda rows: rows * WEIGHT,
        lambda rows: rows.max(1).values + rows.split(1, 1)[0].squeeze(1),
        lambda rows: torch.stack([rows, rows * 2], 1),
        lambda rows: (OTHER * 2, rows + 1)[1],
    ],
)
def test_steps_give_what_the_function_gives(function):
    steps, rows = written(function, [OTHER], [WEIGHT]), torch.rand(4, 2)
    torch.testing.assert_close(steps.run([rows]), function(rows), rtol=0, atol=0)


def without_grad(rows):
    with torch.no_grad():
        half = rows / 2
    return rows * half


@pytest.mark.parametrize(
    "function",
    [
        lambda rows: rows + OTHER,
        lambda rows: rows * torch.utils.dlpack.from_dlpack(WEIGHT),
        lambda rows: (rows * 2).mul_(3),
        lambda rows: rows * rows.sum().item(),
        lambda rows: torch.block_diag(*[rows]) * WEIGHT.add_(0),
        without_grad,
        lambda rows: (rows, rows),
    ],
)
def test_steps_that_may_differ_in_later_calls_are_not_kept(function):
    assert written(function, [OTHER], [WEIGHT]) is None


def repeated(comm, change):
    """Whether the last call of a layer repeated the steps of an earlier one, after a `change` of the layer."""
    graph = shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.int64), comm)
    layer = sp.pyg.wrap(gnn.SAGEConv(6, 6).double(), comm)
    for _ in range(3):  # the first two are followed
        layer(graph.x, graph)
    run, calls = NodeSteps.run, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeSteps, "run", lambda *given: calls.append(1) or run(*given))
        change(layer)
        layer(graph.x, graph)
    return bool(calls)


@pytest.mark.parametrize(
    ("change", "is_repeated"),
    [
        (lambda layer: None, True),
        (lambda layer: setattr(layer.aggr_module, "threshold", 2.0), False),
        (lambda layer: layer.aggr_module.register_forward_hook(lambda *_: None), False),
        (lambda layer: layer.register_aggregate_forward_hook(lambda *_: None), False),
        (lambda layer: setattr(layer, "aggr_module", gnn.MaxAggregation()), False),
    ],
)
def test_what_has_changed_is_run_again(change, is_repeated):
    assert repeated(sp.connect("local"), change) == is_repeated


def test_what_a_message_stores_is_refused_in_every_call():
    comm = sp.connect("local")
    graph = shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.int64), comm)
    layer = sp.pyg.wrap(gnn.TransformerConv(6, 6).double(), comm)
    for _ in range(5):
        with pytest.raises(RefusedError, match="`_alpha`, set inside message"):
            layer(graph.x, graph, return_attention_weights=True)
