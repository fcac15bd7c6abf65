"""Mistakes in programs of DGL: each is told by its true cause."""

from functools import partial

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn
import torch.nn.functional as F
from torch import nn

import shardpass as sp
from shardpass.errors import RefusedError
from tests.frontends.dgl_parity import edges
from tests.frontends.on_ranks import share

from .told import GRAPH, Does, N, assert_told, of, rows_of

SUM = fn.sum("m", "out")
ZERO = {"allow_zero_in_degree": True}


def conv():
    return dnn.GraphConv(5, 5, **ZERO).double()


def summed(g, message, reducer=fn.sum("m", "o")):  # noqa: B008
    g.update_all(message, reducer)
    return g.ndata["o"]


def reduced(g, reducer):
    return summed(g, fn.copy_u("h", "m"), lambda n: {"o": reducer(n)})


def _between(between, comm, graph):
    def program(first, last, g, x):
        with g.local_scope():
            g.ndata["h"] = first(g, x)
            return last(g, between(g, g.ndata["h"]))

    model = Does(program, dnn.GraphConv(5, 8, **ZERO), dnn.SAGEConv(8, 4, "mean")).double()
    sp.dgl.wrap(model, comm).eval()(graph, graph.x)


def _layer(make, comm, graph):
    sp.dgl.wrap(dnn.Sequential(make()).double(), comm)(sp.dgl.graph(graph), graph.x)


def _message(function, comm, graph, reduce=SUM):
    g = sp.dgl.graph(graph)
    g.ndata["n"], g.ndata["x"] = torch.arange(g.num_nodes()), torch.rand(g.num_nodes(), 4)
    g.srcdata["u"], g.dstdata["v"] = g.ndata["x"][:, 0], g.ndata["x"][:, 0]
    g.update_all(function, reduce)


def _on_graph(use, comm, graph):
    print(use(sp.dgl.graph(graph)))


def _model(call, comm, graph):
    call(comm, sp.dgl.graph(graph))


def _block(g):
    return g.mfgs(torch.arange(g.num_nodes()), 1)[0]


NUMBER = "the number of {} that this rank holds"
BETWEEN = {
    "mean": (lambda g, h: h - h.mean(0), "`mean` puts rows together, over the nodes"),
    "mean of edges": (
        lambda g, h: h * (g.edata["edge_weight"] / g.edata["edge_weight"].mean()).sum(),
        "`mean` puts rows together, over the edges",
    ),
    "mean of messages": (
        lambda g, h: summed(g, lambda e: {"m": e.src["h"] - e.src["h"].mean(0)}),
        "`mean` puts rows together, over the edges of the message function",
    ),
    "mean of mailboxes": (
        lambda g, h: reduced(g, lambda n: n.mailbox["m"].sum(1) - n.mailbox["m"].mean((0, 1))),
        "`mean` puts rows together, over the nodes of one in-degree",
    ),
    "size of mailboxes": (
        lambda g, h: reduced(g, lambda n: n.mailbox["m"].sum(1) / n.batch_size()),
        NUMBER.format("nodes of one in-degree"),
    ),
    "branch on the size of mailboxes": (
        lambda g, h: reduced(g, lambda n: n.mailbox["m"].sum(1) * (2 if n.batch_size() > 2 else 1)),
        NUMBER.format("nodes of one in-degree"),
    ),
    "quotient": (lambda g, h: h / g.num_nodes(), NUMBER.format("nodes")),
    "degree": (lambda g, h: h * (2 * (g.num_edges() - g.num_nodes()) + 1), NUMBER.format("edges")),
    "share": (lambda g, h: h * (g.num_nodes() * 0.1), NUMBER.format("nodes")),
}  # fmt: skip


def _gate(last):
    return nn.Sequential(nn.Linear(5, 5), last)


