"""What stands for a DGLGraph: built-in message passing, data, scopes, counts and degrees, as on the whole graph."""

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.function as fn
from torch import nn

import shardpass as sp
from shardpass.frontends.dgl.counts import EdgeCount, NodeCount
from shardpass.testing import assignments, run, shard_in_memory

from .dgl_parity import (  # noqa: F401
    GRAPH,
    assert_dgl_exact,
    dgl_graph,
    edges,
    float64,
    onto_nodes,
    own,
)
from .how_much import EACH_MODE_ONCE, in_turn, one_each
from .on_ranks import on_ranks, share

SPREAD = assignments(GRAPH.num_nodes, 3, GRAPH.edge_index)["no edges"]
REDUCERS = (fn.sum, fn.mean, fn.max, fn.min)
SIDES = [("u", "v"), ("v", "u"), ("u", "e"), ("e", "u"), ("v", "e"), ("e", "v")]
BINARY = {f"{a}_{op}_{b}": getattr(fn, f"{a}_{op}_{b}") for op in ("add", "sub", "mul", "div", "dot") for a, b in SIDES}
SOME_BINARY = "u_add_v v_sub_u u_mul_e e_div_u v_dot_e e_mul_v".split()  # each operation, and each pair of sides


class Model(nn.Module):
    """A function of (model, graph, inputs) with a few parameters."""

    def __init__(self, function):
        super().__init__()
        self.function, self.lin, self.scale = function, nn.Linear(5, 5), nn.Parameter(torch.tensor([0.7, 1.3]))

    def forward(self, g, i):
        with g.local_scope():
            return self.function(self, g, i)


def of(function):
    """A case of `function`."""
    return (lambda: Model(function)), lambda m, g, i: m(g, i)


def sharded(work, owners=SPREAD, ranks=3, options=None):
    """What ``work(graph, comm)`` gives on each rank."""
    return run(lambda comm: work(sp.dgl.graph(shard_in_memory(GRAPH, owners, comm, options)), comm), ranks)


def spread(comm):
    """The graph of a rank, which has edges or none."""
    return sp.dgl.graph(share(GRAPH, comm, "no edges"))


def rows(out):
    return out.reshape(out.size(0), out.shape[1:].numel())


def builtin(make, shapes, reducers=REDUCERS, per_edge=True):
    """All reducers of a built-in message, and its edges. `shapes`: of the u, v and e operands."""

    def function(m, g, i):
        wide = torch.cat([i["x"], m.lin(i["x"])[:, :1]], 1).abs() + 0.5
        attr = torch.cat([i["edge_attr"], i["edge_attr"].flip(1)], 1).abs() + 0.5
        found = {"u": wide, "v": wide.flip(1) * 1.1, "e": attr}
        found = {side: rows[:, : shapes[side].numel()].reshape(-1, *shapes[side]) for side, rows in found.items()}
        g.srcdata["u"], g.dstdata["v"], g.edata["e"] = found["u"], found["v"], found["e"]
        outs = []
        for reducer in reducers:
            g.update_all(make("m"), reducer("m", "out"))
            outs.append(rows(g.dstdata["out"]))
        if per_edge:
            g.apply_edges(make("per edge"))
            outs.append(onto_nodes(g.edata["per edge"], g))
        return torch.cat(outs, 1)

    return of(function)


def binary(name, shapes):
    return builtin(lambda out: BINARY[name](name[0], name[-1], out), shapes)


SAME = dict.fromkeys("uve", torch.Size([3]))


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(BINARY, only=SOME_BINARY))
def test_builtin_messages(name, ranks, modes):
    assert_dgl_exact(binary(name, SAME), ranks=ranks, modes=modes)


@pytest.mark.parametrize("make", [lambda m: fn.copy_u("u", m), lambda m: fn.copy_e("e", m)], ids=["u", "e"])
def test_copies(make):
    assert_dgl_exact(builtin(make, SAME, per_edge=make("m").name == "copy_u"))


