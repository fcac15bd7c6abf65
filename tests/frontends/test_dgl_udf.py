"""User-defined message, reduce and apply functions: what they may read, and that they give what DGL gives."""

from functools import partial

import pytest
import torch

pytest.importorskip("dgl")

import dgl.function as fn
from torch import nn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import WholeGraph, run, shard_in_memory

from .dgl_parity import GRAPH, assert_dgl_exact, float64, onto_nodes  # noqa: F401
from .how_much import EACH_MODE_ONCE, in_turn
from .on_ranks import on_ranks
from .test_dgl_graph import of, sharded

SUM = fn.sum("m", "out")


class Bound(nn.Module):
    """A layer whose functions are methods, with a setting that changes between calls."""

    def __init__(self):
        super().__init__()
        self.lin, self.factor = nn.Linear(8, 5), 0.0

    def message(self, edges):
        return {"m": self.lin(torch.cat([edges.src["x"], edges.data["e"]], 1)).tanh() * self.factor}

    def reduce(self, nodes):
        return {"out": nodes.mailbox["m"].logsumexp(1) * self.factor + nodes.data["x"]}

    def forward(self, g, i):
        with g.local_scope():
            g.ndata["x"], g.edata["e"] = i["x"], i["edge_attr"]
            outs = []
            for self.factor in (1.5, -0.5):
                g.update_all(self.message, SUM)
                outs.append(g.ndata["out"])
                g.update_all(self.message, self.reduce)
                outs.append(g.ndata["out"])
            return torch.cat(outs, 1)


def closures(m, g, i):
    """Variables of a loop, a parameter, a tensor that is no leaf, one that needs no gradient, a partial."""
    g.ndata["x"], g.edata["e"] = i["x"], i["edge_attr"]
    mixed, fixed, outs = m.scale.exp() @ torch.ones(2, 3), torch.arange(5.0), []
    for factor in (1.0, 2.0, -3.0):
        weight = m.lin.weight * factor

        def message(edges, offset=0.5, *, power=2):
            out = torch.tanh(edges.src["x"] @ weight + edges.dst["x"]) * factor + fixed + offset  # noqa: B023
            return {"m": torch.cat([out, (edges.data["e"] * mixed) ** power], 1)}

        g.update_all(message, SUM)
        outs.append(g.ndata["out"])
        g.update_all(partial(message, offset=factor), fn.max("m", "out"))
        outs.append(g.ndata["out"])
    factor, weight = None, None
    return torch.cat(outs, 1)


def only_parameters(m, g, i):
    """Messages that read no field of a node, or none at all but its number of rows."""
    g.edata["e"] = i["edge_attr"]
    g.update_all(lambda e: {"m": m.lin(e.data["e"][:, [0, 1, 2, 0, 1]])}, fn.mean("m", "a"))
    g.update_all(lambda e: {"m": torch.ones(e.batch_size(), 1) * m.scale}, fn.sum("m", "b"))
    return torch.cat([g.ndata["a"], g.ndata["b"]], 1)


def several_fields(m, g, i):
    """Fields of several dtypes and shapes from one function; the reduce function takes one."""
    g.ndata["x"], g.edata["e"] = i["x"], i["edge_attr"]

    def message(e):
        wide = m.lin(e.src["x"]) - e.dst["x"]
        return {
            "a": wide.view(-1, 5, 1),
            "b": e.data["e"].float(),
            "n": (wide.detach() > 0).sum(1),
            "flag": e.src["x"][:, 0] > 0,
            "c": wide.sum(1),
        }

    g.apply_edges(message)
    assert g.edata["n"].dtype == torch.int64 and g.edata["flag"].dtype == torch.bool
    assert g.edata["b"].dtype == torch.float32 and g.edata["a"].shape[1:] == (5, 1)
    g.update_all(message, fn.min("c", "c"))
    g.update_all(message, fn.sum("a", "d"))
    found = [onto_nodes(g.edata[name].double(), g) for name in ("a", "b", "n", "flag", "c")]
    return torch.cat([*found, g.ndata["c"].unsqueeze(1), g.ndata["d"].flatten(1)], 1)


def own_fields(m, g, i):
    """A function that sets and takes away fields for itself."""
    g.ndata["x"] = i["x"]

    def message(e):
        e.src["x"] = m.lin(e.src["x"])
        e.src["y"] = e.src["x"] * 2
        kept = e.dst.pop("x")
        assert "x" not in e.dst and set(e.src) >= {"x", "y"}
        return {"m": e.src["y"] + kept}

    g.update_all(message, SUM)
    return g.ndata["out"] + g.ndata["x"]


def mailbox(m, g, i):
    """What needs all messages of a node, and their order: that of the edge ids."""
    g.ndata["x"], g.edata["e"] = i["x"], i["edge_attr"]

    def reduce(n):
        mail = n.mailbox["m"]
        assert mail.dim() == 3 and len(n) == n.batch_size() == mail.size(0) == n.data["x"].size(0)
        decay = 0.7 ** torch.arange(mail.size(1)).view(1, -1, 1)
        ordered = (mail * decay).sum(1) * m.scale[0]
        median = mail.median(1)[0]
        return {"out": torch.cat([ordered, median, n.mailbox["e"].std(1, correction=0) * n.data["x"][:, :3]], 1),
                "degree": torch.full((mail.size(0),), mail.size(1))}  # fmt: skip

    g.update_all(lambda e: {"m": m.lin(e.src["x"]) * e.dst["x"], "e": e.data["e"] + 1.0}, reduce)
    return torch.cat([g.ndata["out"], g.ndata["degree"].unsqueeze(1)], 1)


