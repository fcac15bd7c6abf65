"""Graphs of several types: `HeteroGraphConv`, message passing by type and over all types, typed blocks."""

import copy

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn
from torch import nn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import (
    WholeHeteroGraph,
    awkward_hetero_graph,
    cotangent,
    hetero_assignments,
    run,
    shard_hetero_in_memory,
)

from .dgl_cases import ZERO
from .dgl_parity import BOUND, assert_dgl_exact, float64  # noqa: F401
from .how_much import assert_exact_in, in_turn

_MADE = awkward_hetero_graph(channels=5, edge_channels=3)


def _in_dgls_order(graph):
    """The types in the order that DGL gives them."""
    known = dgl.heterograph({kind: tuple(ends) for kind, ends in graph.edges.items()}, graph.num_nodes)
    kinds = known.canonical_etypes
    return WholeHeteroGraph(
        {kind: graph.num_nodes[kind] for kind in known.ntypes},
        {kind: graph.edges[kind] for kind in kinds},
        {kind: graph.node[kind] for kind in known.ntypes},
        {kind: graph.edge[kind] for kind in kinds},
    )


GRAPH = _in_dgls_order(_MADE)
ETYPES = list(GRAPH.edges)
SOME = [kind for kind in ETYPES if GRAPH.edges[kind].size(1)]
FULL = WholeHeteroGraph(
    GRAPH.num_nodes, {kind: GRAPH.edges[kind] for kind in SOME}, GRAPH.node, {kind: GRAPH.edge[kind] for kind in SOME}
)
"""Without the type that has no edges: DGL's own result for those is wrong under max and min, and under update_all over
all types (its gradient goes to node 0, or reads memory that is not its own)."""


def typed_graph(edges):
    if isinstance(edges, sp.ShardedHeteroGraph):
        return sp.dgl.graph(edges)
    return dgl.heterograph({kind: tuple(ends) for kind, ends in edges.items()}, GRAPH.num_nodes)


def by_type(fields, name, kinds):
    return {kind: fields[kind][name] for kind in kinds}


class Typed(nn.Module):
    """A function of (model, graph, fields) that gives rows by node type."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.lins = nn.ModuleDict({kind[1]: nn.Linear(5, 5) for kind in ETYPES})

    def forward(self, g, fields):
        with g.local_scope():
            for kind in g.ntypes:
                g.nodes[kind].data["x"] = fields[kind]["x"]
            for kind in g.canonical_etypes:
                g.edges[kind].data["w"] = fields[kind]["edge_weight"].unsqueeze(1)
            return self.function(self, g)


def of(function):
    return (lambda: Typed(function)), lambda m, fields, edges: m(typed_graph(edges), fields)


def layer(make, aggregate, **names):
    """A HeteroGraphConv of a layer for each edge type; `names` of edge fields passed to each."""

    def call(m, fields, edges):
        kinds = [kind for kind in ETYPES if kind in fields]
        extra = {kind[1]: {name: fields[kind][field] for name, field in names.items()} for kind in kinds}
        found = m(typed_graph(edges), by_type(fields, "x", GRAPH.num_nodes), mod_kwargs=extra)
        return {kind: rows.flatten(1) for kind, rows in found.items()}

    return (lambda: dnn.HeteroGraphConv({kind[1]: make() for kind in ETYPES}, aggregate)), call


def _mixed():
    makes = [
        lambda: dnn.SAGEConv(5, 6, "pool"),
        lambda: dnn.GraphConv(5, 6, norm="right"),
        lambda: dnn.GINConv(nn.Linear(5, 6), "max"),
        lambda: dnn.SAGEConv((5, 5), 6, "gcn"),
        lambda: dnn.SAGEConv(5, 6, "lstm"),
    ]
    return {kind[1]: makes[i % len(makes)]() for i, kind in enumerate(ETYPES)}


def _cross(reducer, kinds=ETYPES, cross="sum", **apply):
    def function(m, g):
        each = {kind: (fn.u_mul_e("x", "w", "m"), reducer("m", "out")) for kind in kinds}
        g.multi_update_all(each, cross, **apply)
        g.multi_update_all({kind[1]: each[kind] for kind in reversed(kinds[:3])}, cross)
        return {kind: g.nodes[kind].data["out"].flatten(1) for kind in g.ntypes if "out" in g.nodes[kind].data}

    return of(function)


def _functions(m, g):
    """Functions of users, by type, with applied functions; each type's own reducer."""
    each = {}
    for place, kind in enumerate(ETYPES):
        lin = m.lins[kind[1]]

        def message(e, lin=lin):
            return {"m": lin(e.src["x"] - e.dst["x"]).tanh() * e.data["w"]}

        reduce = [fn.sum("m", "out"), lambda n: {"out": n.mailbox["m"].prod(1) + n.data["x"]}][place % 2]
        each[kind] = (message, reduce, lambda n, lin=lin: {"out": lin(n.data["out"]) + n.data["x"]})
    g.multi_update_all(each, lambda parts: torch.stack(parts).logsumexp(0), lambda n: {"out": n.data["out"] * 2})
    return {kind: g.nodes[kind].data["out"] for kind in g.ntypes}


