"""Indices whose values are numbers of rows: what they point to, and what may stand beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from shardpass.core.following.joins import ATEN, Joins
from shardpass.core.following.origin import Origin
from shardpass.core.following.refusals import NUMBERS
from shardpass.core.following.rows import Rows
from shardpass.core.ranks import RowSet


def _is_every_row(index: Tensor, count: int) -> bool:
    """Whether an index takes all rows in their order, as ``torch.arange`` does."""
    return index.numel() == count and bool((index.flatten() == torch.arange(count, device=index.device)).all())


class Pointers(Joins):
    """An operation that may take rows by their numbers."""

    def _with_pointers(self, given: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        """Several indices, with the numbers of the rows that it picks in the place of a mask of rows."""
        found = []
        for dim, index in given:
            mask = self._of(index)
            if mask is not None and index.dtype == torch.bool and index.dim() == 1:
                numbers = ATEN.nonzero(index).view(-1)
                picked = self.marks.selection(index, mask.of, numbers.size(0))
                self.leaves.append(numbers)
                self.rows[len(self.leaves) - 1] = Rows(0, picked, points_to=mask.of)
                index = numbers
            found.append((dim, index))
        return found

    def _check_beside(self, pointer: Rows, dims: int, others: list[Tensor]) -> None:
        """Refuse other indices beside one that points to rows, if they depend on where rows are."""
        for other in others:
            beside, dim = self._of(other), pointer.dim - dims + other.dim()
            if beside is not None and beside.points_to is not None:
                self._refuse("takes entries of a row by the numbers of rows", beside.points_to, NUMBERS)
            if beside is not None and not beside.of.goes_with(pointer.of):
                self._refuse(f"puts rows of {pointer.of.name} beside rows of {beside.of.name}")
            if beside is None and -1 < dim < other.dim() and other.size(dim) > 1:
                self._check_plain(other, dim, pointer.of)

    def _pointer(self, index: Tensor, table: Rows) -> Rows:
        """Where the rows stand in an index, whose values are numbers of rows of a table."""
        found = self._of(index)
        target = None if found is None else found.points_to
        if target is not None and (target.goes_with(table.of) or table.of.root == ("reached", target.root)):
            assert found is not None
            return found
        is_made = self.marks.is_around or self.marks.origins.get(index) == Origin.NUMBERS
        if found is None and is_made and _is_every_row(index, table.of.count):
            return Rows([*index.shape].index(table.of.count), table.of)
        if found is None and self.marks.origins.get(index) == Origin.FREE and index.dim() == 1 and table.of.is_of_edges:
            drawn = RowSet(f"drawn {table.of.name}", index.numel(), ("drawn", object()), table.of.count)
            self.marks.mark(index, Rows(0, drawn, points_to=table.of))  # torch.randperm: what edge dropout keeps
            return Rows(0, drawn)
        self._refuse("takes rows by numbers that do not come from the graph", table.of, NUMBERS)

    def _is_looked_up(self, table: Tensor, dim: int, index: Tensor) -> bool:
        """Whether entries of a table without rows are taken by numbers of rows, for each of which it has the same."""
        found = self._of(index)
        if found is None or found.points_to is None or self._of(table) is not None:
            return False
        if table.size(dim) != found.points_to.count:
            self._refuse("takes entries of another tensor by the numbers of rows", found.points_to, NUMBERS)
        self._check_plain(table, dim, found.points_to)
        return True
