"""Backward by pulling equals backward by pushing and the whole graph, moves what the formula says, and is chosen so."""

import copy

import pytest
import torch
import torch_geometric.nn as gnn
from torch.utils.checkpoint import checkpoint

import shardpass as sp
from shardpass.backends.recording import RecordingCommunicator
from shardpass.core.aggregation import choice
from shardpass.core.aggregation.pull import KnownOutEdges
from shardpass.core.ranks import Ranks
from shardpass.core.sharding import Transposes
from shardpass.errors import DivergenceError
from shardpass.testing import WholeGraph, assignments, shard_in_memory

from .how_much import assert_exact_in, one_each
from .on_ranks import on_ranks
from .pyg_cases import GRAPH

LAYERS = {
    "SAGE": lambda: gnn.SAGEConv(5, 4, project=True),
    "GIN": lambda: gnn.GINConv(torch.nn.Linear(5, 4), train_eps=True),
    "GAT": lambda: gnn.GATConv(5, 4, heads=2),
    "GATv2": lambda: gnn.GATv2Conv(5, 4, heads=2),
    "GATv2 shared": lambda: gnn.GATv2Conv(5, 4, heads=2, share_weights=True),
    "Transformer": lambda: gnn.TransformerConv(5, 4, heads=2),
}


@pytest.fixture
def pulled(monkeypatch):
    """Whether each call pulled, noted as ranks choose."""
    found = []

    def noted(*args):
        found.append(choose(*args))
        return found[-1]

    choose = choice.choose_pull
    monkeypatch.setattr(choice, "choose_pull", noted)
    return found


