"""Directories that ``dgl.distributed.partition_graph`` wrote, read without dgl.

This room knows DGL's JSON, its binary files and its ids. Its result is a `RawGraph`.
"""

from shardpass.data.readers.dgl_partitions.description import Description, IdRanges, read_description
from shardpass.data.readers.dgl_partitions.files import PartGraph, Stored, integers, read_part_graph, read_tensors
from shardpass.data.readers.dgl_partitions.read import as_mask, own_edges, owner_of, read_dgl_partition

__all__ = [
    "Description",
    "IdRanges",
    "PartGraph",
    "Stored",
    "as_mask",
    "integers",
    "own_edges",
    "owner_of",
    "read_description",
    "read_dgl_partition",
    "read_part_graph",
    "read_tensors",
]
