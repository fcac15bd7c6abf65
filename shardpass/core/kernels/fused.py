"""Attention whose scores have a closed form: one loop of numba or Triton for a run of edges, in one dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from shardpass.core.kernels.cpu_loops import attention_loops, cut_rows, in_threads, numba_loops_for
from shardpass.core.kernels.gpu import triton_attention_for
from shardpass.core.kernels.runs import ClosedScores, RowRun, SoftmaxState


def handles(*tensors: Tensor | None) -> bool:
    """Whether there are loops for tensors of these dtypes and devices."""
    given = [tensor for tensor in tensors if tensor is not None]
    if triton_attention_for(*given) is not None:  # its atomic additions come in any order
        return not torch.are_deterministic_algorithms_enabled()
    return numba_loops_for(given[0]) is not None and len({(t.dtype, t.device) for t in given}) == 1


def accumulate(state: SoftmaxState, run: RowRun, of: ClosedScores, values: Tensor) -> None:
    """Take a run of edges, in order of their destination, into `state`.

    Args:
        values: ``[block rows, heads, width]``.
    """
    triton = triton_attention_for(values)
    if triton is not None:
        return triton.accumulate_closed(state, run, of, values)
    loops = attention_loops()
    mix, kept = (of.none() if t is None else t.numpy() for t in (of.mix, of.kept))
    edges = run.indptr.numpy(), run.columns.numpy()
    given = of.of_source.numpy(), of.of_dst.numpy(), mix, of.number, values.numpy(), kept
    into, bounds = [part.numpy() for part in state], (run.bounds.start, run.bounds.stop)
    kind = of.kind(loops)
    in_threads(lambda low, high: loops.attend(kind, *edges, *given, *bounds, low, high, *into), cut_rows(run))


def adjoint(
    run: RowRun,
    of: ClosedScores,
    values: Tensor,
    log_sum: Tensor,
    grad: Tensor,
    delta: Tensor,
    grad_values: Tensor,
    grad_source: Tensor,
    grad_dst: Tensor,
    grad_mix: Tensor | None,
) -> None:
    """The adjoint of attention over a run of edges, in order of their source, added to the last four in place.

    Args:
        values: ``[block rows, heads, width]``.
        log_sum: ``log(sum(exp(score)))`` of each destination and head, ``[num_dst, heads]``.
        grad: of the weighted sum, ``[num_dst, heads, width]``.
        delta: ``<grad, weighted sum>``, ``[num_dst, heads]``.
    """
    triton = triton_attention_for(values)
    if triton is not None:
        into_all = grad_values, grad_source, grad_dst, grad_mix
        return triton.adjoint_closed(run, of, values, log_sum, grad, delta, *into_all)
    loops = attention_loops()
    mix, kept = (of.none() if t is None else t.numpy() for t in (of.mix, of.kept))
    edges = run.indptr.numpy(), run.columns.numpy()
    given = of.of_dst.numpy(), of.of_source.numpy(), mix, of.number, log_sum.numpy(), values.numpy(), kept
    bounds, kind = (run.bounds.start, run.bounds.stop), of.kind(loops)
    rows, into = (grad.numpy(), delta.numpy(), grad_values.numpy()), grad_source.numpy()
    # rows of a destination's edges are in several threads: each has sums of its own, together no larger than scores
    most = 1 + run.columns.numel() * grad_values.size(1) // max(1, grad_dst.numel())
    ranges = cut_rows(run, most)
    sums = [(grad_dst, grad_mix)]
    sums += [(torch.zeros_like(grad_dst), None if grad_mix is None else torch.zeros_like(grad_mix)) for _ in ranges[1:]]

    def work(low: int, high: int, to_dst: Tensor, to_mix: Tensor | None) -> None:
        last = of.none() if to_mix is None else to_mix.numpy()
        loops.attend_adjoint(kind, *edges, *given, *bounds, low, high, *rows, to_dst.numpy(), into, last)

    in_threads(work, [(*pair, *own) for pair, own in zip(ranges, sums)])
    for to_dst, to_mix in sums[1:]:
        grad_dst += to_dst
        if grad_mix is not None and to_mix is not None:
            grad_mix += to_mix
