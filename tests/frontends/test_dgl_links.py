"""A DGL model that scores pairs of nodes by their ids in the whole graph."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.nn as dnn
from torch import nn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import awkward_graph, run, shard_in_memory

GRAPH = awkward_graph()
PAIRS = torch.randint(0, GRAPH.num_nodes, (2, 30), generator=torch.Generator().manual_seed(0))


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = dnn.SAGEConv(5, 4, "mean")

    def forward(self, g, x, pairs):
        h = self.conv(g, x)
        return (h[pairs[0]] * h[pairs[1]]).sum(1)


def test_pairs_by_ids_of_the_whole_graph():
    torch.manual_seed(0)
    plain = Predictor().double()
    whole = copy.deepcopy(plain)
    expected = whole(dgl.graph(tuple(GRAPH.edge_index), num_nodes=GRAPH.num_nodes), GRAPH.node["x"], PAIRS)
    expected.tanh().mean().backward()

    def work(comm):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 3, comm)
        model, own = sp.dgl.wrap(copy.deepcopy(plain), comm), PAIRS[:, comm.rank :: 3]
        scores = model(graph, graph.x, sp.node_ids(graph, own))
        sp.mean(scores.tanh(), None, comm).backward()
        sp.sync_gradients(model, comm)
        grads = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(RefusedError, match=r"test_dgl_links.py:\d+: return .* do not come from the graph"):
            model.train(False)(graph, graph.x, own)
        return scores.detach(), grads

    for rank, (scores, grads) in enumerate(run(work, 3)):
        torch.testing.assert_close(scores, expected[rank::3].detach(), rtol=0, atol=1e-10)
        for grad, parameter in zip(grads, whole.parameters()):
            torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-10)
