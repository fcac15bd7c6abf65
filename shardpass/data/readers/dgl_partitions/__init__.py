"""Directories that ``dgl.distributed.partition_graph`` wrote, read without dgl.

This room knows DGL's JSON, its binary files and its ids. Its result is a `RawGraph`.
"""

from shardpass.data.readers.dgl_partitions.description import read_description
from shardpass.data.readers.dgl_partitions.files import read_part_graph, read_tensors
from shardpass.data.readers.dgl_partitions.read import as_mask, own_edges, read_dgl_partition, read_fields

__all__ = [
    "as_mask",
    "own_edges",
    "read_description",
    "read_dgl_partition",
    "read_fields",
    "read_part_graph",
    "read_tensors",
]
