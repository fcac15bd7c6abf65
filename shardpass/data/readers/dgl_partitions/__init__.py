"""Directories that ``dgl.distributed.partition_graph`` wrote, read without dgl.

This room knows DGL's JSON, its binary files and its ids. Its result is a `RawGraph`.
"""

from shardpass.data.readers.dgl_partitions.config import Config, IdRanges, read_config
from shardpass.data.readers.dgl_partitions.fields import as_mask, owner_of
from shardpass.data.readers.dgl_partitions.files import PartGraph, Stored, integers, read_part_graph, read_tensors
from shardpass.data.readers.dgl_partitions.read import own_edges, read_dgl_partition

__all__ = [
    "Config",
    "IdRanges",
    "PartGraph",
    "Stored",
    "as_mask",
    "integers",
    "own_edges",
    "owner_of",
    "read_config",
    "read_dgl_partition",
    "read_part_graph",
    "read_tensors",
]
