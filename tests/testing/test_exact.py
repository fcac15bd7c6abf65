"""`assert_exact` passes what is exact, and names the ranks, the mode and the tensors of what is not."""

from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

from torch_geometric.nn import HeteroConv, SAGEConv

import shardpass as sp
from shardpass.testing import Outcome, assert_exact, assert_same, awkward_graph, awkward_hetero_graph

WRAP = partial(sp.pyg.wrap, check=False)  # or the models that are wrong would be refused


class Layer(nn.Module):
    """A SAGEConv whose output, or whose gradients, `wrong` changes."""

    def __init__(self, wrong=lambda out: out):
        super().__init__()
        self.conv, self.wrong = SAGEConv(5, 4), wrong

    def forward(self, x, edges):
        return self.wrong(self.conv(x, edges))


class TwiceTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.is_whole = x.size(0) == awkward_graph().num_nodes
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.is_whole else 2 * grad


def call(model, fields, edges):
    return model(fields["x"], edges)


def test_what_is_exact_passes():
    assert_exact(Layer().double(), awkward_graph(), call, WRAP)


def test_a_mean_of_own_rows_is_found():
    layer = Layer(lambda out: out - out.mean(0)).double()
    with pytest.raises(AssertionError, match=r"Layer on 2 ranks, owners 'random', mode 'keep' differs .* output by"):
        assert_exact(layer, awkward_graph(), call, WRAP, ranks=2, modes=["keep"])


def test_wrong_gradients_are_found():
    layer = Layer(TwiceTheGradient.apply).double()
    with pytest.raises(AssertionError, match=r"inputs.x by .*parameters.conv.lin_l.weight by") as told:
        assert_exact(layer, awkward_graph(), call, WRAP, ranks=[3])
    assert "output" not in str(told.value)


def test_graphs_of_several_types():
    graph = awkward_hetero_graph()

    def typed(model, fields, edges):
        edge_index = edges if isinstance(edges, dict) else edges.edge_index_dict
        return model({kind: fields[kind]["x"] for kind in graph.num_nodes}, edge_index)

    def make(wrong):
        return HeteroConv({kind: Layer(wrong) for kind in graph.edges if kind[0] == kind[2]}).double()

    for layer, is_exact in ((make(lambda out: out), True), (make(lambda out: out - out.mean(0)), False)):
        if is_exact:
            assert_exact(layer, graph, typed, WRAP, ranks=3)
        else:
            with pytest.raises(AssertionError, match=r"HeteroConv on 3 ranks, owners 'random', mode 'sar' differs"):
                assert_exact(layer, graph, typed, WRAP, ranks=3)


def test_errors_may_be_relative():
    whole, sharded = Outcome(torch.full((2,), 1e6)), Outcome(torch.full((2,), 1e6 + 1))
    assert_same(whole, sharded, bound=1e-5, relative=True)
    with pytest.raises(AssertionError, match=r"the sharded run differs from the whole graph: output by 1\.0e"):
        assert_same(whole, sharded, bound=1e-5)
    with pytest.raises(AssertionError, match="output by inf"):
        assert_same(whole, Outcome(torch.full((2,), float("nan"))))


@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=AssertionError, strict=True)
def test_a_test_of_ranks_fails_where_one_rank_fails(comm):
    assert comm.size == 2 and comm.rank == 0