def mailbox_of_builtins(m, g, i):
    g.ndata["x"], g.ndata["h"] = i["x"], m.lin(i["x"])
    g.update_all(
        fn.u_mul_v("x", "h", "m"),
        lambda n: {"h": n.mailbox["m"].cumsum(1).prod(1).tanh() + n.data["h"]},
        lambda n: {"h": n.data["h"] * 2 + n.data["x"]},
    )
    return g.ndata["h"]


def user_message_extremum(m, g, i):
    g.ndata["x"] = i["x"].round()
    g.update_all(lambda e: {"m": torch.relu(e.src["x"] + m.lin.bias)}, fn.max("m", "a"))
    g.update_all(lambda e: {"m": torch.relu(e.src["x"] - m.lin.bias)}, fn.min("m", "b"))
    return torch.cat([g.ndata["a"], g.ndata["b"]], 1)


def normed(m, g, i):
    """Norms inside a message that take each edge alone."""
    g.ndata["x"] = i["x"]
    g.update_all(lambda e: {"m": nn.functional.layer_norm(m.lin(e.src["x"] - e.dst["x"]), (5,))}, SUM)
    return g.ndata["out"]


FUNCTIONS = {
    f.__name__: of(f)
    for f in (
        closures, only_parameters, several_fields, own_fields, mailbox, mailbox_of_builtins, user_message_extremum,
        normed,
    )
} | {"methods": (Bound, lambda m, g, i: m(g, i))}  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(FUNCTIONS))
def test_functions_of_users(name, ranks, modes):
    assert_dgl_exact(FUNCTIONS[name], ranks=ranks, modes=modes)


def test_a_graph_without_any_edge():
    """DGL gives node 0 the gradients of all extrema there; they belong to nobody."""
    no_edges = {name: field[:0] for name, field in GRAPH.edge.items()}
    graph = WholeGraph(5, torch.zeros(2, 0, dtype=torch.int64), {"x": GRAPH.node["x"][:5]}, no_edges)

    def function(*reducers):
        def reduced(m, g, i):
            g.ndata["x"], outs = i["x"], [i["x"]]
            for reducer in reducers:
                g.update_all(fn.copy_u("x", "m"), reducer("m", "out"))
                g.update_all(lambda e: {"m": m.lin(e.src["x"])}, reducer("m", "more"))
                outs += [g.ndata["out"], g.ndata["more"]]
            return torch.cat(outs, 1)

        return of(reduced)

    assert_dgl_exact(function(fn.sum, fn.mean), graph, modes=EACH_MODE_ONCE)

    def work(comm):
        g = sp.dgl.graph(shard_in_memory(graph, torch.arange(5) % 2, comm))
        g.ndata["h"] = x = g.ndata["x"].clone().requires_grad_()
        for reducer in (fn.max, fn.min):
            g.update_all(fn.copy_u("h", "m"), reducer("m", "out"))
            assert g.ndata["out"].eq(0).all()
            (g.ndata["out"] + 0 * x).sum().backward()
            assert x.grad.eq(0).all()

    run(work, 2)


@pytest.mark.parametrize("mode", ["sar", "keep", "halo"])
def test_dropout_inside_a_message_is_the_same_in_backward(mode):
    """The message is linear in x, so that the gradient times x is the output again."""

    def work(g, comm):
        x = g.ndata["x"].clone().requires_grad_()
        g.ndata["h"] = x
        drop = nn.Dropout(0.5)
        g.update_all(lambda e: {"m": drop(e.src["h"])}, SUM)
        out = g.ndata["out"]
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(comm.rank))
        (out * cotangent).sum().backward()
        return float((out.detach() * cotangent).sum()), float((x.grad * x.detach()).sum()), out.detach().eq(0).any()

    found = sharded(work, options=sp.Options(mode=mode, chunk_bytes=1000))
    forward, backward = sum(f[0] for f in found), sum(f[1] for f in found)
    assert abs(forward - backward) < 1e-10 * max(1, abs(forward))


def test_only_the_fields_that_are_read_are_fetched():
    def sent(function, wide):
        def work(g, comm):
            g.ndata["x"], g.ndata["unread"] = torch.rand(g.num_nodes(), 4), torch.rand(g.num_nodes(), wide)
            before = comm.bytes_sent
            g.update_all(lambda e: {"m": function(e)}, SUM)
            return comm.bytes_sent - before

        return sum(sharded(work, options=sp.Options(mode="sar")))

    narrow, wide = (sent(lambda e: e.src["x"] * 2, width) for width in (1, 300))
    assert wide < narrow + 1000
    assert sent(lambda e: e.src["unread"], 300) > wide + 300 * 8
    everything = sent(lambda e: e.dst["unread"], 300)
    assert everything < narrow + 1000, "destinations are here"


@on_ranks(1)
def test_backward_through_messages_whose_norm_has_been_trained_is_refused(comm):
    """With the running statistics of now, messages would be others."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(5)

        def message(self, edges):
            return {"m": self.norm(edges.src["x"]).relu()}

        def forward(self, g, x):
            g.ndata["x"] = x
            g.update_all(self.message, SUM)
            return g.ndata["out"]

    graph = shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.long), comm)
    model = sp.dgl.wrap(Normed().double(), comm)
    loss = model.eval()(graph, graph.x).sum() + model.train()(graph, graph.x).sum()
    with pytest.raises(RefusedError, match=r"loss\.backward\(\): a BatchNorm of \S*Normed\.message was in evaluation"):
        loss.backward()