SHAPES = {
    "a column": {"u": [2, 3], "v": [2, 3], "e": [2, 1]},
    "fewer dimensions": {"u": [2, 3], "v": [3], "e": [1]},
    "both ways": {"u": [2, 1], "v": [1, 3], "e": [2, 1]},
    "numbers": {"u": [], "v": [], "e": []},
    "rows and numbers": {"u": [3], "v": [3], "e": []},
}


@pytest.mark.parametrize(("shapes", "name"), one_each(SHAPES, ["u_mul_e", "e_sub_v", "v_div_u"]))
def test_broadcasting(shapes, name):
    sizes = {side: torch.Size(shape) for side, shape in SHAPES[shapes].items()}
    assert_dgl_exact(binary(name, sizes), modes=((), ("sar",), ()))


def test_extrema_give_the_whole_gradient_to_one_edge():
    """Of tied messages the one with the smallest edge id, wherever its source is."""

    def function(m, g, i):
        g.ndata["x"] = i["x"].sign() * (1 + 0 * m.scale[0])
        g.update_all(fn.copy_u("x", "m"), fn.max("m", "a"))
        g.update_all(fn.copy_u("x", "m"), fn.min("m", "b"))
        g.edata["w"] = i["edge_attr"].round()
        g.update_all(fn.copy_e("w", "m"), fn.max("m", "c"))
        return torch.cat([g.ndata["a"], g.ndata["b"] * 2, g.ndata["c"] * 3], 1)

    def straight(m, g, i):
        g.ndata["x"] = torch.where(i["x"] > 0, 1.0, -1.0) + 0.0 * i["x"]  # a sign that lets gradients through
        out = []
        for scaled in (1.0, 0.0):
            g.ndata["y"] = g.ndata["x"] + (i["x"] - i["x"].detach()) * scaled
            g.update_all(fn.copy_u("y", "m"), fn.max("m", "out"))
            out.append(g.ndata["out"])
        return torch.cat(out, 1)

    for case, modes in ((of(function), ((), ("sar",))), (of(straight), (("keep",), (), ("halo",)))):
        assert_dgl_exact(case, modes=modes)


def test_edges_in_part():
    """apply_edges on some edges leaves the rows of the others; a rank may have none of them."""

    def function(m, g, i):
        g.ndata["x"] = m.lin(i["x"])
        third = edges(torch.arange(300) % 3, g)
        g.edata["w"] = i["edge_attr"]
        g.apply_edges(lambda e: {"a": e.src["x"] - e.dst["x"]}, (third == 1).nonzero().view(-1))
        g.apply_edges(fn.u_mul_v("x", "x", "a"), (third == 2).nonzero().view(-1))
        g.apply_edges(
            lambda e: {"w": e.data["w"] * e.src["x"][:, :3]}, (edges(torch.arange(300), g) == 17).nonzero().view(-1)
        )
        g.update_all(fn.copy_e("a", "m"), fn.sum("m", "out"))
        return torch.cat([g.ndata["out"], onto_nodes(g.edata["a"], g), onto_nodes(g.edata["w"], g)], 1)

    assert_dgl_exact(of(function), modes=((), ("halo",), ("keep",)))


@pytest.mark.parametrize("reducer", [fn.sum, fn.max, fn.min])
def test_update_all_stores_what_the_apply_function_returns(reducer):
    """And nothing else; nodes without messages hold infinity before it under max and min."""

    def function(m, g, i):
        g.ndata["x"], g.ndata["h"] = i["x"], m.lin(i["x"])
        g.update_all(fn.copy_u("x", "m"), reducer("m", "h"), lambda n: {"z": n.data["h"].clamp(-3, 3) * n.data["x"]})
        once = torch.cat([g.ndata["h"], g.ndata["z"]], 1)
        g.update_all(fn.copy_u("x", "m"), reducer("m", "new"), lambda n: {"x": n.data["new"], "h": n.data["x"] * 2})
        assert "new" not in g.ndata
        return torch.cat([once, g.ndata["x"], g.ndata["h"]], 1)

    assert_dgl_exact(of(function))


