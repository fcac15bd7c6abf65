"""The documented names of SAR (IntelLabs). Write ``from shardpass.frontends import sar`` instead of ``import sar``."""

from shardpass.errors import require

require("dgl", "dgl", "the SAR frontend")

from shardpass.frontends.sar import comm, core  # noqa: E402
from shardpass.frontends.sar.comm import (  # noqa: E402
    comm_device,
    gather_grads,
    initialize_comms,
    is_initialized,
    nfs_ip_init,
    rank,
    sync_params,
    world_size,
)
from shardpass.frontends.sar.common_tuples import PartitionData, ShardEdgesAndFeatures  # noqa: E402
from shardpass.frontends.sar.config import Config  # noqa: E402
from shardpass.frontends.sar.construct_shard_manager import (  # noqa: E402
    construct_full_graph,
    construct_mfgs,
    convert_dist_graph,
)
from shardpass.frontends.sar.core.graphshard import (  # noqa: E402
    DistributedBlock,
    GraphShardManager,
    HeteroGraphShardManager,
)
from shardpass.frontends.sar.core.sampling import DataLoader, DistNeighborSampler  # noqa: E402
from shardpass.frontends.sar.core.sar_aggregation import message_has_parameters  # noqa: E402
from shardpass.frontends.sar.data_loading import (  # noqa: E402
    load_dgl_partition_data,
    load_dgl_partition_data_from_graph,
    suffix_key_lookup,
)
from shardpass.frontends.sar.distributed_bn import DistributedBN1D  # noqa: E402
from shardpass.frontends.sar.edge_softmax import edge_softmax  # noqa: E402
from shardpass.frontends.sar.logging_setup import logger, logging_setup  # noqa: E402
from shardpass.frontends.sar.patch_dgl import RelGraphConv, patch_dgl, patched_edge_softmax  # noqa: E402

__all__ = [
    "Config",
    "DataLoader",
    "DistNeighborSampler",
    "DistributedBN1D",
    "DistributedBlock",
    "GraphShardManager",
    "HeteroGraphShardManager",
    "PartitionData",
    "RelGraphConv",
    "ShardEdgesAndFeatures",
    "comm",
    "comm_device",
    "construct_full_graph",
    "construct_mfgs",
    "convert_dist_graph",
    "core",
    "edge_softmax",
    "gather_grads",
    "initialize_comms",
    "is_initialized",
    "load_dgl_partition_data",
    "load_dgl_partition_data_from_graph",
    "logger",
    "logging_setup",
    "message_has_parameters",
    "nfs_ip_init",
    "patch_dgl",
    "patched_edge_softmax",
    "rank",
    "suffix_key_lookup",
    "sync_params",
    "world_size",
]