def _without_edges(m, g):
    """A type that has no edges takes part with zeros. DGL has no gradient there under max and min."""
    outs = {kind: [g.nodes[kind].data["x"]] for kind in g.dsttypes}
    with torch.no_grad():
        for reducer, cross in ((fn.max, "max"), (fn.max, "min"), (fn.min, "max"), (fn.min, "min"), (fn.min, "sum")):
            each = {kind: (fn.u_mul_e("x", "w", "m"), reducer("m", "out")) for kind in ETYPES}
            g.multi_update_all(each, cross)
            for kind, found in outs.items():
                found.append(g.nodes[kind].data["out"])
    return {kind: torch.cat(found, 1) for kind, found in outs.items()}


def _applied_by_type(reducer, cross):
    """Apply functions by type see what was reduced; only what they return is merged, and stored."""

    def function(m, g):
        each = {}
        for place, kind in enumerate(SOME):
            apply = lambda n, lin=m.lins[kind[1]], name="ab"[place % 2]: {name: lin(n.data["out"].clamp(-3, 3))}  # noqa: E731
            each[kind] = (fn.u_mul_e("x", "w", "m"), reducer("m", "out"), *([apply] if place else []))
        g.multi_update_all(each, cross)
        found = {
            kind: [g.nodes[kind].data[name] for name in ("out", "a", "b") if name in g.nodes[kind].data]
            for kind in g.ntypes
        }
        return {kind: torch.cat([rows.flatten(1) for rows in parts], 1) for kind, parts in found.items() if parts}

    return of(function)


def _one_type(m, g):
    """Views of one type share the data of the graph, and a scope of theirs is their own."""
    cites, writes = g["cites"], g["author", :, "paper"]
    assert writes.canonical_etypes == [("author", "writes", "paper")] and writes.srctypes == ["author"]
    cites.update_all(lambda e: {"m": m.lins["cites"](e.src["x"])}, fn.mean("m", "a"))
    g.apply_edges(fn.u_add_v("x", "x", "s"), etype="writes")
    g.update_all(fn.copy_e("s", "m"), fn.max("m", "b"), etype=("author", "writes", "paper"))
    writes.srcdata["y"] = writes.srcdata["x"] * 2
    g["writes"].update_all(fn.copy_u("y", "m"), fn.sum("m", "c"))
    with cites.local_scope():
        cites.ndata["x"] = cites.ndata["x"] * 0
    data = g.nodes["paper"].data
    return {"paper": torch.cat([data["a"], data["b"], data["c"], data["x"]], 1)}


