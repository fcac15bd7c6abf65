"""Shards of an edge list with some edges dropped and others added, merged from shards that are sorted already.

Sorting the whole list again would take several times its memory. Only edge tensors need the place of each edge in the
list, so it is made when it is first read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shardpass.core.sharding.shard import EdgeShards, LazyTensor, Shard, build_shards, running, smallest_index_dtype

_FEW = 256


def edit_shards(base: EdgeShards, dropped: Tensor | None, added: Sequence[Tensor]) -> EdgeShards:
    """What `build_shards` would make of the edges of `base` without those `dropped`, followed by those `added`.

    Args:
        base: its shards are in the order of the rounds.
        dropped: places in the edge list of `base`, ascending. None drops none.
        added: ``[2, k]`` each, in own-first source rows and own destination rows.
    """
    edit = _Edit(base, dropped, added)
    kept = None if dropped is None else without(dropped, base.num_edges)
    extra = edit.extra()
    num_edges = edit.num_kept + sum(shard.num_edges for shard in extra)
    shards = tuple(edit.shard(number, extra[number], kept) for number in range(len(extra)))
    return EdgeShards(shards, base.num_dst, num_edges)


def without(dropped: Tensor, count: int) -> Tensor:
    """A mask of `count` places that is false at those in `dropped`."""
    mask = torch.ones(count, dtype=torch.bool, device=dropped.device)
    mask[dropped.long()] = False
    return mask


def rows_left(rows: Tensor, dropped: Tensor) -> Tensor:
    """`rows` without those at the places `dropped`."""
    if dropped.numel() > _FEW:
        return rows[without(dropped, rows.numel())]
    first, *others = rows.tensor_split(dropped.cpu().long())  # a mask takes four times as long
    return torch.cat([first, *(piece[1:] for piece in others)])


@dataclass(frozen=True)
class _Edit:
    """What is done to an edge list. It is kept until the places of the new edges are read, so it holds little."""

    base: EdgeShards
    dropped: Tensor | None
    added: Sequence[Tensor]

    @property
    def num_kept(self) -> int:
        return self.base.num_edges - (0 if self.dropped is None else self.dropped.numel())

    def extra(self) -> tuple[Shard, ...]:
        """The shards of the added edges."""
        none = self.base.shards[0].indptr.new_empty((2, 0))
        src_rows, dst_rows = torch.cat([none, *self.added], 1).long()
        return build_shards(src_rows, dst_rows, [shard.block for shard in self.base.shards], self.base.num_dst).shards

    def shard(self, number: int, extra: Shard, kept: Tensor | None) -> Shard:
        """The shard of the edges of a block that are `kept`, and of `extra`, which come last in each destination."""
        mine = self.base.shards[number]
        left, src_rows = _left(mine, kept)
        places = LazyTensor(partial(self._places, number))
        if extra.num_edges == 0:
            return Shard(mine.block, left, src_rows, mine.rows if kept is None else places)
        small = smallest_index_dtype(src_rows.numel() + extra.num_edges)
        left, after = left.to(small), extra.indptr.to(small)
        return Shard(mine.block, left + after, _merged(src_rows, left, extra.src_rows, after), places)

    def _places(self, number: int) -> Tensor:
        """Where the edges of a block stand in the new list."""
        mine, kept = self.base.shards[number], None
        places = mine.places(torch.arange(mine.num_edges, device=mine.indptr.device))
        assert isinstance(places, Tensor)
        if self.dropped is not None:
            kept = without(self.dropped, self.base.num_edges)
            places = running(kept)[places[kept[places]]]
        extra = self.extra()[number]
        theirs = extra.places(torch.arange(extra.num_edges, device=mine.indptr.device))
        assert isinstance(theirs, Tensor)
        left, _ = _left(mine, kept)
        small = smallest_index_dtype(self.num_kept + sum(edges.size(1) for edges in self.added))
        return _merged(places.to(small), left.to(small), theirs + self.num_kept, extra.indptr.to(small))


def _left(mine: Shard, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(indptr, src_rows)`` of the edges of a shard that are kept."""
    chosen = None if kept is None else mine.select(kept)
    if chosen is None or bool(chosen.all()):
        return mine.indptr, mine.src_rows
    return running(chosen)[mine.indptr], mine.src_rows[chosen]


def _merged(mine: Tensor, left: Tensor, extra: Tensor, after: Tensor) -> Tensor:
    """The values of two lists that `left` and `after` ``[num_dst + 1]`` group, by group, those of `mine` first."""
    out = mine.new_empty(mine.numel() + extra.numel())
    for values, own, before in ((mine, left, after[:-1]), (extra, after, left[1:])):
        places = torch.repeat_interleave(before.to(own.dtype), own.diff(), output_size=values.numel())
        places += torch.arange(values.numel(), dtype=places.dtype, device=places.device)
        out[places] = values.to(out.dtype)
    return out
