"""Structure that stays in CPU memory: shards are copied to the device for the round that uses them.

`to_device` and `to_host` are the only ways between the two places. They copy where the device is the CPU as well, so
that tests without a GPU take the same path.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shardpass.core.sharding.shard import EdgeShards, Shard

HOST = torch.device("cpu")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor with a row per edge, or of structure, where rows of nodes are."""
    return tensor.to(device, non_blocking=True, copy=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy of a tensor where edge tensors and structure are."""
    return tensor.to(HOST, copy=True)


class StreamedShards:
    """The shards of an edge list on the device: the one at work, and the next, which is copied meanwhile.

    On a GPU copies are made on a stream of their own, out of pinned memory.
    """

    def __init__(self, edges: EdgeShards, device: torch.device) -> None:
        self._shards, self._device = edges.shards, device
        if device.type == "cuda" and edges.copy_stream is None:  # one for all walks: memory belongs to its stream
            edges.copy_stream = torch.cuda.Stream(device)
        self._side = edges.copy_stream
        self._coming: tuple[int, Shard] | None = None

    def __getitem__(self, position: int) -> Shard:
        """The shard at `position`; ask in ascending order."""
        coming, self._coming = self._coming, None
        found = coming[1] if coming is not None and coming[0] == position else self._copied(self._shards[position])
        if self._side is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_stream(self._side)
            for tensor in (found.indptr, found.src_rows):
                tensor.record_stream(here)  # their memory is not used again before `here` is through with it
        if position + 1 < len(self._shards):
            self._coming = position + 1, self._copied(self._shards[position + 1])
        return found

    def _copied(self, shard: Shard) -> Shard:
        if self._side is None:
            return _on(shard, self._device)
        for name in ("indptr", "src_rows"):
            if not getattr(shard, name).is_pinned():
                setattr(shard, name, getattr(shard, name).pin_memory())
        with torch.cuda.stream(self._side):
            return _on(shard, self._device)


def _on(shard: Shard, device: torch.device) -> Shard:
    indptr, src_rows = to_device(shard.indptr, device), to_device(shard.src_rows, device)
    return replace(shard, indptr=indptr, src_rows=src_rows, _transpose=None, _source_order=None, home=shard)
