"""What wrapped models do besides being exact: refusals, ordinary tooling, misuse."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch.utils.checkpoint import checkpoint

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import (
    assert_exact,
    assert_same,
    assignments,
    cotangent,
    evaluate_sharded,
    evaluate_whole,
)

from .how_much import MODES, one_each
from .on_ranks import on_ranks, on_shares, share
from .pyg_cases import GRAPH, LAYERS, GatedConv

OWNERS = assignments(GRAPH.num_nodes, 2, GRAPH.edge_index)["random"]


class Offender(gnn.MessagePassing):
    """A layer whose message is `made` of both ends, the ids of sources, and a table with a row for each node."""

    def __init__(self, made):
        super().__init__(aggr="sum")
        self.made = made

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, table=x)

    def message(self, x_j, x_i, edge_index_j, table):
        return self.made(x_j, edge_index_j, table)


IN_PIECES = "^Offender: messages are computed in pieces"
OFFENDERS = {
    "norm": (lambda x, ids, table: x / x.norm(), IN_PIECES),
    "softmax": (lambda x, ids, table: x.softmax(dim=0), IN_PIECES),
    "mean": (lambda x, ids, table: x - x.mean(0), IN_PIECES),
    "cumsum": (lambda x, ids, table: x.cumsum(0), IN_PIECES),
    "batch_norm": (
        lambda x, ids, table: torch.nn.functional.batch_norm(x, None, None, training=True),
        "BatchNorm in training mode inside message",
    ),
    "ids": (lambda x, ids, table: x * ids.view(-1, 1), "numbered per rank"),
    "lookup": (lambda x, ids, table: x + table[ids], "numbered per rank"),
    "numpy": (lambda x, ids, table: x.detach().numpy(), "out of torch"),
}


@pytest.mark.parametrize(("kind", "mode"), one_each(OFFENDERS))
@on_ranks(2)
def test_messages_that_are_not_row_wise_are_refused(comm, kind, mode):
    made, words = OFFENDERS[kind]
    graph = share(GRAPH, comm, mode=mode)
    with pytest.raises(RefusedError, match=words):
        sp.pyg.wrap(Offender(made).double(), comm)(graph.x, graph)


@on_ranks(2)
def test_wrapping_keeps_names_and_class(comm):
    torch.manual_seed(0)
    plain = gnn.GAT(5, 8, 2, 4, norm="batch_norm").double()
    expected = copy.deepcopy(plain)(GRAPH.node["x"], GRAPH.edge_index)
    graph = share(GRAPH, comm)
    model = sp.pyg.wrap(copy.deepcopy(plain), comm)
    assert list(model.state_dict()) == list(plain.state_dict()) and type(model) is gnn.GAT
    assert sp.pyg.wrap(model, comm) is model
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    before = model(graph.x, graph)
    assert not torch.equal(before, twin(graph.x, graph)), "the copy must use its own parameters"
    out, ids = model(graph.x, graph), graph.node_ids
    torch.testing.assert_close(out, expected[ids])


@pytest.mark.parametrize(("mode", "how"), one_each(MODES, ["twice", "remembered"]))
def test_two_backward_passes_and_checkpointing_are_exact(mode, how):
    make, call = LAYERS["GATConv edges"]
    torch.manual_seed(0)
    model = make().double()
    whole = evaluate_whole(model, GRAPH, call)

    def twice(m, inputs, graph):
        out = call(m, inputs, graph)
        rows = getattr(graph, "node_ids", slice(None))
        (out * cotangent(whole.output)[rows]).sum().backward(retain_graph=True)
        for tensor in [*m.parameters(), *inputs.values()]:
            tensor.grad = None
        return out

    def remembered(m, inputs, graph):
        def body(x, edge_attr):
            return call(m, {"x": x, "edge_attr": edge_attr}, graph)

        return checkpoint(body, inputs["x"], inputs["edge_attr"], use_reentrant=False)

    variant = {"twice": twice, "remembered": remembered}[how]
    sharded = evaluate_sharded(model, GRAPH, variant, OWNERS, 2, sp.pyg.wrap, sp.Options(mode=mode), whole)
    assert_same(whole, sharded)


@pytest.mark.parametrize(
    ("layer", "mode"), one_each([gnn.GATConv, gnn.GATv2Conv, gnn.TransformerConv], ["sar", "halo"])
)
def test_frozen_attention_before_a_layer_that_learns(layer, mode):
    """Backward passes through the frozen layer as well, on all ranks, and has nothing to do there."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([layer(5, 4, heads=2), layer(8, 3)]).double()
    model[0].requires_grad_(False)
    out = model[1](model[0](GRAPH.node["x"], GRAPH.edge_index), GRAPH.edge_index)
    expected = torch.autograd.grad((out * cotangent(out)).sum(), list(model[1].parameters()))

    def work(comm, graph):
        net = gnn.Sequential("x, edge_index", [(m, "x, edge_index -> x") for m in copy.deepcopy(model)])
        mine = sp.pyg.wrap(net, comm, check=False)(graph.x, graph)
        (mine * cotangent(out)[graph.node_ids]).sum().backward()
        assert all(p.grad is None for p in net[0].parameters())
        sp.sync_gradients(net, comm)
        return [p.grad for p in net[1].parameters()]

    for found in on_shares(GRAPH, work, mode=mode):
        torch.testing.assert_close(found, list(expected), rtol=0, atol=1e-10)


