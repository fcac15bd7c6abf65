"""Where the scores of an attention come from: a closed form, or the message function, run up to its softmax."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shardpass.core.aggregation.call import Call, EdgePiece, Operands
from shardpass.core.aggregation.gradients import Gradients
from shardpass.core.aggregation.rerun import GradientRun, run_again
from shardpass.core.kernels import (
    ClosedScores,
    Outer,
    RowRun,
    ScoreGradients,
    SoftmaxState,
    accumulate,
    adjoint,
    fused,
    shaped,
)
from shardpass.core.sharding import Shard
from shardpass.core.tracing import Attention, Base, Key, Score, StopPass
from shardpass.errors import InternalError

Rows = dict[str, Tensor]


class Piece(NamedTuple):
    """A chunk of edges of a shard, and what they read.

    Args:
        rows: of the block, by name.
        values: what is summed, ``[block rows, heads, width]``.
        kept: the factors by which dropout multiplies the weights, ``[edges of the chunk, heads]``, or `None`.
    """

    shard: Shard
    run: RowRun
    rows: Rows
    values: Tensor
    kept: Tensor | None


class Scores(Protocol):
    """Computes the scores of edges, and attention with them."""

    in_one_loop: bool  # no tensor has a row per edge, so edges need not be cut into chunks

    def accumulate(self, state: SoftmaxState, piece: Piece) -> None:
        """Take a chunk of edges, in order of their destination, into `state`; see `kernels.accumulate`."""
        ...

    def adjoint(self, piece: Piece, outer: Outer, grad_values: Tensor, into: Rows, gradients: Gradients) -> bool:
        """Add the gradients of a chunk of edges, by source, to those of values and of the scores' inputs.

        Returns:
            whether `adjoint_of_dst` has to go over the same edges, by destination.
        """
        ...

    def adjoint_of_dst(self, piece: Piece, outer: Outer, gradients: Gradients) -> None:
        """Add what `adjoint` left out of a chunk of edges, by destination."""
        ...


def scores_of(call: Call, operands: Operands, attention: Attention) -> Scores:
    """The scores of `attention`."""
    form, mix = attention.score, call.structure.mix
    if form is None:
        return _FromMessages(call, operands, attention)
    return ClosedForm(operands, attention, form, mix)


class ClosedForm:
    """A formula of one source and one destination tensor.

    Attributes:
        form: the formula.
        tail: heads and channels of both tensors.
        mix: what weighs the channels, ``[heads, channels]``, or `None`.
        key: of the destination tensor.
    """

    def __init__(self, operands: Operands, attention: Attention, form: Score, mix: Tensor | None) -> None:
        of_source, of_dst = operands.src[form.source], operands.dst[form.destination]
        self.in_one_loop = fused.handles(form, operands.src[attention.value], of_source, of_dst, mix)
        self.form, self.key = form, Key("dst", form.destination)
        self.tail = attention.heads, of_dst.shape[1:].numel() // attention.heads
        self.of_dst = shaped(of_dst, self.tail).contiguous()
        self.mix = None if mix is None else mix.reshape(self.tail).contiguous()
        self._mix_shape = torch.Size() if mix is None else mix.shape

    def accumulate(self, state: SoftmaxState, piece: Piece) -> None:
        fused.accumulate(state, piece.run, self._of(piece), piece.values)

    def adjoint(self, piece: Piece, outer: Outer, grad_values: Tensor, into: Rows, gradients: Gradients) -> bool:
        of, name = self._of(piece), self.form.source
        source = into[name] if name in into else torch.zeros_like(of.of_source)
        target = gradients.touch(self.key) if self.key in gradients else torch.zeros_like(self.of_dst)
        to = ScoreGradients(shaped(source, self.tail), shaped(target, self.tail), self.zero_mix())
        lacks_dst = fused.adjoint(piece.run, of, piece.values, outer, grad_values, to)
        self.add_mix(to.mix, gradients)
        return lacks_dst and self.key in gradients

    def adjoint_of_dst(self, piece: Piece, outer: Outer, gradients: Gradients) -> None:
        to_dst = shaped(gradients.touch(self.key), self.tail)
        fused.adjoint_of_dst(piece.run, self._of(piece), piece.values, outer, to_dst)

    def zero_mix(self) -> Tensor | None:
        """Where the gradient of `mix` is added."""
        return None if self.mix is None else torch.zeros_like(self.mix)

    def add_mix(self, found: Tensor | None, gradients: Gradients) -> None:
        """Add the gradient of `mix`, if there is one, to that of the capture."""
        if found is not None and self.form.mix is not None:
            gradients.add_capture(self.form.mix, found.view(self._mix_shape))

    def _of(self, piece: Piece) -> ClosedScores:
        of_source = shaped(piece.rows[self.form.source], self.tail).contiguous()
        return ClosedScores(self.form, of_source, self.of_dst, self.mix, piece.kept)


class _FromMessages:
    """Whatever the message function computes up to its softmax, in steps with a tensor per chunk between them."""

    in_one_loop = False

    def __init__(self, call: Call, operands: Operands, attention: Attention) -> None:
        self.call, self.operands, self.attention = call, operands, attention
        self.names = call.structure.reductions[attention.maximum].sources

    def accumulate(self, state: SoftmaxState, piece: Piece) -> None:
        edges = piece.run.by_destination()
        inputs = self.call.inputs(self.operands, EdgePiece.of_run(piece.shard, edges), self._seen(piece.rows))
        phase = _ScorePhase(self.call, self.attention, None)
        run_again(self.call, inputs, phase)
        accumulate(state, edges, self._in_heads(phase.scores), piece.values, piece.kept)

    def adjoint(self, piece: Piece, outer: Outer, grad_values: Tensor, into: Rows, gradients: Gradients) -> bool:
        edges = piece.run.by_source()
        again = GradientRun(self.call, self.operands, EdgePiece.of_run(piece.shard, edges), self._seen(piece.rows))
        # Measured from the logarithm of the sum instead of from the maximum, exp(score) is the weight itself.
        phase = _ScorePhase(self.call, self.attention, outer.log_sum)
        again.run(phase)
        weights = phase.scores
        relative = adjoint(edges, self._in_heads(weights.detach()), piece.values, piece.kept, outer, grad_values)
        if weights.requires_grad:
            again.add_gradients([weights], [relative.view_as(weights)], into, gradients)
        return False

    def adjoint_of_dst(self, piece: Piece, outer: Outer, gradients: Gradients) -> None:
        raise InternalError("adjoint leaves nothing out")

    def _seen(self, rows: Rows) -> Rows:
        return {name: rows[name] for name in self.names}

    def _in_heads(self, scores: Tensor) -> Tensor:
        return scores.reshape(scores.size(0), self.attention.heads).clone(memory_format=torch.contiguous_format)


class _ScorePhase:
    """Ends a run of the message function at its scores, or at ``exp(score - log_sum)`` where `log_sum` is given."""

    def __init__(self, call: Call, attention: Attention, log_sum: Tensor | None) -> None:
        self.num_dst = self.whole_dst = call.edges.num_dst
        self.offset = 0
        self._scores: Tensor | None = None
        self._reductions, self._attention, self._log_sum = call.structure.reductions, attention, log_sum

    @property
    def scores(self) -> Tensor:
        """What the run ended at."""
        if self._scores is None:
            raise InternalError("the message function ended before its softmax")
        return self._scores

    def known_base(self, k: int) -> Base | None:
        return self._reductions[k].base

    def reduce(self, k: int, op: str, values: Tensor, index: Tensor, base: Base) -> Tensor:
        if k == self._attention.maximum and self._log_sum is not None:
            return self._log_sum.view(-1, *self._reductions[k].tail)
        if k in self._attention.members:
            self._scores = values
            raise StopPass
        return values.new_ones((self.num_dst, *values.shape[1:]))  # a count, which no score depends on
