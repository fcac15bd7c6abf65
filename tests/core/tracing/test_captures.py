"""Tensors that a message function takes from outside are found, and get their whole gradient."""

import pytest
import torch
from looking import GRAPH, OWNERS, add_up, function_of, look, plain
from torch import nn

from shardpass.core.aggregation import aggregate
from shardpass.core.ranks import Options
from shardpass.core.tracing import Key, Program
from shardpass.errors import RefusedError
from shardpass.testing import run, shard_in_memory


def gradients_match(message, parameters, reduce=add_up):
    """Gradients of captured parameters, summed over ranks, against the whole graph."""

    def whole():
        src, dst = GRAPH.edge_index
        out = reduce(message(GRAPH.node["x"][src]), dst, GRAPH.num_nodes)
        return torch.autograd.grad(out.cos().sum(), parameters)

    right = whole()

    def work(comm):
        graph = shard_in_memory(GRAPH, OWNERS, comm, Options(chunk_bytes=300))
        program = Program("Layer", {"x": plain(graph).x}, {}, {}, lambda i: message(i.src["x"]),
                          lambda m, i: reduce(m, i.index, i.num_dst))  # fmt: skip
        out = aggregate(program, graph.relation.plan, graph.relation.shards)
        return torch.autograd.grad(out.cos().sum(), parameters, retain_graph=True)

    found = [sum(parts) for parts in zip(*run(work, 3))]
    for mine, theirs in zip(found, right):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def matrix(*shape, seed=0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return nn.Parameter(values)


class Shift(torch.autograd.Function):
    """Takes a parameter that no function of the trace is given; the graph behind the message leads to it."""

    @staticmethod
    def forward(ctx, x, s):
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum(0)


SQUARE, PAIR, ROW, LAYER = matrix(4, 4), matrix(2, 4), matrix(4), nn.Linear(4, 4).double()
CAPTURED = {
    "a parameter": (lambda x: torch.tanh(x @ SQUARE), [SQUARE]),
    "a weight used twice": (lambda x: torch.tanh(x @ SQUARE) @ SQUARE.t() * SQUARE.diagonal(), [SQUARE]),
    "a module and its bias": (lambda x: LAYER(x).relu() + LAYER.bias, [*LAYER.parameters()]),
    "a view made inside": (lambda x: x * PAIR[0] + PAIR.view(-1)[4:], [PAIR]),
    "given to a custom function": (lambda x: x * function_of(ROW), [ROW]),
    "known to autograd only": (lambda x: Shift.apply(x, ROW), [ROW]),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_gradients_are_those_of_the_whole_graph(name):
    gradients_match(*CAPTURED[name])


def test_a_tensor_computed_outside(graph):
    w = matrix(4)
    strength = w.sigmoid() * 2
    found = look(graph, lambda i: i.src["x"] * strength)
    assert len(found.captures) == 1 and found.captures[0] is strength


def test_a_view_made_outside_beside_its_base(graph):
    w = matrix(2, 4)
    row = w[1]
    found = look(graph, lambda i: i.src["x"] @ w.t() * row.sum())
    assert {id(t) for t in found.captures} == {id(w), id(row)}


def test_an_input_that_needs_no_gradient_has_none(graph):
    found = look(graph, lambda i: i.src["z"].sigmoid(), None, needs_grad=(Key("src", "x"),))
    assert found.edge_output and not found.edge_differentiable


def test_buffers_and_frozen_parameters_are_no_captures(graph):
    buffer, frozen = torch.ones(4, dtype=torch.float64), matrix(4).requires_grad_(False)
    found = look(graph, lambda i: i.src["x"] * buffer + frozen)
    assert found.captures == () and found.reductions[0].differentiable


def test_captures_are_found_on_every_call_with_gradients(graph):
    w = matrix(4)
    with torch.no_grad():
        assert look(graph, lambda i: i.src["x"] * w).captures == ()
    assert [t is w for t in look(graph, lambda i: i.src["x"] * w).captures] == [True]


def test_what_cannot_be_followed_is_refused_or_found(graph):
    """A tensor computed outside that only a custom Function sees: never a silently missing gradient."""
    w = matrix(4)
    strength = w.sigmoid()

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, s):
            return x.clone()  # hides `s`

        @staticmethod
        def backward(ctx, grad):
            return grad, grad.sum(0)

    with pytest.raises(RefusedError, match=r"uses a tensor computed outside it .* Pass it to the layer as an argument"):
        look(graph, lambda i: Scale.apply(i.src["x"], strength))
