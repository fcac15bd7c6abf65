"""Attention over in-edges in one pass forward and one pass backward, for message functions recognised as attention.

Forward is an online softmax, chunk by chunk and block by block. It keeps a weighted sum and a log-sum-exp of each
destination and head. Backward computes every weight again from those, ``weight = exp(score - log_sum)``; the gradient
of a score is ``weight * (<grad, value> - <grad, out>)`` (Dao et al. 2022, arXiv 2205.14135, appendix B). Nothing with
a row per edge outlives a chunk. A `Scores` computes the scores, in closed form or by running the message function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardpass.core.aggregation.call import Call, ForwardResult, Operands
from shardpass.core.aggregation.forward import counts
from shardpass.core.aggregation.gradients import Gradients, Returned
from shardpass.core.aggregation.scores import Piece, scores_of
from shardpass.core.kernels import Outer, RowRun, SoftmaxState, by_destination, by_source, dropout_factors
from shardpass.core.ranks import piece_seed
from shardpass.core.sharding import EdgeShards, Transposes
from shardpass.core.tracing import Attention
from shardpass.errors import InternalError


def run_attention(call: Call, operands: Operands, attention: Attention) -> ForwardResult:
    """The reductions of a message function that is one attention. Collective; runs without gradients."""
    values = operands.src[attention.value]
    width = _numel(values) // attention.heads
    state = SoftmaxState.fresh(call.edges.num_dst, attention.heads, width, values)
    scores = scores_of(call, operands, attention)
    most = chunk_edges(call, attention, operands, scores.in_one_loop)
    for number, shard, rows in call.walk(operands, _fetched(call, attention)):
        table = rows[attention.value].reshape(-1, attention.heads, width) if rows else values
        for run in by_destination(shard, most):
            kept = _kept(call, attention, number, run, values)
            scores.accumulate(state, Piece(shard, run, rows, table, kept))
    total, isolated = state.total.add_(attention.eps), call.isolated().unsqueeze(-1)
    # Scores of -inf alone give 0 / 0, as their softmax does. A device waits for nothing here.
    divisor = total.masked_fill(state.top == float("-inf"), float("nan")).masked_fill_(isolated, 1)
    out = state.out.div_(divisor.unsqueeze(-1))
    result = ForwardResult(values=counts(call))
    shapes = {k: (call.edges.num_dst, *call.structure.reductions[k].tail) for k in attention.members}
    result.values |= {
        attention.maximum: state.top.view(shapes[attention.maximum]),
        attention.total: total.view(shapes[attention.total]),
        attention.output: out.view(shapes[attention.output]),
    }
    result.states = {attention.maximum: [state.top + total.log()]}
    return result


def attention_gradients(
    call: Call, operands: Operands, attention: Attention, out: Tensor, log_sum: Tensor, gradients: Gradients
) -> None:
    """Add the gradients of an attention to `gradients`. Collective."""
    heads, names = attention.heads, _fetched(call, attention)
    width = _numel(out) // heads
    grad, delta = gradient_and_delta(call, attention, out, gradients)
    outer = Outer(grad, delta, log_sum)
    scores = scores_of(call, operands, attention)
    most = chunk_edges(call, attention, operands, scores.in_one_loop)
    one_by_one = bool(attention.dropout) or not scores.in_one_loop
    returned = Returned(call, gradients, names)
    reached, transposes = attention.output in gradients.reached, call.plan.comm.caches.of(Transposes)
    for number, shard, rows in call.walk(operands, names):
        with returned.shard(number) as into:
            table = rows[attention.value].reshape(-1, heads, width) if rows else grad[:0]
            is_wanted = attention.value in into
            target = into[attention.value].view_as(table) if is_wanted else torch.zeros_like(table)
            lacks_dst = False
            for run in by_source(shard, transposes, most, one_by_one) if reached else ():
                kept = _kept(call, attention, number, run, grad)
                gradients.ran = True
                lacks_dst |= scores.adjoint(Piece(shard, run, rows, table, kept), outer, target, into, gradients)
        for run in by_destination(shard, most) if lacks_dst else ():  # while the gradients of sources travel
            kept = _kept(call, attention, number, run, grad)
            scores.adjoint_of_dst(Piece(shard, run, rows, table, kept), outer, gradients)
    returned.finish()


def gradient_and_delta(call: Call, attention: Attention, out: Tensor, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """``(grad, delta)``: the gradient of the result, ``[num_dst, heads, width]``, and ``<grad, result>``."""
    if (gradients.reached - {attention.output}) & {*attention.members}:
        raise InternalError(f"{call.label}: the softmax inside is used outside it. Use Options(fuse_attention=False)")
    width = _numel(out) // attention.heads
    grad = gradients.reductions[attention.output].to(out.dtype).reshape(-1, attention.heads, width).contiguous()
    return grad, (grad * out.view_as(grad)).sum(-1)


def dropout_of_edges(edges: EdgeShards, seed: int, like: Tensor, p: float) -> Tensor:
    """The factors by which dropout multiplies the weights of an attention, for all own edges, shaped as `like`.

    Args:
        seed: of the call.
        like: the weights, ``[num_edges, ...]``; it gives shape and dtype.
        p: probability that a weight is dropped.
    """
    found = torch.ones_like(like, requires_grad=False)
    for number, shard in enumerate(edges.shards):
        rows = slice(0, shard.num_edges)
        factors = dropout_factors(piece_seed(seed, number), rows, _numel(like), p, found)
        shard.put(found, factors.view(-1, *like.shape[1:]))
    return found


def _numel(tensor: Tensor) -> int:
    return tensor.new_empty((1, *tensor.shape[1:])).numel()


def _fetched(call: Call, attention: Attention) -> list[str]:
    return call.structure.sources_of(list(attention.members))


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


def _kept(call: Call, attention: Attention, number: int, run: RowRun, like: Tensor) -> Tensor | None:
    if not attention.dropout:
        return None
    return dropout_factors(call.seed_of(number), run.known_positions(), attention.heads, attention.dropout, like)
