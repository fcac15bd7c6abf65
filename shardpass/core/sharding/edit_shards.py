"""Shards of an edge list with some edges dropped and self-loops added, made from shards that are sorted already.

Sorting the whole list again would take several times its memory. What is added gets a shard of its own, and an edge
that is dropped and added again, as self-loops often are, stays where it is. So most shards are those of the other list,
and so are their transposes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shardpass.core.sharding.shard import (
    EdgeShards,
    LazyTensor,
    Shard,
    SpreadRows,
    build_shards,
    running,
    smallest_index_dtype,
)

_FEW = 256


def edit_shards(base: EdgeShards, dropped: Tensor | None, added: Sequence[Tensor]) -> EdgeShards:
    """The shards of the edges of `base` without those `dropped`, followed by those `added`.

    Args:
        base: its shards are in the order of the rounds.
        dropped: places in the edge list of `base`, ascending. None drops none.
        added: ``[2, k]`` each: own source rows and own destination rows. They get one more shard of the own block.
    """
    shards, num_kept = list(base.shards), base.num_edges
    new = torch.cat([base.shards[0].indptr.new_empty((2, 0)), *added], 1).long()
    is_new = torch.ones(new.size(1), dtype=torch.bool, device=new.device)
    if dropped is not None:
        kept, num_kept = without(dropped, base.num_edges), base.num_edges - dropped.numel()
        for number, shard in enumerate(shards):
            lost = (~shard.select(kept)).nonzero().view(-1)
            again = _found_again(shard, lost, new) if number in base.numbers(0) else None
            if again is not None:
                is_new[again] = False
                again = (again + num_kept).to(smallest_index_dtype(num_kept + new.size(1)))
            shards[number] = _left(shard, kept, dropped, lost, again)
    num_own = base.num_own
    if is_new.any():
        src_rows, dst_rows = new[:, is_new]
        (extra,) = build_shards(src_rows, dst_rows, [base.shards[0].block], base.num_dst).shards
        rows = extra.edge_rows
        if is_new.all() and isinstance(rows, slice):
            rows = slice(num_kept, num_kept + extra.num_edges)
        else:
            rows = is_new.nonzero().view(-1)[rows] + num_kept
        shards.insert(num_own, replace(extra, rows=rows))
        num_own += 1
    return EdgeShards(tuple(shards), base.num_dst, num_kept + new.size(1), num_own=num_own)


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


def _found_again(shard: Shard, lost: Tensor, new: Tensor) -> Tensor | None:
    """Which of the edges `new` each edge at the positions `lost` is; None if one of them is none of these."""
    if not 0 < lost.numel() <= new.size(1):
        return None
    ends = torch.searchsorted(shard.indptr, lost, right=True) - 1
    wanted, keys = shard.src_rows[lost].long() * shard.num_dst + ends, new[0] * shard.num_dst + new[1]
    keys, order = keys.sort()
    found = torch.searchsorted(keys, wanted).clamp(max=keys.numel() - 1)
    is_each = torch.equal(keys[found], wanted) and found.unique().numel() == found.numel()
    return order[found] if is_each else None


def _left(shard: Shard, kept: Tensor, dropped: Tensor, lost: Tensor, again: Tensor | None) -> Shard:
    """A shard in the list without the edges `dropped`. Its own at the positions `lost` come `again` there, or not."""
    places = shard.rows
    rows: slice | LazyTensor | SpreadRows = LazyTensor(partial(_places, shard, dropped, kept.numel(), again))
    if isinstance(places, slice):
        first = int(kept[: places.start].count_nonzero())
        rows = slice(first, first + shard.num_edges - lost.numel())
        if again is not None:
            rows = SpreadRows(first, lost.to(smallest_index_dtype(shard.num_edges)), again)
    if again is not None or lost.numel() == 0:
        return replace(shard, rows=rows)
    chosen = shard.select(kept)
    return Shard(shard.block, running(chosen)[shard.indptr], shard.src_rows[chosen], rows)


def _places(shard: Shard, dropped: Tensor, num_edges: int, again: Tensor | None) -> Tensor:
    """Where these edges stand in that list. Only calls with edge tensors read it."""
    kept, places = without(dropped, num_edges), shard.edge_rows
    left, found = kept[places], running(kept)[:-1][places]
    return found[left] if again is None else found.to(again.dtype).masked_scatter(~left, again)