def test_nodes_in_part_and_apply_functions():
    def function(m, g, i):
        g.ndata["x"] = i["x"]
        chosen = (own(torch.arange(41), g) % 3 == 0).nonzero().view(-1)
        g.apply_nodes(lambda n: {"x": n.data["x"] * 2, "y": m.lin(n.data["x"])}, chosen)
        g.apply_nodes(lambda n: {"z": n.data["x"].sum(1) + n.data["y"][:, 0]})
        g.update_all(
            fn.copy_u("x", "m"), fn.sum("m", "h"), lambda n: {"h": m.lin(n.data["h"]) + n.data["y"], "k": n.data["h"]}
        )
        return torch.cat([g.ndata["x"], g.ndata["y"], g.ndata["z"].unsqueeze(1), g.ndata["h"], g.ndata["k"]], 1)

    assert_dgl_exact(of(function), modes=EACH_MODE_ONCE)


def test_degrees_are_those_of_the_whole_graph():
    whole = dgl.graph(tuple(GRAPH.edge_index), num_nodes=GRAPH.num_nodes)

    def work(g, comm):
        ids = g.ndata[dgl.NID]
        assert torch.equal(g.in_degrees(), whole.in_degrees()[ids])
        assert torch.equal(g.out_degrees(), whole.out_degrees()[ids])
        some = ids % 2 == 0
        assert torch.equal(g.in_degrees(some), whole.in_degrees()[ids[some]])
        assert torch.equal(g.out_degrees(some, etype="_E"), whole.out_degrees()[ids[some]])

    for owners in assignments(GRAPH.num_nodes, 3, GRAPH.edge_index).values():
        sharded(work, owners)


def test_data_of_the_store_is_there_with_original_ids():
    def work(g, comm):
        assert torch.equal(g.ndata["x"], GRAPH.node["x"][g.ndata[dgl.NID]])
        assert torch.equal(g.edata["edge_attr"], GRAPH.edge["edge_attr"][g.edata[dgl.EID]])
        assert set(g.ndata) == {"x"} and dgl.NID in g.ndata and "x" in g.ndata and "nothing" not in g.ndata
        return g.ndata[dgl.NID], g.edata[dgl.EID]

    nodes, eids = (torch.cat(parts).sort()[0] for parts in zip(*sharded(work)))
    assert torch.equal(nodes, torch.arange(41)) and torch.equal(eids, torch.arange(220))


@on_ranks(3)
def test_the_views_of_data_are_one(comm):
    g = spread(comm)
    h, w = torch.rand(g.num_nodes(), 2), torch.rand(g.num_edges())
    g.nodes["_N"].data["a"] = h
    g.srcdata["b"] = h
    g.dstnodes["_N"].data["c"] = h
    g.nodes[None].data["d"] = h
    for view in (g.ndata, g.srcdata, g.dstdata, g.nodes["_N"].data, g.srcnodes["_N"].data, g.nodes.data):
        assert all(are_one(view[name], h) for name in "abcd")
    g.edges["_E"].data["w"] = w
    views = g.edata, g.edges["_N", "_E", "_N"].data, g["_E"].edata
    assert all(are_one(view["w"], w) for view in views)
    assert are_one(g.ndata.pop("d"), h) and "d" not in g.srcdata
    del g.edata["w"]
    assert "w" not in g.edata
    g.ndata.update({"e": h, "f": h})
    assert are_one(g.srcdata["f"], h)


