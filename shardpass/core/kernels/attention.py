"""Softmax-weighted sums over in-edges, a chunk of edges at a time: numba's or Triton's loops, or plain torch.

Source: the online softmax of Milakov and Gimelshein 2018 (arXiv 1805.02867) and the identities of FlashAttention
(Dao et al. 2022, arXiv 2205.14135, appendix B), over the in-edges of a node instead of the keys of a query.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from shardpass.core.kernels.gpu import triton_attention_for
from shardpass.core.sharding import Chunk
from shardpass.errors import InternalError

COMPILED_LOOPS = "compiled loops"
"""The name under which a profiler, or the dry run of the planner, sees loops compiled by numba run."""

DTYPES = (torch.float32, torch.float64)
_SMALL = 1 << 14  # edges below which a thread is not worth starting


class EdgeRun(NamedTuple):
    """A chunk of the edges of a shard in one of its two orders.

    Args:
        indptr: of all edges in that order, by destination or by source.
        bounds: the edges of the chunk and the rows of `indptr` they belong to.
        src_rows, dst_rows: ``[edges of the chunk]``; rows of the block, destination rows.
        positions: of the chunk's edges in the shard: a slice, or ``[edges of the chunk]``.
    """

    indptr: Tensor
    bounds: Chunk
    src_rows: Tensor
    dst_rows: Tensor
    positions: slice | Tensor


class RowRun(NamedTuple):
    """A run of the edges of a shard in one of its two orders, by row: what loops over rows walk.

    Args:
        indptr, bounds: as in `EdgeRun`.
        columns: ``[edges of the run]``; the rows at the other end of the edges.
        positions: as in `EdgeRun`; None where only loops over rows follow, which need none.
    """

    indptr: Tensor
    bounds: Chunk
    columns: Tensor
    positions: slice | Tensor | None

    def by_destination(self) -> EdgeRun:
        """The same edges one by one, where `indptr` counts those of destinations."""
        return EdgeRun(self.indptr, self.bounds, self.columns, self._rows(), self.known_positions())

    def by_source(self) -> EdgeRun:
        """The same edges one by one, where `indptr` counts those of sources."""
        return EdgeRun(self.indptr, self.bounds, self._rows(), self.columns, self.known_positions())

    def known_positions(self) -> slice | Tensor:
        """`positions`, which must be there."""
        if self.positions is None:
            raise InternalError("edges are taken one by one, but nothing says where they stand")
        return self.positions

    def _rows(self) -> Tensor:
        start, stop, low, high = self.bounds
        counts = self.indptr[low : high + 1].long().clamp(start, stop).diff()
        rows = torch.arange(low, high, device=counts.device)
        return torch.repeat_interleave(rows, counts, output_size=stop - start)


class SoftmaxState(NamedTuple):
    """What online softmax keeps for a destination: largest score, sum of weights ``[num_dst, heads]``, weighted sum."""

    top: Tensor
    total: Tensor
    out: Tensor

    @classmethod
    def fresh(cls, num_dst: int, heads: int, width: int, like: Tensor) -> SoftmaxState:
        """The state of destinations that have seen no edge."""
        top = like.new_full((num_dst, heads), float("-inf"))
        return cls(top, torch.zeros_like(top), like.new_zeros((num_dst, heads, width)))


def accumulate(state: SoftmaxState, run: EdgeRun, scores: Tensor, values: Tensor, kept: Tensor | None) -> None:
    """Take a chunk of edges, in order of their destination, into `state`. `scores` is spent.

    Args:
        scores: ``[edges of the chunk, heads]``.
        values: ``[block rows, heads, width]``.
        kept: what dropout multiplies the weights with, like `scores`.
    """
    triton = triton_attention_for(values, scores, kept)
    if triton is not None:
        return triton.accumulate(state, run, scores, values, kept)
    if numba_loops_for(values) is None or scores.dtype != values.dtype:
        return _accumulate(state, run, scores, values, kept)
    loops = attention_loops()
    nothing = values.new_empty((0, values.size(1)))
    edges = run.indptr.numpy(), run.src_rows.numpy()
    given = scores.unsqueeze(-1).numpy(), scores[:0].unsqueeze(-1).numpy(), nothing.numpy(), 1.0, values.numpy()
    factors, into = (nothing if kept is None else kept).numpy(), [part.numpy() for part in state]
    bounds = run.bounds.start, run.bounds.stop

    def work(low: int, high: int) -> None:
        loops.attend(loops.GIVEN, *edges, *given, factors, *bounds, low, high, *into)

    in_threads(work, cut_rows(run))


def softmax_weights(run: EdgeRun, scores: Tensor, log_sum: Tensor) -> Tensor:
    """``exp(score - log_sum[i])`` of each edge, in place of `scores`.

    Args:
        log_sum: ``log(sum(exp(score)))`` of each destination and head, ``[num_dst, heads]``.
    """
    return scores.sub_(log_sum.index_select(0, run.dst_rows)).exp_()


def adjoint(
    run: EdgeRun,
    weights: Tensor,
    values: Tensor,
    kept: Tensor | None,
    grad: Tensor,
    delta: Tensor,
    grad_values: Tensor,
) -> Tensor:
    """The adjoint of the weighted sum over a chunk of edges, in order of their source.

    Args:
        weights: ``[edges of the chunk, heads]``.
        values: ``[block rows, heads, width]``.
        kept: as in `accumulate`.
        grad: of the weighted sum, ``[num_dst, heads, width]``.
        delta: ``<grad, weighted sum>``, ``[num_dst, heads]``.
        grad_values: ``[block rows, heads, width]``, added to in place.

    Returns:
        the gradient of each score divided by its weight, ``kept * <grad, value> - delta``, like `weights`.
    """
    triton = triton_attention_for(values, weights, kept, grad)
    if triton is not None:
        found: Tensor = triton.adjoint(run, weights, values, kept, grad, delta, grad_values)
        return found
    used = weights if kept is None else weights * kept
    loops = numba_loops_for(values)
    if loops is None:
        outer = grad.index_select(0, run.dst_rows)
        dots = (outer * values.index_select(0, run.src_rows)).sum(-1)
        grad_values.index_add_(0, run.src_rows, used.unsqueeze(-1) * outer)
        return (dots if kept is None else dots * kept) - delta.index_select(0, run.dst_rows)
    relative = torch.empty_like(weights)
    factors = weights[:0] if kept is None else kept
    before = [t.numpy() for t in (run.indptr, run.dst_rows, values, used, factors)]
    after = [t.numpy() for t in (grad, delta, grad_values, relative)]
    start, stop = run.bounds.start, run.bounds.stop
    by_rows(run, lambda first, last: loops.weighted_adjoint(*before, start, stop, first, last, *after))
    return relative


def _accumulate(state: SoftmaxState, run: EdgeRun, scores: Tensor, values: Tensor, kept: Tensor | None) -> None:
    low, high = run.bounds.low, run.bounds.high
    rows = run.dst_rows.long() - low
    top, total, out = state.top[low:high], state.total[low:high], state.out[low:high]
    new = top.scatter_reduce(0, rows.view(-1, 1).expand_as(scores), scores, "amax")
    weights = (scores - new.index_select(0, rows)).exp_()
    weights = weights.masked_fill_(scores == float("-inf"), 0)
    scale = (top - new).exp_().masked_fill_(top == new, 1)
    top.copy_(new)
    total.mul_(scale).index_add_(0, rows, weights)
    used = weights if kept is None else weights * kept
    out.mul_(scale.unsqueeze(-1)).index_add_(0, rows, used.unsqueeze(-1) * values.index_select(0, run.src_rows))


def numba_loops_for(rows: Tensor) -> ModuleType | None:
    if rows.device.type != "cpu" or rows.dtype not in DTYPES:
        return None
    try:
        from shardpass.core.kernels import numba_loops
    except ImportError:
        return None
    return numba_loops


def attention_loops() -> Any:
    """`numba_attention`, imported where `numba_loops_for` found loops: what is compiled has no types for a checker."""
    from shardpass.core.kernels import numba_attention

    return numba_attention


def cut_rows(run: EdgeRun | RowRun, most: int | None = None) -> list[tuple[int, int]]:
    """Ranges of the run's rows with about as many edges each, one for each thread of torch, `most` at most."""
    start, stop, low, high = run.bounds
    count = _num_threads(stop - start)
    count = count if most is None else min(count, most)
    if count == 1:
        return [(low, high)]
    edges = torch.linspace(start, stop, count + 1).to(run.indptr.dtype)[1:-1]
    cuts = torch.searchsorted(run.indptr[low : high + 1], edges).add_(low).tolist()
    return list(pairwise([low, *cuts, high]))


def by_rows(run: EdgeRun | RowRun, work: Callable[[int, int], None]) -> None:
    """Call `work` for ranges of the run's rows with about as many edges each, one for each thread of torch."""
    in_threads(work, cut_rows(run))


def _num_threads(num_edges: int) -> int:
    return max(1, min(torch.get_num_threads(), num_edges // _SMALL))


def in_threads(work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Call `work` with each of the arguments, all at the same time."""
    others = [threading.Thread(target=work, args=given) for given in arguments[1:]]
    with record_function(COMPILED_LOOPS):
        for thread in others:
            thread.start()
        work(*arguments[0])
        for thread in others:
            thread.join()
