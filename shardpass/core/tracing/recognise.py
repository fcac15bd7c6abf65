"""The closed forms of a program, from the expressions that its probe kept: copies, scaled copies, attention.

There is no table of layers. Whatever computes ``x_j``, ``x_j * weight`` or a softmax-weighted sum of ``x_j`` is
recognised, a user's own layer as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from shardpass.core.tracing.expression import EDGE, SOURCE, Expr, plain, uncast
from shardpass.core.tracing.scores import SCORES
from shardpass.core.tracing.structure import Attention, Form, Reduction

GENERAL: tuple[Form, str, str] = ("general", "", "")
Tails = dict[str, tuple[int, ...]]
"""Shapes of a row of the source tensors, by name."""
SOFTMAX_DTYPES = (torch.float32, torch.float64)
_NO_EPS = 1e-12
MAX_EPS = 1e-6  # a larger number added to the sum of weights is no guard against division by zero


def simple_form(expr: Expr, tails: Tails) -> tuple[Form, str, str]:
    """``(form, source, weight)`` of a message whose sum is taken."""
    if expr.op == SOURCE and expr.tail == tails[expr.args[0]]:
        return "copy", expr.args[0], ""
    pair = _factors(expr, SOURCE)
    if pair is not None:
        copied, weight = pair
        whole = copied.tail == tails[copied.args[0]] == expr.tail
        if weight.op == EDGE and whole and (prod(weight.tail) == 1 or _is_per_head(weight.tail, copied.tail)):
            return "scale", copied.args[0], weight.args[0]
    return GENERAL


def _is_per_head(weight: tuple[int, ...], value: tuple[int, ...]) -> bool:
    """Whether weights of the first shape scale values of the second one, each all channels of its head."""
    last = next((k for k in range(len(value)) if weight[k:] == (1,) * (len(value) - k)), len(value))
    return len(weight) == len(value) and 0 < last < len(value) and weight[:last] == value[:last]


def extremum_form(expr: Expr, tails: Tails) -> tuple[Form, str, str]:
    """``(form, source, "")`` of a message whose max or min is taken."""
    form, source, _ = simple_form(expr, tails)
    return ("extremum", source, "") if form == "copy" else GENERAL


def leading_maximum(expr: Expr, scores: Sequence[Expr], earlier: Sequence[Reduction]) -> int | None:
    """The max reduction m where a message is ``exp(x - m[index])``: such a sum can be rescaled as the maximum grows.

    Args:
        scores: what the messages of the `earlier` reductions were made of.
    """
    shifted = uncast(expr.args[0]) if expr.op == "exp" else expr
    if shifted.op != "sub":
        return None
    score, taken = shifted.args
    if not isinstance(score, Expr) or not isinstance(taken, Expr) or plain(taken).op != "gather":
        return None
    inner = plain(plain(taken).args[0])
    if inner.op != "reduced" or inner.tail != score.tail:
        return None
    k = inner.args[0]
    if plain(scores[k]) != plain(score):
        return None
    maximum = earlier[k]
    is_that = not maximum.base.included or maximum.base.value == float("-inf")  # else the base may be larger
    return k if maximum.op == "max" and is_that and maximum.tail == expr.tail else None


def attention_of(
    reductions: Sequence[Reduction],
    messages: Sequence[Expr],
    tails: Tails,
    num_drops: int,
    captures: Sequence[torch.Tensor],
) -> Attention | None:
    """The attention that a whole program is, or None.

    Args:
        messages: what the messages of the reductions are made of.
        num_drops: how often the program uses dropout.
        captures: tensors from outside that it uses.
    """
    counted = [k for k, reduction in enumerate(reductions) if reduction.form != "ones"]
    if len(counted) != 3 or reductions[counted[1]].leader != counted[0]:
        return None
    maximum, total, output = counted
    expr, exponential = messages[output], messages[total]
    last = reductions[output]
    pair = _factors(expr, SOURCE)
    if pair is None or last.op != "sum" or last.base.value:
        return None
    value, weight = pair
    heads = prod(exponential.tail)
    name = value.args[0]
    if value.tail != tails[name] or expr.tail != value.tail or not value.tail:
        return None
    # the weights of a row: one for each head, the same for all that follows
    if prod(weight.tail) != heads or weight.tail[-1:] != (1,) or prod(value.tail[: len(weight.tail) - 1]) != heads:
        return None
    if len(weight.tail) > len(value.tail) or reductions[total].dtype != last.dtype:
        return None
    dropout = 0.0
    if weight.op == "dropout":
        weight, dropout = weight.args[0], weight.args[1]
    eps = _denominator(weight, exponential, total)
    if eps is None or num_drops != (1 if dropout else 0) or not 0 <= dropout < 1:
        return None
    score = uncast(exponential.args[0]).args[0]
    if score.op == "detach" or (reductions[maximum].differentiable and eps > _NO_EPS):
        return None  # the gradient through a maximum cancels without eps only
    closed = next((one for kind in SCORES if (one := kind.of(score, heads, captures)) is not None), None)
    is_cast = any(isinstance(arg, Expr) and arg.op == "cast" for arg in expr.args)
    is_seen = name in reductions[maximum].sources
    if closed is None and (last.dtype not in SOFTMAX_DTYPES or (is_cast and is_seen)):
        return None  # the message function, which computes the scores, must see the dtypes that it was given
    return Attention(maximum, total, output, name, heads, eps, dropout, closed)


def _denominator(weight: Expr, exponential: Expr, total: int) -> float | None:
    """The number e if `weight` is ``exponential / (total[index] + e)``, else None."""
    if weight.op != "div" or not all(isinstance(arg, Expr) for arg in weight.args):
        return None
    above, below = weight.args
    if above.shaped(exponential.tail) != exponential:
        return None
    eps = 0.0
    for _ in range(2):  # before or after the rows of destinations are gathered
        if below.op == "add" and any(isinstance(arg, float) for arg in below.args):
            eps += sum(arg for arg in below.args if isinstance(arg, float))
            below = next(arg for arg in below.args if isinstance(arg, Expr))
        if below.op == "gather":
            below = below.args[0]
    gathered = below.op == "reduced" and below.args[0] == total
    return eps if gathered and 0 <= eps <= MAX_EPS else None


def _factors(expr: Expr, op: str) -> tuple[Expr, Expr] | None:
    """``(a, b)`` if `expr` is the product of a leaf a of kind `op` and something else, b."""
    if expr.op != "mul" or not all(isinstance(arg, Expr) for arg in expr.args):
        return None
    first, second = map(uncast, expr.args)
    if (first.op == op) == (second.op == op):
        return None
    return (first, second) if first.op == op else (second, first)
