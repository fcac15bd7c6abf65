"""Softmax-weighted sums over in-edges, a chunk of edges at a time: numba's or Triton's loops, or plain torch.

Source: the online softmax of Milakov and Gimelshein 2018 (arXiv 1805.02867) and the identities of FlashAttention
(Dao et al. 2022, arXiv 2205.14135, appendix B), over the in-edges of a node instead of the keys of a query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardpass.core.kernels.cpu_loops import attention_loops, by_rows, cut_rows, in_threads, numba_loops_for
from shardpass.core.kernels.gpu import triton_attention_for
from shardpass.core.kernels.runs import EdgeRun, SoftmaxState


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