@pytest.mark.parametrize(
    "ranks, mode",
    [pytest.param(2, "halo", marks=pytest.mark.long), (3, "sar"), pytest.param(4, "keep", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("name", LAYERS)
def test_pulling_equals_the_whole_graph(name, ranks, mode, pulled):
    torch.manual_seed(0)
    model = LAYERS[name]().double()
    call = lambda m, inputs, graph: m(inputs["x"], graph)  # noqa: E731
    options = sp.Options(backward="pull", chunk_bytes=300, block_rows=3 if ranks == 3 else None)
    assert_exact_in(((), (mode,)), model, GRAPH, call, sp.pyg.wrap, ranks, options)
    assert pulled and None not in pulled


def rows_moved(owners, edge_index):
    """``(pushed, pulled)`` rows over all ranks: of sources that other ranks need, and of destinations."""
    src, dst = edge_index
    crossing = owners[src] != owners[dst]
    pushed = {(int(s), int(owners[d])) for s, d in zip(src[crossing], dst[crossing])}
    pulled = {(int(owners[s]), int(d)) for s, d in zip(src[crossing], dst[crossing])}
    return len(pushed), len(pulled)


# numbers in a row of a source that is pushed (in mode keep without those fetched again), and of a destination pulled
HEADS, WIDTH = 2, 4
F = HEADS * WIDTH
FORMULAS = {
    "SAGE": (4, 4, 4),  # of what its linear map gives, which is made before the sum
    "GAT": (2 * (F + HEADS), F + HEADS, F + 4 * HEADS),
    "GATv2": (2 * F, F, 3 * F + 2 * HEADS),
    "Transformer": (4 * F, 2 * F, 3 * F + 2 * HEADS),
}


def backward_bytes(name, graph, owners, ranks, options):
    """Bytes of the second backward over all ranks, and the labels of collectives of both."""

    def work(inner):
        comm = Ranks(RecordingCommunicator(inner))
        sharded = shard_in_memory(graph, owners, comm, options)
        model = sp.pyg.wrap({**LAYERS, "SAGE": lambda: gnn.SAGEConv(5, 4)}[name]().double(), comm)
        model(sharded.x.requires_grad_(), sharded).sum().backward()
        out = model(sharded.x, sharded)
        before = comm.bytes_sent
        out.sum().backward()
        return comm.bytes_sent - before, [m.label for m in comm.inner.messages if m.kind.startswith("all_")]

    found = sp.spawn(work, ranks)
    return sum(sent for sent, _ in found), found[0][1]


def fan(num_nodes=60, hubs=3):
    """A few sources with edges to all, so that few rows are pushed and many pulled."""
    src = torch.arange(num_nodes) % hubs
    x = torch.randn(num_nodes, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return WholeGraph(num_nodes, torch.stack([src, torch.arange(num_nodes)]), {"x": x})


@pytest.mark.parametrize("name, mode", [*((name, "sar") for name in FORMULAS), ("GAT", "keep")])
def test_bytes_are_those_of_the_formula_and_auto_takes_the_smaller(name, mode):
    ranks, wide = 3, fan()
    against = WholeGraph(wide.num_nodes, wide.edge_index.flip(0), wide.node)
    again, kept, published = FORMULAS[name]
    better = set()
    for graph in (GRAPH, wide, against) if (name, mode) == ("GAT", "sar") else (wide, against):
        owners = assignments(graph.num_nodes, ranks, graph.edge_index)["random"]
        pushed, pulled = rows_moved(owners, graph.edge_index)
        expected = {"push": pushed * (again if mode == "sar" else kept) * 8, "pull": pulled * published * 8}
        for backward, count in [*expected.items(), ("auto", min(expected.values()))]:
            sent, labels = backward_bytes(name, graph, owners, ranks, sp.Options(mode=mode, backward=backward))
            assert sent == count, (backward, expected)
            pulls = backward == "pull" or (backward == "auto" and expected["pull"] < expected["push"])
            assert sum("out-edges" in label for label in labels) == int(pulls), "made once, where it is needed"
            assert sum("rows to pull" in label for label in labels) == int(backward != "push")
        better.add(min(expected, key=lambda way: expected[way]))
    assert better == {"push", "pull"}


class Two(torch.nn.Module):
    """Two layers that do not feed each other, so that a loss may lead to one of them only."""

    def __init__(self, name, checkpointed):
        super().__init__()
        self.first, self.second, self.checkpointed = LAYERS[name](), LAYERS[name](), checkpointed

    def forward(self, x, y, edge_index):
        if self.checkpointed:
            return tuple(checkpoint(conv, z, edge_index, use_reentrant=False) for conv, z in self.pairs(x, y))
        return tuple(conv(z, edge_index) for conv, z in self.pairs(x, y))

    def pairs(self, x, y):
        return (self.first, x), (self.second, y)


def gradients(name, backward, lost=(), checkpointed=False, ranks=3):
    """Of ``x``, ``y`` and each parameter, rank by rank; the loss of ranks in `lost` leads to the first layer only."""
    owners = assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)["random"]
    torch.manual_seed(0)
    model = Two(name, checkpointed).double()

    def work(comm):
        graph = shard_in_memory(GRAPH, owners, comm, sp.Options(backward=backward))
        mine = sp.pyg.wrap(copy.deepcopy(model), comm)
        x, y = (graph.x.clone().requires_grad_() for _ in range(2))
        first, second = mine(x, y, graph)
        loss = (first * torch.linspace(-1, 1, first.numel(), dtype=first.dtype).view_as(first)).sum()
        (loss if comm.rank in lost else loss + second.square().sum()).backward()
        return [("x", x.grad), ("y", y.grad), *((key, p.grad) for key, p in mine.named_parameters())]

    return sp.spawn(work, ranks)


def assert_same_gradients(expected, found):
    """Gradients agree; those of parameters summed over ranks, since shares of them may lie elsewhere."""
    for theirs, mine in zip(expected, found):
        for (key, right), (_, grad) in zip(theirs, mine):
            is_share = key.endswith(".att")  # an edge counts at its destination, or at its source
            assert is_share or (grad is None) == (right is None), key
            if key in ("x", "y") and right is not None:
                torch.testing.assert_close(grad, right, rtol=0, atol=1e-10, msg=key)
    for (key, right), (_, grad) in zip(summed(expected), summed(found)):
        torch.testing.assert_close(grad, right, rtol=0, atol=1e-10, msg=key)


def summed(found):
    """The gradients of parameters summed over ranks; zeros where there is none."""
    for entries in zip(*(rank[2:] for rank in found)):
        yield entries[0][0], sum((grad for _, grad in entries if grad is not None), torch.zeros((), dtype=torch.double))


@pytest.mark.parametrize(("name", "lost"), one_each(["SAGE", "GAT", "GATv2 shared"], [(), (1,), (0, 1, 2)]), ids=str)
def test_losses_that_do_not_lead_to_a_layer(name, lost):
    assert_same_gradients(gradients(name, "push", lost), gradients(name, "pull", lost))


@pytest.mark.parametrize("name", ["SAGE", "GAT"])
def test_checkpointing(name):
    assert_same_gradients(gradients(name, "pull"), gradients(name, "pull", checkpointed=True))


def test_every_run_gives_the_same_bits():
    first, second = gradients("GAT", "pull"), gradients("GAT", "pull")
    for mine, again in zip(first, second):
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(mine, again))


PUSHED = {
    "weights": (lambda: gnn.GCNConv(5, 4), {}),
    "maximum": (lambda: gnn.SAGEConv(5, 4, aggr="max"), {}),
    "dropout": (lambda: gnn.GATConv(5, 4, dropout=0.5), {}),
    "scores of edges": (lambda: gnn.GATConv(5, 4, edge_dim=3), {"edge_attr": GRAPH.edge["edge_attr"]}),
    "several passes": (lambda: gnn.GATConv(5, 4), {"fuse_attention": False}),
    "rounded rows": (lambda: gnn.GATConv(5, 4), {"wire_dtype": torch.bfloat16}),
    "no gradient": (lambda: gnn.SAGEConv(5, 4), {"x": GRAPH.node["x"]}),
}


@pytest.mark.parametrize("name", PUSHED)
def test_what_is_pushed_whatever_the_option(name, pulled):
    make, given = PUSHED[name]
    fields = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    options = sp.Options(backward="pull", **{key: value for key, value in given.items() if key not in fields})

    def work(comm):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % comm.size, comm, options)
        model = sp.pyg.wrap(make().double(), comm)
        edges = {key: graph.edge[key] for key in fields if key in GRAPH.edge}
        x = graph.x.clone().requires_grad_("x" not in fields)
        model(x, graph, **edges).sum().backward()

    sp.spawn(work, 2)
    assert pulled and set(pulled) == {None}


def test_one_rank_has_nothing_to_pull(pulled):
    gradients("SAGE", "pull", ranks=1)
    assert pulled == [None, None]


def test_ranks_that_mix_scores_differently_push(pulled):
    """The owner of a source would mix with its own tensor, and forward did with the destination's."""

    class Mixes(gnn.GATv2Conv):
        def forward(self, x, edges):
            self.att.data.add_(self._rank)  # after models were compared, and before the next time
            return super().forward(x, edges)

    def work(comm):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm, sp.Options(backward="pull"))
        model = sp.pyg.wrap(Mixes(5, 4).double(), comm, check=False)
        model._rank = comm.rank
        model(graph.x.requires_grad_(), graph).sum().backward()
        with pytest.raises(DivergenceError, match="parameter 'att' is not the same on rank 0 and rank 1"):
            model(graph.x, graph)

    sp.spawn(work, 2)
    assert pulled == [None, None]


