"""Messages as formulas: each channel is computed from the same channel of the rows that an edge reads.

``relu(x_j + e)``, ``sigmoid(k_i + q_j) * v_j`` and ``exp(s_ij - max_i)`` are such messages. A formula lists what they
read and the steps from there, in a straight line. Its gradient is a formula too. Kernels go through the steps for a few
edges at a time, in cache, where the message function would make a tensor with a row per edge in each step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, prod
from typing import Literal, NamedTuple

from shardpass.core.tracing.expression import BINARY, DESTINATION, EDGE, SOURCE, UNARY, Expr

Kind = Literal["src", "dst", "edge", "reduced", "grad", "share", "outside", "number"]
MOST_TABLES = 12  # that a kernel takes at a time
_SIDES: dict[str, Kind] = {SOURCE: "src", DESTINATION: "dst", EDGE: "edge"}


class Leaf(NamedTuple):
    """Something that a formula reads, or whose gradient another one computes.

    Args:
        kind: ``src``, ``dst`` and ``edge`` are rows of inputs. ``reduced`` is the row of an edge's destination in the
            result of a reduction; ``grad`` is that in its gradient, and ``share`` in the part of an extremum's
            gradient that each tied message gets. ``outside`` is a captured tensor, the same for all edges, and
            ``number`` is one number.
        name: of an input.
        number: which reduction or capture it is.
        value: of a ``number``.
        repeats: how often each value stands side by side, where a row has fewer values than the message.
    """

    kind: Kind
    name: str = ""
    number: int = 0
    value: float = 0.0
    repeats: int = 1

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same for all edges."""
        return self.kind in ("outside", "number")


class Step(NamedTuple):
    """An operation on earlier values, channel by channel.

    ``add``, ``sub``, ``mul``, ``div`` and the functions of one operand are those of torch. ``select`` of (x, a, b) is b
    where ``x <= 0`` and else a. ``positive`` is a where ``x > 0`` and else b, so it differs where x is NaN. ``tied`` of
    (a, b, c) is c where ``a == b`` and else 0. ``softplus`` of (x, y) is x above 20 and else y, which is
    ``log1p(exp(x))``. ``at_least`` and ``at_most`` of (x, bound) clamp x. ``detach`` is its operand, to which no
    gradient flows.
    """

    op: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Formula:
    """Values computed for each edge and channel.

    Args:
        width: channels of every value.
        values: leaves and steps. The operands of a step are places in this list before its own.
        outputs: ``(what, place)``: the value at `place` is the message of the reduction `what`, or is added to the
            gradient of the leaf `what`.
    """

    width: int
    values: tuple[Leaf | Step, ...]
    outputs: tuple[tuple[int | Leaf, int], ...]

    def only(self, wanted: Collection[int | Leaf]) -> Formula:
        """The outputs that are wanted, and the values that they need."""
        outputs = [(what, place) for what, place in self.outputs if what in wanted]
        needed, stack = set[int](), [place for _, place in outputs]
        while stack:
            place = stack.pop()
            if place not in needed:
                needed.add(place)
                stack.extend(_operands(self.values[place]))
        places = {old: new for new, old in enumerate(sorted(needed))}
        values = (self.values[old] for old in sorted(needed))
        renumbered = [v if isinstance(v, Leaf) else Step(v.op, tuple(places[a] for a in v.operands)) for v in values]
        return Formula(self.width, tuple(renumbered), tuple((what, places[place]) for what, place in outputs))

    @property
    def leaves(self) -> list[Leaf]:
        """What it reads."""
        return [value for value in self.values if isinstance(value, Leaf)]

    def gradient(self, ops: Mapping[int, str], wanted: Collection[Leaf]) -> Formula:
        """The formula of the gradients of the leaves that are `wanted`; without those to which none flows.

        Args:
            ops: what becomes of each message of which the gradient is taken: ``sum``, ``max`` or ``min``.
        """
        lines = _Lines(self.values)
        grads: dict[int, int] = {}
        for k, place in self.outputs:
            if isinstance(k, int) and k in ops:
                lines.accumulate(grads, place, _seed(lines, ops[k], k, place))
        active = set[int]()
        for place, value in enumerate(self.values):
            is_wanted = value in wanted if isinstance(value, Leaf) else value.op != "detach"
            if is_wanted and (isinstance(value, Leaf) or active.intersection(value.operands)):
                active.add(place)
        outputs: list[tuple[int | Leaf, int]] = []
        for place in range(len(self.values) - 1, -1, -1):
            value = self.values[place]
            if place not in grads or place not in active:
                continue
            if isinstance(value, Leaf):
                outputs.append((value, grads[place]))
                continue
            for operand, grad in _operand_gradients(lines, place, value, grads[place]):
                if operand in active:
                    lines.accumulate(grads, operand, grad)
        found = Formula(self.width, tuple(lines.values), tuple(outputs))
        return found.only([what for what, _ in outputs])


