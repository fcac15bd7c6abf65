"""Rows of several sets, one after the other, in one tensor: how they come together, and how they are told apart."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from shardpass.core.following.primitive import Primitive
from shardpass.core.following.rows import Rows
from shardpass.core.ranks import RowSet, loops_first

ATEN = torch.ops.aten
_PARTS = frozenset([ATEN.slice, ATEN.split, ATEN.split_with_sizes])


class Joins(Primitive):
    """Operations that join rows and part them again."""

    def _join(self) -> bool:
        """``torch.cat`` along rows of different sets, as of edges and the self-loops of nodes. Whether it was that."""
        pieces, dim = self.args[0], (self.args[1] if len(self.args) > 1 else 0)
        found = [(self._of(piece), piece) for piece in pieces]
        found = [(rows, piece) for rows, piece in found if rows is not None or piece.numel() or piece.dim() > 1]
        along = [rows for rows, piece in found if rows is not None and rows.dim == dim % piece.dim()]
        if not along or (len({rows.of for rows in along}) == 1 and len(along) == len(found) and len(found) > 1):
            return False
        roots = tuple(
            piece.size(dim) if rows is None else replace(rows, dim=0, points_to=None) for rows, piece in found
        )
        edges = next((rows.of for rows in along if rows.of.is_of_edges), None)
        count = self.outs[0].size(dim)
        counts = {known.count for known in self.marks.known}  # of rows without a mark, such as zeros for self-loops
        copies = sum(piece for piece in roots if isinstance(piece, int) and piece not in counts)
        copies += sum(rows.of.copies for rows in along)
        joined = along[0].of if len(found) == 1 else RowSet("joined rows", count, ("joined", roots), copies=copies)
        relations = {rows.of.relation for rows in along if rows.of.is_of_edges}
        if edges is not None and len(relations) == 1:
            comes_first = found[0][0] is not None and found[0][0].of.is_of_edges
            joined = RowSet(edges.name, count, edges.root if comes_first else loops_first(edges.root), copies=copies)
        elif edges is not None:
            joined = replace(joined, name=edges.name)
        targets = {rows.points_to for rows in along}
        points_to = targets.pop() if len(targets) == 1 else None
        self._mark([Rows(dim % self.outs[0].dim(), joined, points_to=points_to)])
        return True

    def _part(self) -> bool:
        """A slice or split of joined rows where they were joined, each part with all rows of a set.

        Whether it was that. Where this rank has no rows of some set, a part goes with any rows of its number.
        """
        rows, table = self.first, self.leaves[next(iter(self.rows))]
        pieces = _pieces(rows)
        starts = self._starts(table)
        if len(pieces) < 2 or starts is None:
            return False
        bounds = [0, *accumulate(_size(piece) * rows.inner for piece in pieces)]
        found: list[Rows | None] = []
        for start, out in zip(starts, self.outs):
            size = out.size(rows.dim)
            fits = [
                piece for piece, low, high in zip(pieces, bounds, bounds[1:]) if (start, start + size) == (low, high)
            ]
            if not fits or not isinstance(piece := fits[0], Rows):
                return False
            of = piece.of if 0 not in map(_size, pieces) else replace(piece.of, count=size, root=None)
            found.append(replace(piece, dim=rows.dim, of=of, inner=piece.inner * rows.inner, points_to=rows.points_to))
        self._mark(found)
        return True

    def _starts(self, table: Tensor) -> list[int] | None:
        """Where the results of a slice or a split along rows begin; `None` if it is something else."""
        if self.packet not in _PARTS:
            return None
        dim = (*self.args, 0, 0)[1 if self.packet is ATEN.slice else 2]
        if dim % table.dim() != self.first.dim or self.args[4:] not in ((), (1,)):
            return None
        if self.packet is ATEN.slice:
            return [slice(*(*self.args, None, None)[2:4]).indices(table.size(dim))[0]]
        return [*accumulate([0, *(out.size(dim) for out in self.outs)])][:-1]


def _size(piece: Rows | int) -> int:
    return piece if isinstance(piece, int) else piece.size


def _pieces(rows: Rows) -> list[Rows | int]:
    """The whole sets that stand one after the other in rows; a number stands for entries that are no rows."""
    root = rows.of.root
    joined = root[1] if isinstance(root, tuple) and root[0] == "joined" else [Rows(0, rows.of)]
    return [*joined] * rows.outer
