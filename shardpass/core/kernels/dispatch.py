"""One shard's partial result, added in place into an accumulator. `reference` is the definition of right."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from shardpass.core.kernels import cpu, heads, reference
from shardpass.core.kernels.extremum import gather_extremum, gather_extremum_transposed
from shardpass.core.kernels.gpu import triton_sums_for
from shardpass.core.sharding import PlacedRows, Shard, Transposes

__all__ = [
    "edge_dot",
    "gather_extremum",
    "gather_extremum_transposed",
    "gather_sum",
    "gather_sum_transposed",
]


def gather_sum(
    out: Tensor, shard: Shard, rows: Tensor | PlacedRows, weight: Tensor | None, fresh: bool = False
) -> None:
    """``out[dst] += weight * rows[src]`` over the shard's edges, in place.

    Args:
        out: ``[num_dst, ...]``.
        rows: the block's source rows, ``[block rows, ...]``.
        weight: one scalar per edge of the shard, ``[num_edges]``, or one for each head (of equal width), ``[num_edges,
            heads]``, or None.
        fresh: `out` holds nothing yet and is written instead of added to: all of it, zeros where no edge ends.
    """
    shard, rows = shard.reading(rows)
    _sums_for(out, shard, rows, weight).gather_sum(out, shard, rows, weight, fresh)


def gather_sum_transposed(
    out: Tensor, shard: Shard, transposes: Transposes, grad: Tensor, weight: Tensor | None, fresh: bool = False
) -> None:
    """``out[src] += weight * grad[dst]`` over the shard's edges, in place: the adjoint of `gather_sum` in `rows`.

    Args:
        out: ``[block rows, ...]``.
        transposes: those of the shards of the graph.
        grad: ``[num_dst, ...]``.
        weight: as in `gather_sum`.
        fresh: as in `gather_sum`.
    """
    _sums_for(out, shard, grad, weight).gather_sum_transposed(out, shard, transposes, grad, weight, fresh)


def edge_dot(shard: Shard, rows: Tensor, grad: Tensor, max_edges: int, num_heads: int = 1) -> Tensor:
    """``<rows[src], grad[dst]>`` of each edge, ``[num_edges]``: the adjoint of `gather_sum` in `weight`.

    With several heads that of each, ``[num_edges, num_heads]``.
    """
    triton = triton_sums_for(rows, grad)
    if triton is not None and rows.dtype == grad.dtype:
        dots: Tensor = triton.edge_dot(shard, rows, grad, num_heads)
        return dots if num_heads > 1 else dots.view(-1)
    if num_heads > 1 or (rows.dim() > 1 and rows.shape[1:].numel() and heads.handles(rows, grad)):
        found = heads.edge_dot(shard, rows, grad, num_heads, max_edges)
        return found if num_heads > 1 else found.view(-1)
    return reference.edge_dot(shard, rows, grad, max_edges)


def _sums_for(out: Tensor, shard: Shard, rows: Tensor, weight: Tensor | None) -> ModuleType:
    """What sums rows like these: each has `gather_sum` and `gather_sum_transposed`."""
    if shard.num_edges == 0:
        return reference
    if weight is not None and weight.dim() == 2:
        return triton_sums_for(out, rows) or heads
    return triton_sums_for(out, rows) or (cpu if cpu.handles(rows) else reference)
