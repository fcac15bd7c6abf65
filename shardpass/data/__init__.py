"""Graphs on disk: readers, partitioners, and the store that ranks load their parts from.

A reader returns a `RawGraph`, a partitioner gives each of its nodes a part, `partition` writes a store of both, and
`load` gives each rank its share. This package knows whole graphs and files. It knows no models and no frontends.
"""

from shardpass.data.inspect import Report, inspect, inspect_layers, verify
from shardpass.data.load import load
from shardpass.data.lookup import find_nodes, node_names
from shardpass.data.manifest import FieldInfo, Manifest
from shardpass.data.merge import RankData, merge_parts, parts_of_rank
from shardpass.data.partition import partition
from shardpass.data.raw import EDGE, NODE, EdgeArrays, RawGraph
from shardpass.data.readers import (
    GraphFiles,
    read,
    read_edge_list,
    stream_edge_list,
    stream_files,
    stream_ogb,
    stream_tables,
)
from shardpass.data.rows_between import inspect_pairs
from shardpass.data.shard import shard
from shardpass.data.store import Store, open_store

__all__ = [
    "EDGE",
    "NODE",
    "EdgeArrays",
    "FieldInfo",
    "GraphFiles",
    "Manifest",
    "RankData",
    "RawGraph",
    "Report",
    "Store",
    "find_nodes",
    "inspect",
    "inspect_layers",
    "inspect_pairs",
    "load",
    "merge_parts",
    "node_names",
    "open_store",
    "partition",
    "parts_of_rank",
    "read",
    "read_edge_list",
    "shard",
    "stream_edge_list",
    "stream_files",
    "stream_ogb",
    "stream_tables",
    "verify",
]
