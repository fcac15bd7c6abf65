"""Numba's loop over the steps of a formula, against torch."""

from itertools import pairwise

import pytest
import torch

from shardpass.core.kernels import FormulaEdges, FormulaLoop
from shardpass.core.tracing import REDUCERS, Formula, Leaf, Step
from tests.core.steps import STEPS

loops = pytest.importorskip("shardpass.core.kernels.numba_formula")

X, Y, Z = Leaf("src", "x"), Leaf("src", "y"), Leaf("src", "z")
NAN, INF = float("nan"), float("inf")
AWKWARD = [0.0, INF, -INF, NAN, 1e-45, 1e-40, -1e-40, 88.0, 88.5, 88.72, 88.73, 89.0, -87.0, -87.5, -103.0, -110.0]


def numbers(count, dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)
    small, large, many = (torch.randn(count // 4, generator=draw) for _ in range(3))
    found = torch.cat([torch.tensor(AWKWARD), small * 1e-3, large * 40, (many * 20).clamp(-100, 88).exp()])
    return torch.cat([found, torch.randn(count - found.numel(), generator=draw)]).to(dtype)


def edges(index, num_threads=1, src_rows=None):
    src_rows = torch.arange(index.numel()) if src_rows is None else src_rows
    bounds = torch.linspace(0, index.numel(), num_threads + 1).long().tolist()
    return FormulaEdges(torch.stack([src_rows, index.long(), torch.arange(index.numel())]), list(pairwise(bounds)))


def constant(leaf):
    return torch.tensor([leaf.value], dtype=torch.float64)


@pytest.mark.parametrize("width", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", [op for op in STEPS if op != "detach"])
def test_a_step_is_that_of_torch(op, dtype, width):
    assert hasattr(loops, op.upper())
    function = STEPS[op]
    count = (
        function.__code__.co_argcount
        if hasattr(function, "__code__")
        else 2
        if op in ("add", "sub", "mul", "div")
        else 1
    )
    operands = [numbers(width * 300, dtype, seed).view(300, width) for seed in range(3)][:count]
    if op == "tied":
        operands[1][::2] = operands[0][::2]
    formula = Formula(width, (*(X, Y, Z)[:count], Step(op, tuple(range(count)))), ((0, count),))
    rows = dict(zip((X, Y, Z), operands))
    out = torch.zeros(300, width, dtype=dtype)
    loop = FormulaLoop(formula, constant, {0: "sum"}, dtype)
    loop.run(edges(torch.arange(300)), rows.__getitem__, lambda what: [out])
    right = function(*operands)
    bound = 1e-14 if dtype == torch.float64 else 4e-7
    torch.testing.assert_close(out, right, rtol=bound, atol=1e-43, equal_nan=True)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_reduction_is_that_of_the_reducer(op, num_threads):
    index = torch.tensor([0] * 40 + [1] * 20 + [3] * 30 + [4] * 30)  # a thread has whole rows
    values = torch.randint(-3, 4, (120, 5), generator=torch.Generator().manual_seed(0)).double()
    values[3, 2], values[70, 1] = NAN, INF
    formula = Formula(5, (X,), ((7, 0),))
    reducer, like = REDUCERS[op], values[:0]
    state, right = reducer.init(6, (5,), like), reducer.init(6, (5,), like)
    FormulaLoop(formula, constant, {7: op}, torch.float64).run(
        edges(index, num_threads), lambda leaf: values, lambda what: state
    )
    reducer.accumulate(right, values, index)
    for found, wanted in zip(state, right):
        torch.testing.assert_close(found[~right[0].isnan()], wanted[~right[0].isnan()])
        assert torch.equal(state[0].isnan(), right[0].isnan())


def test_rows_with_fewer_values_and_gradients_that_all_threads_add():
    weight, outside = Leaf("edge", "w", repeats=3), Leaf("outside", number=0, repeats=2)
    formula = Formula(6, (weight, outside, Step("mul", (0, 1))), ((weight, 2), (outside, 2)))
    rows = {weight: torch.arange(20.0).view(10, 2), outside: torch.tensor([1.0, 10.0, 100.0])}
    into = {weight: torch.zeros(10, 2), outside: torch.zeros(2, 3)}
    # what is the same for all edges has as many numbers as channels, or one
    wide = {outside: rows[outside].repeat_interleave(2)}
    loop = FormulaLoop(formula, wide.__getitem__, {}, torch.float32)
    loop.run(edges(torch.zeros(10), num_threads=2), rows.__getitem__, lambda what: [into[what]])
    products = (rows[weight].repeat_interleave(3, 1) * wide[outside]).view(10, 6)
    torch.testing.assert_close(into[weight], products.view(10, 2, 3).sum(-1))
    torch.testing.assert_close(into[outside], products.view(2, 5, 3, 2).sum((1, 3)))


def test_long_sums_in_float32_do_not_forget_small_terms():
    outside, count, width = Leaf("outside", number=0, repeats=100), 200_000, 100
    formula = Formula(width, (outside, Step("add", (0, 0))), ((outside, 1),))
    loop, into = FormulaLoop(formula, lambda leaf: torch.ones(1), {}, torch.float32), torch.zeros(1, 1)
    loop.run(edges(torch.zeros(count)), {}.__getitem__, lambda what: [into])
    assert into.item() == 2 * count * width  # more than 2**24, where adding one changes nothing


def test_a_message_has_the_same_bits_wherever_its_edge_stands():
    """Backward compares messages with their maximum, maybe in another order of edges."""
    values = numbers(300 * 7, torch.float32).view(300, 7)
    formula = Formula(
        7, (X, Step("exp", (0,)), Step("tanh", (1,)), Step("log1p", (2,)), Step("mul", (3, 0))), ((0, 4),)
    )
    loop = FormulaLoop(formula, constant, {0: "sum"}, torch.float32)
    found = []
    for seed in range(3):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
        out = torch.zeros(300, 7)
        loop.run(edges(order, seed + 1, src_rows=order), lambda leaf: values, lambda what, out=out: [out])
        found.append(out.nan_to_num(nan=5.0))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_registers_are_used_again():
    values = [X]
    for place in range(30):
        values.append(Step("neg", (place,)))
    loop = FormulaLoop(Formula(2, tuple(values), ((0, 30),)), constant, {0: "sum"}, torch.float64)
    out, rows = torch.zeros(5, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    loop.run(edges(torch.arange(5)), lambda leaf: rows, lambda what: [out])
    assert torch.equal(out, rows) and loop.num_registers <= 3
