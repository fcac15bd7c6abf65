"""A reducer that an aggregation module of the user's asks for by its name."""

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation

import shardpass as sp
from shardpass.testing import assert_exact, awkward_graph

GRAPH = awkward_graph(channels=5, edge_channels=3)


class LogSumExp(Aggregation):
    """The logarithm of the sum of the exponentials of messages, and 0 for a node without one."""

    def __init__(self, comm=None):
        super().__init__()
        self.comm = comm

    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        if self.comm is not None and self.comm.watch is not None:
            return self.comm.watch.reduced("logsumexp", x)
        wide, rows = index.view(-1, 1).expand_as(x), (dim_size, x.size(1))
        peak = x.new_zeros(rows).scatter_reduce(0, wide, x.detach(), "amax", include_self=False)
        total = x.new_zeros(rows).scatter_add(0, wide, (x - peak[index]).exp())
        return torch.where(total > 0, peak + total.clamp(min=1).log(), 0)


class Conv(MessagePassing):
    def __init__(self, scale=1.0):
        super().__init__(aggr=LogSumExp())
        self.lin, self.scale = nn.Linear(13, 6), scale

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i, x_j, edge_attr):
        return self.scale * self.lin(torch.cat([x_i, x_j, edge_attr], dim=-1))


def call(model, tensors, edge_index):
    return model(tensors["x"], edge_index, tensors["edge_attr"]).tanh()


def wrap(model, comm):
    model.aggr_module.comm = comm
    return sp.pyg.wrap(model, comm)


@pytest.mark.parametrize("scale", [1.0, 2000.0], ids=["small", "would overflow"])
@pytest.mark.parametrize("mode", ["sar", "keep", "halo"])
def test_logsumexp_by_name(mode, scale):
    options = sp.Options(chunk_bytes=1000)
    assert_exact(Conv(scale).double(), GRAPH, call, wrap, ranks=3, modes=[mode], options=options, relative=True)


@pytest.mark.parametrize("mode", ["sar", "halo"])
def test_its_derivatives(mode):
    assert_exact(Conv().double(), GRAPH, call, wrap, ranks=3, modes=[mode], relative=True, order=2)
