"""graph.layers: the wanted nodes' outputs and all gradients are those of the whole graph, from fewer nodes and rows."""

import copy
from itertools import pairwise

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn

import shardpass as sp
from shardpass.backends.recording import RecordingCommunicator
from shardpass.core.ranks import Ranks
from shardpass.errors import RefusedError
from shardpass.testing import WholeGraph, cotangent, run, shard_in_memory

from .conv_cases import SORTED
from .how_much import owned_in_turn
from .on_ranks import on_ranks, share
from .pyg_cases import GRAPH, mlp

WANTED = torch.zeros(GRAPH.num_nodes, dtype=torch.bool).index_fill(0, torch.tensor([2, 7, 30]), True)


class PerLayer(nn.Module):
    """Called with one edge_index per layer, or with one for all."""

    def __init__(self, make, widths=(5, 6, 6, 4)):
        super().__init__()
        self.convs = nn.ModuleList(make(i, o) for i, o in pairwise(widths))

    def forward(self, x, layers):
        layers = layers if isinstance(layers, list) else [layers] * len(self.convs)
        for conv, edge_index in zip(self.convs, layers):
            x = conv(x, edge_index).tanh()
        return x


KINDS = {
    "GCN": (gnn.GCNConv, "sar"),
    "SAGE": (gnn.SAGEConv, "sar"),
    "SAGE kept": (gnn.SAGEConv, "keep"),
    "SAGE max": (lambda i, o: gnn.SAGEConv(i, o, aggr="max"), "halo"),
    "GAT": (lambda i, o: gnn.GATConv(i, o, heads=2, concat=False), "sar"),
    "GATv2": (lambda i, o: gnn.GATv2Conv(i, o), "keep"),
    "EdgeConv": (lambda i, o: gnn.EdgeConv(mlp(2 * i, o)), "sar"),
    "median": (lambda i, o: gnn.SAGEConv(i, o, aggr="median"), "halo"),
}


@pytest.mark.parametrize(("kind", "ranks", "owned"), owned_in_turn(KINDS, (3, 1, 2, 4)))
def test_wanted_nodes_equal_those_of_the_whole_graph(kind, ranks, owned):
    make, mode = KINDS[kind]
    torch.manual_seed(0)
    plain = PerLayer(make).double()
    x = torch.randn(GRAPH.num_nodes, 5, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    expected = plain(x, GRAPH.edge_index)
    weights = cotangent(expected) * WANTED[:, None]
    (expected * weights).sum().backward()

    def work(comm):
        graph = share(GRAPH, comm, owned, mode=mode, chunk_bytes=1200)
        model = sp.pyg.wrap(copy.deepcopy(plain), comm, check=owned == "random")
        mine, ids = x.detach()[graph.node_ids].requires_grad_(), graph.node_ids
        model.zero_grad()
        out = model(mine, graph.layers(WANTED[ids], 3))
        (out * weights[ids]).sum().backward()
        wanted = WANTED[ids]
        torch.testing.assert_close(out[wanted], expected[ids][wanted], rtol=0, atol=1e-10)
        torch.testing.assert_close(mine.grad, x.grad[ids], rtol=0, atol=1e-10)
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]

    for parameter, *parts in zip(plain.parameters(), *run(work, ranks)):
        for part in parts:
            torch.testing.assert_close(part, parameter.grad, rtol=0, atol=1e-10)


def chain(length=24):
    """A path: the wanted end needs one node more per layer."""
    return WholeGraph(
        length, torch.stack([torch.arange(length - 1), torch.arange(1, length)]), {"x": torch.rand(length, 5)}
    )


def test_layers_shrink_to_what_is_needed():
    graph, owners = chain(), torch.arange(24) % 2

    def work(inner):
        comm = Ranks(RecordingCommunicator(inner))
        sharded = shard_in_memory(graph, owners, comm)
        wanted = sharded.node_ids == 23
        layers = sharded.layers(wanted, 3)
        needed = [sharded.node_ids[layer.flow.needed].tolist() for layer in layers]
        halos = [layer.flow.plan.num_halo for layer in layers]
        model = sp.pyg.wrap(PerLayer(gnn.SAGEConv), comm, check=False)
        counts = []
        for argument in (sharded, layers):
            before = comm.bytes_sent
            with torch.no_grad():
                model(sharded.x, argument)
            counts.append(comm.bytes_sent - before)
        return needed, halos, counts

    results = run(work, 2)
    together = [sorted(a + b) for a, b in zip(results[0][0], results[1][0])]
    assert together == [[21, 22, 23], [22, 23], [23]]
    assert [sum(r[1][i] for r in results) for i in range(3)] == [3, 2, 1], "halo rows"
    assert sum(r[2][1] for r in results) < sum(r[2][0] for r in results)


@on_ranks(2)
def test_norms_over_nodes_are_refused_while_they_take_statistics(comm):
    class Normed(PerLayer):
        def __init__(self):
            super().__init__(gnn.SAGEConv)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x, layers):
            return self.norm(super().forward(x, layers))

    graph = shard_in_memory(chain(), torch.arange(24) % 2, comm)
    model = sp.pyg.wrap(Normed(), comm)
    layers = graph.layers(graph.node_ids > 20, 3)
    with pytest.raises(RefusedError, match=r"norm: .* the statistics of all nodes.* graph\.layers"):
        model(graph.x, layers)
    model.eval()(graph.x, layers)


@on_ranks(2)
def test_wrong_masks_are_told(comm):
    graph = shard_in_memory(chain(), torch.arange(24) % 2, comm)
    with pytest.raises(ValueError, match=r"expected bool \[12\], got torch.int64 \[3\]"):
        graph.layers(torch.arange(3), 2)
    with pytest.raises(RefusedError, match=r"do not work with graph\.layers"):
        sp.pyg.wrap(gnn.SAGEConv(5, 5, flow="target_to_source"), comm)(graph.x, graph.layers(graph.x[:, 0] > 0, 1)[0])