LAYERS = {
    "activation": lambda: dnn.SAGEConv(5, 3, "mean", activation=nn.Softmax(dim=0)),
    "norm": lambda: dnn.SAGEConv(5, 3, "mean", norm=partial(F.normalize, dim=0)),
    "function of torch": lambda: dnn.GATConv(5, 3, 2, activation=partial(F.softmax, dim=0), **ZERO),
    "mlp": lambda: dnn.GINConv(_gate(nn.Softmax(0))),
    "norm of PyG": lambda: dnn.SAGEConv(5, 3, "mean", norm=pytest.importorskip("torch_geometric").nn.PairNorm()),
    "gate of a readout": lambda: dnn.GlobalAttentionPooling(nn.Sequential(nn.Linear(5, 1), nn.Softmax(0))),
}
PIECES = "messages are computed in pieces"
MESSAGES = {
    "a mean in a message": (lambda e: {"m": e.src["x"] - e.src["x"].mean(0)}, PIECES),
    "a count in a message": (lambda e: {"m": e.src["x"] * (1 + (e.src["x"][:, :1] > 0.5).sum())}, PIECES),
    "a size in a message": (lambda e: {"m": e.src["x"] / e.batch_size()}, PIECES),
    "ends in a message": (lambda e: {"m": e.src["x"] * e.edges()[0].unsqueeze(1)}, "edges"),
    "a sum of a message": (lambda e: {"m": e.src["x"].sum(0)}, "row for each"),
    "a number as a message": (lambda e: {"m": 1.0}, "row for each"),
    "no dict": (lambda e: e.src["x"], "dict"),
    "no such field": (lambda e: {"m": e.src["y"]}, "y"),
    "another message": (lambda e: {"other": e.src["x"]}, "'m'"),
    "a field that is not there": (fn.copy_u("nothing", "m"), "nothing"),
    "scalars in a dot product": (fn.u_dot_v("u", "v", "m"), ""),
}
COUNTS = {
    "counts + 1": lambda counts, g: counts + 1,
    "their sum": lambda counts, g: counts.sum(),
    "as floats": lambda counts, g: counts.float(),
    "as a list": lambda counts, g: counts.tolist(),
    "as an item": lambda counts, g: counts.item(),
    "as an int": lambda counts, g: int(counts),
    "their maximum": lambda counts, g: counts.max(),
    "as a divisor in float64": lambda counts, g: 1 / counts.double(),
    "twice": lambda counts, g: torch.cat([counts, counts]),
    "their cumulative sum": lambda counts, g: torch.cumsum(counts, 0),
    "compared": lambda counts, g: counts == N,
    "halved": lambda counts, g: counts / 2,
    "in a segment reduction": lambda counts, g: dgl.ops.segment_reduce(counts, g.ndata["x"]),
    "those of edges": lambda counts, g: g.batch_num_edges(),
}
DIFFERS = "differs from rank to rank"
OF_COUNTS = {
    "a part of a count": (lambda count, g: count // 3, DIFFERS),
    "the rest of a count": (lambda count, g: count % 3, DIFFERS),
    "a product of counts": (lambda count, g: count * g.num_nodes(), "a number of pairs"),
}
TOGETHER = "`mean` puts rows together"


def numbered(g, h):
    with g.local_scope():
        g.ndata["i"] = torch.arange(g.num_nodes())
        g.update_all(lambda edges: {"m": h[edges.src["i"]]}, fn.sum("m", "o"))
        return g.ndata["o"]


def centred(layer, g, x):
    return (h := layer(g, x)) - h.mean(0)


def in_held_graph(comm, g):
    model = sp.dgl.wrap(Does(lambda layer, x: centred(layer, model.g, x), conv()), comm)
    model.g = g
    model(g.ndata["x"])


def after_blocks(comm, g):
    model, block = sp.dgl.wrap(Does(centred, conv()), comm), _block(g)
    model(block, block.srcdata["x"])
    model(g.core, g.ndata["x"])


class Trusting(dnn.TypedLinear):
    """Trusts the order of all edges, and a part is ordered otherwise."""


def trusting(comm, g):
    lin = Trusting(5, 3, 3).double()
    g.edata["kind"] = edges(torch.arange(300) * 3 // 220, g)
    g.update_all(lambda e: {"m": lin(e.src["x"], e.data["kind"], sorted_by_type=True)}, SUM)


def with_generator(comm, g):
    generator = torch.Generator().manual_seed(0)
    drawn = lambda e: {"m": torch.empty_like(e.src["x"]).bernoulli_(0.5, generator=generator)}  # noqa: E731
    g.update_all(drawn, SUM)


def on_ordinary_graph(comm, g):
    model = sp.dgl.wrap(dnn.SAGEConv(5, 4, "mean").double(), comm)
    pairs = dgl.graph(([0, 1], [2, 3]), num_nodes=g.num_nodes())
    pairs.ndata["h"] = model(g.core, g.ndata["x"])
    pairs.apply_edges(fn.u_dot_v("h", "h", "score"))


def group_rev_res():
    return dnn.GroupRevRes(dnn.GINConv(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), 2)


MODELS = {
    "numbers of nodes": (
        lambda comm, g: sp.dgl.wrap(Does(numbered), comm)(g.core, g.ndata["x"]),
        "differs from row to row of the nodes, and the model made it",
    ),
    "a graph that the model holds": (in_held_graph, TOGETHER),
    "a call on blocks first": (after_blocks, TOGETHER),
    "edges taken for sorted": (trusting, PIECES),
    "a generator of its own": (with_generator, "generator"),
    "the quotient of a count": (lambda comm, g: 1 / g.num_nodes(), r"graph\.total_nodes and graph\.total_edges"),
    "GroupRevRes": (
        lambda comm, g: sp.dgl.wrap(nn.ModuleDict({"layer": group_rev_res()}), comm), r"^GroupRevRes \(at 'layer'\)"
    ),
    **{
        f"an ordinary graph, {name}": (
            lambda comm, g, make=make: sp.dgl.wrap(conv(), comm)(make(dgl.graph(([0, 1], [1, 2]))), torch.rand(3, 5)),
            "ordinary DGLGraph",
        )
        for name, make in {"itself": lambda g: g, "in a list": lambda g: [g]}.items()
    },
    "rows on an ordinary graph": (on_ordinary_graph, "DGL reads rows by the numbers"),
}  # fmt: skip
GRAPHS = {
    "a field that is not stored": (lambda g: g.ndata["nothing"], "nothing"),
    "no such node type": (lambda g: g.num_nodes("paper"), "paper"),
    "no such edge type": (lambda g: g.update_all(fn.copy_u("x", "m"), fn.sum("m", "h"), etype="cites"), "cites"),
    "too many rows": (lambda g: g.ndata.update(short=torch.zeros(g.num_nodes() + 1)), "own"),
    "rows of all edges": (
        lambda g: g.edata.update(whole=torch.zeros(220)), "each of the 220 edges of the whole graph"
    ),
    "another field": (lambda g: g.update_all(fn.copy_u("x", "m"), fn.sum("other", "out")), "same field"),
    "node data of a block": (lambda g: _block(g).ndata, r"use src(data|nodes) or"),
    "nodes of a block": (lambda g: _block(g).nodes, r"use src(data|nodes) or"),
    "blocks of a block": (lambda g: _block(g).mfgs(torch.arange(3), 1), "mfgs"),
    **{
        f"blocks of {len(wanted)} {wanted[0]}": (lambda g, wanted=wanted: g.mfgs(wanted, 1), "own")
        for wanted in ([-1], [N], [0, 0], torch.ones(N, dtype=torch.bool))
    },
    **{
        f"edges {number}": (lambda g, wrong=wrong: g.apply_edges(fn.u_add_v("x", "x", "s"), wrong), "own")
        for number, wrong in enumerate(
            [(torch.tensor([0]), torch.tensor([1])), (0, 1), [-1], [220], torch.tensor([0, 220])]
        )
    },
}  # fmt: skip
GIVEN = {"metapath_reachable_graph": (["_E", "_E"],)}
TRANSFORMS = {
    name: (
        AttributeError, r"a transform of DGL is given the graph .* before it is cut",
        lambda comm, graph, name=name: getattr(dgl, name)(graph, *GIVEN.get(name, ())),
    )
    for name in ("add_self_loop", "reverse", "metapath_reachable_graph")
}  # fmt: skip
KINDS = RefusedError, dgl.DGLError, KeyError, ValueError
THREE = {
    **of(_between, BETWEEN),
    **of(_layer, {name: (make, "puts rows together, over the nodes") for name, make in LAYERS.items()}),
    **of(_message, MESSAGES, KINDS),
    **{
        f"{name}, {counted}": (
            NotImplementedError, words,
            partial(_on_graph, lambda g, use=use, counted=counted: use(getattr(g, counted)(), g)),
        )
        for name, (use, words) in OF_COUNTS.items()
        for counted in ("num_nodes", "num_edges")
    },
    **of(_model, MODELS),
    **of(_on_graph, GRAPHS, KINDS),
    **{
        f"counts of nodes, {name}": (
            RefusedError, "", partial(_on_graph, lambda g, use=use: use(g.batch_num_nodes(), g))
        )
        for name, use in COUNTS.items()
    },
    **{
        f"integers, {reducer.__name__}, {name}": (
            RefusedError, "floating point", partial(_message, message, reduce=reducer("m", "out"))
        )
        for reducer in (fn.sum, fn.mean, fn.max, fn.min)
        for name, message in {"as stored": fn.copy_u("n", "m"), "bool": lambda e: {"m": e.src["n"] > 0}}.items()
    },
    "ids in a reduction": (
        KINDS, "ids",
        partial(_message, lambda e: {"m": e.src["x"]},
                reduce=lambda n: {"out": n.mailbox["m"].sum(1) * n.nodes().view(-1, 1)}),
    ),
    "a streamed graph": (
        (ValueError, RefusedError), "stream_structure=True",
        lambda comm, graph: sp.dgl.graph(share(GRAPH, comm, stream_structure=True)),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:a user-defined reduce function")
@rows_of(TRANSFORMS, THREE)
def test_a_mistake_with_a_graph_of_dgl_is_told(row, ranks, kind):
    assert_told(row, ranks, kind)
