"""Attention over in-edges in one pass forward and one backward: the general loops, where a body is recognised as such.

Forward: online softmax, chunk by chunk and block by block; kept are a weighted sum and a log-sum-exp per destination
and head. Backward: every weight is computed again from those, ``weight = exp(score - log_sum)``, and the gradient of a
score is ``weight * (<grad, value> - <grad, out>)`` (Dao et al. 2022, arXiv 2205.14135, appendix B). Nothing with a row
per edge outlives a chunk. How a score comes about is up to a `Scores`: in closed form, or by running the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from shardpass.core.backward import Gradients, Returned
from shardpass.core.call import Call, Operands
from shardpass.core.forward import ForwardResult
from shardpass.core.kernels import attention as kernels
from shardpass.core.kernels.attention import EdgeRun, SoftmaxState
from shardpass.core.program import AdditiveScore, Attention, Inputs
from shardpass.core.random import dropout_factors
from shardpass.core.reducers import Base
from shardpass.core.shard import Shard, cut
from shardpass.core.tracing import EdgeTrace, StopPass

Rows = dict[str, Tensor]
Adjoint = Callable[[Tensor, Rows, Gradients], None]
"""Takes the gradient of a chunk's scores divided by their weights, and where the gradients of the block's rows, and
all others, are added up."""


class Scores(Protocol):
    """Where the scores of edges come from: ``[edges of the chunk, heads]``."""

    def forward(self, shard: Shard, run: EdgeRun, rows: Rows) -> Tensor:
        """The scores of a chunk; the caller may overwrite them."""
        ...

    def weights(self, shard: Shard, run: EdgeRun, rows: Rows, log_sum: Tensor) -> tuple[Tensor, Adjoint]:
        """``exp(score - log_sum)`` of a chunk's edges, and what adds the gradient of the scores to the inputs'."""
        ...


def run_attention(call: Call, operands: Operands, attention: Attention) -> ForwardResult:
    """What forward finds of a body that is one attention. Collective; runs without gradients."""
    values = operands.src[attention.value]
    width = _numel(values) // attention.heads
    state = SoftmaxState.fresh(call.edges.num_dst, attention.heads, width, values)
    scores = _scores(call, operands, attention)
    for position, shard, rows in call.walk(operands, _fetched(call, attention)):
        table = rows[attention.value].reshape(-1, attention.heads, width) if rows else values
        for run in _by_destination(call, shard, attention, operands):
            kept = _kept(call, attention, position, run, values)
            kernels.accumulate(state, run, scores.forward(shard, run, rows), table, kept)
    total = state.total.add_(attention.eps)
    out = state.out.div_(total.unsqueeze(-1).masked_fill(total.unsqueeze(-1) == 0, 1))
    if (state.top == float("-inf")).any():  # nothing but scores of -inf is 0 / 0, as the softmax of them is
        lost = (state.top == float("-inf")) & (call.edges.degrees() > 0).unsqueeze(-1)
        out.masked_fill_(lost.unsqueeze(-1), float("nan"))
    result = ForwardResult()
    shapes = {k: (call.edges.num_dst, *call.structure.reductions[k].tail) for k in attention.members}
    result.values = {
        attention.maximum: state.top.view(shapes[attention.maximum]),
        attention.total: total.view(shapes[attention.total]),
        attention.output: out.view(shapes[attention.output]),
    }
    result.states = {attention.maximum: [state.top + total.log()]}
    return result


def attention_gradients(
    call: Call, operands: Operands, attention: Attention, out: Tensor, log_sum: Tensor, gradients: Gradients
) -> None:
    """The gradients of an attention, added to `gradients`. Collective."""
    heads, names = attention.heads, _fetched(call, attention)
    width = _numel(out) // heads
    grad = gradients.reductions[attention.output].reshape(-1, heads, width).contiguous()
    delta = (grad * out.view_as(grad)).sum(-1)
    scores = _scores(call, operands, attention)
    returned = Returned(call, gradients, names)
    reached = attention.output in gradients.reached
    for position, shard, rows in call.walk(operands, names):
        with returned.block(position) as into:
            table = rows[attention.value].reshape(-1, heads, width) if rows else grad[:0]
            target = into.get(attention.value, torch.empty(0))
            target = target.view_as(table) if attention.value in into else torch.zeros_like(table)
            for run in _by_source(call, shard, attention, operands) if reached else ():
                kept = _kept(call, attention, position, run, grad)
                gradients.ran = True
                weights, pull = scores.weights(shard, run, rows, log_sum)
                pull(kernels.adjoint(run, weights, table, kept, grad, delta, target), into, gradients)
    returned.finish()


def _numel(tensor: Tensor) -> int:
    return tensor.new_empty((1, *tensor.shape[1:])).numel()


def _fetched(call: Call, attention: Attention) -> list[str]:
    return call.structure.sources_of(list(attention.members))


def _chunk_edges(call: Call, attention: Attention, operands: Operands) -> int:
    widths = [attention.heads]
    if not isinstance(attention.score, AdditiveScore):
        read = call.structure.reductions[attention.maximum].sources
        tensors = [operands.src[name] for name in read] + [*operands.dst.values(), *operands.edge.values()]
        widths += [_numel(tensor) for tensor in tensors]
    return max(1, call.plan.options.chunk_bytes // (max(widths) * operands.src[attention.value].itemsize))


def _by_destination(call: Call, shard: Shard, attention: Attention, operands: Operands) -> Iterator[EdgeRun]:
    for chunk in shard.chunks(_chunk_edges(call, attention, operands)):
        span = slice(chunk.start, chunk.stop)
        dst_rows = shard.dst_rows(chunk).add_(chunk.low)
        yield EdgeRun(shard.indptr, chunk, shard.src_rows[span], dst_rows, span)


def _by_source(call: Call, shard: Shard, attention: Attention, operands: Operands) -> Iterator[EdgeRun]:
    if shard.num_edges == 0:
        return
    indptr, dst_rows, positions = shard.transpose()
    for chunk in cut(indptr, shard.num_edges, _chunk_edges(call, attention, operands)):
        span = slice(chunk.start, chunk.stop)
        bounds = indptr[chunk.low : chunk.high + 1].long().clamp(chunk.start, chunk.stop)
        src_rows = torch.repeat_interleave(
            torch.arange(chunk.low, chunk.high, device=indptr.device),
            bounds.diff(),
            output_size=chunk.stop - chunk.start,
        )
        yield EdgeRun(indptr, chunk, src_rows, dst_rows[span], positions[span])


def _kept(call: Call, attention: Attention, position: int, run: EdgeRun, like: Tensor) -> Tensor | None:
    if not attention.dropout:
        return None
    edges = run.positions
    if isinstance(edges, slice):
        edges = torch.arange(edges.start, edges.stop, device=like.device)
    seed = call.seed_of(position)
    return dropout_factors(seed, edges, attention.heads, attention.dropout, like.dtype)


def _scores(call: Call, operands: Operands, attention: Attention) -> Scores:
    if isinstance(attention.score, AdditiveScore):
        return _Additive(operands, attention.score, attention.heads)
    return _Body(call, operands, attention)


class _Additive:
    """``leaky_relu(of_source[j] + of_dst[i])``, in closed form."""

    def __init__(self, operands: Operands, score: AdditiveScore, heads: int) -> None:
        self.score, self.heads = score, heads
        self.of_dst = operands.dst[score.destination].reshape(-1, heads)

    def forward(self, shard: Shard, run: EdgeRun, rows: Rows) -> Tensor:
        of_source = rows[self.score.source].reshape(-1, self.heads)
        return kernels.additive_scores(run, of_source, self.of_dst, self.score.slope)

    def weights(self, shard: Shard, run: EdgeRun, rows: Rows, log_sum: Tensor) -> tuple[Tensor, Adjoint]:
        of_source = rows[self.score.source].reshape(-1, self.heads)
        weights = kernels.softmax_weights(run, self.forward(shard, run, rows), log_sum)

        def pull(relative: Tensor, into: Rows, gradients: Gradients) -> None:
            source = into.get(self.score.source, torch.zeros_like(of_source)).view_as(of_source)
            name = self.score.destination
            target = gradients.of_dst(name) if name in gradients.dst else torch.zeros_like(self.of_dst)
            target = target.view_as(self.of_dst)
            kernels.additive_adjoint(run, of_source, self.of_dst, self.score.slope, weights, relative, source, target)

        return weights, pull


class _Body:
    """Whatever the body computes, by running it up to the softmax."""

    def __init__(self, call: Call, operands: Operands, attention: Attention) -> None:
        self.call, self.operands, self.attention = call, operands, attention
        self.names = call.structure.reductions[attention.maximum].sources

    def forward(self, shard: Shard, run: EdgeRun, rows: Rows) -> Tensor:
        return self._in_heads(self._run(self._gathered(shard, run, rows, leaves=False), {}, None, None))

    def weights(self, shard: Shard, run: EdgeRun, rows: Rows, log_sum: Tensor) -> tuple[Tensor, Adjoint]:
        call = self.call
        leaves = [saved.detach().requires_grad_() for saved in self.operands.captures]
        substitutes = {id(original): leaf for original, leaf in zip(call.captured, leaves)}
        with torch.enable_grad():
            inputs = self._gathered(shard, run, rows, leaves=True)
            expected = {id(t) for group in (inputs.src, inputs.dst, inputs.edge) for t in group.values()}
            expected |= {id(t) for t in (*leaves, *call.captured)}
            # measured from the logarithm of the sum instead of from the maximum, exp(score) is the weight itself
            weights = self._run(inputs, substitutes, expected, log_sum)
        captured = [*enumerate(leaves), *((i, t) for i, t in enumerate(call.captured) if t.requires_grad)]

        def pull(relative: Tensor, into: Rows, gradients: Gradients) -> None:
            self._pull(weights, relative.view_as(weights), shard, run, inputs, captured, into, gradients)

        return self._in_heads(weights.detach()), pull

    def _in_heads(self, scores: Tensor) -> Tensor:
        return scores.reshape(scores.size(0), self.attention.heads).clone(memory_format=torch.contiguous_format)

    def _pull(
        self,
        weights: Tensor,
        grad: Tensor,
        shard: Shard,
        run: EdgeRun,
        inputs: Inputs,
        captured: list[tuple[int, Tensor]],
        into: Rows,
        gradients: Gradients,
    ) -> None:
        targets: list[tuple[str, str | int, Tensor]] = []
        for kind, tensors in (("s", inputs.src), ("d", inputs.dst), ("e", inputs.edge)):
            targets += [(kind, name, t) for name, t in tensors.items() if t.requires_grad]
        targets += [("c", i, t) for i, t in captured]
        if not weights.requires_grad or not targets:
            return
        found = torch.autograd.grad(weights, [t for *_, t in targets], grad, allow_unused=True)
        for (kind, key, _), part in zip(targets, found):
            if part is None:
                continue
            if kind == "s":
                into[str(key)].index_add_(0, run.src_rows, part)
            elif kind == "d":
                gradients.of_dst(str(key)).index_add_(0, run.dst_rows, part)
            elif kind == "e":
                places = shard.places(run.positions)
                gradients.of_edges(str(key))[places] += part  # each edge stands there once
            else:
                old = gradients.captures[int(key)]
                gradients.captures[int(key)] = part if old is None else old + part

    def _gathered(self, shard: Shard, run: EdgeRun, rows: Rows, leaves: bool) -> Inputs:
        call, operands = self.call, self.operands
        seen = {name: rows[name] for name in self.names}
        return call.gathered(operands, run.src_rows, run.dst_rows, shard.places(run.positions), seen, leaves)

    def _run(
        self,
        inputs: Inputs,
        substitutes: dict[int, Tensor],
        expected: set[int] | None,
        log_sum: Tensor | None,
    ) -> Tensor:
        phase = _ScorePhase(self.call, self.attention, log_sum)
        try:
            with self.call.scope(), EdgeTrace(self.call.program, inputs.index, phase, substitutes, expected):
                message = self.call.program.message(inputs)
                if self.call.program.aggregate is not None:
                    self.call.program.aggregate(message, inputs)
        except StopPass:
            pass
        assert phase.found is not None
        return phase.found


class _ScorePhase:
    """Ends a run of the body at its scores; given what to measure them from, at ``exp(score - log_sum)``."""

    def __init__(self, call: Call, attention: Attention, log_sum: Tensor | None) -> None:
        self.num_dst = self.whole_dst = call.edges.num_dst
        self.offset = 0
        self.found: Tensor | None = None
        self._reductions, self._attention, self._log_sum = call.structure.reductions, attention, log_sum

    def known_base(self, k: int) -> Base | None:
        return self._reductions[k].base

    def reduce(self, k: int, op: str, values: Tensor, index: Tensor, base: Base) -> Tensor:
        if k == self._attention.maximum and self._log_sum is not None:
            return self._log_sum.view(-1, *self._reductions[k].tail)
        if k in self._attention.members:
            self.found = values
            raise StopPass
        return values.new_ones((self.num_dst, *values.shape[1:]))  # a count, which no score depends on
