"""Partitioning in bounded memory: edges are sorted through files and read back one run of nodes at a time.

This room knows graphs in memory and in files, and layouts. It knows neither file formats nor stores.
"""

from shardpass.data.streaming.adjacency import all_edges
from shardpass.data.streaming.budget import MEMORY_BYTES, Budget
from shardpass.data.streaming.edges import EdgesByPart
from shardpass.data.streaming.partitioners import PASSES, STREAMING, streamed_parts

__all__ = ["MEMORY_BYTES", "PASSES", "STREAMING", "Budget", "EdgesByPart", "all_edges", "streamed_parts"]
