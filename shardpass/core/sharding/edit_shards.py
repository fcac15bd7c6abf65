"""Shards of an edge list with some edges dropped and others added, merged from shards that are sorted already.

Sorting the whole list again would take several times its memory. Only edge tensors need the place of each edge in the
list, so it is made when it is first read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shardpass.core.sharding.shard import EdgeShards, LazyTensor, Shard, build_shards, running, smallest_index_dtype

_FEW = 256


def edit_shards(base: EdgeShards, dropped: Tensor | None, added: Tensor | None) -> EdgeShards:
    """What `build_shards` would make of the edges of `base` without those `dropped`, followed by those `added`.

    Args:
        base: its shards are in the order of the rounds.
        dropped: places in the edge list of `base`, ascending. None drops none.
        added: ``[2, k]`` in own-first source rows and own destination rows, or None.
    """
    kept = None if dropped is None else without(dropped, base.num_edges)
    num_kept = base.num_edges - (0 if dropped is None else dropped.numel())
    blocks = [shard.block for shard in base.shards]
    if added is None:
        added = base.shards[0].indptr.new_empty((2, 0))
    src_rows, dst_rows = added.long()
    extra = build_shards(src_rows, dst_rows, blocks, base.num_dst)
    num_edges = num_kept + extra.num_edges
    shards = []
    for mine, theirs in zip(base.shards, extra.shards):
        places_left = partial(_places_left, mine, dropped, base.num_edges, smallest_index_dtype(num_edges))
        shards.append(_edited(mine, theirs, kept, num_kept, places_left))
    return EdgeShards(tuple(shards), base.num_dst, num_edges)


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


def _edited(mine: Shard, extra: Shard, kept: Tensor | None, num_kept: int, places_left: Callable[[], Tensor]) -> Shard:
    """The shard of the kept edges of `mine` and all of `extra`, which come last in each destination row."""
    chosen = None if kept is None else mine.select(kept)
    if chosen is None or bool(chosen.all()):
        left, src_rows = mine.indptr, mine.src_rows
    else:
        left, src_rows = running(chosen)[mine.indptr], mine.src_rows[chosen]
    if extra.num_edges == 0:
        return Shard(mine.block, left, src_rows, mine.rows if kept is None else LazyTensor(places_left))
    small = smallest_index_dtype(src_rows.numel() + extra.num_edges)
    left, after = left.to(small), extra.indptr.to(small)

    def places() -> Tensor:
        theirs = extra.places(torch.arange(extra.num_edges, device=after.device))
        assert isinstance(theirs, Tensor)
        return _merged(places_left(), left, theirs + num_kept, after)

    return Shard(mine.block, left + after, _merged(src_rows, left, extra.src_rows, after), LazyTensor(places))


def _places_left(mine: Shard, dropped: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
    """The places that the edges of `mine` that are not dropped have among all `count` edges that are not."""
    places = mine.places(torch.arange(mine.num_edges, device=mine.indptr.device))
    assert isinstance(places, Tensor)
    if dropped is not None:
        kept = without(dropped, count)
        places = running(kept)[places[kept[places]]]
    return places.to(dtype)


def _merged(mine: Tensor, left: Tensor, extra: Tensor, after: Tensor) -> Tensor:
    """The values of two lists that `left` and `after` ``[num_dst + 1]`` group, by group, those of `mine` first."""
    out = mine.new_empty(mine.numel() + extra.numel())
    for values, own, before in ((mine, left, after[:-1]), (extra, after, left[1:])):
        places = torch.repeat_interleave(before.to(own.dtype), own.diff(), output_size=values.numel())
        places += torch.arange(values.numel(), dtype=places.dtype, device=places.device)
        out[places] = values.to(out.dtype)
    return out