def are_one(one, other):
    """Whether both are names of one tensor: a script gets fields in a form that is followed."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


@pytest.mark.parametrize("raised", [False, True])
@on_ranks(3)
def test_scopes_forget_what_was_set(comm, raised):
    g = spread(comm)
    kept = g.ndata["x"]
    g.edata["w"] = w = torch.rand(g.num_edges())
    with pytest.raises(ZeroDivisionError) if raised else g.local_scope(), g.local_scope():
        g.ndata["x"] = kept * 2
        g.ndata["y"] = kept
        g["_E"].edata["w"] = w * 2
        del g.edata["edge_attr"]
        assert torch.equal(g.srcdata["x"], kept * 2)
        if raised:
            raise ZeroDivisionError
    assert are_one(g.ndata["x"], kept) and "y" not in g.ndata
    assert are_one(g.edata["w"], w) and "edge_attr" in g.edata
    other = g.local_var()
    other.ndata["y"] = kept
    other.edata.clear()
    assert "y" not in g.ndata and are_one(g.edata["w"], w) and other.num_nodes() == g.num_nodes()


def test_what_kind_of_graph_it_is():
    def work(g, comm):
        assert isinstance(g, dgl.DGLGraph) and g.is_homogeneous and not g.is_block
        assert g.ntypes == g.srctypes == g.dsttypes == ["_N"] and g.etypes == ["_E"]
        assert g.canonical_etypes == [("_N", "_E", "_N")] and g.to_canonical_etype("_E") == ("_N", "_E", "_N")
        assert g.get_ntype_id("_N") == g.get_etype_id("_E") == g.get_etype_id(None) == 0
        assert g.idtype == torch.int64 and g.device == torch.device("cpu") and g.batch_size == 1
        assert torch.tensor(g.num_nodes()).dtype == torch.int64  # NumPy once ended the process there
        return int(g.num_nodes()), int(g.num_src_nodes()), int(g.number_of_dst_nodes()), int(g.num_edges())

    nodes, sources, destinations, num_edges = zip(*sharded(work))
    assert sum(nodes) == sum(sources) == sum(destinations) == 41 and sum(num_edges) == 220 and 0 in num_edges


def test_counts_are_own_sizes_but_whether_there_are_any_is_asked_of_all():
    questions = [  # not in an assert, which pytest rewrites
        lambda count: bool(count),
        lambda count: count > 0,
        lambda count: 0 < count,  # noqa: SIM300
        lambda count: count != 0,
        lambda count: not count == 0,  # noqa: SIM201
        lambda count: not count <= 0,
    ]
    none, some, never = (EdgeCount(own, total) for own, total in ((0, 5), (3, 5), (0, 0)))
    for any_edges in questions:
        assert [any_edges(count) for count in (none, some, never)] == [True, True, False]
    rows = torch.zeros(0, 4)
    assert some != rows.shape[0] and some == 3 and len(torch.zeros(3)) == some
    assert torch.zeros(none, 2).shape == (0, 2) and list(range(some)) == [0, 1, 2] and some + 1 == 4
    assert {some: 1}[3] == 1 and max(some, 0) == 3
    nodes = NodeCount(0, 7)
    assert nodes and nodes > 0 and nodes == rows.shape[0] and {nodes: 1}[0] == 1


def test_numbers_of_nodes_are_sizes_or_divisors():
    def work(g, comm):
        counts = g.batch_num_nodes()
        assert (torch.ones(4) / counts).eq(1 / 41).all() and torch.div(1.0, counts).eq(1 / 41).all()
        assert torch.repeat_interleave(torch.ones(1, 2), counts, 0).size(0) == g.num_nodes()
        assert [torch.ones(n, 1).size(0) for n in counts] == [g.num_nodes()] and len(counts) == 1

    sharded(work, assignments(41, 3, GRAPH.edge_index)["random"])


def test_nodes_without_data_have_one_frame_in_a_scope():
    """As sources and as destinations: layers of DGL set the one and read the other."""
    graph = sp.dgl.graph(sp.shard(dgl.graph(([0, 1, 2], [1, 2, 0]))))
    with graph.local_scope():
        graph.srcdata["h"] = torch.ones(3, 2)
        assert [*graph.dstdata] == ["h"]