def _all_types(*reducers):
    def function(m, g):
        outs = {kind: [g.nodes[kind].data["x"]] for kind in g.dsttypes}
        for reducer in reducers:
            for message in (fn.copy_u("x", "m"), fn.u_mul_e("x", "w", "m"), fn.copy_e("w", "m")):
                with torch.set_grad_enabled(reducer is fn.sum or message.name == "copy_u"):  # others fail in DGL
                    g.update_all(message, reducer("m", "out"))
                for kind, found in outs.items():
                    found.append(g.nodes[kind].data["out"])
        return {kind: torch.cat(found, 1) for kind, found in outs.items()}

    return of(function)


def _edges_of_all_types(m, g):
    """Built-in functions of the edges of all types."""
    g.apply_edges(fn.u_mul_v("x", "x", "s"))
    g.apply_edges(fn.copy_e("w", "w"))
    g.multi_update_all({kind: (fn.u_mul_e("x", "s", "m"), fn.mean("m", "out")) for kind in g.canonical_etypes}, "sum")
    return {kind: g.nodes[kind].data["out"] for kind in g.dsttypes}


class Rows(nn.Module):
    """Layers that take each row alone."""

    def __init__(self):
        super().__init__()
        self.embed = dnn.HeteroEmbedding(dict.fromkeys(GRAPH.num_nodes, 3), 4)
        self.mix = dnn.HeteroLinear({**dict.fromkeys(GRAPH.num_nodes, 5), ETYPES[0]: 3}, 4)

    def forward(self, fields):
        ids = {kind: (fields[kind]["x"][:, 0] > 0).long() for kind in GRAPH.num_nodes}
        mixed = self.mix({kind: fields[kind]["x"] for kind in GRAPH.num_nodes})
        return {kind: rows + mixed[kind] for kind, rows in self.embed(ids).items()}


GAT = {"attn_drop": 0.0, **ZERO}
CASES = {
    **{f"GraphConv {agg}": layer(lambda: dnn.GraphConv(5, 4, norm="right"), agg) for agg in ("sum", "mean", "min")},
    "GraphConv both weighted": layer(lambda: dnn.GraphConv(5, 4), "max", edge_weight="edge_weight"),
    "SAGEConv stack": layer(lambda: dnn.SAGEConv(5, 4, "mean"), "stack"),
    "SAGEConv weighted": layer(lambda: dnn.SAGEConv(5, 4, "pool"), "sum", edge_weight="edge_weight"),
    "GATConv": layer(lambda: dnn.GATConv(5, 3, 2, residual=True, **GAT), "mean"),
    "GATv2Conv": layer(lambda: dnn.GATv2Conv((5, 5), 3, 2, **GAT), "sum"),
    "mixed": ((lambda: dnn.HeteroGraphConv(_mixed(), "sum")), layer(None, None)[1]),
    "own aggregate": ((lambda: dnn.HeteroGraphConv(_mixed(), lambda p, t: torch.stack(p).exp().sum(0))),
                      layer(None, None)[1]),
    **{f"multi_update_all {cross}": _cross(fn.mean, cross=cross) for cross in ("sum", "mean", "max", "min", "stack")},
    "multi_update_all of maxima": _cross(fn.max, SOME, cross="max"),
    "multi_update_all of minima": _cross(fn.min, SOME, cross="min"),
    "multi_update_all of maxima summed": _cross(fn.max, SOME, cross="mean"),
    "multi_update_all own": _cross(fn.sum, cross=lambda parts: torch.stack(parts).prod(0),
                                   apply_node_func=lambda n: {"out": n.data["out"] + n.data["x"]}),
    **{f"apply functions by type {cross}": _applied_by_type(reducer, cross)
       for reducer, cross in ((fn.sum, "min"), (fn.min, "min"), (fn.max, "sum"), (fn.mean, "stack"))},
    "extrema without edges": of(_without_edges),
    "functions of users": of(_functions),
    "one type": of(_one_type),
    "apply_edges over all types": of(_edges_of_all_types),
    "update_all over all types": _all_types(fn.sum),
    "update_all over all types, extrema": _all_types(fn.max, fn.min),
    "HeteroLinear HeteroEmbedding": (Rows, lambda m, fields, edges: m(fields)),
}  # fmt: skip


