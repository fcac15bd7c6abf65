"""Reductions over the in-edges of a node, in pieces: any split and any order of the edges give the same answer.

A reducer keeps a state with one row per destination. `accumulate` takes the messages of some edges into it, `merge`
joins two states, and `value` finishes. `vjp` gives the gradient of the messages of some edges from the state and the
finished value, so that backward needs no other edge's message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from shardpass.errors import InternalError

State = list[Tensor]


class Base(NamedTuple):
    """What a destination holds before any message, and whether that takes part (torch's ``include_self``)."""

    value: float = 0.0
    included: bool = False


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which messages of `dtype` are accumulated: float32 for half precision, else `dtype` itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def expand_index(index: Tensor, values: Tensor) -> Tensor:
    """`index` ``[E]`` in the shape of `values` ``[E, ...]``, without a copy."""
    return index.view(-1, *[1] * (values.dim() - 1)).expand_as(values)


class Reducer(ABC):
    """Base class of reducers of one message tensor ``[E, ...]`` to one value ``[num_dst, ...]``.

    The value has the trailing shape of the messages, and each tensor of the state has a row per destination. A global
    reducer has one row for all edges of all ranks instead.
    """

    name: str
    is_global = False  # one result for all edges of all ranks, instead of one per destination

    def lead(self, num_dst: int) -> tuple[int, ...]:
        """The shape of the value before the trailing shape of the messages."""
        return (num_dst,)

    @abstractmethod
    def init(self, num_dst: int, tail: Sequence[int], like: Tensor) -> State:
        """The state of `num_dst` destinations that have seen no message."""

    def accumulate(self, state: State, values: Tensor, index: Tensor) -> None:
        """Take `values` ``[E, ...]`` for destination rows `index` ``[E]`` into the state, in place."""
        part = self.init(state[0].size(0), values.shape[1:], values)
        self.fill(part, values, index)
        self.merge(state, part)

    @abstractmethod
    def fill(self, state: State, values: Tensor, index: Tensor) -> None:
        """Like `accumulate`, into a state fresh from `init`."""

    @abstractmethod
    def merge(self, state: State, other: State) -> None:
        """Join `other` into `state`, in place."""

    @abstractmethod
    def value(self, state: State, base: Base) -> Tensor:
        """The reduction, ``[num_dst, ...]``. Destinations without a message hold ``base.value``."""

    @abstractmethod
    def vjp(self, values: Tensor, index: Tensor, state: State, value: Tensor, grad: Tensor, base: Base) -> Tensor:
        """The gradient of `values` ``[E, ...]``, given that of the reduction (rows of `index` in all arguments)."""

    @abstractmethod
    def whole(self, values: Tensor, index: Tensor, num_dst: int, base: Base) -> Tensor:
        """The reduction of all messages at once, by functions of torch that can be differentiated any number of times.

        A gradient of gradients is made of it.
        """


class Sum(Reducer):
    name = "sum"

    def init(self, num_dst: int, tail: Sequence[int], like: Tensor) -> State:
        return [like.new_zeros((num_dst, *tail), dtype=accumulator_dtype(like.dtype))]

    def accumulate(self, state: State, values: Tensor, index: Tensor) -> None:
        state[0].index_add_(0, index, values.to(state[0].dtype))

    fill = accumulate

    def merge(self, state: State, other: State) -> None:
        state[0] += other[0]

    def value(self, state: State, base: Base) -> Tensor:
        return state[0] + base.value if base.value else state[0]

    def vjp(self, values: Tensor, index: Tensor, state: State, value: Tensor, grad: Tensor, base: Base) -> Tensor:
        return grad.index_select(0, index)

    def whole(self, values: Tensor, index: Tensor, num_dst: int, base: Base) -> Tensor:
        wide = values.to(accumulator_dtype(values.dtype))
        return wide.new_full((num_dst, *values.shape[1:]), base.value).index_add(0, index, wide).to(values.dtype)


def _scattered(op: str, values: Tensor, index: Tensor, num_dst: int, base: Base) -> Tensor:
    start = values.new_full((num_dst, *values.shape[1:]), base.value)
    return start.scatter_reduce(0, expand_index(index, values), values, op, include_self=base.included)


class Extremum(Reducer):
    """max or min. The gradient is split evenly among tied messages, as torch's ``scatter_reduce`` does.

    torch counts the base as one more tie if the result equals it, even with ``include_self=False``. So does this.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def _worst(self, dtype: torch.dtype) -> float | int:
        if dtype.is_floating_point:
            return -inf if self.name == "max" else inf
        info = torch.iinfo(dtype)
        return info.min if self.name == "max" else info.max

    def init(self, num_dst: int, tail: Sequence[int], like: Tensor) -> State:
        best = like.new_full((num_dst, *tail), self._worst(like.dtype))
        return [best, torch.zeros_like(best, dtype=torch.int32)]

    def fill(self, state: State, values: Tensor, index: Tensor) -> None:
        best, ties = state
        best.scatter_reduce_(0, expand_index(index, values), values, "a" + self.name)
        tied = values == best.index_select(0, index)
        # torch adds rows of floats many times faster than rows of integers, and float32 counts up to 2**24 exactly
        counts = torch.zeros_like(best, dtype=torch.float32 if index.numel() < 2**24 else torch.float64)
        ties += counts.index_add_(0, index, tied.to(counts.dtype)).to(ties.dtype)

    def merge(self, state: State, other: State) -> None:
        best, ties = state
        new = torch.maximum(best, other[0]) if self.name == "max" else torch.minimum(best, other[0])
        ties.mul_(best == new).add_(other[1] * (other[0] == new))
        best.copy_(new)

    def value(self, state: State, base: Base) -> Tensor:
        best, ties = state
        if base.included:
            fixed = torch.full_like(best, base.value)
            return torch.maximum(best, fixed) if self.name == "max" else torch.minimum(best, fixed)
        return best.masked_fill((ties == 0) & (best == best), base.value)

    def vjp(self, values: Tensor, index: Tensor, state: State, value: Tensor, grad: Tensor, base: Base) -> Tensor:
        share = self.share(state, value, grad, base)
        return share.index_select(0, index).masked_fill_(values != value.index_select(0, index), 0)

    def share(self, state: State, value: Tensor, grad: Tensor, base: Base) -> Tensor:
        """The part of the gradient that each of the tied messages gets, ``[num_dst, ...]``."""
        return grad / (state[1] * (state[0] == value) + (value == base.value)).clamp(min=1)

    def whole(self, values: Tensor, index: Tensor, num_dst: int, base: Base) -> Tensor:
        return _scattered("a" + self.name, values, index, num_dst, base)


class FirstExtremum(Reducer):
    """max or min whose whole gradient goes to the first of the tied messages, as in DGL.

    The messages and the result are pairs ``[..., 2]`` of a value and its place in the order of edges.
    """

    def __init__(self, op: str) -> None:
        self.name = f"first_{op}"
        self._extremum = Extremum(op)

    def init(self, num_dst: int, tail: Sequence[int], like: Tensor) -> State:
        best = self._extremum.init(num_dst, tail[:-1], like)[0]
        return [best, torch.full_like(best, inf)]

    def fill(self, state: State, values: Tensor, index: Tensor) -> None:
        best, first = state
        values, places = values.unbind(-1)
        best.scatter_reduce_(0, expand_index(index, values), values, "a" + self._extremum.name)
        places = places.masked_fill(values != best.index_select(0, index), inf)
        first.scatter_reduce_(0, expand_index(index, places), places, "amin")

    def merge(self, state: State, other: State) -> None:
        best, first = state
        new = torch.maximum(best, other[0]) if self._extremum.name == "max" else torch.minimum(best, other[0])
        lost = inf
        mine, theirs = first.masked_fill(best != new, lost), other[1].masked_fill(other[0] != new, lost)
        first.copy_(torch.minimum(mine, theirs))
        best.copy_(new)

    def value(self, state: State, base: Base) -> Tensor:
        best, first = state
        return torch.stack([best.masked_fill(first.isinf() & (best == best), base.value), first], dim=-1)

    def vjp(self, values: Tensor, index: Tensor, state: State, value: Tensor, grad: Tensor, base: Base) -> Tensor:
        won = (values == value.index_select(0, index)).all(-1)
        grad = grad[..., 0].index_select(0, index) * won
        return torch.stack([grad, torch.zeros_like(grad)], dim=-1)

    def whole(self, values: Tensor, index: Tensor, num_dst: int, base: Base) -> Tensor:
        known = values.detach()
        state = self.init(num_dst, values.shape[1:], known)
        self.accumulate(state, known, index)
        value = self.value(state, base)
        won = (known == value.index_select(0, index)).all(-1)
        best = REDUCERS["sum"].whole(torch.where(won, values[..., 0], 0), index, num_dst, Base())
        return torch.stack([torch.where(value[..., 1].isinf(), value[..., 0], best), value[..., 1]], dim=-1)


class Prod(Reducer):
    """The product. It keeps the product of the non-zero messages and the count of zeros, so that its vjp is exact.

    It also counts all messages, because a destination without one holds the base, as in torch.
    """

    name = "prod"

    def init(self, num_dst: int, tail: Sequence[int], like: Tensor) -> State:
        product = like.new_ones((num_dst, *tail), dtype=accumulator_dtype(like.dtype))
        zeros = torch.zeros_like(product, dtype=torch.int32)
        return [product, zeros, zeros.new_zeros((num_dst,) + (1,) * len(tail))]

    def accumulate(self, state: State, values: Tensor, index: Tensor) -> None:
        product, zeros, count = state
        is_zero = values == 0
        factors = values.to(product.dtype).masked_fill(is_zero, 1)
        product.scatter_reduce_(0, expand_index(index, values), factors, "prod")
        zeros.index_add_(0, index, is_zero.to(zeros.dtype))
        count.view(-1).index_add_(0, index, count.new_ones(index.numel()))

    fill = accumulate

    def merge(self, state: State, other: State) -> None:
        state[0] *= other[0]
        state[1] += other[1]
        state[2] += other[2]

    def value(self, state: State, base: Base) -> Tensor:
        product = torch.where(state[1] > 0, state[0] * 0, state[0])  # times zero, not zero: NaN and infinity stay
        return product * base.value if base.included else product.masked_fill(state[2] == 0, base.value)

    def vjp(self, values: Tensor, index: Tensor, state: State, value: Tensor, grad: Tensor, base: Base) -> Tensor:
        product, zeros = (t.index_select(0, index) for t in state[:2])
        is_zero = values == 0
        others = product / values.masked_fill(is_zero, 1)
        alone = torch.where(is_zero, zeros == 1, zeros == 0)
        scale = base.value if base.included else 1.0
        return grad.index_select(0, index) * torch.where(alone, others, 0) * scale

    def whole(self, values: Tensor, index: Tensor, num_dst: int, base: Base) -> Tensor:
        return _scattered("prod", values, index, num_dst, base)


def rescale(old_peak: Tensor, new_peak: Tensor) -> Tensor:
    """``exp(old - new)``, and 1 if both are the same infinity."""
    return torch.where(old_peak == new_peak, 1, (old_peak - new_peak).exp())


class EdgeMoments(Reducer):
    """Mean and population variance over all edges of the graph: ``[1, 2, channels]`` from ``[E, channels]``.

    States merge without cancellation (Chan, Golub, LeVeque 1979, eq. 2.1).
    """

    name = "edge_moments"
    is_global = True

    def lead(self, num_dst: int) -> tuple[int, ...]:
        return 1, 2

    def init(self, num_dst: int, tail: Sequence[int], like: Tensor) -> State:
        mean = like.new_zeros((1, *tail), dtype=accumulator_dtype(like.dtype))
        return [mean.new_zeros((1,) + (1,) * len(tail)), mean, torch.zeros_like(mean)]

    def fill(self, state: State, values: Tensor, index: Tensor) -> None:
        count, mean, squares = state
        values, only = values.to(mean.dtype), torch.zeros_like(index)
        count += index.numel()
        mean.index_add_(0, only, values).div_(count.clamp(min=1))
        squares.index_add_(0, only, (values - mean).square())

    def merge(self, state: State, other: State) -> None:
        count, mean, squares = state
        total = (count + other[0]).clamp(min=1)
        shift = other[1] - mean
        squares += other[2] + shift.square() * (count * other[0] / total)
        mean += shift * (other[0] / total)
        count += other[0]

    def value(self, state: State, base: Base) -> Tensor:
        return torch.stack([state[1], state[2] / state[0].clamp(min=1)], dim=1)

    def vjp(self, values: Tensor, index: Tensor, state: State, value: Tensor, grad: Tensor, base: Base) -> Tensor:
        count, (mean, _), (grad_mean, grad_variance) = state[0].clamp(min=1), value[0], grad[0]
        return (grad_mean + 2 * (values - mean) * grad_variance) / count

    def whole(self, values: Tensor, index: Tensor, num_dst: int, base: Base) -> Tensor:
        raise InternalError("moments over the edges of all ranks are made of sums")


REDUCERS: dict[str, Reducer] = {
    reducer.name: reducer
    for reducer in (
        Sum(),
        Extremum("max"),
        Extremum("min"),
        FirstExtremum("max"),
        FirstExtremum("min"),
        Prod(),
        EdgeMoments(),
    )
}
