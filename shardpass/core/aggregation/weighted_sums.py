"""Weighted sums of source rows, differentiated any number of times by kernels.

The sum over edges of weight times source row times gradient row is linear in each of the three. What it is multiplied
by in one of them, given the others, is a kernel: the weighted sum itself, the transposed one, or a dot product for each
edge. Its derivatives are the same three, with something else in the place of one of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shardpass.core.aggregation.call import Call
from shardpass.core.kernels import edge_dot, gather_sum, gather_sum_transposed
from shardpass.core.sharding import HOST, CopyStreams, Shard, StreamedShards, Transposes
from shardpass.core.tracing import accumulator_dtype

Factor = Literal["src", "dst", "edge"]


@dataclass(frozen=True)
class WeightedSum:
    """The product of three tables, summed over the edges of a call.

    Args:
        shapes: of the tables: sources with all halo rows, ``[num_src, ...]``, destinations ``[num_dst, ...]``, and
            weights ``[num_edges, ...]``, which a sum of copies does not have.
        max_edges: how many edges are taken at a time where a tensor has a row per edge.
    """

    call: Call
    shapes: Mapping[Factor, torch.Size]
    max_edges: int

    def by(self, factor: Factor, others: Mapping[Factor, Tensor]) -> Tensor:
        """What `factor` is multiplied by, given the other tables, in its shape; differentiable. Not collective."""
        found: Tensor = _By.apply(self, factor, *(others[name] for name in self.shapes if name != factor))
        return found

    def shards(self) -> Iterator[Shard]:
        """The shards, on the device of node rows."""
        call, streamed = self.call, self.call.streamed_to
        if streamed is None:
            yield from call.edges.shards
            return
        there = StreamedShards(call.edges, streamed, call.plan.comm.caches.of(CopyStreams))
        yield from (there[number] for number in range(len(call.edges.shards)))

    def weights(self, shard: Shard, table: Tensor | None) -> Tensor | None:
        """The weights of a shard's edges, as kernels take them."""
        if table is None:
            return None
        rows, heads = shard.select(table), self.heads
        return rows.reshape(-1, heads) if heads > 1 else rows.reshape(-1)

    def to_nodes(
        self, factor: Factor, src: Tensor | None = None, dst: Tensor | None = None, edge: Tensor | None = None
    ) -> Tensor:
        """See `by`. One of `src` and `dst` is given, and weights unless there are none."""
        given = dst if src is None else src
        assert given is not None
        found = given.new_zeros(self.shapes[factor], dtype=accumulator_dtype(given.dtype))
        transposes = self.call.plan.comm.caches.of(Transposes)
        for shard in self.shards():
            block, weights = slice(shard.block.start, shard.block.stop), self.weights(shard, edge)
            if factor == "dst":
                gather_sum(found, shard, given[block], weights)
            else:
                gather_sum_transposed(found[block], shard, transposes, given, weights)
        return found.to(given.dtype)

    def to_edges(self, src: Tensor, dst: Tensor) -> Tensor:
        """See `by`."""
        device = src.device if self.call.streamed_to is None else HOST
        found, whole = None, slice(0, self.call.edges.num_edges)
        for shard in self.shards():
            rows = edge_dot(shard, src[shard.block.start : shard.block.stop], dst, self.max_edges, self.heads)
            rows = rows.reshape(-1, *self.shapes["edge"][1:])
            places = shard.places(slice(0, shard.num_edges))
            if device == src.device and isinstance(places, slice) and places == whole:
                return rows
            found = torch.empty(self.shapes["edge"], dtype=src.dtype, device=device) if found is None else found
            shard.put(found, rows)  # each edge is in one of the shards
        assert found is not None
        return found

    @property
    def heads(self) -> int:
        """How many weights an edge has."""
        return self.shapes["edge"][1:].numel()


class _By(torch.autograd.Function):
    """Inputs: the sum, the factor, the other tables. Output: what the factor is multiplied by."""

    @staticmethod
    def forward(ctx: Any, of: WeightedSum, factor: Factor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        ctx.of, ctx.factor = of, factor
        tables = {name: rows.contiguous() for name, rows in zip((n for n in of.shapes if n != factor), others)}
        return of.to_edges(**tables) if factor == "edge" else of.to_nodes(factor, **tables)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of: WeightedSum = ctx.of
        names = [name for name in of.shapes if name != ctx.factor]
        tables = {**dict(zip(names, ctx.saved_tensors)), ctx.factor: grad}
        needed = ctx.needs_input_grad[2:]
        return None, None, *(of.by(name, tables) if need else None for name, need in zip(names, needed))
