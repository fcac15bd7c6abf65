"""What a probe found is kept for the next calls of a layer, unless something has changed on which it depends."""

import copy

import pytest
import torch
import torch_geometric.nn as gnn
from torch import nn

import shardpass as sp
from shardpass.core.tracing import probing
from shardpass.testing import assignments, awkward_graph, run, shard_in_memory

from .how_much import one_each

GRAPH = awkward_graph()
OWNERS = {ranks: assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)["random"] for ranks in (1, 3)}
FACTOR = [1.0]


class One(nn.Module):
    """A model of one layer, whose arguments may change from call to call."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.in_place, self.given = layer, False, ()

    def forward(self, x, edge_index, weight):
        out = self.layer(x, edge_index, *(weight for _ in self.given))
        return out.relu_() if self.in_place else out


class Written(gnn.GCNConv):
    """A class of a user's: its message may read anything."""

    def message(self, x_j, edge_weight):
        return x_j * FACTOR[0]


def as_of_pyg(kind):
    """A class as if it were PyG's own."""
    kind.__module__ = kind.forward.__module__ = kind.message.__module__ = "torch_geometric.nn.conv.gcn_conv"
    return kind


@as_of_pyg
class Repeats(gnn.MessagePassing):
    """The message is a number of the layer, which is 1 at first: then a sum of messages counts edges."""

    def __init__(self):
        super().__init__("sum")
        self.register_buffer("number", torch.ones(1))

    def forward(self, x, edge_index):
        return x + self.propagate(edge_index, x=x)

    def message(self, x_j):
        return self.number.expand(x_j.shape)


@as_of_pyg
class Branches(Repeats):
    """What the message is depends on a number that Python reads."""

    def message(self, x_j):
        return x_j if self.number.item() == 1 else x_j * x_j


def gat(**options):
    return gnn.GATConv(5, 3, heads=2, **options)


def widened(conv):
    conv.lin = gnn.Linear(5, 8, bias=False).double()
    with_other_values(conv.lin.weight)
    conv.att_src, conv.att_dst = (nn.Parameter(torch.ones(1, 2, 4).double()) for _ in range(2))
    conv.bias, conv.out_channels = None, 4


def with_other_values(parameter):
    parameter.data = torch.linspace(-1, 1, parameter.numel(), dtype=torch.float64).view(parameter.shape)


def patched(conv):
    conv.__class__ = type("Tripled", (type(conv),), {"message": lambda self, x_j, edge_weight: 3 * x_j})


CHANGES = {
    "nothing": (gat, lambda model: None),
    "evaluates": (lambda: gat(dropout=0.5), lambda model: model.eval()),
    "slope": (gat, lambda model: setattr(model.layer, "negative_slope", 0.7)),
    "frozen": (gat, lambda model: model.layer.att_src.requires_grad_(False)),
    "wider": (gat, lambda model: widened(model.layer)),
    "in place": (lambda: gat(bias=False), lambda model: setattr(model, "in_place", True)),
    "another parameter": (
        lambda: gnn.GATv2Conv(5, 3, heads=2),
        lambda model: setattr(model.layer, "att", nn.Parameter(torch.ones(1, 2, 3).double())),
    ),
    "data": (lambda: gnn.GATv2Conv(5, 3, heads=2), lambda model: with_other_values(model.layer.att)),
    "message hook": (
        lambda: gnn.GCNConv(5, 3),
        lambda model: model.layer.register_message_forward_hook(lambda module, given, out: out * 2),
    ),
    "aggregate hook": (
        lambda: gnn.GCNConv(5, 3),
        lambda model: model.layer.register_aggregate_forward_hook(lambda module, given, out: out * 2),
    ),
    "hook inside": (
        lambda: gnn.EdgeConv(nn.Linear(10, 3)),
        lambda model: model.layer.nn.register_forward_hook(lambda module, given, out: out * 2),
    ),
    "forward inside": (lambda: gnn.EdgeConv(nn.Linear(10, 3)), lambda model: adapted(model.layer)),
    "module inside": (
        lambda: gnn.EdgeConv(nn.Sequential(nn.Linear(10, 3))),
        lambda model: model.layer.nn.append(nn.ReLU()),
    ),
    "aggregation": (
        lambda: gnn.GraphConv(5, 3),
        lambda model: setattr(model.layer, "aggr_module", gnn.MaxAggregation()),
    ),
    "argument": (lambda: gnn.GraphConv(5, 3), lambda model: setattr(model, "given", (1,))),
    "class": (lambda: gnn.GCNConv(5, 3), lambda model: patched(model.layer)),
    "constant messages": (Repeats, lambda model: model.layer.number.fill_(2)),
    "a number read by Python": (Branches, lambda model: model.layer.number.fill_(2)),
    "value that a user's class reads": (lambda: Written(5, 3), lambda model: FACTOR.__setitem__(0, 2.0)),
}


def adapted(layer):
    """As adapters of low rank do it: another forward of a module, with a parameter of its own."""
    inner, layer.adapter = layer.nn.forward, nn.Parameter(torch.linspace(0, 1, 30).double().view(3, 10))
    layer.nn.forward = lambda h: inner(h) + h @ layer.adapter.t()


def called(model, change, x, edges, weight, pick=lambda out: out):
    """The output of the third call, and gradients: `change` comes before it."""
    for number in range(3):
        if number == 2:
            change(model)
        model.zero_grad()
        given = x.detach().clone().requires_grad_()
        out = model(given, edges, weight)
        (out * pick(torch.linspace(1, 2, GRAPH.num_nodes).double().view(-1, 1))).sum().backward()
    parameters = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return out.detach(), given.grad, parameters


@pytest.mark.parametrize(("name", "ranks"), one_each(CHANGES, (3, 1)))
def test_a_change_between_calls_is_noticed(name, ranks):
    make, change = CHANGES[name]
    FACTOR[0] = 1.0
    torch.manual_seed(0)
    plain = One(make()).double()
    sharded = copy.deepcopy(plain)
    edges, weight, x = GRAPH.edge_index, GRAPH.edge["edge_weight"], GRAPH.node["x"]
    expected = called(plain, change, x, edges, weight)
    FACTOR[0] = 1.0

    def rank(comm):
        graph = shard_in_memory(GRAPH, OWNERS[ranks], comm)
        model = sp.pyg.wrap(copy.deepcopy(sharded), comm, check=False)
        ids = graph.node_ids
        return ids, *called(model, change, graph.x, graph, graph.edge["edge_weight"], lambda rows: rows[ids])

    found = run(rank, ranks)
    for ids, out, grad, _ in found:
        torch.testing.assert_close(out, expected[0][ids])
        torch.testing.assert_close(grad, expected[1][ids])
    for key, value in expected[2].items():
        for *_, parameters in found:
            torch.testing.assert_close(parameters[key], value)


@pytest.mark.parametrize(
    ("make", "probes"), [(gat, 1), (lambda: gnn.GCNConv(5, 3), 1), (lambda: gnn.SAGEConv(5, 3), 1), (Written, 4)]
)
def test_a_layer_of_pyg_is_probed_once(make, probes, monkeypatch):
    counted, probe = [], probing.probe
    monkeypatch.setattr(probing, "probe", lambda *given: counted.append(1) or probe(*given))
    comm = sp.connect("local")
    graph = shard_in_memory(GRAPH, OWNERS[1], comm)
    layer = make(5, 3) if make is Written else make()
    model = sp.pyg.wrap(layer.double(), comm)
    for _ in range(4):  # three of which are followed
        model(graph.x, graph).sum().backward()
    assert len(counted) == probes
