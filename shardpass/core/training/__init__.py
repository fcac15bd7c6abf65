"""What training needs besides the graph: losses, norms, metrics, gradients over ranks, checkpoints.

This room knows rows, parameters and ranks. A batch norm inside a message function asks `Ranks.watch` for its
statistics; otherwise the room knows no edges.
"""

from shardpass.core.training.checkpoint import load_checkpoint, save_checkpoint
from shardpass.core.training.checkpoint_file import digest
from shardpass.core.training.gradients import (
    alike,
    clip_grad_norm,
    note_forward,
    refuse_as_built,
    sync_gradients,
    sync_parameters,
)
from shardpass.core.training.moments import Moments
from shardpass.core.training.norm import BATCH_NORMS, DistributedBatchNorm, global_moments, replace_batch_norms
from shardpass.core.training.objective import accuracy, cross_entropy, mean, note_objective, replicated, sum, total
from shardpass.core.training.shared_copy import follow, shared_copy
from shardpass.core.training.statistics import row_moments, shifted, total_rows

__all__ = [
    "BATCH_NORMS",
    "DistributedBatchNorm",
    "Moments",
    "accuracy",
    "alike",
    "clip_grad_norm",
    "cross_entropy",
    "digest",
    "follow",
    "global_moments",
    "load_checkpoint",
    "mean",
    "note_forward",
    "note_objective",
    "refuse_as_built",
    "replace_batch_norms",
    "replicated",
    "row_moments",
    "save_checkpoint",
    "shared_copy",
    "shifted",
    "sum",
    "sync_gradients",
    "sync_parameters",
    "total",
    "total_rows",
]
