"""An aggregate() of the user's on whole neighbourhoods: exact, or refused where it puts all of them together."""

import pytest
import torch

pytest.importorskip("torch_geometric")

from torch import nn
from torch_geometric.nn import MessagePassing

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import run

from .on_ranks import share
from .pyg_cases import GRAPH


class Centred(MessagePassing):
    """A median, and beside it what `beside` makes of the messages and the medians."""

    def __init__(self, beside, aggr="median"):
        super().__init__(aggr=aggr)
        self.beside, self.norm = beside, nn.BatchNorm1d(5)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        out = super().aggregate(inputs, index, ptr=ptr, dim_size=dim_size)
        return out + self.beside(self, inputs, out)


TOGETHER = {
    "mean": lambda layer, messages, out: messages.mean(0),
    "sum": lambda layer, messages, out: messages.sum(),
    "std": lambda layer, messages, out: (2 * messages).std(dim=0),
    "norm": lambda layer, messages, out: messages.norm(2, 0),
    "vector_norm": lambda layer, messages, out: torch.linalg.vector_norm(messages, dim=0),
    "var": lambda layer, messages, out: torch.var(input=messages, dim=0),
    "softmax": lambda layer, messages, out: torch.softmax(messages, -2).amax(),
    "batch_norm": lambda layer, messages, out: nn.functional.batch_norm(messages, None, None, training=True)[:1],
    "mean of nodes": lambda layer, messages, out: out.relu().mean(dim=(0, 1)),
    "softmax of nodes": lambda layer, messages, out: nn.functional.softmax(out, dim=0),
}
APART = {
    "mean": lambda layer, messages, out: out.mean(1, keepdim=True),
    "softmax": lambda layer, messages, out: nn.functional.softmax(out, dim=-1),
    "layer_norm": lambda layer, messages, out: nn.functional.layer_norm(out, (5,)),
    "std": lambda layer, messages, out: out.std(dim=-1, keepdim=True),
    "a norm over all ranks": lambda layer, messages, out: layer.norm(out),
}


def called(layer, ranks):
    x = torch.randn(GRAPH.num_nodes, 5, generator=torch.Generator().manual_seed(1)).double()

    def on_rank(comm):
        graph = share(GRAPH, comm, mode="halo")
        out = sp.pyg.wrap(Centred(layer).double(), comm)(x[graph.node_ids], graph.edge_index)
        return graph.node_ids, out.detach()

    out = torch.zeros(GRAPH.num_nodes, 5, dtype=torch.float64)
    for nodes, rows in run(on_rank, ranks):
        out[nodes] = rows
    return out, Centred(layer).double()(x, GRAPH.edge_index).detach()


@pytest.mark.parametrize("name", TOGETHER)
def test_what_puts_the_rows_of_a_rank_together_is_refused(name):
    with pytest.raises(RefusedError, match=rf"Centred: .*`\w*{name.split()[0]}` in aggregate\(\) puts rows"):
        called(TOGETHER[name], 2)


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_treats_rows_one_by_one_is_exact(name, ranks):
    found, expected = called(APART[name], ranks)
    assert (found - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["mean", "std", "mean of nodes"])
def test_one_rank_has_all_rows(name):
    found, expected = called(TOGETHER[name], 1)
    assert (found - expected).abs().max() < 1e-12
