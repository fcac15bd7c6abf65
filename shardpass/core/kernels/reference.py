"""Kernels in plain torch for every device, dtype and shape. They define what is right."""

from __future__ import annotations

import torch
from torch import Tensor

from shardpass.core.sharding import Shard, Transposes

CHUNK_EDGES = 8192


def _weighted(rows: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return rows
    if weight.dim() == 2:
        width = rows.shape[1:].numel() // weight.size(1)
        return (rows.reshape(-1, weight.size(1), width) * weight.unsqueeze(-1)).view_as(rows)
    return rows * weight.view(-1, *[1] * (rows.dim() - 1))


def gather_sum(out: Tensor, shard: Shard, rows: Tensor, weight: Tensor | None, fresh: bool = False) -> None:
    """See `kernels.gather_sum`."""
    if fresh:
        out.zero_()
    for chunk in shard.chunks(CHUNK_EDGES):
        span = slice(chunk.start, chunk.stop)
        messages = rows.index_select(0, shard.src_rows[span])
        messages = _weighted(messages, None if weight is None else weight[span])
        out[chunk.low : chunk.high].index_add_(0, shard.dst_rows(chunk), messages.to(out.dtype))


def gather_sum_transposed(
    out: Tensor, shard: Shard, transposes: Transposes, grad: Tensor, weight: Tensor | None, fresh: bool = False
) -> None:
    """See `kernels.gather_sum_transposed`. It walks the edges by destination, so it needs no transpose."""
    if fresh:
        out.zero_()
    for chunk in shard.chunks(CHUNK_EDGES):
        span = slice(chunk.start, chunk.stop)
        messages = grad[chunk.low : chunk.high].index_select(0, shard.dst_rows(chunk))
        messages = _weighted(messages, None if weight is None else weight[span])
        out.index_add_(0, shard.src_rows[span], messages.to(out.dtype))


def edge_dot(shard: Shard, rows: Tensor, grad: Tensor, max_edges: int) -> Tensor:
    """See `kernels.edge_dot`."""
    result = rows.new_empty(shard.num_edges)
    for chunk in shard.chunks(max_edges):
        span = slice(chunk.start, chunk.stop)
        left = rows.index_select(0, shard.src_rows[span]).unsqueeze(-1).flatten(1)
        right = grad[chunk.low : chunk.high].index_select(0, shard.dst_rows(chunk)).unsqueeze(-1).flatten(1)
        result[span] = torch.einsum("ec,ec->e", left, right)
    return result
