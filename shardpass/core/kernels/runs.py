"""What the kernels of attention are given: chunks of edges, the state of online softmax, scores in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardpass.core.sharding import Chunk, Shard, Transposes, cut
from shardpass.core.tracing import Score, accumulator_dtype
from shardpass.errors import InternalError


class EdgeRun(NamedTuple):
    """A chunk of a shard's edges, by destination or by source, with both ends of each edge.

    Args:
        indptr: where the edges of each row begin among all edges of the shard in this order.
        bounds: the edges of the chunk, and the rows of `indptr` that they belong to.
        src_rows: row of the block at which each edge begins, ``[edges of the chunk]``.
        dst_rows: row of the destination at which each edge ends, ``[edges of the chunk]``.
        positions: where the chunk's edges stand in the shard: a slice, or ``[edges of the chunk]``.
    """

    indptr: Tensor
    bounds: Chunk
    src_rows: Tensor
    dst_rows: Tensor
    positions: slice | Tensor


class RowRun(NamedTuple):
    """A chunk of a shard's edges, by destination or by source, for loops over the rows of `indptr`.

    Args:
        indptr, bounds: as in `EdgeRun`.
        columns: the row at the other end of each edge, ``[edges of the chunk]``.
        positions: as in `EdgeRun`. It may be `None` if only loops over rows use the run.
    """

    indptr: Tensor
    bounds: Chunk
    columns: Tensor
    positions: slice | Tensor | None

    def by_destination(self) -> EdgeRun:
        """The same edges with both ends, for a run whose rows are destinations."""
        return EdgeRun(self.indptr, self.bounds, self.columns, self._rows(), self.known_positions())

    def by_source(self) -> EdgeRun:
        """The same edges with both ends, for a run whose rows are sources."""
        return EdgeRun(self.indptr, self.bounds, self._rows(), self.columns, self.known_positions())

    def ends(self, is_by_source: bool) -> tuple[Tensor, Tensor]:
        """The rows of sources and of destinations, ``[edges of the chunk]`` each."""
        return (self._rows(), self.columns) if is_by_source else (self.columns, self._rows())

    def known_positions(self) -> slice | Tensor:
        """`positions`, which must not be `None`."""
        if self.positions is None:
            raise InternalError("edges are taken one by one, but this run does not know their positions in the shard")
        return self.positions

    def _rows(self) -> Tensor:
        start, stop, low, high = self.bounds
        counts = self.indptr[low : high + 1].long().clamp(start, stop).diff()
        rows = torch.arange(low, high, device=counts.device)
        return torch.repeat_interleave(rows, counts, output_size=stop - start)


class SoftmaxState(NamedTuple):
    """What online softmax keeps of each destination, in the dtype that `accumulator_dtype` gives.

    Args:
        top: the largest score so far, ``[num_dst, heads]``.
        total: the sum of the weights, ``[num_dst, heads]``.
        out: the weighted sum, ``[num_dst, heads, width]``.
    """

    top: Tensor
    total: Tensor
    out: Tensor

    @classmethod
    def fresh(cls, num_dst: int, heads: int, width: int, like: Tensor) -> SoftmaxState:
        """The state of destinations that have not seen an edge yet."""
        wide = accumulator_dtype(like.dtype)
        top = like.new_full((num_dst, heads), float("-inf"), dtype=wide)
        return cls(top, torch.zeros_like(top), like.new_zeros((num_dst, heads, width), dtype=wide))


class Outer(NamedTuple):
    """What backward knows of each destination.

    Args:
        grad: gradient of the weighted sum, ``[num_dst, heads, width]``.
        delta: ``<grad, weighted sum>``, ``[num_dst, heads]``.
        log_sum: ``log(sum(exp(score)))``, ``[num_dst, heads]``.
    """

    grad: Tensor
    delta: Tensor
    log_sum: Tensor


class ClosedScores(NamedTuple):
    """What the scores of edges are computed from.

    Args:
        form: the formula.
        of_source: rows of the block, ``[block rows, heads, channels]``. An `AdditiveScore` has one channel.
        of_dst: rows of all destinations, ``[num_dst, heads, channels]``.
        mix: the weights of the channels in a `MixedScore`, ``[heads, channels]``.
        kept: the factors by which dropout multiplies the weights, ``[edges of the chunk, heads]``, or `None`.
    """

    form: Score
    of_source: Tensor
    of_dst: Tensor
    mix: Tensor | None
    kept: Tensor | None


class ScoreGradients(NamedTuple):
    """The gradients of the tensors of a `ClosedScores`, which kernels add to in place.

    Args:
        of_source, of_dst, mix: in the shape of the tensor of that name.
    """

    of_source: Tensor
    of_dst: Tensor
    mix: Tensor | None


def by_destination(shard: Shard, most: int) -> Iterator[RowRun]:
    """The edges of a shard in its own order, `most` at a time."""
    for chunk in shard.chunks(most):
        span = slice(chunk.start, chunk.stop)
        yield RowRun(shard.indptr, chunk, _part(shard.src_rows, span), span)


def by_source(shard: Shard, transposes: Transposes, most: int, one_by_one: bool) -> Iterator[RowRun]:
    """The edges of a shard in the other order, `most` at a time; with their positions if they are taken one by one."""
    if shard.num_edges == 0:
        return
    indptr, dst_rows, order = transposes.of(shard, with_order=one_by_one)
    positions = order if one_by_one else None
    for chunk in cut(indptr, shard.num_edges, most):
        span = slice(chunk.start, chunk.stop)
        yield RowRun(indptr, chunk, _part(dst_rows, span), None if positions is None else _part(positions, span))


def _part(rows: Tensor, span: slice) -> Tensor:
    return rows if span.stop - span.start == rows.size(0) else rows[span]
