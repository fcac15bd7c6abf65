"""Sums of source rows over one shard, and their adjoints, by the fastest kernel that takes the tensors."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from shardpass.core.kernels import cpu, heads, reference
from shardpass.core.kernels.gpu import triton_for
from shardpass.core.sharding import PlacedRows, Shard, Transposes


def gather_sum(
    out: Tensor, shard: Shard, rows: Tensor | PlacedRows, weight: Tensor | None, fresh: bool = False
) -> None:
    """``out[dst] += weight * rows[src]`` over the shard's edges, in place.

    Args:
        out: ``[num_dst, ...]``.
        rows: the block's source rows, ``[block rows, ...]``.
        weight: one number per edge, ``[num_edges]``, or one per edge and head, ``[num_edges, heads]``, where all heads
            have the same width. `None` for a plain sum.
        fresh: overwrite `out` instead of adding to it. Rows without edges become zero.
    """
    shard, rows = shard.reading(rows)
    _sums_for(out, shard, rows, weight).gather_sum(out, shard, rows, weight, fresh)


def gather_sum_transposed(
    out: Tensor, shard: Shard, transposes: Transposes, grad: Tensor, weight: Tensor | None, fresh: bool = False
) -> None:
    """``out[src] += weight * grad[dst]`` over the shard's edges, in place.

    This is the adjoint of `gather_sum` in `rows`.

    Args:
        out: ``[block rows, ...]``.
        transposes: owns the transposes of the graph's shards.
        grad: ``[num_dst, ...]``.
        weight: as in `gather_sum`.
        fresh: as in `gather_sum`.
    """
    _sums_for(out, shard, grad, weight).gather_sum_transposed(out, shard, transposes, grad, weight, fresh)


def edge_dot(shard: Shard, rows: Tensor, grad: Tensor, max_edges: int, num_heads: int = 1) -> Tensor:
    """``<rows[src], grad[dst]>`` of each edge, ``[num_edges]``; with several heads, ``[num_edges, num_heads]``.

    This is the adjoint of `gather_sum` in `weight`. Plain torch takes at most `max_edges` edges at a time.
    """
    triton = triton_for("sums", rows, grad)
    if triton is not None and rows.dtype == grad.dtype:
        dots: Tensor = triton.edge_dot(shard, rows, grad, num_heads)
        return dots if num_heads > 1 else dots.view(-1)
    if num_heads > 1 or (rows.dim() > 1 and rows.shape[1:].numel() and heads.handles(rows, grad)):
        found = heads.edge_dot(shard, rows, grad, num_heads, max_edges)
        return found if num_heads > 1 else found.view(-1)
    return reference.edge_dot(shard, rows, grad, max_edges)


def _sums_for(out: Tensor, shard: Shard, rows: Tensor, weight: Tensor | None) -> ModuleType:
    """The module that sums rows like these. Each has `gather_sum` and `gather_sum_transposed`."""
    if shard.num_edges == 0:
        return reference
    if weight is not None and weight.dim() == 2:
        return triton_for("sums", out, rows) or heads
    return triton_for("sums", out, rows) or (cpu if cpu.handles(rows) else reference)
