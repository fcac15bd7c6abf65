"""Rows of nodes for a piece of the edges, and back: the gathers and scatters around a message function."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardpass.core.kernels.cpu_loops import COMPILED_LOOPS, numba_loops_for
from shardpass.core.ranks import torch_private

_FEW_THREADS = 2  # with more of them, torch's own parallel gather is faster than one thread that prefetches


def shaped(tensor: Tensor, tail: Sequence[int]) -> Tensor:
    """`tensor` with rows of the shape `tail`: itself if it has them, or a view where there can be one."""
    return tensor if tensor.shape[1:] == tuple(tail) else tensor.reshape(-1, *tail)


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]``, ``[len(index), ...]``, without gradients.

    Args:
        rows: ``[num_rows, ...]``.
        index: int32 or int64, within range: the compiled loop does not look.
    """
    loops = numba_loops_for(rows) if rows.is_contiguous() and torch.get_num_threads() <= _FEW_THREADS else None
    if loops is None or not _is_loop_sized(rows, index):
        return rows.index_select(0, index)
    out = rows.new_empty((index.numel(), *rows.shape[1:]))
    with torch_private.span(COMPILED_LOOPS):
        loops.gather_rows(_flat(rows), index.contiguous().numpy(), _flat(out))
    return out


def scatter_rows(out: Tensor, index: Tensor, rows: Tensor) -> None:
    """``out[index] += rows`` in place, in the order of `index`, which may name a row several times.

    Args:
        out: ``[num_rows, ...]``.
        index: int32 or int64, within range: the compiled loop does not look.
        rows: ``[len(index), ...]``.
    """
    loops = numba_loops_for(out)
    if loops is None or rows.dtype != out.dtype or not out.is_contiguous() or not _is_loop_sized(rows, index):
        out.index_add_(0, index.long(), rows)  # torch takes four times as long with an int32 index
        return
    with torch_private.span(COMPILED_LOOPS):
        loops.scatter_rows(_flat(out), index.contiguous().numpy(), _flat(rows))


def _is_loop_sized(rows: Tensor, index: Tensor) -> bool:
    """Whether a compiled loop has something to do."""
    return index.numel() > 0 and rows.shape[1:].numel() > 0


def _flat(rows: Tensor) -> object:
    return rows.detach().contiguous().view(rows.size(0), -1).numpy()
