"""One shard's partial result, added in place into an accumulator. `reference` is the definition of right."""

from __future__ import annotations

from torch import Tensor

from shardpass.core.kernels import cpu, heads, reference
from shardpass.core.kernels.extremum import gather_extremum, gather_extremum_transposed
from shardpass.core.shard import PlacedRows, Shard

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
    if weight is not None and weight.dim() == 2:
        return heads.gather_sum(out, shard, rows, weight, fresh)
    if shard.num_edges and cpu.handles(rows):
        return cpu.gather_sum(out, shard, rows, weight, fresh)
    if fresh:
        out.zero_()
    if shard.num_edges:
        reference.gather_sum(out, shard, rows, weight)


def gather_sum_transposed(out: Tensor, shard: Shard, grad: Tensor, weight: Tensor | None, fresh: bool = False) -> None:
    """``out[src] += weight * grad[dst]`` over the shard's edges, in place: the adjoint of `gather_sum` in `rows`.

    Args:
        out: ``[block rows, ...]``.
        grad: ``[num_dst, ...]``.
        weight: as in `gather_sum`.
        fresh: as in `gather_sum`.
    """
    if weight is not None and weight.dim() == 2:
        return heads.gather_sum_transposed(out, shard, grad, weight, fresh)
    if shard.num_edges and cpu.handles(grad):
        return cpu.gather_sum_transposed(out, shard, grad, weight, fresh)
    if fresh:
        out.zero_()
    if shard.num_edges:
        reference.gather_sum_transposed(out, shard, grad, weight)


def edge_dot(shard: Shard, rows: Tensor, grad: Tensor, max_edges: int, num_heads: int = 1) -> Tensor:
    """``<rows[src], grad[dst]>`` of each edge, ``[num_edges]``: the adjoint of `gather_sum` in `weight`.

    With several heads that of each, ``[num_edges, num_heads]``.
    """
    if num_heads > 1 or (rows.dim() > 1 and rows.shape[1:].numel() and heads.handles(rows, grad)):
        found = heads.edge_dot(shard, rows, grad, num_heads, max_edges)
        return found if num_heads > 1 else found.view(-1)
    return reference.edge_dot(shard, rows, grad, max_edges)
