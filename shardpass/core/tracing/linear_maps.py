"""Linear maps of what the ends of an edge hold: ``W [x_i, x_j, e] = W_1 x_i + W_2 x_j + W_3 e``.

Where a message function maps the rows of both ends side by side, the map of a node is the same for all of its edges.
The probe finds such calls of ``torch.nn.functional.linear`` by what their input is made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shardpass.core.tracing.expression import Expr

EndSide = Literal["src", "dst"]
_END_SIDES: tuple[EndSide, ...] = ("src", "dst")
_DTYPES = (torch.float32, torch.float64)  # in half precision each part would be rounded before they are added


@dataclass(frozen=True)
class Columns:
    """Columns of a map's input that are rows of one end.

    Args:
        side, name: which input of the program.
        tail: shape of one of its rows.
        picks: the places taken along the first dimensions of such a row, as by ``x[:, tower]``.
        start, stop: which columns.
    """

    side: EndSide
    name: str
    tail: tuple[int, ...]
    picks: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class LinearMap:
    """One call of ``linear`` inside a message function.

    Args:
        number: of the call, counted from 0 as the message function runs.
        ends: the columns that hold rows of an end.
        weight: ``[out_channels, in_channels]``, made outside, as is `bias`.
    """

    number: int
    ends: tuple[Columns, ...]
    weight: Tensor
    bias: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """The weight, and the bias if there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def others(self) -> list[tuple[int, int]]:
        """``(start, stop)`` of the columns between those of the ends."""
        bounds = [0, *(bound for part in self.ends for bound in (part.start, part.stop)), self.weight.size(1)]
        return [(start, stop) for start, stop in zip(bounds[::2], bounds[1::2]) if start < stop]

    @property
    def sides(self) -> list[EndSide]:
        """The ends that it maps, sources first."""
        return [side for side in _END_SIDES if any(part.side == side for part in self.ends)]

    @property
    def table_name(self) -> str:
        """Under which the mapped rows of an end are an input of the program."""
        return f"linear map {self.number}"

    def describe(self) -> str:
        """What ranks must have in common to map nodes instead of edges."""
        return f"{self.number} {self.ends} {[(list(t.shape), t.dtype, t.requires_grad) for t in self.tensors]}"


def linear_map(number: int, input: Expr, args: tuple[Any, ...], is_outside: list[bool]) -> LinearMap | None:
    """The map that call `number` of ``linear`` makes, if some of its columns are rows of an end and it is worth it.

    Args:
        input: what its input is made of.
        args: of the call: input, weight, and maybe bias.
        is_outside: whether weight, and bias, were made outside the message function.
    """
    rows, weight, bias = (*args, None)[:3]
    if not all(is_outside) or rows.dim() < 2 or weight.dim() != 2:
        return None
    if rows.dtype not in _DTYPES or rows.dtype != weight.dtype or torch.is_autocast_enabled(rows.device.type):
        return None
    ends: list[Columns] = []
    start = 0
    for part, picks in _side_by_side(input):
        taken = part.tail[len(picks) :]
        stop = start + taken[-1]
        sides = [side for side in _END_SIDES if part.op == side and taken[:-1] == tuple(rows.shape[1:-1])]
        ends += [Columns(side, part.args[0], part.tail, picks, start, stop) for side in sides]
        start = stop
    # wider rows for each edge would cost more than a map of a few columns
    if start != weight.size(1) or weight.size(0) > sum(part.stop - part.start for part in ends):
        return None
    return LinearMap(number, tuple(ends), weight, bias)


def _side_by_side(expr: Expr, picks: tuple[int, ...] = ()) -> Iterator[tuple[Expr, tuple[int, ...]]]:
    """The tensors whose columns are side by side in `expr`, and the places taken in each of their rows."""
    if expr.op == "cat" and expr.tail == (*expr.args[0].tail[:-1], sum(part.tail[-1] for part in expr.args)):
        for part in expr.args:
            yield from _side_by_side(part, picks)
    elif expr.op == "pick" and expr.tail == expr.args[0].tail[1:]:
        yield from _side_by_side(expr.args[0], (expr.args[1], *picks))
    else:
        yield expr, picks
