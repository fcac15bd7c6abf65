"""Scores of attention that have a closed form: how a message function is seen to compute one, and its formula.

A new score is a class here, in `SCORES`. It runs in steps, with a tensor per chunk of edges between them, until the
loops of `numba_attention` and `triton_scores` know its `kind` as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import leaky_relu

from shardpass.core.tracing.expression import DESTINATION, SOURCE, Expr, uncast


@dataclass(frozen=True)
class Score:
    """A formula of a source row and a destination row, head by head. It must be symmetric in the two.

    Args:
        source, destination: names of the tensors.
        number: the factor, or the slope for negative numbers, of the formula.
        mix: which of the captures weighs the channels, or `None`.
    """

    source: str
    destination: str
    number: float
    mix: int | None = None

    kind: ClassVar[str]  # by which loops know the formula

    @classmethod
    def of(cls, expr: Expr, heads: int, captures: Sequence[Tensor]) -> Score | None:
        """The score that `expr`, of shape ``[E, heads]``, computes; `None` if it is another one.

        Args:
            captures: tensors from outside that the message function uses.
        """
        raise NotImplementedError

    def formula(self, left: Tensor, right: Tensor, mix: Tensor | None) -> Tensor:
        """The scores ``[E, heads]`` of rows ``[E, heads, channels]`` of sources and destinations."""
        raise NotImplementedError


class AdditiveScore(Score):
    """``leaky_relu(source[j] + destination[i], slope)`` of node tensors with a number per head (GATConv)."""

    kind = "additive"

    @classmethod
    def of(cls, expr: Expr, heads: int, captures: Sequence[Tensor]) -> Score | None:
        slanted = _slanted_sum(expr)
        return None if slanted is None else cls(*slanted)

    def formula(self, left: Tensor, right: Tensor, mix: Tensor | None) -> Tensor:
        return leaky_relu(left + right, self.number).squeeze(-1)


class DotScore(Score):
    """``factor * <destination[i], source[j]>``, head by head (TransformerConv)."""

    kind = "dot"

    @classmethod
    def of(cls, expr: Expr, heads: int, captures: Sequence[Tensor]) -> Score | None:
        factor = 1.0
        if expr.op in ("div", "mul") and isinstance(expr.args[1], float):
            factor = 1 / expr.args[1] if expr.op == "div" else expr.args[1]
            expr = uncast(expr.args[0])
        if expr.op != "sum" or prod(expr.args[0].tail[:-1]) != heads:
            return None
        pair = _pair(uncast(expr.args[0]), "mul")
        return None if pair is None else cls(*pair, factor)

    def formula(self, left: Tensor, right: Tensor, mix: Tensor | None) -> Tensor:
        return self.number * (left * right).sum(-1)


class MixedScore(Score):
    """``<mix, leaky_relu(source[j] + destination[i], slope)>``, head by head (GATv2Conv)."""

    kind = "mixed"

    @classmethod
    def of(cls, expr: Expr, heads: int, captures: Sequence[Tensor]) -> Score | None:
        product = uncast(expr.args[0]) if expr.op == "sum" else expr
        if product.op != "mul" or prod(product.tail[:-1]) != heads:
            return None
        for first, second in (product.args, product.args[::-1]):
            if not isinstance(first, Expr) or (mix := _mix_of(first, second, captures)) is None:
                continue
            if (slanted := _slanted_sum(first)) is not None:
                return cls(*slanted, mix)
        return None

    def formula(self, left: Tensor, right: Tensor, mix: Tensor | None) -> Tensor:
        assert mix is not None
        return (leaky_relu(left + right, self.number) * mix).sum(-1)


SCORES: tuple[type[Score], ...] = (AdditiveScore, DotScore, MixedScore)


def _slanted_sum(expr: Expr) -> tuple[str, str, float] | None:
    """``(source, destination, slope)`` of ``leaky_relu(source + destination)``, or of the sum itself."""
    slope = 1.0
    expr = uncast(expr)
    if expr.op == "leaky_relu":
        expr, slope = uncast(expr.args[0]), expr.args[1]
    pair = _pair(expr, "add")
    return None if pair is None or slope < 0 else (*pair, slope)


def _mix_of(rows: Expr, other: Any, captures: Sequence[Tensor]) -> int | None:
    """Which capture `other` is, if it has one number for each channel of `rows` and is the same for all edges."""
    if not isinstance(other, Expr) or other.op != "outside" or other.tail != rows.tail:
        return None
    number = next((n for n, tensor in enumerate(captures) if id(tensor) == other.args[0]), None)
    return number if number is not None and captures[number].numel() == prod(rows.tail) else None


def _pair(expr: Expr, op: str) -> tuple[str, str] | None:
    """The names of a source and a destination tensor of which `expr` is the elementwise sum or product."""
    if expr.op != op or not all(isinstance(arg, Expr) and arg.tail == expr.tail for arg in expr.args):
        return None
    names = {arg.op: arg.args[0] for arg in map(uncast, expr.args)}
    return (names[SOURCE], names[DESTINATION]) if set(names) == {SOURCE, DESTINATION} else None
