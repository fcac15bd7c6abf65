"""Formulas of messages: which messages have one, what it computes, and its gradient."""

import pytest
import torch
from looking import add_up, largest, look, softmax
from torch.nn import functional as F

from shardpass.core.tracing import Formula, Leaf
from tests.core.steps import STEPS


def computed(formula: Formula, rows):
    """The outputs of `formula`, by what they are; `rows` gives what each leaf reads for every edge, ``[E, ...]``."""
    values = []
    for value in formula.values:
        if isinstance(value, Leaf) and value.kind == "number":
            values.append(torch.tensor(value.value, dtype=torch.float64))
        elif isinstance(value, Leaf):
            values.append(rows[value].repeat_interleave(value.repeats, dim=-1))
        else:
            values.append(STEPS[value.op](*(values[operand] for operand in value.operands)))
    return {what: values[place] for what, place in formula.outputs}


UNARY = {
    "relu": torch.relu,
    "nn.ReLU": torch.nn.ReLU(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "log": lambda x: (x * x + 1).log(),
    "log1p": lambda x: torch.log1p(x * x),
    "sqrt": lambda x: (x * x + 1).sqrt(),
    "neg": lambda x: -x,
    "abs": torch.abs,
    "square": torch.square,
    "power": lambda x: x**2,
    "silu": F.silu,
    "softplus": F.softplus,
    "softplus of large numbers": lambda x: F.softplus(x * 40),
    "softplus(beta=, threshold=)": lambda x: F.softplus(x, threshold=20, beta=1),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.3),
    "clamp": lambda x: x.clamp(-0.4, 0.7),
    "clamp(min=)": lambda x: x.clamp(min=0.1),
    "clamp_max": lambda x: torch.clamp_max(x, 0.1),
    "clamp the other way": lambda x: x.clamp(0.5, -0.5),
    "less": lambda x: 1 - x,
    "reciprocal": lambda x: 1 / (x + 7),
    "divided": lambda x: x / 3,
}


@pytest.mark.parametrize("name", UNARY)
def test_a_function_and_its_gradient(graph, name):
    function = UNARY[name]
    formula = look(graph, lambda i: function(i.src["x"] * i.dst["x"]) + i.edge["w"].view(-1, 1)).formula
    draw = torch.Generator().manual_seed(0)
    src, dst, grad = (torch.randn(50, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    src[:3], weight = 0, torch.randn(50, 1, generator=draw, dtype=torch.float64)
    leaves = {Leaf("src", "x"): src, Leaf("dst", "x"): dst, Leaf("edge", "w", repeats=4): weight}
    given = {leaf: rows.clone().requires_grad_() for leaf, rows in leaves.items()}
    one, other, added = given.values()
    right = function(one * other) + added
    torch.testing.assert_close(computed(formula, leaves)[0], right.detach(), rtol=1e-13, atol=1e-13)
    right.backward(grad)
    found = computed(formula.gradient({0: "sum"}, list(leaves)), {**leaves, Leaf("grad", number=0): grad})
    for leaf, rows in given.items():
        width = 4 // leaf.repeats
        sums = found[leaf].view(50, width, leaf.repeats).sum(-1)
        torch.testing.assert_close(sums, rows.grad, rtol=1e-12, atol=1e-13)


def test_the_gradient_of_an_extremum_goes_to_the_tied(graph):
    formula = look(graph, lambda i: i.src["x"].abs(), largest).formula
    assert [what for what, _ in formula.outputs] == [0]
    gradient = formula.gradient({0: "max"}, [Leaf("src", "x")])
    rows = torch.tensor([[2.0, -3.0], [-2.0, 1.0]])
    best, share = torch.tensor([[2.0, 3.0]]).expand(2, 2), torch.tensor([[0.5, 1.0]]).expand(2, 2)
    given = {Leaf("src", "x"): rows, Leaf("reduced", number=0): best, Leaf("share", number=0): share}
    assert computed(gradient, given)[Leaf("src", "x")].tolist() == [[0.5, -1.0], [-0.5, 0.0]]


def test_a_softmax_by_channel(graph):
    """Three reductions: the third reads the first two, and its gradient flows to the sum alone."""

    def reduce(message, index, num_dst):
        return add_up(message * softmax(message * 2, index, num_dst), index, num_dst)

    structure = look(graph, lambda i: i.src["x"].relu(), reduce)
    assert [r.leader for r in structure.reductions] == [None, 0, None]
    kinds = {leaf.kind for leaf in structure.formula.only([2]).leaves}
    assert kinds == {"src", "reduced", "number"}
    wanted = [Leaf("src", "x"), Leaf("reduced", number=1)]
    gradient = structure.formula.gradient({2: "sum"}, wanted)
    assert {what for what, _ in gradient.outputs} == {*wanted}
    assert Leaf("reduced", number=0) in gradient.leaves  # the weights are computed again from it


def test_what_is_not_wanted_is_not_computed(graph):
    formula = look(graph, lambda i: (i.src["x"] * i.dst["x"]).exp() * i.edge["w"].view(-1, 1)).formula
    gradient = formula.gradient({0: "sum"}, [Leaf("edge", "w", repeats=4)])
    assert [what for what, _ in gradient.outputs] == [Leaf("edge", "w", repeats=4)]
    assert [step.op for step in gradient.values if not isinstance(step, Leaf)] == ["mul", "exp", "mul"]
    assert formula.gradient({}, formula.leaves).values == ()


CAPTURED = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))
FLAT = torch.nn.Parameter(torch.randn((1, 4), dtype=torch.float64))
NUMBER = torch.nn.Parameter(torch.randn((), dtype=torch.float64))