Rows = Mapping[tuple[str, str], int]
"""How many values a row of each input has, by side and name."""
Captured = Mapping[int, tuple[int, tuple[int, ...]]]
"""The number and the shape of each captured tensor, by id."""


def formula_of(messages: Mapping[int, Expr], ops: Mapping[int, str], rows: Rows, captured: Captured) -> Formula | None:
    """The formula of some messages, or `None` if they are not made channel by channel.

    Args:
        messages: what the messages of each reduction are made of.
        ops: ``sum``, ``max`` or ``min``: how they are reduced.
    """
    width = max(prod(expr.tail) for expr in messages.values())
    if width == 0:
        return None
    lines = _Lines(())
    reader = _Reader(lines, width, rows, captured)
    try:
        outputs = tuple((k, reader.read(expr, 1)) for k, expr in messages.items())
    except _NotByChannelError:
        return None
    found = Formula(width, tuple(lines.values), outputs)
    of_gradients = sum(1 if op == "sum" else 3 for op in ops.values())
    of_leaves = sum(leaf.kind != "number" for leaf in found.leaves)  # of what they hold, or of their gradients
    return found if of_leaves + of_gradients <= MOST_TABLES else None


class _NotByChannelError(Exception):
    """An expression is not computed channel by channel, or not by operations that kernels know."""


class _Lines:
    """Values that a formula is made of. What is there already is not added again."""

    def __init__(self, values: Iterable[Leaf | Step]) -> None:
        self.values = list(values)
        self._places = {value: place for place, value in enumerate(self.values)}

    def add(self, value: Leaf | Step) -> int:
        """The place of `value`."""
        if value not in self._places:
            self._places[value] = len(self.values)
            self.values.append(value)
        return self._places[value]

    def step(self, op: str, *operands: int) -> int:
        """The place of a step."""
        return self.add(Step(op, operands))

    def number(self, value: float) -> int:
        """The place of a number."""
        return self.add(Leaf("number", value=value))

    def accumulate(self, grads: dict[int, int], place: int, grad: int) -> None:
        """Add a gradient to those of the value at `place`."""
        grads[place] = self.step("add", grads[place], grad) if place in grads else grad


