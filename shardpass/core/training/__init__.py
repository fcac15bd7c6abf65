"""What training needs besides the graph: losses, norms, metrics, gradients over ranks, checkpoints.

This room knows rows, parameters and ranks. A batch norm inside a message function asks `Ranks.watch` for its
statistics; otherwise the room knows no edges.
"""

from shardpass.core.training.checkpoint import load_checkpoint, save_checkpoint
from shardpass.core.training.checkpoint_file import read_verified, write_verified
from shardpass.core.training.gradients import (
    GradientSums,
    clip_grad_norm,
    no_sync,
    sync_gradients,
    sync_parameters,
)
from shardpass.core.training.groups import refuse_inside_ddp, refuse_sharded
from shardpass.core.training.metrics import accuracy, average_precision, f1, mae, roc_auc
from shardpass.core.training.moments import Moments, RowNorm, global_moments, row_moments, shifted, total_rows
from shardpass.core.training.norm import BATCH_NORMS, DistributedBatchNorm, SteadyNorms, replace_batch_norms
from shardpass.core.training.objective import cross_entropy, mean, replicated, sum, total
from shardpass.core.training.same_model import LIBRARIES, refuse_unlike

__all__ = [
    "BATCH_NORMS",
    "LIBRARIES",
    "DistributedBatchNorm",
    "GradientSums",
    "Moments",
    "RowNorm",
    "SteadyNorms",
    "accuracy",
    "average_precision",
    "clip_grad_norm",
    "cross_entropy",
    "f1",
    "global_moments",
    "load_checkpoint",
    "mae",
    "mean",
    "no_sync",
    "read_verified",
    "refuse_inside_ddp",
    "refuse_sharded",
    "refuse_unlike",
    "replace_batch_norms",
    "replicated",
    "roc_auc",
    "row_moments",
    "save_checkpoint",
    "shifted",
    "sum",
    "sync_gradients",
    "sync_parameters",
    "total",
    "total_rows",
    "write_verified",
]
