"""Which dimension of a tensor holds rows of nodes or edges, and what becomes of it where the tensor is only viewed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from shardpass.core.ranks import RowSet


@dataclass(frozen=True)
class Rows:
    """Where the rows of a set stand in a tensor, ``tensor.size(dim) == outer * of.count * inner``.

    Args:
        dim: the dimension.
        of: the set.
        outer, inner: how many times all rows are repeated, and how many entries in a row belong to one of them. Both
            are 1 unless a view has merged dimensions.
        points_to: the values are numbers of rows of this set, as destinations of edges are numbers of nodes.
    """

    dim: int
    of: RowSet
    outer: int = 1
    inner: int = 1
    points_to: RowSet | None = None

    @property
    def size(self) -> int:
        """The size of the dimension."""
        return self.outer * self.of.count * self.inner

    def fit(self, tensor: Tensor) -> bool:
        """Whether `tensor` has such a dimension."""
        return -1 < self.dim < tensor.dim() and tensor.size(self.dim) == self.size

    def picked(self, tensor: Tensor, numbers: Tensor) -> Tensor:
        """The rows `numbers` of a tensor that has some rows like these, each with all of its entries."""
        apart = tensor.unflatten(self.dim, (self.outer, -1, self.inner))
        return apart.index_select(self.dim + 1, numbers).flatten(self.dim, self.dim + 2)

    def put(self, tensor: Tensor, numbers: Tensor, values: Tensor) -> None:
        """Write `values`, which `picked` returned, where it found them."""
        apart = tensor.unflatten(self.dim, (self.outer, -1, self.inner))
        apart.index_copy_(self.dim + 1, numbers, values.unflatten(self.dim, (self.outer, -1, self.inner)))


def reshaped(rows: Rows, old: Sequence[int], new: Sequence[int]) -> Rows | None:
    """Where the rows stand after a reshape from the shape `old` to `new`; `None` if no dimension holds them any more.

    A reshape keeps the order of the entries. They are `before` repetitions of all rows, of which each has `after`
    entries; the new dimension must cut them at the same places.
    """
    count = rows.of.count
    if count == 0:
        return next((replace(rows, dim=dim, outer=1, inner=1) for dim, size in enumerate(new) if size == 0), None)
    before, after = prod(old[: rows.dim]) * rows.outer, rows.inner * prod(old[rows.dim + 1 :])
    fits = []
    for dim, size in enumerate(new):
        outside = prod(new[:dim])
        if outside and before % outside == 0 and size % (before // outside * count) == 0:
            outer = before // outside
            inner = size // (outer * count)
            if inner * prod(new[dim + 1 :]) == after:
                fits.append(replace(rows, dim=dim, outer=outer, inner=inner))
    # of one row, several dimensions may: rather one that is merged with others before it, as linear layers do it
    return min(fits, key=lambda one: (one.inner, one.outer, one.dim != rows.dim), default=None)


def reshaped_at(rows: Rows, old: Sequence[int], new: Sequence[int], dim: int) -> Rows | None:
    """Where the rows stand after a reshape that says of the dimension `dim` that it holds them; `None` if it does not.

    No number of rows decides: the entries before and after each row must divide what stands before and after `dim`.
    """
    before, after = prod(old[: rows.dim]) * rows.outer, rows.inner * prod(old[rows.dim + 1 :])
    outside, inside = prod(new[:dim]), prod(new[dim + 1 :])
    if not outside or not inside or before % outside or after % inside:
        return None
    found = replace(rows, dim=dim, outer=before // outside, inner=after // inside)
    return found if found.size == new[dim] else None
