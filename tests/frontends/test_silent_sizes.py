"""Programs inside a model where sizes coincide or vanish, in eval, on features made outside; and hooks of gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch_geometric.data import Data

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import WholeGraph, run, shard_in_memory

from . import inside_counts as counts
from . import inside_rows as rows
from . import inside_square as square
from . import inside_values as values
from .inside_model import (
    GRAPH,
    NODES,
    OWNERS,
    TEAMS,
    Team,
    Together,
    built,
    called,
    cases,
    exact_or_why,
    own_fields,
    refused_or_why,
    whole_graph,
)

EIGHTS = {w: torch.arange(w).repeat_interleave(8)[torch.randperm(8 * w)] for w in (1, 3, 4)}
SQUARES = {w: Team(whole_graph(who), who, w) for w, who in EIGHTS.items()}
FEW = {3: Team(GRAPH, torch.tensor([1] + [0] * (NODES - 1)), 3)}

MIXING = cases(square.MIXING)
ROW_WISE = cases(square.ROW_WISE)
REFUSED = cases(rows.MIXING_BY_PLACE, counts.POSITIONS, counts.CONSTANTS, counts.TURNED, counts.NUMPY)
REFUSED |= cases(counts.ESCAPES, values.SCALARS, values.LEAVING)
EXACT = cases(rows.ROW_WISE, values.STAYING)
SOME_REFUSED = [
    "roll by 28 rows",
    "rows above a far diagonal",
    "roll of edges in a message",
    "standardised",
    "zeros in the first sixty",
    "ones and zeros cut",
    "eight rows turned",
    "NumPy, a line",
    "an integer",
    "a tensor of the least and the most",
    "a dataclass with a loss",
]
SOME_EXACT = [
    "roll of channels",
    "a triangle of each row",
    "renorm of rows in a message",
    "convolution over channels",
    "batch norm of all ranks",
    "LSTM over a time per node",
    "mask of nodes computed",
    "largest channels",
    "softmax over edges",
    "views by size",
    "zeros of own size",
    "a constant cut by the width",
]

HOOKED_WRONG = """
a norm of a gradient inside
    h.register_hook(lambda g: g / g.norm())  # here
    after: pass
the sign of the gradient of a weight made inside
    weight = self.lin.weight * 1.0
    weight.register_hook(lambda g: g.sign())  # here
    h = h @ weight
    after: pass
a module's gradients by the largest
    made: self.lin.register_full_backward_hook(lambda m, i, o: tuple(g / g.abs().max() for g in i))  # here
    h = self.lin(h)
    after: pass
a function whose backward averages
    top: class Averaging(torch.autograd.Function):
    top:     @staticmethod
    top:     def forward(ctx, h, weight):
    top:         ctx.save_for_backward(h, weight)
    top:         return h @ weight
    top:     @staticmethod
    top:     def backward(ctx, grad):
    top:         h, weight = ctx.saved_tensors
    top:         return grad @ weight.t(), h.t() @ grad / h.size(0)  # here
    h = Averaging.apply(h, self.lin.weight)
    after: pass
a function that takes the sign of a weight's gradient
    top: class Sign(torch.autograd.Function):
    top:     @staticmethod
    top:     def forward(ctx, weight):
    top:         return weight * 1.0
    top:     @staticmethod
    top:     def backward(ctx, grad):
    top:         return grad.sign()  # here
    h = h @ Sign.apply(self.lin.weight)
    after: pass
the gradient of a squared total
    h = h - torch.func.grad(lambda z: (z.tanh().mean() * 10).square())(h)  # here
"""
HOOKED_RIGHT = """
a function that binarises rows and a weight
    top: class Binary(torch.autograd.Function):
    top:     @staticmethod
    top:     def forward(ctx, given):
    top:         ctx.save_for_backward(given)
    top:         return given.sign()
    top:     @staticmethod
    top:     def backward(ctx, grad):
    top:         return grad * (ctx.saved_tensors[0].abs() <= 0.8)
    h = Binary.apply(h) @ Binary.apply(self.lin.weight * 1.0)
a module's gradients clamped
    made: self.lin.register_full_backward_hook(lambda m, i, o: tuple(g.clamp(-0.3, 0.3) for g in i))
    h = self.lin(h)
the output's gradient doubled
    after: out.register_hook(lambda g: 2 * g)
the output's gradient clamped
    after: out.register_hook(lambda g: g.clamp(-0.5, 0.5))
rows of the output's gradient normalised
    after: out.register_hook(lambda g: g / g.norm(dim=1, keepdim=True))
the output's gradient looked at
    after: model.seen = []
    after: out.register_hook(model.seen.append)
a parameter's gradient halved
    after: model.lin.weight.register_hook(lambda g: g / 2)
    h = self.lin(h)
a parameter's gradient masked
    after: model.lin.weight.register_hook(lambda g: g * torch.eye(8))
    h = self.lin(h)
a gradient clamped inside
    h.register_hook(lambda g: g.clamp(-0.5, 0.5))
