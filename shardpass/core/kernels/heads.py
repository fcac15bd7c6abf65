"""Sums with a weight per edge and head, and dot products per head, by numba's loops or else plain torch.

torch's fused operator takes only one weight per edge.
"""

from __future__ import annotations

from torch import Tensor

from shardpass.core.kernels import reference
from shardpass.core.kernels.cpu_loops import by_rows, numba_loops_for
from shardpass.core.kernels.runs import RowRun
from shardpass.core.sharding import Chunk, Shard, Transposes


def handles(rows: Tensor, grad: Tensor) -> bool:
    """Whether numba has a loop for the dot products of these."""
    return numba_loops_for(rows) is not None and rows.dtype == grad.dtype


def gather_sum(out: Tensor, shard: Shard, rows: Tensor, weight: Tensor, fresh: bool) -> None:
    """See `kernels.gather_sum`; `weight` is ``[num_edges, heads]``."""
    if numba_loops_for(rows) is None or out.dtype != rows.dtype:
        return reference.gather_sum(out, shard, rows, weight, fresh)
    if fresh:
        out.zero_()
    _accumulate(out, shard.indptr, shard.src_rows, rows, weight)


def gather_sum_transposed(
    out: Tensor, shard: Shard, transposes: Transposes, grad: Tensor, weight: Tensor, fresh: bool
) -> None:
    """See `kernels.gather_sum_transposed`; `weight` is ``[num_edges, heads]``."""
    if numba_loops_for(grad) is None or out.dtype != grad.dtype:
        return reference.gather_sum_transposed(out, shard, transposes, grad, weight, fresh)
    if fresh:
        out.zero_()
    indptr, columns, order = transposes.of(shard, with_order=True)
    assert order is not None
    _accumulate(out, indptr, columns, grad, weight.index_select(0, order))


def edge_dot(shard: Shard, rows: Tensor, grad: Tensor, heads: int, max_edges: int) -> Tensor:
    """``<rows[src, h], grad[dst, h]>`` of each edge and head, ``[num_edges, heads]``."""
    left, right = _in_heads(rows, heads), _in_heads(grad, heads)
    result = rows.new_empty((shard.num_edges, heads))
    loops = numba_loops_for(rows)
    if loops is not None and handles(rows, grad):
        edges = RowRun(shard.indptr, Chunk(0, shard.num_edges, 0, shard.num_dst), shard.src_rows, None)
        given = [t.numpy() for t in (edges.indptr, edges.columns, left, right)]
        loop, numbers = loops.edge_dots, result.numpy()
        by_rows(edges, lambda low, high: loop(*given, low, high, numbers))
        return result
    for chunk in shard.chunks(max_edges):
        span, dst_rows = slice(chunk.start, chunk.stop), shard.dst_rows(chunk).add_(chunk.low)
        products = left.index_select(0, shard.src_rows[span]) * right.index_select(0, dst_rows)
        result[span] = products.sum(-1)
    return result


def _accumulate(out: Tensor, indptr: Tensor, columns: Tensor, rows: Tensor, weight: Tensor) -> None:
    heads = weight.size(1)
    table, target = _in_heads(rows, heads), out.view(out.size(0), heads, out.shape[1:].numel() // heads)
    given = [t.numpy() for t in (indptr, columns, table, weight.to(table.dtype).contiguous())]
    run = RowRun(indptr, Chunk(0, columns.numel(), 0, out.size(0)), columns, None)
    loops = numba_loops_for(rows)
    assert loops is not None
    loop, into = loops.add_scaled, target.numpy()
    by_rows(run, lambda low, high: loop(*given, low, high, into))


def _in_heads(rows: Tensor, heads: int) -> Tensor:
    return rows.reshape(rows.size(0), heads, rows.shape[1:].numel() // heads).contiguous()
