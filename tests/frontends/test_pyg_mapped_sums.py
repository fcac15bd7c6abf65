"""SAGEConv and GraphConv map their sums linearly: before the sum where rows get narrower; the same numbers always."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

from torch_geometric.nn import GraphConv, SAGEConv

import shardpass as sp
from shardpass.testing import awkward_graph

from .how_much import ONE_PART_EMPTY, assert_case_exact, in_turn
from .on_ranks import on_ranks, share
from .pyg_cases import GRAPH


def plain(model, inputs, graph):
    return model(inputs["x"], graph)


def weighted(model, inputs, graph):
    return model(inputs["x"], graph, inputs["edge_weight"])


def replaced(make):
    def changed():
        layer = SAGEConv(5, 3, root_weight=False)
        layer.lin_l = make()
        return layer

    return changed


class Twice(nn.Module):
    """Uses the sums in two maps, as they are, and by name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3, bias=False)

    def forward(self, sums):
        keyword = nn.functional.linear(input=sums, weight=self.first.weight)
        return self.first(sums) + self.second(sums) + sums[:, :3] + keyword


CASES = {
    "SAGE narrower": (lambda: SAGEConv(5, 2), plain),
    "SAGE equal, sum, normalised": (lambda: SAGEConv(5, 5, aggr="sum", normalize=True), plain),
    "SAGE projected, no root, no bias": (lambda: SAGEConv(5, 2, project=True, root_weight=False, bias=False), plain),
    "GraphConv weighted": (lambda: GraphConv(5, 2), weighted),
    "GraphConv mean": (lambda: GraphConv(5, 2, aggr="mean"), plain),
    "replaced by a stack": (replaced(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))), plain),
    "replaced by a cut": (replaced(lambda: nn.Sequential(nn.Softmax(1), nn.Linear(5, 3))), plain),
    "replaced by nothing": (replaced(nn.Identity), plain),
    "used twice": (replaced(Twice), plain),
}


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(CASES))
def test_equals_the_whole_graph(name, ranks, modes):
    assert_case_exact(CASES[name], GRAPH, sp.pyg.wrap, ranks, modes, block_rows=6)


def bytes_of(layer, needs_grad=True, hook=None, **options):
    """Payload bytes of a forward and backward on three ranks."""
    graph_of = awkward_graph(channels=8)

    def rank(comm):
        graph = share(graph_of, comm, **options)
        with sp.seed(0, comm):
            model = layer()
        if hook is not None:
            hook(model)
        sp.pyg.wrap(model, comm, check=False)
        x = graph.x.float().requires_grad_(needs_grad)
        before = comm.bytes_sent
        model(x, graph).sum().backward()
        rows = sum(graph.edge_index.plan.schedule.counts[comm.rank])
        return comm.bytes_sent - before, rows

    found = sp.spawn(rank, 3)
    return sum(sent for sent, _ in found), sum(rows for _, rows in found)


def test_narrower_rows_travel_in_both_directions():
    sent, rows = bytes_of(lambda: SAGEConv(8, 2))
    assert sent == rows * 2 * 4 * 2
    sent, rows = bytes_of(lambda: SAGEConv(8, 8))
    assert sent == rows * 8 * 4 * 2


def test_wider_rows_do_not():
    sent, rows = bytes_of(lambda: SAGEConv(8, 16))
    assert sent == rows * 8 * 4 * 2


def test_rows_without_gradient_travel_once_as_they_are():
    sent, rows = bytes_of(lambda: SAGEConv(8, 2), needs_grad=False)
    assert sent == rows * 8 * 4


def test_rows_without_gradient_travel_narrower_where_their_sums_are_not_kept():
    sent, rows = bytes_of(lambda: SAGEConv(8, 2), needs_grad=False, cache_constant_inputs=False)
    assert sent == rows * 2 * 4 * 2
    assert_case_exact((Constant, plain), GRAPH, sp.pyg.wrap, modes=ONE_PART_EMPTY, cache_constant_inputs=False)


class Constant(nn.Module):
    """A layer over features without gradient, before one over its result."""

    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv(5, 4), GraphConv(4, 2)

    def forward(self, x, edge_index):
        return self.second(self.first(x.detach(), edge_index).tanh(), edge_index)


def test_a_hook_sees_the_sums_themselves():
    seen = []
    sent, rows = bytes_of(
        lambda: SAGEConv(8, 2),
        hook=lambda layer: layer.register_aggregate_forward_hook(lambda *args: seen.append(args[-1].shape[1])),
    )
    assert sent == rows * 8 * 4 * 2 and set(seen) == {8}


@pytest.mark.parametrize("mode", ["sar", "keep"])
@on_ranks(3)
def test_a_hook_on_one_rank_alone_makes_no_rank_wrong(comm, mode):
    """Rows in shared memory have no length by which readers would notice."""
    whole = awkward_graph(channels=8)
    torch.manual_seed(0)
    model = nn.Sequential(SAGEConv(8, 6), SAGEConv(6, 2)).double()
    out = model[1](model[0](whole.node["x"], whole.edge_index), whole.edge_index)
    out.square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    comm.inner.shares_memory, comm.inner.local_ranks = True, tuple(range(comm.size))
    graph, own = share(whole, comm, mode=mode, cache_constant_inputs=False), copy.deepcopy(model)  # both layers map
    for layer in own:
        sp.pyg.wrap(layer, comm, check=False)
        if comm.rank == 0:
            layer.aggr_module.register_forward_hook(lambda *args: None)
    found = own[1](own[0](graph.x, graph), graph)
    torch.testing.assert_close(found, out.detach()[graph.node_ids])
    own.zero_grad()
    found.square().sum().backward()
    own = [p.grad for p in own.parameters()]
    torch.testing.assert_close(own, expected)


def test_a_layer_with_code_of_its_own_is_left_alone():
    class Mine(SAGEConv):
        def forward(self, x, edge_index):
            out = self.propagate(edge_index, x=(x, x))
            assert type(out) is torch.Tensor
            return self.lin_l(out) + self.lin_r(x)

    sent, rows = bytes_of(lambda: Mine(8, 2))
    assert sent == rows * 8 * 4 * 2
    assert_case_exact((lambda: Mine(5, 2), plain), GRAPH, sp.pyg.wrap, 2, ONE_PART_EMPTY)