@pytest.mark.parametrize("layer", [gnn.TAGConv(5, 4, 2), gnn.APPNP(2, 0.1), gnn.GCN(5, 4, 2), gnn.ChebConv(5, 4, 3)])
@on_ranks(2)
def test_several_hops_over_one_edge_index_are_refused(comm, layer):
    graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm)
    model = sp.pyg.wrap(copy.deepcopy(layer).double(), comm)
    (flow,) = graph.layers(WANTED[graph.node_ids], 1)
    for _ in range(2):
        with pytest.raises(RefusedError, match=r"a second message over one edge_index of graph\.layers"):
            model(graph.x, flow)


@pytest.mark.parametrize("how", ["its memory is used again", "changed in place"])
@on_ranks(1)
def test_a_second_message_is_noticed_whatever_memory_it_starts_from(comm, how):
    class TwoHops(gnn.MessagePassing):
        def forward(self, x, edge_index):
            h = x * 1
            out = self.propagate(edge_index, x=h)
            if how == "changed in place":
                return self.propagate(edge_index, x=h.copy_(out))
            address = h.data_ptr()
            del h
            kept = []
            while len(kept) < 100 and (not kept or kept[-1].data_ptr() != address):
                kept.append(out * 1)
            return self.propagate(edge_index, x=kept[-1])

    graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % comm.size, comm)
    model = sp.pyg.wrap(TwoHops(), comm, check=False)
    (flow,) = graph.layers(WANTED[graph.node_ids], 1)
    with torch.no_grad(), pytest.raises(RefusedError, match="a second message over one edge_index"):
        model(graph.x, flow)


@on_ranks(2)
def test_layers_in_another_order_are_refused(comm):
    graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % comm.size, comm)
    model = sp.pyg.wrap(PerLayer(gnn.SAGEConv), comm, check=False).double()
    layers = graph.layers(WANTED[graph.node_ids], 3)
    model(graph.x, layers)  # and again, in the right order
    model(graph.x, layers)
    with pytest.raises(RefusedError, match=r"number 1 of graph\.layers after number 2"):
        model(graph.x, layers[::-1])


@on_ranks(2)
def test_siblings_over_one_edge_index_are_not_hops(comm):
    graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm)
    model = sp.pyg.wrap(gnn.RGCNConv(5, 4, 2).double(), comm)
    (flow,) = graph.layers(WANTED[graph.node_ids], 1)
    for _ in range(2):
        out = model(graph.x, flow, torch.arange(graph.num_own_edges) % 2)
    whole = model(graph.x, graph, torch.arange(graph.num_own_edges) % 2)
    wanted = WANTED[graph.node_ids]
    torch.testing.assert_close(out[wanted], whole[wanted])


@on_ranks(2)
def test_caches_and_readouts_are_refused(comm):
    graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm)
    (flow,) = graph.layers(WANTED[graph.node_ids], 1)
    with pytest.raises(RefusedError, match="cached=True"):
        sp.pyg.wrap(gnn.GCNConv(5, 4, cached=True).double(), comm)(graph.x, flow)

    class Readout(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = gnn.GCNConv(5, 4)

        def forward(self, x, edge_index, batch):
            return gnn.global_mean_pool(self.conv(x, edge_index), batch)

    with pytest.raises(RefusedError, match=r"graph\.batch"):
        sp.pyg.wrap(Readout().double(), comm)(graph.x, flow, graph.batch)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@on_ranks(2)
def test_neighbourhoods_are_padded_as_on_the_whole_graph(comm, kind):
    torch.manual_seed(0)
    aggr = gnn.aggr.GRUAggregation(5, 5) if kind == "gru" else "lstm"
    plain = gnn.SAGEConv(5, 4, aggr=aggr).double()
    expected = plain(SORTED.node["x"], SORTED.edge_index)
    wanted = torch.zeros(SORTED.num_nodes, dtype=torch.bool)
    wanted[torch.bincount(SORTED.edge_index[1], minlength=SORTED.num_nodes).topk(30, largest=False).indices] = True
    graph = shard_in_memory(SORTED, torch.arange(SORTED.num_nodes) % 2, comm, sp.Options(mode="halo"))
    (flow,) = graph.layers(wanted[graph.node_ids], 1)
    out, mine = sp.pyg.wrap(copy.deepcopy(plain), comm)(graph.x, flow), wanted[graph.node_ids]
    torch.testing.assert_close(out[mine], expected[graph.node_ids][mine], rtol=0, atol=1e-10)


class IndexesAfter(nn.Module):
    """Reads the result of a conv by source: rows that were not needed may not be computed."""

    def __init__(self, before):
        super().__init__()
        self.conv, self.before = gnn.SAGEConv(5, 5), before

    def forward(self, x, layers):
        edge_index = layers[0] if isinstance(layers, list) else layers
        h = self.conv(x, edge_index)
        rows = (x if self.before else h)[edge_index[0]]
        return h + torch.zeros_like(h).index_add(0, edge_index[1], rows)


@pytest.mark.parametrize("before", [True, False])
@on_ranks(2)
def test_a_result_is_not_indexed_by_the_layer_that_made_it(comm, before):
    graph = share(GRAPH, comm)
    layers = graph.layers(WANTED[graph.node_ids], 1)
    model = sp.pyg.wrap(IndexesAfter(before).double(), comm, check=False)
    if before:
        return model(graph.x, layers)
    with pytest.raises(RefusedError, match="after a message over it"):
        model(graph.x, layers)
