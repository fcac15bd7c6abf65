"""Layers give the numbers of messages where rows travel through shared memory, on several graphs of a communicator."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torch_geometric")

from torch_geometric.nn import GATConv, SAGEConv

import shardpass as sp
from shardpass.core.exchange.windows import WindowPool
from shardpass.testing import assignments, awkward_graph, run, shard_in_memory

from .how_much import one_each


def sharing(comm):
    """`comm` as that of a process: it shares memory with all ranks."""
    comm.inner.shares_memory, comm.inner.local_ranks = True, tuple(range(comm.size))
    return comm


LAYERS = {
    "SAGE": lambda: SAGEConv(5, 4),
    "SAGE max": lambda: SAGEConv(5, 4, aggr="max"),
    "GAT": lambda: GATConv(5, 2, heads=2, edge_dim=3),
}


def trained(comm, graphs, name):
    """Outputs and gradients of a layer on several graphs, run again in backward where the second is concerned."""
    with sp.seed(0, comm):
        layer = LAYERS[name]().double()
    sp.pyg.wrap(layer, comm, check=False)
    found = []
    for k, graph in enumerate(graphs):
        x = graph.x.clone().requires_grad_()
        extra = {"edge_attr": graph.edge_attr} if name == "GAT" else {}
        out = checkpoint(layer, x, graph, use_reentrant=False, **extra) if k else layer(x, graph, **extra)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        found += [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
    return found


@pytest.mark.parametrize(("name", "mode"), one_each(LAYERS))
def test_layers_on_several_graphs_of_one_communicator(name, mode):
    graph = awkward_graph()
    parts = assignments(graph.num_nodes, 4, graph.edge_index)

    def work(comm):
        sharing(comm)
        twin = sharing(comm.duplicate("twin"))
        results = []
        for on, share in ((comm, False), (comm, True), (twin, True)):
            options = sp.Options(mode=mode, share_memory=share, block_rows=None if on is comm else 3)
            results.append(trained(on, [shard_in_memory(graph, part, on, options) for part in parts.values()], name))
        ours, theirs = comm.caches.of(WindowPool), twin.caches.of(WindowPool)
        assert ours.windows and theirs.windows and ours is not theirs
        assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
        for a, b in zip(results[0], results[2], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)

    run(work, 4)
