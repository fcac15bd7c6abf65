"""Sums of constant tensors are computed twice at most, and never used when anything has changed."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GCNConv, GraphConv, SAGEConv

import shardpass as sp
from shardpass.core.aggregation.constants import ConstantSums
from shardpass.testing.graphs import assignments, awkward_graph, shard_in_memory

GRAPH = awkward_graph()
RANKS = 3


def train(change, cached, make=lambda: SAGEConv(5, 6), epochs=5, ranks=RANKS):
    """Outputs of every epoch and bytes sent in it, on each rank; `change(epoch, rank, x)` returns the epoch's x."""

    def rank(comm):
        owners = assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)["random"]
        graph = shard_in_memory(GRAPH, owners, comm, sp.Options(cache_constant_inputs=cached))
        with sp.seed(0, comm):
            layer = make().double()
        layer = sp.pyg.wrap(layer, comm, check=False)
        x, outs, sent = graph.x.clone(), [], []
        for epoch in range(epochs):
            x = change(epoch, comm.rank, x)
            before = comm.bytes_sent
            out = layer(x, graph)
            out.sum().backward()
            sp.sync_gradients(layer, comm)
            outs += [out.detach().clone(), *(p.grad.clone() for p in layer.parameters())]
            layer.zero_grad()
            sent.append(comm.bytes_sent - before)
        return outs, sent

    return sp.spawn(rank, ranks)


def in_place(epoch, rank, x):
    return x.mul_(2) if epoch == 3 and rank == 1 else x


def in_place_everywhere(epoch, rank, x):
    return x.mul_(2) if epoch == 3 else x


CHANGES = {
    "nothing": lambda epoch, rank, x: x,
    "in place on one rank": in_place,
    "in place on all": in_place_everywhere,
    "another tensor": lambda epoch, rank, x: x.clone(),
    "another tensor on one rank": lambda epoch, rank, x: x.clone() if rank == 2 else x,
    "with gradient from some epoch on": lambda epoch, rank, x: x.clone().requires_grad_() if epoch == 3 else x,
}


@pytest.mark.parametrize("name", CHANGES)
def test_results_are_those_without_it(name):
    for mine, theirs in zip(train(CHANGES[name], True), train(CHANGES[name], False)):
        assert len(mine[0]) == len(theirs[0])
        for a, b in zip(mine[0], theirs[0]):
            assert torch.equal(a, b)


def test_nothing_is_sent_again_for_what_did_not_change():
    sent = [bytes_sent for _, bytes_sent in train(CHANGES["nothing"], True)]
    for per_epoch in sent:
        assert per_epoch[0] == per_epoch[1] > per_epoch[2] == per_epoch[3] == per_epoch[4]
    changed = [bytes_sent for _, bytes_sent in train(CHANGES["in place on one rank"], True)]
    for per_epoch in changed:
        assert per_epoch[2] < per_epoch[3] == per_epoch[0]


def test_activations_are_not_kept():
    """In evaluation nothing needs gradients; what layers hand on must not take the place of the features."""

    def rank(comm):
        owners = assignments(GRAPH.num_nodes, RANKS, GRAPH.edge_index)["random"]
        graph = shard_in_memory(GRAPH, owners, comm)
        layers = [sp.pyg.wrap(GraphConv(5, 5).double(), comm, check=False) for _ in range(3)]
        x = graph.x.clone()
        for _ in range(4):
            with torch.no_grad():
                h = x
                for layer in layers:
                    h = layer(h, graph)
        kept = graph.edge_index.plan.comm.caches.of(ConstantSums, graph.edge_index.plan)._kept
        return [sum(bool(one.values) for one in kept), sum(not one.values for one in kept)]

    for filled, noted in sp.spawn(rank, RANKS):
        assert filled == 1 and noted <= 1  # the last activation of all may still be alive


def test_the_result_belongs_to_the_caller():
    """GCN sums with constant weights; what it returns is written into."""

    def rank(comm):
        owners = assignments(GRAPH.num_nodes, RANKS, GRAPH.edge_index)["random"]
        graph = shard_in_memory(GRAPH, owners, comm)
        layer = sp.pyg.wrap(GCNConv(5, 5, bias=False, cached=True).double(), comm, check=False)
        layer.lin = torch.nn.Identity()
        x, outs = graph.x.clone(), []
        for _ in range(5):
            out = layer(x, graph)
            outs.append(out.clone())
            out.zero_()
        return outs

    for outs in sp.spawn(rank, RANKS):
        assert all(torch.equal(out, outs[0]) for out in outs[1:])
