"""Attention over in-edges in one pass forward and one pass backward, for message functions recognised as attention.

Forward is an online softmax, chunk by chunk and block by block. It keeps a weighted sum and a log-sum-exp of each
destination and head. Backward computes every weight again from those, ``weight = exp(score - log_sum)``; the gradient
of a score is ``weight * (<grad, value> - <grad, out>)`` (Dao et al. 2022, arXiv 2205.14135, appendix B). Nothing with
a row per edge outlives a chunk. A `Scores` computes the scores, in closed form or by running the message function.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shardpass.core.aggregation.call import Call, ForwardResult, Operands
from shardpass.core.aggregation.execute import Later, Part, Push, Rows, execute
from shardpass.core.aggregation.forward import counts
from shardpass.core.aggregation.gradients import Gradients
from shardpass.core.aggregation.scores import Piece, scores_of
from shardpass.core.kernels import Outer, RowRun, SoftmaxState, by_destination, by_source, shaped
from shardpass.core.sharding import Shard, Transposes
from shardpass.core.tracing import Attention
from shardpass.errors import InternalError


def run_attention(call: Call, operands: Operands, attention: Attention) -> ForwardResult:
    """The reductions of a message function that is one attention. Collective; runs without gradients."""
    part = _Softmax(call, operands, attention)
    execute(Push(call, operands), part)
    return part.result()


class _Softmax(Part):
    """An online softmax."""

    def __init__(self, call: Call, operands: Operands, attention: Attention) -> None:
        self.call, self.attention = call, attention
        self.values = operands.src[attention.value]
        self.width = _numel(self.values) // attention.heads
        self.state = SoftmaxState.fresh(call.edges.num_dst, attention.heads, self.width, self.values)
        self.scores = scores_of(call, operands, attention)
        self.most = chunk_edges(call, attention, operands, self.scores.in_one_loop)
        self.reads = call.structure.sources_of(list(attention.members))

    def add(self, number: int, shard: Shard, rows: Rows, into: Rows) -> None:
        table = shaped(rows[self.attention.value], (self.attention.heads, self.width)) if rows else self.values
        for run in by_destination(shard, self.most):
            kept = _kept(self.call, self.attention, shard, run, self.values)
            self.scores.accumulate(self.state, Piece(shard, run, rows, table, kept))

    def result(self) -> ForwardResult:
        """What forward found."""
        call, attention, state = self.call, self.attention, self.state
        total, isolated = state.total.add_(attention.eps), call.isolated()
        # Scores of -inf alone give 0 / 0, as their softmax does. A device waits for nothing here.
        divisor = total.masked_fill(state.top == float("-inf"), float("nan")).masked_fill_(isolated, 1)
        out = state.out.div_(divisor.unsqueeze(-1))
        result = ForwardResult(values=counts(call))
        found = {attention.maximum: state.top, attention.total: total, attention.output: out}
        result.values |= {k: shaped(rows, call.structure.reductions[k].tail) for k, rows in found.items()}
        result.states = {attention.maximum: [state.top + total.log()]}
        return result


class AttentionAdjoint(Part):
    """The gradients of an attention."""

    def __init__(
        self, call: Call, operands: Operands, attention: Attention, out: Tensor, log_sum: Tensor, gradients: Gradients
    ) -> None:
        self.call, self.attention, self.gradients = call, attention, gradients
        self.grad, delta = gradient_and_delta(call, attention, out, gradients)
        self.outer = Outer(self.grad, delta, log_sum)
        self.scores = scores_of(call, operands, attention)
        self.most = chunk_edges(call, attention, operands, self.scores.in_one_loop)
        self.one_by_one = bool(attention.dropout) or not self.scores.in_one_loop
        self.reads = self.returns = call.structure.sources_of(list(attention.members))
        self.is_reached = attention.output in gradients.reached
        self.transposes = call.plan.comm.caches.of(Transposes)

    def add(self, number: int, shard: Shard, rows: Rows, into: Rows) -> Later:
        tail = self.grad.shape[1:]
        table = shaped(rows[self.attention.value], tail) if rows else self.grad[:0]
        is_wanted = self.attention.value in into
        target = shaped(into[self.attention.value], tail) if is_wanted else torch.zeros_like(table)
        lacks_dst = False
        for run in by_source(shard, self.transposes, self.most, self.one_by_one) if self.is_reached else ():
            self.gradients.ran = True
            piece = self._piece(number, shard, rows, table, run)
            lacks_dst |= self.scores.adjoint(piece, self.outer, target, into, self.gradients)
        return partial(self._add_to_dst, number, shard, rows, table) if lacks_dst else None

    def _add_to_dst(self, number: int, shard: Shard, rows: Rows, table: Tensor) -> None:
        for run in by_destination(shard, self.most):
            self.scores.adjoint_of_dst(self._piece(number, shard, rows, table, run), self.outer, self.gradients)

    def _piece(self, number: int, shard: Shard, rows: Rows, table: Tensor, run: RowRun) -> Piece:
        return Piece(shard, run, rows, table, _kept(self.call, self.attention, shard, run, self.grad))


def gradient_and_delta(call: Call, attention: Attention, out: Tensor, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """``(grad, delta)``: the gradient of the result, ``[num_dst, heads, width]``, and ``<grad, result>``."""
    if (gradients.reached - {attention.output}) & {*attention.members}:
        raise InternalError(f"{call.label}: the softmax inside is used outside it. Use Options(fuse_attention=False)")
    width = _numel(out) // attention.heads
    tail = attention.heads, width
    grad = shaped(gradients.reductions[attention.output].to(out.dtype), tail).contiguous()
    return grad, (grad * shaped(out, tail)).sum(-1)


def _numel(tensor: Tensor) -> int:
    return tensor.shape[1:].numel()


def chunk_edges(call: Call, attention: Attention, operands: Operands, in_one_loop: bool) -> int:
    """How many edges are taken at a time, so that a tensor with a row per edge holds `Options.chunk_bytes`.

    Args:
        in_one_loop: no tensor has a row per edge, except for the factors of dropout.
    """
    if in_one_loop and not attention.dropout:
        return max(1, call.edges.num_edges)
    widths = [attention.heads]
    if attention.score is None:
        read = call.structure.reductions[attention.maximum].sources
        tensors = [operands.src[name] for name in read] + [*operands.dst.values(), *operands.edge.values()]
        widths += [_numel(tensor) for tensor in tensors]
    return max(1, call.plan.options.chunk_bytes // (max(widths) * operands.src[attention.value].itemsize))


def _kept(call: Call, attention: Attention, shard: Shard, run: RowRun, like: Tensor) -> Tensor | None:
    """The factors by which dropout, the only one of the message function, multiplies the weights of a run's edges."""
    if not attention.dropout:
        return None
    weights = like.new_empty(()).expand(run.columns.numel(), attention.heads)
    return call.drops(shard.places(run.known_positions()))(0, weights, attention.dropout)
