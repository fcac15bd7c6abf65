"""The edges of several parts as those of one rank, merged piece by piece, so that no part is in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from shardpass.core.sharding import OwnerEdges, smallest_index_dtype
from shardpass.data.part_edges import PartEdges
from shardpass.data.rows import SIGNED_TWIN

_EDGES_AT_ONCE = 1 << 16


class EdgePiece(NamedTuple):
    """Some edges from one source part: where they are stored, and where they stand among those of the same owner."""

    source: int
    stored: slice
    places: Tensor


class MergedEdges:
    """The edges into the nodes of a rank, which owns several parts or has peers that do.

    The list has the edges of one owner after those of another, by destination, then by source part.

    Args:
        parts: the rank's edges, part by part.
        groups: the parts of each rank.
        offsets: of the source nodes of the parts, num_parts + 1 numbers.
    """

    def __init__(self, parts: Sequence[PartEdges], groups: Sequence[range], rank: int, offsets: Sequence[int]) -> None:
        self.parts, self.groups, self.rank, self.offsets = parts, groups, rank, offsets
        self._counts = [sum(sum(part.counts[group.start : group.stop]) for part in parts) for group in groups]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The rows of all parts, each part's as they are stored, in the order of the list."""
        out = torch.empty((sum(self._counts), *tensors[0].shape[1:]), dtype=tensors[0].dtype)
        twin = SIGNED_TWIN.get(out.dtype, out.dtype)
        for group, first in zip(self.groups, accumulate(self._counts, initial=0)):
            for rows, (part, starts, before) in zip(tensors, self._row_starts(group)):
                for piece in _pieces(group, part, starts, first + before):
                    out.view(twin)[piece.places] = rows.view(twin)[piece.stored]
        return out

    def from_owner(self, owner: int) -> OwnerEdges:
        """The edges from a rank's nodes."""
        group, num_edges = self.groups[owner], self._counts[owner]
        shift = [self.offsets[source] - self.offsets[group.start] for source in group]
        needed: list[Tensor] = []  # of each source part, the rows that any of the rank's parts needs, ascending
        if owner != self.rank:
            needed = [torch.cat([part.halo_rows(source) for part in self.parts]).unique() for source in group]
        src_rows = torch.empty(num_edges, dtype=torch.int32)
        indptr = torch.zeros(sum(part.num_dst for part in self.parts) + 1, dtype=smallest_index_dtype(num_edges))
        row = 0
        for number, (part, starts, before) in enumerate(self._row_starts(group)):
            new_rows = self._new_rows(owner, number, needed, shift)
            for piece in _pieces(group, part, starts, before):
                stored = part.read("src_rows", piece.stored.start, piece.stored.stop)
                table = new_rows[piece.source - group.start]
                src_rows[piece.places] = stored + table if isinstance(table, int) else table[stored]
            row_ends = indptr[row + 1 : row + part.num_dst + 1]
            torch.sum(starts[:, 1:], 0, dtype=indptr.dtype, out=row_ends)
            row_ends += before
            row += part.num_dst
        rows = [rows + first for rows, first in zip(needed, shift)]
        return OwnerEdges(torch.cat(rows) if rows else src_rows[:0], indptr, src_rows)

    def _new_rows(self, owner: int, number: int, needed: list[Tensor], shift: list[int]) -> list[Tensor | int]:
        """For each source part of an owner, what becomes of the source rows of a part: new ones, or by how much more.

        Args:
            number: of the part among those of the rank.
            needed: of each source part; empty if the rank is the owner.
            shift: where each source part's nodes begin among the owner's.
        """
        found: list[Tensor | int] = []
        firsts = accumulate((rows.numel() for rows in needed), initial=0)
        for source, more in zip(self.groups[owner], shift):
            halo = self.parts[number].halo_rows(source)
            if owner != self.rank:
                first, rows = next(firsts), needed[source - self.groups[owner].start]
                found.append(torch.searchsorted(rows, halo, out_int32=True) + first)
            else:
                found.append(more if source == self.groups[owner][number] else halo + more)
        return found

    def _row_starts(self, group: range) -> Iterator[tuple[PartEdges, Tensor, int]]:
        """Each part of the rank, the row pointers of its edges from a group, and how many of these came before it."""
        before = 0
        for part in self.parts:
            starts = part.row_starts(group)
            yield part, starts, before
            before += int(starts[:, -1].sum())


def _pieces(group: range, part: PartEdges, starts: Tensor, before: int) -> Iterator[EdgePiece]:
    """The edges of a part from the source parts of a group, some destinations at a time.

    Args:
        starts: the row pointers, [len(group), num_dst + 1].
        before: how many edges stand before those of the part.
    """
    total, edge_starts, row = starts.sum(0), part.edge_starts, 0
    while row < part.num_dst:
        reached = int(torch.searchsorted(total, total[row] + _EDGES_AT_ONCE, right=True)) - 1
        stop = min(part.num_dst, max(row + 1, reached))
        some = starts[:, row : stop + 1].long()
        counts = some.diff(dim=1)
        by_row = counts.t().reshape(-1)
        firsts = (by_row.cumsum(0) - by_row).view(stop - row, len(group)) + (before + total[row])
        for place, source in enumerate(group):
            begin, end = int(some[place, 0]), int(some[place, -1])
            shift = firsts[:, place] - (some[place, :-1] - begin)
            places = torch.repeat_interleave(shift, counts[place], output_size=end - begin) + torch.arange(end - begin)
            yield EdgePiece(source, slice(edge_starts[source] + begin, edge_starts[source] + end), places)
        row = stop
