"""Who owns what: the ownership of nodes, and a rank's edges as shards, one per block of source rows.

This room knows ids, rows and edges. It does not communicate.
"""

from shardpass.core.sharding.by_owner import OwnerEdges, edges_by_owner, shards_of_owners
from shardpass.core.sharding.derived import Derivation, DerivedShards, KnownLists
from shardpass.core.sharding.host_copies import HOST, to_device, to_host
from shardpass.core.sharding.ordering import stable_order
from shardpass.core.sharding.ownership import EDGE, NODE, EdgeType, NodeType, Ownership
from shardpass.core.sharding.shard import (
    Block,
    Chunk,
    EdgeShards,
    LazyTensor,
    PlacedRows,
    Shard,
    build_shards,
    cut,
    running,
    smallest_index_dtype,
)
from shardpass.core.sharding.streamed_shards import CopyStreams, StreamedShards
from shardpass.core.sharding.transposes import Transposes, transposed

__all__ = [
    "EDGE",
    "HOST",
    "NODE",
    "Block",
    "Chunk",
    "CopyStreams",
    "Derivation",
    "DerivedShards",
    "EdgeShards",
    "EdgeType",
    "KnownLists",
    "LazyTensor",
    "NodeType",
    "OwnerEdges",
    "Ownership",
    "PlacedRows",
    "Shard",
    "StreamedShards",
    "Transposes",
    "build_shards",
    "cut",
    "edges_by_owner",
    "running",
    "shards_of_owners",
    "smallest_index_dtype",
    "stable_order",
    "to_device",
    "to_host",
    "transposed",
]
