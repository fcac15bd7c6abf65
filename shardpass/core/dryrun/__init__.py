"""A dry run trains copies of a model on one made-up rank and counts every tensor. Planners estimate memory with it."""

from shardpass.core.dryrun.estimate import COMPILED_BYTES, PROCESS_BYTES, Estimate, estimate
from shardpass.core.dryrun.rank import EdgeSizes, Field, NodeSizes, RankSizes
from shardpass.core.dryrun.trial import TERMS, Training

__all__ = [
    "COMPILED_BYTES",
    "PROCESS_BYTES",
    "TERMS",
    "EdgeSizes",
    "Estimate",
    "Field",
    "NodeSizes",
    "RankSizes",
    "Training",
    "estimate",
]