@on_ranks(2)
def test_a_rank_that_lost_the_out_edges_makes_all_count_again(inner):
    comm = Ranks(RecordingCommunicator(inner))
    graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm, sp.Options(backward="pull"))
    model, found = sp.pyg.wrap(gnn.SAGEConv(5, 4).double(), comm), []
    for turn in range(3):
        if turn == 1 and comm.rank == 1:
            comm.caches.of(KnownOutEdges, graph.relation.shards).out_edges = None
        x = graph.x.clone().requires_grad_()
        model(x, graph).sum().backward()
        found.append(x.grad)
    counted = sum("rows to pull" in message.label for message in comm.inner.messages)
    assert counted == 2 and torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@on_ranks(3)
def test_the_structure_is_there_once(comm):
    kept = []
    for backward in ("push", "pull"):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 3, comm, sp.Options(backward=backward))
        model = sp.pyg.wrap(gnn.SAGEConv(5, 4).double(), comm)
        model(graph.x.requires_grad_(), graph).sum().backward()
        shards = graph.relation.shards
        out_edges = comm.caches.of(KnownOutEdges, shards).out_edges
        halo = any(s in comm.caches.of(Transposes)._kept for s in shards.shards[1:])
        kept.append((halo, out_edges is not None))
        if out_edges is not None:
            _, mine = out_edges.of(graph.relation.plan, shards, "")
            assert all(s.src_rows.dtype == s.indptr.dtype == torch.int32 for s in mine.shards)
    assert kept == [(True, False), (False, True)]
