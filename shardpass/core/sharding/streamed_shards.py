"""Shards that are copied from CPU memory to the device for the round that uses them."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardpass.core.sharding.host_copies import to_device
from shardpass.core.sharding.shard import EdgeShards, Shard


class CopyStreams:
    """The owner of the CUDA streams on which a graph's shards are copied to the device.

    All walks over the graph share one, because freed memory is used again only on the stream it was allocated on.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def of(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream for copies to `device`; None if that is no GPU."""
        if device.type == "cuda" and device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams.get(device)


class StreamedShards:
    """The shards of an edge list on the device: the one in use, and the next, which is copied meanwhile.

    On a GPU the copies are made on a stream of their own, out of pinned memory.
    """

    def __init__(self, edges: EdgeShards, device: torch.device, streams: CopyStreams) -> None:
        self._shards, self._device, self._side = edges.shards, device, streams.of(device)
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
        for tensor in (shard.indptr, shard.src_rows):
            if not tensor.is_pinned():
                tensor.data = tensor.pin_memory()  # the same numbers, where a copy does not hold up the CPU
        with torch.cuda.stream(self._side):
            return _on(shard, self._device)


def _on(shard: Shard, device: torch.device) -> Shard:
    indptr, src_rows = to_device(shard.indptr, device), to_device(shard.src_rows, device)
    return replace(shard, indptr=indptr, src_rows=src_rows, home=shard)
