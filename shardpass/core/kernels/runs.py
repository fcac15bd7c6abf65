"""What the loops of attention are given: runs of edges, the state of online softmax, scores in closed form."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardpass.core.sharding import Chunk
from shardpass.core.tracing import AdditiveScore, DotScore, Score
from shardpass.errors import InternalError


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
    """A run of the edges of a shard in one of its two orders, as loops over rows walk it.

    Args:
        indptr, bounds: as in `EdgeRun`.
        columns: ``[edges of the run]``; the rows at the other end of the edges.
        positions: as in `EdgeRun`, or `None` where only loops over rows follow, which need none.
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
        """`positions`, which must be given."""
        if self.positions is None:
            raise InternalError("edges are taken one by one, but nothing says where they stand")
        return self.positions

    def _rows(self) -> Tensor:
        start, stop, low, high = self.bounds
        counts = self.indptr[low : high + 1].long().clamp(start, stop).diff()
        rows = torch.arange(low, high, device=counts.device)
        return torch.repeat_interleave(rows, counts, output_size=stop - start)


class SoftmaxState(NamedTuple):
    """What online softmax keeps of each destination.

    Args:
        top: the largest score so far, ``[num_dst, heads]``.
        total: the sum of weights, ``[num_dst, heads]``.
        out: the weighted sum, ``[num_dst, heads, width]``.
    """

    top: Tensor
    total: Tensor
    out: Tensor

    @classmethod
    def fresh(cls, num_dst: int, heads: int, width: int, like: Tensor) -> SoftmaxState:
        """The state of destinations that have seen no edge."""
        top = like.new_full((num_dst, heads), float("-inf"))
        return cls(top, torch.zeros_like(top), like.new_zeros((num_dst, heads, width)))


class ClosedScores(NamedTuple):
    """What the scores of edges are made of.

    Args:
        form: the formula.
        of_source: rows of the block, ``[block rows, heads, channels]``; one channel in an `AdditiveScore`.
        of_dst: rows of all destinations, in the same shape.
        mix: of a `MixedScore`, ``[heads, channels]``.
        kept: what dropout multiplies the weights with, ``[edges of the run, heads]``, or `None`.
    """

    form: Score
    of_source: Tensor
    of_dst: Tensor
    mix: Tensor | None
    kept: Tensor | None

    @property
    def number(self) -> float:
        """The factor or slope of the formula."""
        return self.form.factor if isinstance(self.form, DotScore) else self.form.slope

    def kind(self, loops: ModuleType) -> int:
        """The number by which `loops` know the formula."""
        if isinstance(self.form, AdditiveScore):
            return int(loops.ADDITIVE)
        return int(loops.DOT if isinstance(self.form, DotScore) else loops.MIXED)

    def none(self) -> Any:
        """A numpy array that stands for a missing tensor ``[edges, heads]`` or ``[heads, channels]``."""
        return self.of_source.new_empty((0, self.of_source.size(1))).numpy()
