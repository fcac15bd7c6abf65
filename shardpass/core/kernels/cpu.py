"""CPU kernels made of torch's own fused operators.

``embedding_bag`` is a fused gather and segment sum with a weight per edge. It is 20 to 40 times faster than gathering
and ``index_add_``, and makes no tensor with a row per edge. It runs over some destinations at a time, so that its
result is still in cache when it is added to the accumulator.

Where wide rows have few edges each, as in the blocks of many ranks, most of that time goes into calls and into adding.
A loop of numba's then adds straight to the accumulator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardpass.core.kernels.cpu_loops import by_rows, numba_loops_for
from shardpass.core.kernels.runs import RowRun
from shardpass.core.sharding import Chunk, Shard, Transposes

CHUNK_BYTES = 1 << 20
_WIDE_BYTES, _FEW_EDGES, _MANY = 512, 8, 1 << 12
"""For the loop: bytes of a row at least, edges per row at most, edges in all at least."""


def handles(rows: Tensor) -> bool:
    """Whether these kernels take rows of this device, dtype and shape."""
    kind = rows.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    return rows.device.type == "cpu" and kind and rows.dim() >= 2 and rows.numel() > 0


def _add_straight(out: Tensor, indptr: Tensor, columns: Tensor, rows: Tensor, fresh: bool) -> bool:
    """Add by a loop of numba's, if there is one and it is faster. Returns whether it did."""
    wide, few = rows.size(1) * rows.itemsize >= _WIDE_BYTES, columns.numel() <= _FEW_EDGES * out.size(0)
    loops = numba_loops_for(rows) if wide and few and columns.numel() >= _MANY and out.dtype == rows.dtype else None
    if loops is None:
        return False
    loop, into, given = loops.add_copied, out.numpy(), [t.numpy() for t in (indptr, columns, rows)]
    run = RowRun(indptr, Chunk(0, columns.numel(), 0, out.size(0)), columns, None)
    by_rows(run, lambda low, high: loop(*given, fresh, low, high, into))
    return True


def _accumulate(out: Tensor, indptr: Tensor, columns: Tensor, rows: Tensor, weight: Tensor | None, fresh: bool) -> None:
    table, target = rows.flatten(1).contiguous(), out if out.dim() == 2 else out.view(out.size(0), -1)
    if weight is None and _add_straight(target, indptr, columns, table, fresh):
        return
    weight = None if weight is None else weight.to(table.dtype)
    most = max(1, CHUNK_BYTES // max(1, target.size(1) * table.itemsize))
    if most >= target.size(0):
        found = _bag_sums(columns, table, indptr, weight)
        target.copy_(found) if fresh else target.add_(found)
        return
    cuts = [0, *indptr[most:-1:most].tolist(), columns.numel()]
    for first, start, stop in zip(range(0, target.size(0), most), cuts, cuts[1:]):
        last = min(first + most, target.size(0))
        if start == stop:
            if fresh:
                target[first:last] = 0
            continue
        some = None if weight is None else weight[start:stop]
        found = _bag_sums(columns[start:stop], table, indptr[first : last + 1] - start, some)
        if fresh:
            target[first:last] = found
        else:
            target[first:last] += found


def _bag_sums(columns: Tensor, table: Tensor, indptr: Tensor, weight: Tensor | None) -> Tensor:
    return torch.nn.functional.embedding_bag(
        columns, table, indptr, mode="sum", include_last_offset=True, per_sample_weights=weight
    )


def gather_sum(out: Tensor, shard: Shard, rows: Tensor, weight: Tensor | None, fresh: bool = False) -> None:
    """See `kernels.gather_sum`."""
    _accumulate(out, shard.indptr, shard.src_rows.to(shard.indptr.dtype), rows, weight, fresh)


def gather_sum_transposed(
    out: Tensor, shard: Shard, transposes: Transposes, grad: Tensor, weight: Tensor | None, fresh: bool = False
) -> None:
    """See `kernels.gather_sum_transposed`."""
    indptr, columns, order = transposes.of(shard, with_order=weight is not None)
    weight = None if weight is None or order is None else weight.index_select(0, order)
    _accumulate(out, indptr, columns, grad, weight, fresh)
