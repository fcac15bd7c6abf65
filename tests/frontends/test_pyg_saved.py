"""What a sum of copies keeps between forward and backward: nothing with a row per node."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_geometric")

from torch_geometric.nn import GATConv, GCNConv, SAGEConv, SimpleConv

import shardpass as sp
from shardpass.testing.graphs import assignments, awkward_graph, shard_in_memory

GRAPH = awkward_graph(channels=6)


def saved_by(make, mode):
    """Bytes of storage that autograd saves in tensors of own or fetched rows, and the output, of two ranks."""

    def rank(comm):
        owners = assignments(GRAPH.num_nodes, 2, GRAPH.edge_index)["random"]
        graph = shard_in_memory(GRAPH, owners, comm, sp.Options(mode=mode))
        with sp.seed(0, comm):
            layer = make().double()
        sp.pyg.wrap(layer, comm, check=False)
        x = graph.x.clone().requires_grad_()
        found = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = layer(x, graph)
        for tensor in (x, *layer.parameters()):
            found.pop(tensor.untyped_storage().data_ptr(), None)
        out.square().sum().backward()
        return sum(found.values()), x.grad.abs().sum()

    return sp.spawn(rank, 2)


@pytest.mark.parametrize("mode", ["sar", "keep", "halo"])
def test_a_sum_of_copies_keeps_nothing(mode):
    for make in (lambda: SimpleConv(aggr="sum"), lambda: SAGEConv(6, 4), lambda: SAGEConv(6, 6, aggr="sum")):
        for saved, gradient in saved_by(make, mode):
            assert saved <= 8 * GRAPH.num_nodes + 500, saved  # counts of in-edges; what the probe has of eight edges
            assert gradient > 0


def test_what_is_needed_is_kept():
    kept = [saved for saved, _ in saved_by(lambda: GATConv(6, 6), "sar")]
    assert min(kept) > 4 * 8 * GRAPH.num_nodes // 2
    weighted = [saved for saved, _ in saved_by(lambda: GCNConv(6, 6, normalize=False), "keep")]
    assert max(weighted) <= min(kept)
