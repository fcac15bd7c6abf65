"""Graphs on disk: readers, partitioners, and the store that ranks load their parts from."""

from shardpass.data.flow import LayerReport, inspect_layers
from shardpass.data.inspect import GroupReport, Report, inspect, verify
from shardpass.data.manifest import FieldInfo, Manifest
from shardpass.data.merge import RankData, RankEdges, merge_parts, parts_of_rank
from shardpass.data.partition import partition
from shardpass.data.raw import EDGE, NODE, EdgeArrays, EdgeType, NodeType, RawGraph
from shardpass.data.readers import GraphFiles, read, read_edge_list, stream_edge_list, stream_files, stream_ogb
from shardpass.data.store import PartData, PartEdges, Store, open_store

__all__ = [
    "EDGE",
    "NODE",
    "EdgeArrays",
    "EdgeType",
    "FieldInfo",
    "GraphFiles",
    "GroupReport",
    "LayerReport",
    "Manifest",
    "NodeType",
    "PartData",
    "PartEdges",
    "RankData",
    "RankEdges",
    "RawGraph",
    "Report",
    "Store",
    "inspect",
    "inspect_layers",
    "merge_parts",
    "open_store",
    "partition",
    "parts_of_rank",
    "read",
    "read_edge_list",
    "stream_edge_list",
    "stream_files",
    "stream_ogb",
    "verify",
]
