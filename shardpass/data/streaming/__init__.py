"""Partitioning in bounded memory: edges are sorted through files and read back one run of nodes at a time.

This room knows graphs in memory and in files, and layouts. It knows neither file formats nor stores.
"""

from shardpass.data.streaming.adjacency import Adjacency
from shardpass.data.streaming.buckets import INT32_LIMIT
from shardpass.data.streaming.budget import MEMORY_BYTES, Budget
from shardpass.data.streaming.edges import EdgesByPart, parts_of

__all__ = ["INT32_LIMIT", "MEMORY_BYTES", "Adjacency", "Budget", "EdgesByPart", "parts_of"]
