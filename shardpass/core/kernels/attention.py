"""Softmax-weighted sums over in-edges whose scores are given, one chunk of edges at a time.

The loops of numba or Triton run where they can, and plain torch elsewhere.

Source: the online softmax of Milakov and Gimelshein 2018 (arXiv 1805.02867) and the identities of FlashAttention
(Dao et al. 2022, arXiv 2205.14135, appendix B), over the in-edges of a node instead of the keys of a query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardpass.core.kernels.cpu_loops import attention_loops, by_rows, numba_loops_for
from shardpass.core.kernels.gpu import triton_for
from shardpass.core.kernels.runs import EdgeRun, Outer, SoftmaxState


def accumulate(state: SoftmaxState, run: EdgeRun, scores: Tensor, values: Tensor, kept: Tensor | None) -> None:
    """Take a chunk of edges, ordered by destination, into `state`. The chunk's `scores` may be overwritten.

    Args:
        scores: ``[edges of the chunk, heads]``.
        values: the rows that are summed, ``[block rows, heads, width]``.
        kept: the factors by which dropout multiplies the weights, in the shape of `scores`, or `None`.
    """
    triton = triton_for("attention", values, scores, kept)
    if triton is not None:
        return triton.accumulate(state, run, scores, values, kept)
    if numba_loops_for(values) is None or scores.dtype != values.dtype:
        return _accumulate(state, run, scores, values, kept)
    loops, nothing = attention_loops(), values.new_empty((0, values.size(1))).numpy()
    edges = run.indptr.numpy(), run.src_rows.numpy(), run.bounds.start, run.bounds.stop
    rows, given = values.numpy(), scores.unsqueeze(-1).numpy()
    scored = loops.GIVEN, given, given[:0], nothing, rows.dtype.type(1)
    factors, into = nothing if kept is None else kept.numpy(), tuple(part.numpy() for part in state)
    by_rows(run, lambda low, high: loops.attend(edges, scored, rows, factors, low, high, into))


def softmax_weights(run: EdgeRun, scores: Tensor, log_sum: Tensor) -> Tensor:
    """``exp(score - log_sum[i])`` of each edge, computed in place of `scores`.

    Args:
        log_sum: ``log(sum(exp(score)))`` of each destination and head, ``[num_dst, heads]``.
    """
    return scores.sub_(log_sum.index_select(0, run.dst_rows)).exp_()


def adjoint(
    run: EdgeRun, weights: Tensor, values: Tensor, kept: Tensor | None, outer: Outer, grad_values: Tensor
) -> Tensor:
    """The gradient of each score divided by its weight, ``kept * <grad, value> - delta``, for edges ordered by source.

    Args:
        weights: of the softmax, ``[edges of the chunk, heads]``.
        values: the rows that are summed, ``[block rows, heads, width]``.
        kept: as in `accumulate`.
        grad_values: the gradient of `values`, which is added to in place.

    Returns:
        a tensor in the shape of `weights`.
    """
    grad, delta, _ = outer
    triton = triton_for("attention", values, weights, kept, grad)
    if triton is not None:
        found: Tensor = triton.adjoint(run, weights, values, kept, outer, grad_values)
        return found
    used = weights if kept is None else weights * kept
    loops = numba_loops_for(values)
    if loops is None:
        arrived = grad.index_select(0, run.dst_rows)
        dots = (arrived * values.index_select(0, run.src_rows)).sum(-1)
        grad_values.index_add_(0, run.src_rows.long(), used.unsqueeze(-1) * arrived)
        return (dots if kept is None else dots * kept) - delta.index_select(0, run.dst_rows)
    relative = torch.empty_like(weights)
    edges = run.indptr.numpy(), run.dst_rows.numpy(), run.bounds.start, run.bounds.stop
    factors = weights[:0] if kept is None else kept
    given = [t.numpy() for t in (values, used, factors, grad, delta, grad_values, relative)]
    by_rows(run, lambda low, high: loops.weighted_adjoint(edges, low, high, *given))
    return relative


def _accumulate(state: SoftmaxState, run: EdgeRun, scores: Tensor, values: Tensor, kept: Tensor | None) -> None:
    low, high = run.bounds.low, run.bounds.high
    rows = run.dst_rows.long() - low
    top, total, out = state.top[low:high], state.total[low:high], state.out[low:high]
    scores = scores.to(top.dtype)
    new = top.scatter_reduce(0, rows.view(-1, 1).expand_as(scores), scores, "amax")
    weights = (scores - new.index_select(0, rows)).exp_()
    weights = weights.masked_fill_(scores == float("-inf"), 0)
    scale = (top - new).exp_().masked_fill_(top == new, 1)
    top.copy_(new)
    total.mul_(scale).index_add_(0, rows, weights)
    used = weights if kept is None else weights * kept
    out.mul_(scale.unsqueeze(-1)).index_add_(0, rows, used.unsqueeze(-1) * values.index_select(0, run.src_rows))
