"""What DGL code can write that once was wrong without a word: exact now, or refused at its line, on 1, 3 and 4 ranks.

Rows of edges of other relations are in `test_other_relations.py`, parts of models in `test_parts.py`.
"""

import collections
import copy
import types

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn
import numpy as np
from torch import nn

import shardpass as sp
from shardpass.testing import WholeGraph, run, shard_in_memory

from .dgl_parity import float64, whole_graph  # noqa: F401
from .how_much import one_each
from .on_ranks import RANKS, assert_refused, assert_rows, on_ranks

N, STEPS = 24, (1, 5, 7)


def _graph():
    """Every node has three in-edges, so that functions of mailboxes see all nodes of a rank together."""
    generator = torch.Generator().manual_seed(0)
    start = torch.arange(N).repeat(len(STEPS))
    ends = torch.stack([start, (start + torch.tensor(STEPS).repeat_interleave(N)) % N])
    x, w = (torch.randn(rows, 5, generator=generator, dtype=torch.float64) for rows in (N, ends.size(1)))
    kinds = torch.randint(0, 3, (ends.size(1),), generator=generator)
    return WholeGraph(N, ends, {"x": x, "m": x[:, 0] > 0}, {"w": w, "t": kinds})


GRAPH = _graph()


def share(comm):
    return shard_in_memory(GRAPH, torch.arange(N) % comm.size, comm)


