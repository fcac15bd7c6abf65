"""Reducers by law: any split of the messages, any order, the same value; gradients as torch's own functions give."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardpass.core.tracing import REDUCERS, Base, Extremum, accumulator_dtype, rescale
from shardpass.core.tracing.reducers import FirstExtremum, Reducer, expand_index
from shardpass.errors import InternalError
from shardpass.testing import LiveBytes

NUM_DST = 4
SCATTER = {"sum": "sum", "max": "amax", "min": "amin", "prod": "prod"}
NAMES = [*SCATTER, "edge_moments"]
BASES = [Base(), Base(3.0), Base(0.0, True), Base(1.0, True), Base(-2.0, True), Base(float("-inf"), True)]


def reference(name, values, index, base=None):
    """The whole reduction in one piece, by torch; differentiable."""
    if name == "edge_moments":
        if len(values) == 0:
            return values.new_zeros((1, 2, *values.shape[1:]))
        return torch.stack([values.mean(0), values.var(0, unbiased=False)]).unsqueeze(0)
    base = base or Base()
    included = base.included or name == "sum"
    start = values.new_full((NUM_DST, *values.shape[1:]), base.value)
    return start.scatter_reduce(0, expand_index(index, values), values, SCATTER[name], include_self=included)


def state_of(name, values, index, groups):
    """The state from `groups` of edges, each accumulated or merged in turn."""
    reducer = REDUCERS[name]
    state = reducer.init(NUM_DST, values.shape[1:], values)
    for number, group in enumerate(groups):
        if number % 2:
            reducer.accumulate(state, values[group], index[group])
        else:
            other = reducer.init(NUM_DST, values.shape[1:], values)
            reducer.fill(other, values[group], index[group])
            reducer.merge(state, other)
    return state


@st.composite
def messages(draw, choices=(-2.0, -1.5, 0.0, 0.5, 1.0, 3.0)):  # few values: ties and zeros
    count = draw(st.integers(0, 14))
    elements = st.sampled_from(choices)
    values = draw(st.lists(elements, min_size=2 * count, max_size=2 * count))
    index = draw(st.lists(st.integers(0, NUM_DST - 2), min_size=count, max_size=count))  # the last has none
    order = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=3)))
    groups = [torch.tensor(order[a:b], dtype=torch.int64) for a, b in zip([0, *cuts], [*cuts, count])]
    return torch.tensor(values, dtype=torch.float64).view(count, 2), torch.tensor(index, dtype=torch.int64), groups


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(drawn=messages(), base=st.sampled_from(BASES))
def test_value_does_not_depend_on_split_or_order(name, drawn, base):
    values, index, groups = drawn
    if name == "sum" and math.isinf(base.value):
        base = Base()
    value = REDUCERS[name].value(state_of(name, values, index, groups), base)
    right = reference(name, values, index, base)
    torch.testing.assert_close(value, right, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert value.shape == (*REDUCERS[name].lead(NUM_DST), 2)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(drawn=messages(), base=st.sampled_from(BASES), cut=st.integers(0, 14))
def test_vjp_is_that_of_torch(name, drawn, base, cut):
    values, index, groups = drawn
    if math.isinf(base.value) and name not in ("max", "min"):
        base = Base()
    leaf = values.clone().requires_grad_()
    right = reference(name, leaf, index, base)
    grad = torch.randn(right.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.autograd.grad(right, leaf, grad)[0] if right.requires_grad else torch.zeros_like(leaf)
    reducer = REDUCERS[name]
    state = state_of(name, values, index, groups)
    value = reducer.value(state, base)
    found = [
        reducer.vjp(values[part], index[part], state, value, grad, base)  # each edge without the others
        for part in (slice(0, cut), slice(cut, None))
    ]
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SCATTER)
@settings(max_examples=30, deadline=None)
@given(drawn=messages((-math.inf, -2.0, 0.0, 1.0, 1.0)), base=st.sampled_from(BASES[:-1]))
def test_the_whole_reduction_at_once_is_the_same(name, drawn, base):
    values, index, groups = drawn
    reducer, state = REDUCERS[name], state_of(name, values, index, groups)
    whole = reducer.whole(values, index, NUM_DST, base)
    torch.testing.assert_close(whole, reducer.value(state, base), rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("tail", [(), (3,)], ids=str)
@pytest.mark.parametrize("name", ["max", "min"])
def test_the_first_extremum_at_once_is_the_same(name, tail):
    draw = torch.Generator().manual_seed(0)
    values = torch.randint(-2, 2, (20, *tail), generator=draw).double()
    values[::5] = -math.inf
    places = torch.arange(20.0).double().view(20, *[1] * len(tail)).expand_as(values)
    pairs, index = torch.stack([values, places], -1), torch.randint(3, (20,), generator=draw)
    reducer = REDUCERS[f"first_{name}"]
    state = reducer.init(NUM_DST, pairs.shape[1:], pairs)
    reducer.accumulate(state, pairs, index)
    whole = reducer.whole(pairs, index, NUM_DST, Base())
    torch.testing.assert_close(whole, reducer.value(state, Base()), rtol=0, atol=0)


@pytest.mark.parametrize("name", [*NAMES, "first_max"])
def test_every_reducer_accumulates_as_all_may(name):
    values, index = torch.tensor([[1.0, 0.0], [2.0, 1.0], [2.0, 2.0]]), torch.tensor([0, 1, 1])
    states = [REDUCERS[name].init(NUM_DST, values.shape[1:], values) for _ in range(2)]
    Reducer.accumulate(REDUCERS[name], states[0], values, index)
    REDUCERS[name].accumulate(states[1], values, index)
    assert all(map(torch.equal, *states)) and states[0][0].shape[0] == (1 if name == "edge_moments" else NUM_DST)


def test_moments_are_not_made_at_once():
    with pytest.raises(InternalError, match=r"^moments over the edges of all ranks are made of sums$"):
        REDUCERS["edge_moments"].whole(torch.ones(2, 1), torch.zeros(2).long(), 1, Base())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("num", [300, 2**24 + 2])
def test_ties_are_counted_exactly_whatever_their_type_and_number(num, dtype):
    """These types count no further than 256. Float32 counts up to 2**24, and takes half the memory of float64."""
    values, index = torch.ones(1, dtype=dtype).expand(num), torch.zeros(1, dtype=torch.int64).expand(num)
    best, ties = state = REDUCERS["max"].init(1, (), values)
    with LiveBytes() as live:
        REDUCERS["max"].fill(state, values, index)
    assert best.tolist() == [1] and ties.tolist() == [num]
    assert num > 2**24 or live.peak < num * 8


@pytest.mark.parametrize("name", ["max", "min"])
def test_ties_share_evenly_and_the_base_is_one_more(name):
    values = torch.tensor([[1.0], [1.0], [0.0], [0.0], [0.0]], dtype=torch.float64)
    index = torch.tensor([0, 0, 1, 1, 1])
    state = state_of(name, values, index, [torch.tensor([0, 2]), torch.tensor([1, 3, 4])])
    value = REDUCERS[name].value(state, Base())
    grad = torch.full((NUM_DST, 1), 12.0, dtype=torch.float64)
    found = REDUCERS[name].vjp(values, index, state, value, grad, Base())
    assert found.view(-1).tolist() == [6.0, 6.0, 3.0, 3.0, 3.0]  # three messages and the base, all zero


@pytest.mark.parametrize("op", ["max", "min"])
@settings(max_examples=30, deadline=None)
@given(drawn=messages(), cut=st.integers(0, 14))
def test_the_whole_gradient_goes_to_the_first_of_tied_messages(op, drawn, cut):
    values, index, groups = drawn
    places = torch.arange(len(index), dtype=torch.float64).view(-1, 1).expand_as(values)
    pairs = torch.stack([values, places], dim=-1)
    expected = torch.tensor([3.0, math.inf], dtype=torch.float64).expand(NUM_DST, 2, 2).clone()  # the base, no place
    grad = torch.randn(NUM_DST, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = torch.zeros_like(pairs)
    for node in range(NUM_DST):
        for channel in range(2):
            edges = (index == node).nonzero().view(-1)
            if len(edges):
                own = values[edges, channel]
                best = own.max() if op == "max" else own.min()
                first = edges[own == best].min()
                expected[node, channel] = pairs[first, channel]
                gradients[first, channel, 0] = grad[node, channel, 0]
    reducer, state = REDUCERS[f"first_{op}"], state_of(f"first_{op}", pairs, index, groups)
    value = reducer.value(state, Base(3.0))
    assert torch.equal(value, expected)
    parts = (slice(0, cut), slice(cut, None))
    found = [reducer.vjp(pairs[part], index[part], state, value, grad, Base(3.0)) for part in parts]
    assert torch.equal(torch.cat(found), gradients)


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("first", [True, False])
def test_nan_among_messages_of_which_the_first_wins(op, first):
    pairs = torch.tensor([[[math.nan, 0.0]], [[1.0, 1.0]], [[2.0, 2.0]]], dtype=torch.float64)
    groups = [torch.tensor([0]), torch.tensor([1, 2])]
    state = state_of(f"first_{op}", pairs, torch.tensor([0, 0, 1]), groups if first else groups[::-1])
    value = REDUCERS[f"first_{op}"].value(state, Base(3.0))[:, 0, 0]
    assert value[0].isnan() and value[1:].tolist() == [2.0, 3.0, 3.0]


def test_one_pair_for_each_message():
    pairs = torch.tensor([[1.0, 0.0], [2.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    state = state_of("first_max", pairs, torch.tensor([0, 0, 0]), [torch.tensor([2]), torch.tensor([0, 1])])
    value = REDUCERS["first_max"].value(state, Base())
    assert value.tolist() == [[2.0, 1.0], *[[0.0, math.inf]] * (NUM_DST - 1)]


@pytest.mark.parametrize("kind", [Extremum, FirstExtremum])
@pytest.mark.parametrize("op", ["max", "min"])
def test_extrema_by_name(kind, op):
    reducer = kind(op)
    known = REDUCERS[reducer.name]
    pairs = torch.tensor([[3.0, 0.0], [5.0, 1.0], [5.0, 2.0]])
    values, index = pairs if reducer.name.startswith("first") else pairs[:, :1], torch.tensor([0, 0, 1])
    states = [one.init(2, values.shape[1:], values) for one in (reducer, known, Extremum(known.name[-3:]))]
    reducer.fill(states[0], values, index)
    known.fill(states[1], values, index)
    assert type(known) is type(reducer) and all(map(torch.equal, states[0], states[1]))
    assert states[2][1].dtype == torch.int32, "counts of ties are exact"


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_zeros_in_a_product(zeros):
    values = torch.tensor([2.0, 3.0, -4.0], dtype=torch.float64)
    values[:zeros] = 0
    leaf = values.clone().requires_grad_()
    leaf.prod().backward()
    index = torch.zeros(3, dtype=torch.int64)
    state = state_of("prod", values.view(-1, 1), index, [torch.tensor([k]) for k in range(3)])
    assert state[1].dtype == state[2].dtype == torch.int32, "counts are exact"
    value = REDUCERS["prod"].value(state, Base())
    grad = torch.ones(NUM_DST, 1, dtype=torch.float64)
    found = REDUCERS["prod"].vjp(values.view(-1, 1), index, state, value, grad, Base())
    assert value[0, 0] == values.prod() and torch.equal(found.view(-1), leaf.grad)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("beside", [0.0, 1.0])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first", [True, False])
def test_nan_and_infinity_are_not_swallowed(name, poison, beside, first):
    values = torch.tensor([[poison], [beside], [1.0]], dtype=torch.float64)
    index = torch.tensor([0, 0, 1])
    groups = [torch.tensor([0]), torch.tensor([1, 2])]
    value = REDUCERS[name].value(state_of(name, values, index, groups if first else groups[::-1]), Base())
    if name == "edge_moments":
        assert not value.isfinite().any()
    else:
        torch.testing.assert_close(value, reference(name, values, index), equal_nan=True)


@pytest.mark.parametrize("name", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers(name, dtype):
    values = torch.tensor([[3], [0], [2], [5], [1]], dtype=dtype)
    index = torch.tensor([0, 0, 1, 2, 1])
    groups = [torch.tensor([4, 0]), torch.tensor([1, 2, 3])]
    value = REDUCERS[name].value(state_of(name, values, index, groups), Base())
    assert torch.equal(value, reference(name, values, index)) and value.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["sum", "prod", "edge_moments"])
def test_half_precision_accumulates_in_float32(name, dtype):
    assert accumulator_dtype(dtype) == torch.float32 and accumulator_dtype(torch.int32) == torch.int32
    values = (torch.rand(300, 2, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    index = torch.zeros(300, dtype=torch.int64)
    if name == "prod":
        values, index = values[:20], index[:20]
    groups = torch.arange(len(index)).split(7)
    value = REDUCERS[name].value(state_of(name, values, index, groups), Base())
    assert value.dtype == torch.float32
    right = reference(name, values.double(), index)[0]
    torch.testing.assert_close(value[0].double(), right, rtol=1e-5, atol=1e-5)
    if name == "sum":
        whole = REDUCERS[name].whole(values[:, 0], index, NUM_DST, Base())  # torch widens rows of several itself
        torch.testing.assert_close(whole[0], right[0].to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


def test_rescaling_to_another_peak():
    old, new = torch.tensor([-math.inf, -math.inf, 0.0, math.inf]), torch.tensor([-math.inf, 1.0, 1.0, math.inf])
    torch.testing.assert_close(rescale(old, new), torch.tensor([1.0, 0.0, math.exp(-1), 1.0]))


def test_large_offsets_do_not_cancel_in_the_variance():
    values = (torch.randn(1000, 1, generator=torch.Generator().manual_seed(0)) + 1e4).float()
    index = torch.zeros(1000, dtype=torch.int64)
    state = state_of("edge_moments", values, index, torch.arange(1000).split(13))
    expected = values.double().var(0, unbiased=False)
    found = REDUCERS["edge_moments"].value(state, Base())
    torch.testing.assert_close(found[0, 1].double(), expected, rtol=1e-3, atol=0)
