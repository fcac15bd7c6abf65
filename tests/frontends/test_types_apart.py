"""Rows of node types and relations are told apart where there are as many of both, on every number of ranks."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.utils import scatter

import shardpass as sp
from shardpass.testing import WholeHeteroGraph, shard_hetero_in_memory

from .how_much import one_each
from .on_ranks import assert_refused, assert_rows

N, CHANNELS = 24, 4
CITES, WRITES, BACK = ("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "back", "author")


def _graph():
    generator = torch.Generator().manual_seed(0)
    ends = torch.stack([torch.randperm(2 * N, generator=generator) % N for _ in range(2)])
    more = torch.randint(0, N, (2, 3 * N), generator=generator)
    fields = {kind: torch.randn(N, CHANNELS, generator=generator).double() for kind in ("paper", "author")}
    weights = {
        kind: torch.rand(count, generator=generator).double() for kind, count in ((WRITES, 2 * N), (CITES, 3 * N))
    }
    edges = {WRITES: ends, BACK: ends.flip(0), CITES: more}
    return WholeHeteroGraph(
        {"paper": N, "author": N},
        edges,
        {kind: {"x": x} for kind, x in fields.items()},
        {kind: {"w": weights[kind]} if kind in weights else {} for kind in edges},
    )


GRAPH = _graph()


def share(comm):
    return shard_hetero_in_memory(GRAPH, {kind: torch.arange(N) % comm.size for kind in ("paper", "author")}, comm)


class Weighted(gnn.MessagePassing):
    def forward(self, x, edge_index, w, over):
        return self.propagate(edge_index, x=x, w=w, over=over)

    def message(self, x_j, w, over):
        return x_j * w[:, None] * over


class Net(nn.Module):
    """Layers of both types, what stands `between` them, and layers again."""

    def __init__(self, between):
        super().__init__()
        self.between = between
        self.enc = nn.ModuleDict({kind: nn.Linear(CHANNELS, CHANNELS) for kind in ("paper", "author")})
        self.first, self.last = (
            gnn.HeteroConv({kind: gnn.SAGEConv(CHANNELS, CHANNELS) for kind in GRAPH.edges}) for _ in range(2)
        )
        self.pair = gnn.SAGEConv((CHANNELS, CHANNELS), CHANNELS)
        self.simple = gnn.SimpleConv("mean")
        self.alone = gnn.GCNConv(CHANNELS, CHANNELS)
        self.own, self.over = Weighted(), nn.Parameter(torch.randn(CHANNELS))

    def forward(self, x_dict, edges, fields):
        h = self.first({kind: self.enc[kind](x).relu() for kind, x in x_dict.items()}, edges)
        return self.last(self.between(self, h, x_dict, edges, fields), edges)


def papers(rows):
    """`rows` in the place of those of papers."""
    return lambda m, h, x, e, f: {**h, "paper": rows(m, h, x, e, f)}


EXACT = {
    "by type": lambda m, h, x, e, f: {kind: rows.tanh() + x[kind] for kind, rows in h.items()},
    "columns of both": lambda m, h, x, e, f: {
        kind: torch.cat([rows[:, :2], rows[:, 2:] * 2], 1) for kind, rows in h.items()
    },
    "sources and no destinations": papers(lambda m, h, x, e, f: m.simple((h["author"], None), e[WRITES])),
    "weights of the relation": papers(
        lambda m, h, x, e, f: h["paper"] + m.own((h["author"], h["paper"]), e[WRITES], f[WRITES], m.over)
    ),
}
MIXED = {
    "added": papers(lambda m, h, x, e, f: h["paper"] + h["author"]),
    "columns added": papers(lambda m, h, x, e, f: torch.cat([h["paper"][:, :2], h["author"][:, 2:]], 1)),
    "features of the other": papers(lambda m, h, x, e, f: h["paper"] * x["author"]),
    "one layer's on another's": papers(lambda m, h, x, e, f: m.enc["paper"](h["paper"]) + m.enc["author"](x["author"])),
    "a mask of the other": papers(lambda m, h, x, e, f: h["paper"].masked_fill(h["author"][:, :1] > 0, 0.0)),
    "under the other's name": lambda m, h, x, e, f: {"paper": h["author"], "author": h["paper"]},
    "sources for destinations": papers(lambda m, h, x, e, f: m.pair((h["paper"], h["author"]), e[WRITES])),
    "destinations alone": papers(lambda m, h, x, e, f: m.alone(h["paper"], e[WRITES])),
    "sources alone, with loops": papers(lambda m, h, x, e, f: m.alone(h["author"], e[WRITES])),
    "sources for both": papers(lambda m, h, x, e, f: m.pair(h["author"], e[WRITES])),
    "both in one tensor": papers(lambda m, h, x, e, f: torch.stack([h["paper"], h["author"]]).mean(0)),
    "weights of another relation": papers(
        lambda m, h, x, e, f: m.own((h["author"], h["paper"]), e[WRITES], f[CITES], m.over)
    ),
    "edges under another's name": lambda m, h, x, e, f: m.first(h, {**e, WRITES: e[BACK], BACK: e[WRITES]}),
    "messages in two orders": papers(
        lambda m, h, x, e, f: scatter(
            torch.cat([h["author"][e[WRITES][0]], h["paper"][e[BACK][0]]]),
            torch.cat([e[BACK][1], e[WRITES][1]]),
            dim_size=h["paper"].size(0),
        )
    ),
    "ends of two relations": papers(
        lambda m, h, x, e, f: m.own(
            (h["author"], h["paper"]), torch.stack([e[WRITES][0], e[BACK][0]]), f[WRITES], m.over
        )
    ),
}


def model_of(between):
    torch.manual_seed(0)
    return Net(between).double()


def called(model, comm):
    graph = share(comm)
    fields = {kind: graph.relations[kind].fields.get("w") for kind in GRAPH.edges}
    out = sp.pyg.wrap(copy.deepcopy(model), comm)(graph.x_dict, graph, fields)
    return graph.node_ids_dict["paper"], out["paper"]


@pytest.mark.parametrize(("name", "ranks"), one_each(EXACT, (4, 1)))
def test_each_type_by_itself_is_exact(name, ranks):
    model = model_of(EXACT[name])
    x = {kind: fields["x"] for kind, fields in GRAPH.node.items()}
    weights = {kind: fields.get("w") for kind, fields in GRAPH.edge.items()}
    expected = copy.deepcopy(model)(x, GRAPH.edges, weights)["paper"]
    assert_rows(lambda comm: called(model, comm), expected, ranks=(ranks,))


def test_a_pair_the_wrong_way_round_is_refused_by_a_layer_of_dgl():
    dnn = pytest.importorskip("dgl.nn.pytorch")

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = dnn.GATv2Conv((CHANNELS, CHANNELS), CHANNELS, 1, allow_zero_in_degree=True)

        def forward(self, g, x):
            return self.conv(g["writes"], (x["paper"], x["author"]))  # from authors to papers

    def call(comm):
        graph = share(comm)
        return sp.dgl.wrap(Turned().double(), comm)(sp.dgl.graph(graph), graph.x_dict)

    assert_refused(call, "test_types_apart.py")


@pytest.mark.parametrize(("name", "ranks"), one_each(MIXED, (4, 1)))
def test_rows_of_two_types_or_relations_are_not_put_together(name, ranks):
    model = model_of(MIXED[name])
    assert_refused(lambda comm: called(model, comm), "test_types_apart.py", ranks=(ranks,))