class Model(nn.Module):
    """A function of a graph and rows of nodes."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, g, x):
        with g.local_scope():
            g.ndata["h"] = x
            return self.function(g, x)


def in_model(function):
    """What a rank does: `function`, called in a wrapped model."""

    def work(comm):
        graph = share(comm)
        return graph.node_ids, sp.dgl.wrap(Model(function), comm)(graph, graph.node["x"])

    return work


def outside(function):
    """What a rank does: `function`, called where no model runs."""

    def work(comm):
        graph = share(comm)
        return graph.node_ids, Model(function)(sp.dgl.graph(graph), graph.node["x"])

    return work


def whole(function):
    """What `function` gives on the whole graph."""
    return Model(function)(whole_graph(GRAPH), GRAPH.node["x"])


def summed(g, message):
    g.update_all(message, fn.sum("m", "o"))
    return g.ndata["o"]


def reduced(g, reducer):
    g.update_all(fn.copy_u("h", "m"), reducer)
    return g.ndata["o"]


def some_degrees(x, mask, degrees):
    return x.masked_scatter(mask[:, None], x[mask] * degrees[:, None])


def some_edges(g, chosen):
    g.edata["s"] = torch.zeros(len(g.edata["t"]), 5)
    g.apply_edges(lambda edges: {"s": edges.src["h"] * edges.data["w"]}, edges=chosen)
    return summed(g, fn.copy_e("s", "m"))


def applied(g, function):
    g.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"), function)
    return g.ndata["h"]


def some_nodes(g, chosen):
    g.apply_nodes(lambda nodes: {"h": nodes.data["h"].tanh()}, v=chosen)
    return g.ndata["h"]


EXACT = {
    "in-degrees": lambda g, x: x / g.in_degrees()[:, None],
    "some in-degrees": lambda g, x: some_degrees(x, g.ndata["m"], g.in_degrees()[g.ndata["m"]]),
    "some edges": lambda g, x: some_edges(g, (g.edata["t"] == 1).nonzero().view(-1)),
    "some nodes": lambda g, x: some_nodes(g, g.ndata["m"].nonzero().view(-1)),
    "number of fields": lambda g, x: x * len(g.ndata) + len(g.edata),
    "fields": lambda g, x: x + sum(g.ndata[k].double().view(len(x), -1)[:, :1] for k in g.ndata),
    "fields of messages": lambda g, x: summed(g, lambda e: {"m": e.src["h"] * len(e.src) + len([*e.data])}),
    "a size": lambda g, x: summed(g, lambda e: {"m": e.src["h"] * torch.ones(e.batch_size(), 1)}),
    "a length": lambda g, x: summed(g, lambda e: {"m": e.src["h"] * torch.ones(len(e), 1)}),
    "zeros of own size": lambda g, x: torch.cat([x, torch.zeros(g.num_nodes(), 2, dtype=x.dtype)], 1)[:, 1:],
    "a place in each row": lambda g, x: reduced(
        g, lambda n: {"o": n.mailbox["m"][torch.arange(n.mailbox["m"].size(0)), n.mailbox["m"].sum(2).argmax(1)]}
    ),
    "mailbox": lambda g, x: reduced(g, lambda n: {"o": n.mailbox["m"].mean(1)}),
    "applied": lambda g, x: g.apply_nodes(lambda n: {"h": n.data["h"].softmax(1)}) or g.ndata["h"],
    "int32": lambda g, x: summed(g.int(), fn.copy_u("h", "m")),
    "a branch on nodes": lambda g, x: x * 2 if g.num_nodes() > 20 else x.tanh(),
    "a branch on nodes and edges": lambda g, x: x * 2 if g.num_edges() > g.num_nodes() * 4 else x.tanh(),
    "all nodes": lambda g, x: g.nodes[:].data["h"] + g.nodes["_N"].data["h"],
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_exact_in_a_model(name):
    assert_rows(in_model(EXACT[name]), whole(EXACT[name]))


@pytest.mark.parametrize("name", [name for name in EXACT if name not in ("some edges", "some nodes")])
def test_exact_where_no_model_runs(name):
    assert_rows(outside(EXACT[name]), whole(EXACT[name]))


BY_NUMBER = {
    "in_degrees(3)": lambda g, x: x * g.in_degrees(3),
    "in_degrees(torch.arange(5))": lambda g, x: x * g.in_degrees(torch.arange(5)).sum(),
    "in_degrees([1, 2])": lambda g, x: x * g.in_degrees([1, 2]).sum(),
    "out_degrees(2)": lambda g, x: x * g.out_degrees(2),
    "out_degrees(np.arange(2))": lambda g, x: x * g.out_degrees(np.arange(2)).sum(),
    "some_nodes(g, torch.arange(5))": lambda g, x: some_nodes(g, torch.arange(5)),
    "some_nodes(g, 3)": lambda g, x: some_nodes(g, 3),
    "some_edges(g, [0, 1, 2])": lambda g, x: some_edges(g, [0, 1, 2]),
    "some_edges(g, torch.arange(3))": lambda g, x: some_edges(g, torch.arange(3)),
    "nodes[3]": lambda g, x: x + g.nodes[3].data["h"],
    "nodes[[0, 1]]": lambda g, x: x + g.nodes[[0, 1]].data["h"].sum(0),
    "edges[torch.arange(2)]": lambda g, x: x + g.edges[torch.arange(2)].data["w"].sum(0),
}


@pytest.mark.parametrize(("name", "place"), one_each(BY_NUMBER, [in_model, outside]))
def test_ids_of_the_users_order_are_refused(name, place):
    line = {"some_nodes": "g.apply_nodes", "some_edges": "g.apply_edges"}.get(name.split("(")[0], name)
    assert_refused(place(BY_NUMBER[name]), line, "number")


MIXED = {
    "len(e)": lambda g, x: summed(g, lambda e: {"m": e.src["h"] / len(e)}),
    "batch_size()": lambda g, x: summed(g, lambda e: {"m": e.src["h"] / e.batch_size()}),
    "ones(e.batch_size())": lambda g, x: summed(g, lambda e: {"m": e.src["h"] * torch.ones(e.batch_size()).sum()}),
    "ones(len(e))": lambda g, x: summed(g, lambda e: {"m": e.src["h"] * torch.ones(len(e)).sum()}),
    "mean(0)": lambda g, x: g.apply_nodes(lambda n: {"h": n.data["h"] - n.data["h"].mean(0)}) or g.ndata["h"],
    "* n.batch_size()": lambda g, x: g.apply_nodes(lambda n: {"h": n.data["h"] * n.batch_size()}) or g.ndata["h"],
    "* len(n)": lambda g, x: g.apply_nodes(lambda n: {"h": n.data["h"] * len(n)}) or g.ndata["h"],
    "softmax(0)": lambda g, x: reduced(g, lambda n: {"o": n.mailbox["m"].mean(1).softmax(0)}),
    "max(0)": lambda g, x: reduced(g, lambda n: {"o": n.mailbox["m"].sum(1) + n.data["h"].max(0)[0]}),
    "cumsum(0)": lambda g, x: applied(g, lambda n: {"h": n.data["o"].cumsum(0)}),
    "/ n.batch_size()": lambda g, x: reduced(g, lambda n: {"o": n.mailbox["m"].sum(1) / n.batch_size()}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "place"), one_each(MIXED, [in_model, outside]))
def test_functions_that_mix_rows_are_refused(name, place):
    assert_refused(place(MIXED[name]), name)


def test_segments_in_the_order_of_edges_are_refused():
    def called(g, x):
        return x + dgl.ops.segment_reduce(g.in_degrees(), x[g.edges()[1]], "sum")  # edges are not sorted

    assert_refused(in_model(called), "segment_reduce")


COUNTED = {
    "ones(g.num_nodes())": lambda g, x: x * torch.ones(g.num_nodes()).sum(),
    "zeros(g.num_nodes()), 0": lambda g, x: x + torch.softmax(torch.zeros(g.num_nodes()), 0)[:, None],
    "eye(g.num_nodes())": lambda g, x: x * torch.eye(g.num_nodes()).trace(),
    "zeros(g.num_nodes()).shape": lambda g, x: x * torch.zeros(g.num_nodes()).shape[0],
    "zeros(g.num_edges())": lambda g, x: x * torch.zeros(g.num_edges()).shape[0],
    "num_nodes() * 2.5": lambda g, x: x * 2 if g.num_edges() > g.num_nodes() * 2.5 else x.tanh(),
    "x[g.num_nodes()": lambda g, x: x * torch.arange(30.0)[g.num_nodes()],
    "rand(g.num_nodes())": lambda g, x: x * torch.from_numpy(np.random.RandomState(0).rand(g.num_nodes()))[:, None],
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_made_of_counts_is_refused(name):
    assert_refused(in_model(COUNTED[name]), name)


MAPPINGS = {
    "dict": dict,
    "ParameterDict": nn.ParameterDict,
    "UserDict": collections.UserDict,
    "ChainMap": collections.ChainMap,
    "MappingProxyType": types.MappingProxyType,
}


class Table(nn.Module):
    """A parameter with a row for each node, which a layer is given in a mapping of types."""

    def __init__(self, mapping):
        super().__init__()
        self.mapping, self.table = mapping, nn.ParameterDict({"_N": torch.randn(N, 5)})
        self.conv = dnn.HeteroGraphConv({"_E": dnn.GraphConv(5, 4)})

    def forward(self, g):
        return self.conv(g, self.mapping(dict(self.table)))["_N"]


@pytest.mark.parametrize("name", MAPPINGS)
def test_parameters_of_nodes_are_refused_in_any_mapping(name):
    assert_refused(lambda comm: sp.dgl.wrap(Table(MAPPINGS[name]), comm)(share(comm)), "self.conv(g", "NodeEmbedding")


class Given(nn.Module):
    """Gives a layer its weight: to each rank's number of nodes as many rows as it has."""

    def __init__(self, width, by_type):
        super().__init__()
        self.lin, self.weight, self.by_type = nn.Linear(5, width), nn.Parameter(torch.randn(width, 5)), by_type
        self.conv = dnn.GraphConv(width, 5, weight=False)
        self.typed = dnn.HeteroGraphConv({"_E": self.conv})

    def forward(self, g, x):
        if self.by_type:
            return self.typed(g, {"_N": self.lin(x)}, mod_kwargs={"_E": {"weight": self.weight}})["_N"]
        return self.conv(g, self.lin(x), weight=self.weight)


