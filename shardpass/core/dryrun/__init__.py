"""A model on a made-up rank, with every tensor counted: what the planner's estimates are made of."""

from shardpass.core.dryrun.auto import choose_mode, undecided
from shardpass.core.dryrun.estimate import COMPILED_BYTES, PROCESS_BYTES, Estimate, fastest
from shardpass.core.dryrun.rank import Field, RankSizes
from shardpass.core.dryrun.trial import TERMS, Training, estimate

__all__ = [
    "COMPILED_BYTES",
    "PROCESS_BYTES",
    "TERMS",
    "Estimate",
    "Field",
    "RankSizes",
    "Training",
    "choose_mode",
    "estimate",
    "fastest",
    "undecided",
]