SOME_CASES = (
    "GraphConv min", "SAGEConv weighted", "GATConv", "mixed", "own aggregate", "multi_update_all stack",
    "multi_update_all of minima", "multi_update_all own", "apply functions by type min", "extrema without edges",
    "functions of users", "one type", "apply_edges over all types", "update_all over all types",
    "update_all over all types, extrema", "HeteroLinear HeteroEmbedding",
)  # fmt: skip
ON_FULL = (
    "SAGEConv weighted", "mixed", "own aggregate", "update_all over", "multi_update_all of m", "apply functions by",
    "apply_edges over",
)  # fmt: skip


def graph_of(name):
    return FULL if name.startswith(ON_FULL) else GRAPH


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(CASES, only=SOME_CASES))
def test_several_types_equal_the_whole_graph(name, ranks, modes):
    make, call = CASES[name]
    torch.manual_seed(0)
    assert_exact_in(modes, make().double(), graph_of(name), call, sp.dgl.wrap, ranks, sp.Options(chunk_bytes=1000))


class TwoHetero(nn.Module):
    """Two layers on blocks."""

    def __init__(self):
        super().__init__()
        self.first = dnn.HeteroGraphConv({kind[1]: dnn.SAGEConv(5, 6, "mean") for kind in ETYPES}, "sum")
        second = {kind[1]: dnn.GATConv((6, 6), 2, 2, residual=True, **ZERO) for kind in ETYPES}
        self.second = dnn.HeteroGraphConv(second, "mean")

    def forward(self, blocks, x):
        x = {kind: rows.tanh() for kind, rows in self.first(blocks[0], x).items()}
        return {kind: rows.flatten(1) for kind, rows in self.second(blocks[1], x).items()}


WANTED = {"paper": [0, 4, 9, 22], "author": [1, 0, 13], "venue": [1]}


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_typed_blocks_give_what_dgls_give(ranks):
    whole = typed_graph(GRAPH.edges)
    torch.manual_seed(0)
    model, wanted, blocks = TwoHetero().double(), {k: torch.tensor(rows) for k, rows in WANTED.items()}, []
    for _ in range(2):
        cut = dgl.in_subgraph(whole, wanted)
        blocks.insert(0, dgl.to_block(cut, wanted))
        wanted = {kind: blocks[0].srcnodes[kind].data[dgl.NID] for kind in whole.ntypes}
    x = {kind: fields["x"].clone().requires_grad_() for kind, fields in GRAPH.node.items()}
    mine = copy.deepcopy(model)
    out = mine(blocks, {kind: x[kind][rows] for kind, rows in wanted.items()})
    out = {kind: rows for kind, rows in out.items() if kind in WANTED}
    weights = {kind: cotangent(torch.empty(count, 4)) for kind, count in GRAPH.num_nodes.items()}
    sum((rows * weights[kind][torch.tensor(WANTED[kind])]).sum() for kind, rows in out.items()).backward()

    def work(comm, owners):
        wrapped = sp.dgl.wrap(copy.deepcopy(model), comm)
        g = sp.dgl.graph(shard_hetero_in_memory(GRAPH, owners, comm, sp.Options(chunk_bytes=1000)))
        own = {kind: g.nodes[kind].data["x"].clone().requires_grad_() for kind in g.ntypes}
        ids = {kind: g.nodes[kind].data[dgl.NID] for kind in g.ntypes}
        for kind, rows in own.items():
            g.nodes[kind].data["x"] = rows
        blocks = g.mfgs({k: torch.isin(ids[k], torch.tensor(rows)).nonzero().view(-1) for k, rows in WANTED.items()}, 2)
        out = wrapped(blocks, {kind: blocks[0].srcnodes[kind].data["x"] for kind in blocks[0].srctypes})
        found = {kind: (blocks[-1].dstnodes[kind].data[dgl.NID], rows) for kind, rows in out.items()}
        sum((rows * weights[kind][nodes]).sum() for kind, (nodes, rows) in found.items()).backward()
        grads = {kind: torch.zeros_like(rows) if rows.grad is None else rows.grad for kind, rows in own.items()}
        return found, ids, grads, [p.grad if p.grad is not None else p.detach() * 0 for p in wrapped.parameters()]

    for where, owners in hetero_assignments(GRAPH, ranks).items():
        if ranks == 3 and where != "types apart":
            continue
        results = run(work, ranks, args=(owners,))
        for kind, rows in out.items():
            expected = torch.zeros_like(weights[kind])
            expected[torch.tensor(WANTED[kind])] = rows.detach()
            found = torch.zeros_like(expected)
            for parts, _, _, _ in results:
                found[parts[kind][0]] = parts[kind][1].detach()
            torch.testing.assert_close(found, expected, rtol=0, atol=BOUND)
        for kind, rows in x.items():
            found = torch.full_like(rows, float("nan"))
            for _, ids, grads, _ in results:
                found[ids[kind]] = grads[kind]
            expected = torch.zeros_like(rows) if rows.grad is None else rows.grad
            torch.testing.assert_close(found.detach(), expected, rtol=0, atol=BOUND)
        for place, parameter in enumerate(mine.parameters()):
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(results[-1][3][place].detach(), expected.detach(), rtol=0, atol=BOUND)


