"""Functions that fail on the rows of this rank and would not fail on those of the whole graph, which has more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardpass.core.following.follow import FollowRows
from shardpass.core.following.refusals import ALL_ROWS, NUMBERS, refusal
from shardpass.core.following.row_count import RowCount, own_of, plain_sizes
from shardpass.core.following.rows import Rows
from shardpass.core.ranks import RowSet, is_out_of_memory, torch_private
from shardpass.errors import RefusedError, ShardpassError

_MOST = 1 << 24
"""Of how many entries a tensor is made to find out."""


def explained_failure(
    follower: FollowRows, name: str, func: Callable[..., Any], args: Any, kwargs: Any, error: Exception
) -> Exception:
    """What to raise where a function failed with `error`: `error` itself if it fails on the whole graph too.

    It is run again, on as many rows as all ranks have.

    Args:
        follower: knows which tensors hold rows.
        name: of the function.
        func, args, kwargs: the function, and what it was given: own counts are told from other numbers.
    """
    if isinstance(error, (RefusedError, ShardpassError)) or is_out_of_memory(error):
        return error
    with follower.paused(), torch.no_grad():
        return _explained(follower, name, func, (args, kwargs), error)


def _explained(
    follower: FollowRows, name: str, func: Callable[..., Any], given: tuple[Any, Any], error: Exception
) -> Exception:
    leaves, structure = torch_private.tree_flatten(given)
    rows = {i: found for i, leaf in enumerate(leaves) if (found := _rows_of(follower, leaf)) is not None}
    if not rows:
        return error
    whole = [_whole(leaf, rows.get(i), follower) for i, leaf in enumerate(leaves)]
    if any(isinstance(leaf, Tensor) and leaf.numel() > _MOST for leaf in whole):
        return error
    args, kwargs = torch_private.tree_unflatten(whole, structure)
    try:
        func(*plain_sizes(args), **{key: plain_sizes(value) for key, value in kwargs.items()})
    except Exception:  # whatever is raised for what does not fit: the user's mistake
        return error
    of = next(iter(rows.values())).of
    by_number = isinstance(error, IndexError) or "out of range in self" in str(error)
    return refusal(
        f"`{name}` fails on the {of.count} {of.name} of this rank, though not on as many as all ranks have ({error})",
        NUMBERS if by_number else ALL_ROWS,
    )


def _rows_of(follower: FollowRows, leaf: Any) -> Rows | None:
    if isinstance(leaf, RowCount):
        return Rows(0, leaf.of)
    if type(leaf) is not Tensor:
        return None
    follower.marks.recognise(leaf)
    return follower.marks.rows_of(leaf)


def _whole(leaf: Any, rows: Rows | None, follower: FollowRows) -> Any:
    """What stands for `leaf` on the whole graph: the rows of this rank again and again, or zeros if it has none."""
    if rows is None:
        return leaf.clone() if type(leaf) is Tensor else leaf
    total = _total(rows.of, follower)
    if not isinstance(leaf, Tensor):
        return total if own_of(leaf) == rows.of.count else leaf
    shape = [*leaf.shape]
    shape[rows.dim] = rows.outer * total * rows.inner
    if not leaf.numel():
        return leaf.new_zeros(shape)
    numbers = torch.arange(total, device=leaf.device) % rows.of.count
    return rows.picked(leaf.detach(), numbers).clone()


def _total(of: RowSet, follower: FollowRows) -> int:
    totals = {known: known.total or known.count for known in follower.marks.known}
    return max(of.count, of.total or totals.get(of) or max(totals.values(), default=0))
