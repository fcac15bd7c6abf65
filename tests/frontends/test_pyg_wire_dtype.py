"""Rows that travel in bfloat16: half the bytes, sums in float32, the same in every run; float64 is left alone."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import shardpass as sp
from shardpass.testing.graphs import assignments, awkward_graph, shard_in_memory

from .how_much import one_each

GRAPH = awkward_graph(channels=8)
LAYERS = {
    "SAGE": lambda: SAGEConv(8, 8),
    "SAGE max": lambda: SAGEConv(8, 8, aggr="max"),
    "GCN": lambda: GCNConv(8, 8),
    "GAT": lambda: GATConv(8, 4, heads=2),
}


def results(make, dtype, **options):
    """``(output and gradients in node order, bytes sent)`` of two forwards and one backward."""

    def rank(comm):
        owners = assignments(GRAPH.num_nodes, 3, GRAPH.edge_index)["random"]
        graph = shard_in_memory(GRAPH, owners, comm, sp.Options(**options))
        with sp.seed(0, comm):
            layer = make().to(dtype)
        layer = sp.pyg.wrap(layer, comm, check=False)
        x = graph.x.to(dtype).requires_grad_()
        before = comm.bytes_sent
        out = layer(x, graph)
        (out * torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)).sum().backward()
        return torch.cat([out.detach(), x.grad], 1), graph.node_ids, comm.bytes_sent - before

    found = sp.spawn(rank, 3)
    order = torch.cat([ids for _, ids, _ in found]).argsort()
    return torch.cat([rows for rows, _, _ in found])[order], sum(count for *_, count in found)


@pytest.mark.parametrize(("name", "mode"), one_each(LAYERS))
def test_half_the_bytes_and_three_digits(name, mode):
    backward = "push"  # attention is not pulled over rounded rows
    plain, sent = results(LAYERS[name], torch.float32, mode=mode, backward=backward)
    short, less = results(LAYERS[name], torch.float32, mode=mode, backward=backward, wire_dtype=torch.bfloat16)
    assert less == sent / 2
    assert not torch.equal(short, plain)
    if name != "SAGE max":  # which message wins may change
        torch.testing.assert_close(short, plain, rtol=0, atol=0.02 * float(plain.abs().max()))
    again, _ = results(LAYERS[name], torch.float32, mode=mode, backward=backward, wire_dtype=torch.bfloat16)
    assert torch.equal(short, again)


def test_other_dtypes_travel_as_they_are():
    plain, sent = results(LAYERS["SAGE"], torch.float64)
    same, bytes_sent = results(LAYERS["SAGE"], torch.float64, wire_dtype=torch.bfloat16)
    assert torch.equal(plain, same) and sent == bytes_sent


def test_other_wire_dtypes_are_refused():
    with pytest.raises(ValueError, match="bfloat16 or None"):
        sp.Options(wire_dtype=torch.float16)