def test_what_kind_of_graph_it_is():
    whole = typed_graph(GRAPH.edges)

    def work(comm):
        g = sp.dgl.graph(shard_hetero_in_memory(GRAPH, hetero_assignments(GRAPH, 3)["types apart"], comm))
        assert g.ntypes == whole.ntypes and g.canonical_etypes == whole.canonical_etypes and g.etypes == whole.etypes
        assert set(g.dsttypes) == set(whole.dsttypes) and not g.is_homogeneous and not g.is_block
        for kind in whole.canonical_etypes:
            assert g.to_canonical_etype(kind[1]) == kind and g.get_etype_id(kind) == whole.get_etype_id(kind)
            sources = g.nodes[kind[0]].data[dgl.NID]
            assert torch.equal(g.in_degrees(etype=kind), whole.in_degrees(etype=kind)[g.nodes[kind[2]].data[dgl.NID]])
            assert torch.equal(g.out_degrees(etype=kind), whole.out_degrees(etype=kind)[sources])
            asked = g.num_edges(kind) == 0  # of all ranks
            assert asked == (whole.num_edges(kind) == 0)
        assert set(g.ndata["x"]) == set(g.ntypes) and set(g.edata["edge_weight"]) == set(g.canonical_etypes)
        g.ndata["y"] = {"paper": torch.zeros(g.num_nodes("paper"), 2)}
        assert "y" in g.nodes["paper"].data and "y" not in g.nodes["venue"].data
        mean = fn.copy_u("x", "m"), fn.mean("m", "h")
        for wrong in (g.in_degrees, lambda: g.update_all(*mean), lambda: g.apply_edges(len)):
            with pytest.raises(dgl.DGLError):
                wrong()
        with pytest.raises(RefusedError):
            dgl.nn.functional.edge_softmax(g, {})
        return [int(g.num_nodes(kind)) for kind in g.ntypes], int(g.num_nodes()), int(g.num_edges())

    kinds, nodes, edges = zip(*run(work, 3))
    assert [sum(counts) for counts in zip(*kinds)] == [whole.num_nodes(kind) for kind in whole.ntypes]
    assert sum(nodes) == whole.num_nodes() and sum(edges) == whole.num_edges()