@pytest.mark.parametrize("by_type", [False, True])
def test_a_weight_with_as_many_rows_as_nodes_is_a_weight(by_type):
    for ranks in RANKS:
        model = Given(N // ranks, by_type).double()
        expected = model(dgl.graph(tuple(GRAPH.edge_index), num_nodes=N), GRAPH.node["x"])

        def work(comm, model=model):
            graph = share(comm)
            return graph.node_ids, sp.dgl.wrap(copy.deepcopy(model), comm)(graph, graph.node["x"])

        assert_rows(work, expected, ranks=(ranks,))


WORDS = {
    "add_self_loop": "change the graph before",
    "reverse": "change the graph before",
    "to_bidirected": "before you partition",
    "prop_nodes_topo": "walks over the nodes",
    "topological_nodes_generator": "walks over the nodes",
    "metapath_reachable_graph": "an edge type of their own",
}
GIVEN = {
    "prop_nodes_topo": (fn.copy_u("x", "m"), fn.sum("m", "o")),
    "metapath_reachable_graph": (["_E", "_E"],),
}


@pytest.mark.parametrize("name", WORDS)
def test_functions_of_dgl_are_named_with_a_reason(name):
    given = GIVEN.get(name, ())
    assert_refused(lambda comm: getattr(dgl, name)(sp.dgl.graph(share(comm)), *given), f"`{name}` of DGL", WORDS[name])


@pytest.mark.parametrize("name", ["add_self_loop", "reverse", "metapath_reachable_graph"])
def test_transforms_of_what_load_returned_say_when_to_apply_them(name):
    with pytest.raises(AttributeError, match=r"a transform of DGL is given the graph .* before it is cut"):
        run(lambda comm: getattr(dgl, name)(share(comm), *GIVEN.get(name, ())), 1)


@on_ranks(3)
def test_widths_that_differ_are_said_of_the_embedding(comm):
    with pytest.raises(ValueError, match=r"the models differ: 0.weight: float64, rows of own nodes of shape \[4\]"):
        graph = share(comm)
        return sp.dgl.wrap(nn.ModuleList([sp.NodeEmbedding(graph, 4 + comm.rank)]), comm)
