"""``sar.core``, in which scripts look for the classes of graphs and samplers."""

from shardpass.frontends.sar.core.graphshard import (
    DistributedBlock,
    GraphShard,
    GraphShardManager,
    HeteroGraphShardManager,
)
from shardpass.frontends.sar.core.sampling import DataLoader, DistNeighborSampler
from shardpass.frontends.sar.core.sar_aggregation import message_has_parameters

__all__ = [
    "DataLoader",
    "DistNeighborSampler",
    "DistributedBlock",
    "GraphShard",
    "GraphShardManager",
    "HeteroGraphShardManager",
    "message_has_parameters",
]