def test_a_model_that_threads_share_is_refused():
    model = gnn.GCNConv(5, 3).double()

    def work(comm, graph):
        with pytest.raises(RefusedError, match="ranks 0 and 1 hold the same model"):
            sp.pyg.wrap(model, comm)
        with pytest.raises(RefusedError, match="ranks 0 and 1 hold the same model"):
            sp.pyg.exact(model, comm)
        mine = sp.pyg.wrap(copy.deepcopy(model), comm)
        assert sp.pyg.wrap(mine, comm) is mine
        return mine

    mine, other = on_shares(GRAPH, work)
    with pytest.raises(RefusedError, match="is wrapped already, with another communicator"):
        sp.pyg.wrap(mine, sp.connect("local"))
    assert mine is not other


@on_ranks(2)
def test_in_place_change_of_a_saved_tensor_is_noticed(comm):
    graph = share(GRAPH, comm)
    x = graph.x.clone().requires_grad_()
    hidden = x * 1
    out = sp.pyg.wrap(gnn.EdgeConv(torch.nn.Linear(10, 3)).double(), comm)(hidden, graph)
    hidden.detach().add_(1)
    hidden.data.add_(1)
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@on_ranks(2)
def test_attention_weights_of_gat_are_those_of_the_whole_graph(comm):
    torch.manual_seed(0)
    plain = gnn.GATConv(5, 4, heads=2, add_self_loops=False).double()
    _, (_, expected) = plain(GRAPH.node["x"], GRAPH.edge_index, return_attention_weights=True)
    graph = share(GRAPH, comm)
    layer = sp.pyg.wrap(copy.deepcopy(plain), comm)
    _, (_, alpha) = layer(graph.x, graph, return_attention_weights=True)
    torch.testing.assert_close(alpha + 0, expected[graph.edge_ids])


@on_ranks(2)
def test_half_precision_runs(comm):
    graph = share(GRAPH, comm)
    model = sp.pyg.wrap(gnn.GraphSAGE(5, 8, 2, 4).to(torch.bfloat16), comm)
    model(graph.x.to(torch.bfloat16), graph).sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())


class Twice(torch.nn.Module):
    """Its layer keeps a tensor on itself; backward of the first call comes when it holds that of the second."""

    def __init__(self):
        super().__init__()
        self.conv = GatedConv(5, 3)

    def forward(self, x, edge_index, edge_attr):
        return self.conv(self.conv(x, edge_index, edge_attr), edge_index, edge_attr)


class Tempered(gnn.MessagePassing):
    """Keeps a number and a flag on itself that are others at the second call."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(5, 5)

    def forward(self, x, edge_index):
        out = 0
        for self._scale, self._bend in ((1.0, True), (3.0, False)):
            out = out + self.propagate(edge_index, x=self.lin(x))
        return out

    def message(self, x_j):
        return (x_j * self._scale).tanh() if self._bend else x_j.square() * self._scale


@pytest.mark.parametrize(("mode", "make"), one_each(MODES, [Twice, Tempered]))
def test_a_layer_that_keeps_something_on_itself_for_its_message(mode, make):
    torch.manual_seed(0)
    model = make().double()

    def call(m, inputs, graph):
        return m(inputs["x"], graph, inputs["edge_attr"]) if make is Twice else m(inputs["x"], graph)

    assert_exact(model, GRAPH, call, sp.pyg.wrap, ranks=2, modes=(mode,), owners={"random": OWNERS})