class _Reader:
    """Enters expressions into the lines of a formula."""

    def __init__(self, lines: _Lines, width: int, rows: Rows, captured: Captured) -> None:
        self.lines, self.width, self.rows, self.captured = lines, width, rows, captured
        self._places: dict[tuple[int, int, bool], int] = {}  # what has been read, by the id of its expression

    def read(self, expr: Expr, repeats: int, is_gathered: bool = False) -> int:
        """The place of `expr`, each value of which stands `repeats` times side by side.

        Args:
            is_gathered: it has a row per destination, and the row of each edge's destination is meant.
        """
        key = id(expr), repeats, is_gathered
        if key not in self._places:
            self._places[key] = self._read(expr, repeats, is_gathered)
        return self._places[key]

    def _read(self, expr: Expr, repeats: int, is_gathered: bool) -> int:
        if prod(expr.tail) * repeats != self.width:
            raise _NotByChannelError
        if expr.op in _SIDES and not is_gathered:
            if self.rows[expr.op, expr.args[0]] == prod(expr.tail):
                return self.lines.add(Leaf(_SIDES[expr.op], name=expr.args[0], repeats=repeats))
        elif expr.op == "reduced" and is_gathered:
            return self.lines.add(Leaf("reduced", number=expr.args[0], repeats=repeats))
        elif expr.op == "gather" and not is_gathered and expr.args[0].tail == expr.tail:
            return self.read(expr.args[0], repeats, is_gathered=True)
        elif expr.op in UNARY or expr.op in BINARY.values() or expr.op in ("detach", "leaky_relu", "clamp"):
            return self._operation(expr, repeats, is_gathered)
        raise _NotByChannelError

    def _operation(self, expr: Expr, repeats: int, is_gathered: bool) -> int:
        def operand(arg: Expr | float) -> int:
            if isinstance(arg, float):
                return self._number(arg)
            if arg.op == "outside":
                return self._outside(arg, expr)
            return self.read(arg, repeats * _ratio(arg, expr), is_gathered)

        lines, op = self.lines, expr.op
        if op in BINARY.values():
            return lines.step(op, operand(expr.args[0]), operand(expr.args[1]))
        x = operand(expr.args[0])
        zero = lines.number(0.0)
        if op == "relu":
            return lines.step("select", x, x, zero)
        if op == "leaky_relu":
            return lines.step("positive", x, x, lines.step("mul", lines.number(expr.args[1]), x))
        if op == "softplus":
            return lines.step(op, x, lines.step("log1p", lines.step("exp", x)))
        if op == "square":
            return lines.step("mul", x, x)
        if op == "silu":
            return lines.step("mul", x, lines.step("sigmoid", x))
        if op == "clamp":
            return self._clamped(x, *expr.args[1:])
        return lines.step(op, x)

    def _clamped(self, x: int, low: float | None, high: float | None) -> int:
        if low is not None:
            x = self.lines.step("at_least", x, self._number(low))
        return x if high is None else self.lines.step("at_most", x, self._number(high))

    def _number(self, value: float) -> int:
        if not isfinite(value):
            raise _NotByChannelError
        return self.lines.number(value)

    def _outside(self, arg: Expr, expr: Expr) -> int:
        """A captured tensor of which each edge reads the same: one number, or one for each channel of `expr`.

        Its shape is asked for, since the tail of its expression lacks the first dimension, which is not one of rows.
        """
        number, shape = self.captured.get(arg.args[0], (-1, ()))
        count = prod(shape)
        per_channel = count == prod(expr.tail) == self.width and _without_ones(shape) == _without_ones(expr.tail)
        if number < 0 or not (count == 1 or per_channel):
            raise _NotByChannelError
        return self.lines.add(Leaf("outside", number=number, repeats=self.width // count))


def _ratio(arg: Expr, expr: Expr) -> int:
    """How often each value of an operand stands side by side in the result `expr`."""
    few, many = prod(arg.tail), prod(expr.tail)
    if few in (many, 1):
        return many // few
    last = next((k for k in range(len(arg.tail)) if arg.tail[k:] == (1,) * (len(arg.tail) - k)), len(arg.tail))
    if len(arg.tail) != len(expr.tail) or arg.tail[:last] != expr.tail[:last]:
        raise _NotByChannelError
    return many // few


def _seed(lines: _Lines, op: str, k: int, message: int) -> int:
    """The gradient of the message at place `message` of reduction `k`."""
    if op == "sum":
        return lines.add(Leaf("grad", number=k))
    return lines.step("tied", message, lines.add(Leaf("reduced", number=k)), lines.add(Leaf("share", number=k)))


def _operand_gradients(lines: _Lines, place: int, step: Step, grad: int) -> list[tuple[int, int]]:
    """``(operand, its gradient)`` for each operand of the step at `place`, as torch defines them."""
    op, operands = step
    one, zero = lines.number(1.0), lines.number(0.0)
    a, b = operands[0], operands[-1]
    if op == "add":
        return [(a, grad), (b, grad)]
    if op == "sub":
        return [(a, grad), (b, lines.step("neg", grad))]
    if op == "mul":
        return [(a, lines.step("mul", grad, b)), (b, lines.step("mul", grad, a))]
    if op == "div":
        slope = lines.step("div", place, b)
        return [(a, lines.step("div", grad, b)), (b, lines.step("neg", lines.step("mul", grad, slope)))]
    if op in ("select", "positive"):  # of x, a, b
        return [(operands[1], lines.step(op, a, grad, zero)), (b, lines.step(op, a, zero, grad))]
    if op == "at_least":
        return [(a, lines.step("select", lines.step("sub", b, a), zero, grad))]
    if op == "at_most":
        return [(a, lines.step("select", lines.step("sub", a, b), zero, grad))]
    if op == "abs":
        negative = lines.step("positive", lines.step("neg", a), lines.number(-1.0), zero)
        return [(a, lines.step("mul", grad, lines.step("positive", a, one, negative)))]
    if op == "softplus":  # torch takes x itself above 20
        of_curve = lines.step("mul", grad, lines.step("sigmoid", a))
        return [(a, lines.step("positive", lines.step("sub", a, lines.number(20.0)), grad, of_curve))]
    if op in ("tanh", "sigmoid"):
        other = lines.step("mul", place, place) if op == "tanh" else place
        slope = lines.step("sub", one, other)
        return [(a, lines.step("mul", grad, slope if op == "tanh" else lines.step("mul", slope, place)))]
    factors = {"neg": lambda: lines.number(-1.0), "exp": lambda: place}
    if op in factors:
        return [(a, lines.step("mul", grad, factors[op]()))]
    divisors = {
        "log": lambda: a,
        "sqrt": lambda: lines.step("add", place, place),
        "log1p": lambda: lines.step("add", a, one),
    }
    return [(a, lines.step("div", grad, divisors[op]()))]


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` without the leading dimensions that are 1."""
    first = next((k for k, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]


def _operands(value: Leaf | Step) -> tuple[int, ...]:
    return () if isinstance(value, Leaf) else value.operands
