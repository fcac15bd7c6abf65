"""A rank's share of a graph, and what one trace of a message function on it shows."""

from types import SimpleNamespace

import torch

from shardpass.core.tracing import Key, Program, probe
from shardpass.testing import assignments, awkward_graph

GRAPH = awkward_graph(channels=4, edge_channels=3)
OWNERS = assignments(GRAPH.num_nodes, 3, GRAPH.edge_index)["random"]
NEED_GRADIENTS = (Key("src", "x"), Key("src", "z"), Key("dst", "x"), Key("edge", "e"))


def add_up(values, index, num_dst):
    return values.new_zeros((num_dst, *values.shape[1:])).index_add(0, index, values)


def largest(values, index, num_dst):
    start = values.new_zeros((num_dst, *values.shape[1:]))
    spread = index.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    return start.scatter_reduce(0, spread, values, "amax", include_self=False)


def softmax(logit, index, num_dst):
    weight = (logit - largest(logit.detach(), index, num_dst).index_select(0, index)).exp()
    return weight / (add_up(weight, index, num_dst).index_select(0, index) + 1e-16)


def plain(graph):
    """The fields of a graph as the engine has them, by name: what these tests call is called by no script."""
    return SimpleNamespace(**graph.fields_of("node"), **graph.relation.fields)


def look(graph, message, reduce=add_up, needs_grad=NEED_GRADIENTS, dtype=None):
    """The structure of a message function of ``i.src["x"], i.dst["x"], i.src["z"], i.edge["e"], i.edge["w"]``.

    dtype: of the source tensors; by default float64, that of the others.
    """
    src = {"x": plain(graph).x, "z": plain(graph).x[:, :1].clone(), "h": plain(graph).x[:, :4].reshape(-1, 2, 2)}
    edge = {
        "e": plain(graph).edge_attr,
        "w": plain(graph).edge_weight,
        "v": plain(graph).edge_attr[:, :2].unsqueeze(-1).clone(),
    }
    src = {name: rows.to(dtype or rows.dtype) for name, rows in src.items()}
    tail = None if reduce is None else (lambda m, i: reduce(m, i.index, i.num_dst))
    program = Program("Layer", src, {"x": plain(graph).x}, edge, message, tail)
    return probe(program, graph.relation.shards, graph.num_own_nodes, needs_grad)


def function_of(x):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad

    return Square.apply(x)