"""
WRONG, RIGHT = cases(HOOKED_WRONG), cases(HOOKED_RIGHT)


@pytest.mark.parametrize("name", MIXING)
def test_a_square_of_rows_and_channels_is_refused(name, doubles, tmp_path):
    wrong = refused_or_why(built(MIXING[name], tmp_path), MIXING[name], SQUARES)
    assert not wrong, "\n".join([str(MIXING[name]), *wrong])


@pytest.fixture(scope="module")
def squares(doubles, tmp_path_factory):
    return Together(ROW_WISE, tmp_path_factory.mktemp("squares"), SQUARES)


@pytest.mark.parametrize("name", ROW_WISE)
def test_a_square_is_exact_row_by_row(name, squares):
    wrong = squares.wrong(name)
    assert not wrong, "\n".join([str(ROW_WISE[name]), *wrong])


@pytest.mark.parametrize("name", SOME_REFUSED)
def test_refused_by_ranks_with_one_row_and_with_none(name, doubles, tmp_path):
    wrong = refused_or_why(built(REFUSED[name], tmp_path), REFUSED[name], FEW)
    assert not wrong, "\n".join([str(REFUSED[name]), *wrong])


@pytest.fixture(scope="module")
def few(doubles, tmp_path_factory):
    return Together({name: EXACT[name] for name in SOME_EXACT}, tmp_path_factory.mktemp("few"), FEW)


@pytest.mark.parametrize("name", SOME_EXACT)
def test_exact_on_ranks_with_one_row_and_with_none(name, few):
    wrong = few.wrong(name)
    assert not wrong, "\n".join([str(EXACT[name]), *wrong])


@pytest.mark.parametrize("name", SOME_REFUSED)
def test_refused_in_eval(name, doubles, tmp_path):
    model = built(REFUSED[name], tmp_path).eval().requires_grad_(False)
    wrong = refused_or_why(model, REFUSED[name], {3: TEAMS[3]})
    assert not wrong, "\n".join([str(REFUSED[name]), *wrong])


@pytest.mark.parametrize("name", WRONG)
def test_hooks_of_gradients_that_mix_rows_are_refused(name, doubles, tmp_path):
    wrong = refused_or_why(built(WRONG[name], tmp_path), WRONG[name], TEAMS)
    assert not wrong, "\n".join([str(WRONG[name]), *wrong])


@pytest.mark.parametrize("name", RIGHT)
def test_hooks_of_gradients_row_by_row_are_exact(name, doubles, tmp_path):
    wrong = exact_or_why(built(RIGHT[name], tmp_path), RIGHT[name], TEAMS)
    assert not wrong, "\n".join([str(RIGHT[name]), *wrong])


@pytest.mark.parametrize("ranks", OWNERS)
@pytest.mark.parametrize("made", [lambda x: x * 2, lambda x: x.detach().clone(), lambda x: x[:, [1, 0, 2, 3, 4, 5]]])
def test_features_made_outside_are_rows_of_nodes_where_edges_are_as_many(made, ranks, doubles, tmp_path):
    """Twice, of which the second call has features that only look like those of the first."""
    model = built(EXACT["a layer norm in a message"], tmp_path)
    fields = dict(GRAPH.node | GRAPH.edge)
    expected = called(model, fields | {"x": made(fields["x"])}, GRAPH.edge_index)

    def job(comm, graph):
        mine = sp.pyg.wrap(copy.deepcopy(model), comm)
        own = own_fields(graph)
        outs = [called(mine, own | {"x": made(own["x"])}, graph) for _ in range(2)]
        return [(out - expected[graph.node_ids]).abs().max() for out in outs]

    for found in TEAMS[ranks].run(job):
        assert not isinstance(found, Exception), found
        assert max(found) < 1e-10


class Renewing(nn.Module):
    """It writes what it has computed into the data that it was given, as PyG's own transforms do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = gnn.SAGEConv(6, 8), gnn.SAGEConv(8, 8)

    def forward(self, data):
        data.x = self.first(data.x, data.edge_index).relu()  # here
        return self.last(data.x, data.edge_index)


@pytest.mark.parametrize("ranks", OWNERS)
def test_what_forward_assigns_is_read_after_the_call_or_refused(ranks, doubles):
    torch.manual_seed(0)
    plain = Renewing().double()
    data = Data(x=GRAPH.node["x"], edge_index=GRAPH.edge_index)
    plain(data)

    def job(comm):
        graph = shard_in_memory(WholeGraph(NODES, GRAPH.edge_index, {"x": GRAPH.node["x"]}), OWNERS[ranks], comm)
        try:
            sp.pyg.wrap(copy.deepcopy(plain), comm)(graph)
        except RefusedError as error:
            return str(error)
        found = graph.x
        assert found.shape == (graph.num_own_nodes, 8), "the assignment is lost"
        return float((found - data.x[graph.node_ids]).abs().max())

    found = run(job, ranks)
    assert all(one < 1e-10 if isinstance(one, float) else "data.x = " in one for one in found)
    assert len({type(one) for one in found}) == 1
