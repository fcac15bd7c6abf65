"""Complex features: outputs and gradients are those of the whole graph, in every mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.core.training import mean
from shardpass.errors import RefusedError
from shardpass.testing.graphs import shard_in_memory
from shardpass.testing.run import run

from .how_much import assert_case_exact
from .pyg_cases import GRAPH

MESSAGES = {
    "weighted": lambda p, x_i, x_j, w: w.view(-1, 1) * x_j,
    "by a parameter": lambda p, x_i, x_j, w: p * x_j,
    "conjugated": lambda p, x_i, x_j, w: x_j.conj() * x_i * p,
    "by a phase": lambda p, x_i, x_j, w: torch.polar(w.abs(), w.angle()).view(-1, 1) * x_j,
    "by a score": lambda p, x_i, x_j, w: (x_i * x_j.conj()).sum(-1, keepdim=True) * x_j * p,
    "of real parts": lambda p, x_i, x_j, w: torch.complex(x_j.abs(), x_i.imag),
}


class Complex(gnn.MessagePassing):
    def __init__(self, message):
        super().__init__(aggr="add")
        self.of = MESSAGES[message]
        self.p = nn.Parameter(torch.randn(5, 2))

    def forward(self, x, edge_index, weight):
        rows = torch.complex(x, x.flip(1) - 0.3)
        out = self.propagate(edge_index, x=rows, w=torch.complex(weight, 0.5 - weight))
        return torch.view_as_real(out).flatten(1)

    def message(self, x_i, x_j, w):
        return self.of(torch.view_as_complex(self.p), x_i, x_j, w)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("message", MESSAGES)
def test_complex_messages(message, ranks):
    torch.manual_seed(0)
    case = lambda: Complex(message), lambda m, fields, graph: m(fields["x"], graph, fields["edge_weight"])
    assert_case_exact(case, GRAPH, sp.pyg.wrap, ranks, True)


def test_sums_over_all_nodes_and_what_is_refused():
    def work(comm):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % comm.size, comm)
        rows = torch.complex(graph.x, -graph.x)
        summed = gnn.global_add_pool(rows, graph.batch)
        with pytest.raises(RefusedError, match="the max of complex numbers over all nodes"):
            gnn.global_max_pool(rows, graph.batch)
        with pytest.raises(ValueError, match="mean: expected real values, found complex128"):
            mean(rows, None, comm)
        return summed

    whole = torch.complex(GRAPH.node["x"], -GRAPH.node["x"]).sum(0, keepdim=True)
    for found in run(work, 3):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
