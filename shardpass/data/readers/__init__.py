"""Readers: everything that can be partitioned, as one checked `RawGraph`."""

from shardpass.data.readers.dgl_partition import DglPartition, read_dgl_partition
from shardpass.data.readers.dispatch import read, stream_files
from shardpass.data.readers.edge_list import read_edge_list
from shardpass.data.readers.graph_files import GraphFiles, stream_edge_list
from shardpass.data.readers.ogb import stream_ogb

__all__ = [
    "DglPartition",
    "GraphFiles",
    "read",
    "read_dgl_partition",
    "read_edge_list",
    "stream_edge_list",
    "stream_files",
    "stream_ogb",
]
