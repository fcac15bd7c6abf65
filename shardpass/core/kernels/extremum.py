"""Max and min of source rows with their number of ties, by the loops of numba or Triton or else by the reducers."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from shardpass.core.kernels.cpu_loops import COMPILED_LOOPS, by_rows, numba_loops_for
from shardpass.core.kernels.gpu import triton_for
from shardpass.core.kernels.reference import CHUNK_EDGES
from shardpass.core.kernels.runs import RowRun
from shardpass.core.ranks import torch_private
from shardpass.core.sharding import Chunk, Shard, Transposes
from shardpass.core.tracing import REDUCERS, State


def gather_extremum(op: str, state: State, shard: Shard, rows: Tensor) -> None:
    """Take ``rows[src]`` of the shard's edges into the state of a max or min, in place.

    Args:
        op: "max" or "min".
        state: the reducer's value and number of ties, ``[num_dst, ...]`` each.
        rows: the block's source rows, ``[block rows, ...]``.
    """
    triton = triton_for("extremum", rows, state[0])
    if triton is not None and shard.num_edges and rows.dtype == state[0].dtype:
        return triton.gather_extremum(op, state, shard, rows)
    loops = numba_loops_for(rows)
    if loops is not None and shard.num_edges and rows.dtype == state[0].dtype:
        best, ties = (_flat(part).numpy() for part in state)
        run, loop = _run(shard, shard.indptr, shard.src_rows), loops.extremum
        given = run.indptr.numpy(), run.columns.numpy(), _flat(rows.contiguous()).numpy(), op == "max"
        return by_rows(run, lambda low, high: loop(*given, low, high, best, ties))
    for chunk in shard.chunks(CHUNK_EDGES):
        messages = rows.index_select(0, shard.src_rows[chunk.start : chunk.stop])
        window = [part[chunk.low : chunk.high] for part in state]
        REDUCERS[op].accumulate(window, messages, shard.dst_rows(chunk))


def gather_extremum_transposed(
    out: Tensor, shard: Shard, transposes: Transposes, rows: Tensor, value: Tensor, share: Tensor
) -> None:
    """``out[src] += (rows[src] == value[dst]) * share[dst]`` over the shard's edges, in place.

    This is the adjoint of `gather_extremum` in `rows`.

    Args:
        out: ``[block rows, ...]``.
        transposes: owns the transposes of the graph's shards.
        rows: as in `gather_extremum`.
        value: the max or min, ``[num_dst, ...]``.
        share: the part of its gradient that each tied message gets, ``[num_dst, ...]``.
    """
    triton = triton_for("extremum", out, rows, value, share)
    if triton is not None and shard.num_edges:
        return triton.gather_extremum_transposed(out, shard, transposes, rows, value, share)
    loops = numba_loops_for(rows)
    if loops is not None and shard.num_edges and len({t.dtype for t in (out, rows, value, share)}) == 1:
        indptr, columns, _ = transposes.of(shard)
        run, loop, into = _run(shard, indptr, columns), loops.extremum_adjoint, _flat(out).numpy()
        given = [t.numpy() for t in (indptr, columns, *(_flat(part.contiguous()) for part in (rows, value, share)))]
        return by_rows(run, lambda low, high: loop(*given, low, high, into))
    for chunk in shard.chunks(CHUNK_EDGES):
        source, index = shard.src_rows[chunk.start : chunk.stop], shard.dst_rows(chunk).add_(chunk.low)
        won = rows.index_select(0, source) == value.index_select(0, index)
        out.index_add_(0, source, (won * share.index_select(0, index)).to(out.dtype))


def take_extremum(op: str, state: State, values: Tensor, index: Tensor) -> None:
    """Take `values` ``[E, ...]`` into the state of a max or min, in place: row e into row ``index[e]``.

    Args:
        op, state: as in `gather_extremum`.
        index: ``[E]`` int64, within range: the compiled loop does not look.
    """
    loops = _edge_loops(values, index, state[0])
    if loops is None:
        return REDUCERS[op].accumulate(state, values, index)
    best, ties = (_flat(part).numpy() for part in state)
    with torch_private.span(COMPILED_LOOPS):
        loops.extremum_of_edges(_flat(values.detach().contiguous()).numpy(), index.numpy(), op == "max", best, ties)


def shares_of_edges(values: Tensor, index: Tensor, value: Tensor, share: Tensor) -> Tensor:
    """``(values[e] == value[index[e]]) * share[index[e]]``, ``[E, ...]``: what each message gets of a gradient.

    Args:
        values, index: as in `take_extremum`.
        value, share: as in `gather_extremum_transposed`.
    """
    loops = _edge_loops(values, index, value) if value.dtype == share.dtype else None
    if loops is None:
        won = values == value.index_select(0, index)
        return share.index_select(0, index).masked_fill_(~won, 0)
    out = torch.empty_like(values, memory_format=torch.contiguous_format)
    given = [_flat(part.detach().contiguous()).numpy() for part in (values, value, share)]
    with torch_private.span(COMPILED_LOOPS):
        loops.shares_of_edges(given[0], index.numpy(), given[1], given[2], _flat(out).numpy())
    return out


def _edge_loops(values: Tensor, index: Tensor, rows: Tensor) -> ModuleType | None:
    is_empty = index.numel() == 0 or values.shape[1:].numel() == 0
    return None if is_empty or values.dtype != rows.dtype else numba_loops_for(values)


def _run(shard: Shard, indptr: Tensor, columns: Tensor) -> RowRun:
    return RowRun(indptr, Chunk(0, shard.num_edges, 0, indptr.numel() - 1), columns, None)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(tensor.size(0), tensor.shape[1:].numel())  # what is written to must not be a copy
