"""What travels and what is kept: rows in bfloat16 or in shared memory, shards of several edge lists, constant sums."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch_geometric.nn import GATConv, GCNConv, GraphConv, SAGEConv, SimpleConv

import shardpass as sp
from shardpass.core.aggregation.constants import ConstantSums
from shardpass.core.exchange.windows import WindowPool
from shardpass.core.sharding import derived
from shardpass.testing import WholeGraph, assert_exact, assignments, awkward_graph, shard_in_memory

from .how_much import assert_exact_in, one_each
from .on_ranks import on_ranks, share
from .pyg_cases import GRAPH

WIDE = awkward_graph(channels=8)
WIDE_LAYERS = {
    "SAGE": lambda: SAGEConv(8, 8),
    "SAGE max": lambda: SAGEConv(8, 8, aggr="max"),
    "GCN": lambda: GCNConv(8, 8),
    "GAT": lambda: GATConv(8, 4, heads=2),
}


def results(make, dtype, **options):
    """``(output and gradients in node order, bytes sent)`` of two forwards and one backward."""

    def rank(comm):
        graph = share(WIDE, comm, **options)
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


@pytest.mark.parametrize(("name", "mode"), one_each(WIDE_LAYERS))
def test_half_the_bytes_and_three_digits(name, mode):
    backward = "push"  # attention is not pulled over rounded rows
    plain, sent = results(WIDE_LAYERS[name], torch.float32, mode=mode, backward=backward)
    short, less = results(WIDE_LAYERS[name], torch.float32, mode=mode, backward=backward, wire_dtype=torch.bfloat16)
    assert less == sent / 2
    assert not torch.equal(short, plain)
    if name != "SAGE max":  # which message wins may change
        torch.testing.assert_close(short, plain, rtol=0, atol=0.02 * float(plain.abs().max()))
    again, _ = results(WIDE_LAYERS[name], torch.float32, mode=mode, backward=backward, wire_dtype=torch.bfloat16)
    assert torch.equal(short, again)


def test_other_dtypes_travel_as_they_are():
    plain, sent = results(WIDE_LAYERS["SAGE"], torch.float64)
    same, bytes_sent = results(WIDE_LAYERS["SAGE"], torch.float64, wire_dtype=torch.bfloat16)
    assert torch.equal(plain, same) and sent == bytes_sent


def sharing(comm):
    """`comm` as that of a process: it shares memory with all ranks."""
    comm.inner.shares_memory, comm.inner.local_ranks = True, tuple(range(comm.size))
    return comm


SHARING = {
    "SAGE": lambda: SAGEConv(5, 4),
    "SAGE max": lambda: SAGEConv(5, 4, aggr="max"),
    "GAT": lambda: GATConv(5, 2, heads=2, edge_dim=3),
}


def trained_on(comm, graphs, name):
    """Outputs and gradients of a layer on several graphs, run again in backward where the second is concerned."""
    with sp.seed(0, comm):
        layer = SHARING[name]().double()
    sp.pyg.wrap(layer, comm, check=False)
    found = []
    for k, graph in enumerate(graphs):
        x = graph.x.clone().requires_grad_()
        extra = {"edge_attr": graph.edge_attr} if name == "GAT" else {}
        out = checkpoint(layer, x, graph, use_reentrant=False, **extra) if k else layer(x, graph, **extra)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        found += [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
    return found


@pytest.mark.parametrize(("name", "mode"), one_each(SHARING))
@on_ranks(3)
def test_layers_on_several_graphs_of_one_communicator(comm, name, mode):
    graph = awkward_graph()
    parts = assignments(graph.num_nodes, 3, graph.edge_index)
    sharing(comm)
    twin = sharing(comm.duplicate("twin"))
    results = []
    for on, shared in ((comm, False), (comm, True), (twin, True)):
        options = sp.Options(mode=mode, share_memory=shared, block_rows=None if on is comm else 3)
        results.append(trained_on(on, [shard_in_memory(graph, part, on, options) for part in parts.values()], name))
    ours, theirs = comm.caches.of(WindowPool), twin.caches.of(WindowPool)
    assert ours.windows and theirs.windows and ours is not theirs
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    for a, b in zip(results[0], results[2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


LAYERS = {
    "GCN": lambda: gnn.GCNConv(5, 4),
    "GAT": lambda: gnn.GATConv(5, 4, heads=2),
    "GAT with edges": lambda: gnn.GATConv(5, 4, heads=2, edge_dim=3, fill_value="mean"),
    "GATv2 with edges": lambda: gnn.GATv2Conv(5, 4, heads=2, edge_dim=3),
    "Cheb": lambda: gnn.ChebConv(5, 4, K=3),
    "PointNet": lambda: gnn.PointNetConv(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4)),
}


def call(layer, inputs, edge_index):
    if isinstance(layer, (gnn.GCNConv, gnn.ChebConv)):
        return layer(inputs["x"], edge_index, inputs["edge_weight"])
    if isinstance(layer, gnn.PointNetConv):
        return layer(inputs["x"], inputs["x"][:, :3], edge_index)
    return layer(inputs["x"], edge_index, *([inputs["edge_attr"]] if getattr(layer, "edge_dim", None) else []))


def without_second_loops(has_loops: bool) -> WholeGraph:
    """The graph with at most one self-loop at each node, or with none."""
    src, dst = GRAPH.edge_index
    places = torch.arange(src.numel())
    first = torch.stack([places[(src == s) & (dst == d)].min() for s, d in zip(src, dst)])
    kept = (src != dst) | ((places == first) & has_loops)
    edge = {name: rows[kept] for name, rows in GRAPH.edge.items()}
    return WholeGraph(GRAPH.num_nodes, GRAPH.edge_index[:, kept], GRAPH.node, edge)


GRAPHS = {"doubled loops": GRAPH, "loops": without_second_loops(True), "no loops": without_second_loops(False)}


WAYS = [*itertools.product(GRAPHS, ("pull", "push"))]


@pytest.mark.parametrize(("name", "way"), one_each(LAYERS, WAYS))
def test_shared_shards_equal_the_whole_graph(name, way, monkeypatch):
    graph, backward = way
    monkeypatch.setattr(derived, "_LONG", 0)
    torch.manual_seed(0)
    options = sp.Options(backward=backward, chunk_bytes=300)
    model = LAYERS[name]().double()
    assert_exact(model, GRAPHS[graph], call, sp.pyg.wrap, ranks=1, modes=("sar",), options=options)
    assert_exact_in((("sar",), ("halo",)), model, GRAPHS[graph], call, sp.pyg.wrap, 3, options)


RANKS = 3


def train(change, cached, make=lambda: SAGEConv(5, 6), epochs=5, ranks=RANKS):
    """Outputs of every epoch and bytes sent in it, on each rank; `change(epoch, rank, x)` returns the epoch's x."""

    def rank(comm):
        graph = share(GRAPH, comm, cache_constant_inputs=cached)
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


SIX = awkward_graph(channels=6)


def saved_by(make, mode):
    """Bytes of storage that autograd saves in tensors of own or fetched rows, and the output, of two ranks."""

    def rank(comm):
        graph = share(SIX, comm, mode=mode)
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
            assert saved <= 8 * SIX.num_nodes + 500, saved  # counts of in-edges; what the probe has of eight edges
            assert gradient > 0


def test_what_is_needed_is_kept():
    kept = [saved for saved, _ in saved_by(lambda: GATConv(6, 6), "sar")]
    assert min(kept) > 4 * 8 * SIX.num_nodes // 2
    weighted = [saved for saved, _ in saved_by(lambda: GCNConv(6, 6, normalize=False), "keep")]
    assert max(weighted) <= min(kept)
