"""Partitioning in bounded memory: what is needed of the edges goes through files, one run of nodes at a time."""

from shardpass.data.streaming.budget import MEMORY_BYTES, Budget
from shardpass.data.streaming.edges import SpilledEdges
from shardpass.data.streaming.partitioners import PASSES, STREAMING, streamed_parts

__all__ = ["MEMORY_BYTES", "PASSES", "STREAMING", "Budget", "SpilledEdges", "streamed_parts"]
