"""Train unmodified PyG and DGL models on whole graphs too large for one memory. ``docs/`` holds a tour."""

from typing import TYPE_CHECKING, Any

from shardpass.backends.communicator import Communicator
from shardpass.backends.connect import connect
from shardpass.backends.spawn import spawn
from shardpass.core.calls import all_reduce_sum
from shardpass.core.checkpoint import load_checkpoint, save_checkpoint
from shardpass.core.embedding import NodeEmbedding
from shardpass.core.gradient_overlap import sync_during_backward
from shardpass.core.gradients import clip_grad_norm, sync_gradients, sync_parameters
from shardpass.core.graph import ShardedGraph, gather
from shardpass.core.hetero_graph import ShardedHeteroGraph
from shardpass.core.inference import infer
from shardpass.core.objective import accuracy, cross_entropy, mean, replicated, sum, total
from shardpass.core.offload import offload
from shardpass.core.options import Options
from shardpass.core.random import seed
from shardpass.data.inspect import inspect
from shardpass.data.load import load
from shardpass.data.partition import partition
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
    "clip_grad_norm",
    "connect",
    "cross_entropy",
    "gather",
    "infer",
    "inspect",
    "load",
    "load_checkpoint",
    "mean",
    "offload",
    "partition",
    "plan",
    "replicated",
    "save_checkpoint",
    "seed",
    "spawn",
    "sum",
    "sync_during_backward",
    "sync_gradients",
    "sync_parameters",
    "total",
]


def __getattr__(name: str) -> Any:
    if name in ("pyg", "dgl"):  # import PyG and DGL, so only when asked for
        import importlib

        return importlib.import_module(f"shardpass.frontends.{name}")
    raise AttributeError(f"module 'shardpass' has no attribute {name!r}")