@pytest.mark.parametrize(
    "message",
    [
        lambda i: i.src["x"].relu() * CAPTURED,
        lambda i: (i.src["x"] + i.dst["x"]).tanh() * NUMBER + FLAT,
        lambda i: (i.src["h"] * i.edge["v"]).exp(),
        lambda i: (i.src["x"].detach() * i.dst["x"]).exp(),
        lambda i: torch.stack([i.src["x"].exp()], dim=1),
    ],
    ids=["parameter", "number", "heads", "detached", "stacked"],
)
def test_has_a_formula(graph, message):
    assert look(graph, message).formula is not None


CONSTANT = torch.ones(4, dtype=torch.float64)
TWO = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
MANY = [torch.nn.Parameter(torch.rand(4, dtype=torch.float64)) for _ in range(12)]


@pytest.mark.parametrize(
    "message",
    [
        lambda i: i.src["x"],
        lambda i: i.src["x"].relu() * CONSTANT,
        lambda i: i.src["x"].relu().flip(-1),
        lambda i: i.src["x"].softmax(-1),
        lambda i: F.elu(i.src["x"]),
        lambda i: i.src["x"].relu() @ torch.eye(4, dtype=torch.float64),
        lambda i: F.dropout(i.src["x"].relu(), 0.5),
        lambda i: (i.src["x"].relu() + torch.rand(())),
        lambda i: i.src["h"].exp() * i.src["h"].exp()[:, :1],
        lambda i: i.src["x"].float().exp().double(),
        lambda i: i.src["x"].exp() * float("inf"),
        lambda i: F.softplus(i.src["x"], 2),
        lambda i: i.src["x"].relu().index_fill(1, torch.tensor([0]), 0),
        lambda i: i.src["x"].clone().relu_() + 1,
        lambda i: i.src["x"] ** 3,
        lambda i: i.src["x"].abs() ** TWO,
        lambda i: i.src["x"].abs() ** i.src["x"],
        lambda i: F.softplus(i.src["x"], threshold=1),
        lambda i: F.leaky_relu(i.src["x"], TWO.detach()),
        lambda i: i.src["x"][:, :0].relu(),
        lambda i: sum((i.src["x"] * p).tanh() for p in MANY),
    ],
    ids=[
        "copy", "constant", "flipped", "softmax", "elu", "product", "dropout", "random", "part", "cast", "infinite",
        "beta", "filled", "in place", "cubed", "power of a parameter", "power of rows", "threshold",
        "slope in a tensor", "no channels", "too many tables",
    ],
)  # fmt: skip
def test_has_none(graph, message):
    assert look(graph, message).formula is None


def test_a_view_made_without_gradients_is_detached(graph):
    """torch says that it requires gradients."""

    def message(i):
        with torch.no_grad():
            still = i.src["x"].view(-1, 4)
        return (still * i.dst["x"]).relu()

    formula = look(graph, message).formula
    gradient = formula.gradient({0: "sum"}, [Leaf("src", "x"), Leaf("dst", "x")])
    assert [what for what, _ in gradient.outputs] == [Leaf("dst", "x")]


@pytest.mark.parametrize("function", [torch.abs, F.leaky_relu, F.softplus, torch.relu], ids=lambda f: f.__name__)
def test_gradients_of_awkward_numbers(graph, function):
    """NaN, and infinite gradients where the slope is 0."""
    formula = look(graph, lambda i: function(i.src["x"])).formula
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[nan, nan, 0.0, 0.0], [inf, -inf, 30.0, -1.0]], dtype=torch.float64, requires_grad=True)
    grad = torch.tensor([[1.0, inf, inf, 2.0], [1.0, 1.0, inf, inf]], dtype=torch.float64)
    function(x).backward(grad)
    gradient = formula.gradient({0: "sum"}, [Leaf("src", "x")])
    found = computed(gradient, {Leaf("src", "x"): x.detach(), Leaf("grad", number=0): grad})
    torch.testing.assert_close(found[Leaf("src", "x")], x.grad, equal_nan=True)


def test_the_gradient_of_a_tiny_divisor_does_not_overflow(graph):
    formula = look(graph, lambda i: i.src["x"] / i.dst["x"]).formula
    gradient = formula.gradient({0: "sum"}, [Leaf("dst", "x")])
    rows = {Leaf("src", "x"): 0.0, Leaf("dst", "x"): 1e-300, Leaf("grad", number=0): 1e10}
    filled = {leaf: torch.full((1, 4), value, dtype=torch.float64) for leaf, value in rows.items()}
    assert computed(gradient, filled)[Leaf("dst", "x")].tolist() == [[0.0] * 4]


@pytest.mark.parametrize("reduce", ["prod", "mixed"])
def test_other_reductions_have_none(graph, reduce):
    def times(message, index, num_dst):
        spread = index.view(-1, 1).expand_as(message)
        product = message.new_ones((num_dst, 4)).scatter_reduce(0, spread, message, "prod")
        return product if reduce == "prod" else product + add_up(message, index, num_dst)

    assert look(graph, lambda i: i.src["x"].exp(), times).formula is None
