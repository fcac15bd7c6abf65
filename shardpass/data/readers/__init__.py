"""Readers: everything that can be partitioned, as one checked `RawGraph`.

This room knows formats of files and of other libraries' graphs. It knows neither partitions nor stores.
"""

from shardpass.data.readers.dispatch import read, stream_files
from shardpass.data.readers.graph_files import GraphFiles, read_edge_list, stream_edge_list
from shardpass.data.readers.ogb import stream_ogb
from shardpass.data.readers.tables import stream_tables

__all__ = [
    "GraphFiles",
    "read",
    "read_edge_list",
    "stream_edge_list",
    "stream_files",
    "stream_ogb",
    "stream_tables",
]
