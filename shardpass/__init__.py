"""Train unmodified PyG and DGL models on whole graphs too large for one memory. ``docs/`` holds a tour."""

from typing import TYPE_CHECKING, Any

from shardpass.connection import connect, spawn
from shardpass.core.graphs import NodeEmbedding, ShardedGraph, ShardedHeteroGraph, gather, node_ids, rows
from shardpass.core.inference import infer
from shardpass.core.memory import offload
from shardpass.core.ranks import Options, all_reduce_sum, seed
from shardpass.core.ranks import Ranks as Communicator
from shardpass.core.sampling import negative_sampling, permuted_ids
from shardpass.core.training import (
    accuracy,
    average_precision,
    clip_grad_norm,
    cross_entropy,
    f1,
    load_checkpoint,
    mae,
    mean,
    no_sync,
    replicated,
    roc_auc,
    save_checkpoint,
    sum,
    sync_gradients,
    sync_parameters,
    total,
)
from shardpass.data import find_nodes, inspect, load, node_names, partition, shard
from shardpass.planning.plan import Plan, plan
from shardpass.planning.sizes import GraphCounts

if TYPE_CHECKING:
    from shardpass.frontends import dgl as dgl
    from shardpass.frontends import pyg as pyg

__version__ = "0.1.0"

__all__ = [
    "Communicator",
    "GraphCounts",
    "NodeEmbedding",
    "Options",
    "Plan",
    "ShardedGraph",
    "ShardedHeteroGraph",
    "accuracy",
    "all_reduce_sum",
    "average_precision",
    "clip_grad_norm",
    "connect",
    "cross_entropy",
    "f1",
    "find_nodes",
    "gather",
    "infer",
    "inspect",
    "load",
    "load_checkpoint",
    "mae",
    "mean",
    "negative_sampling",
    "no_sync",
    "node_ids",
    "node_names",
    "offload",
    "partition",
    "permuted_ids",
    "plan",
    "replicated",
    "roc_auc",
    "rows",
    "save_checkpoint",
    "seed",
    "shard",
    "spawn",
    "sum",
    "sync_gradients",
    "sync_parameters",
    "total",
]


def __getattr__(name: str) -> Any:
    if name in ("pyg", "dgl"):  # import PyG and DGL, so only when asked for
        import importlib

        return importlib.import_module(f"shardpass.frontends.{name}")
    raise AttributeError(f"module 'shardpass' has no attribute {name!r}")
