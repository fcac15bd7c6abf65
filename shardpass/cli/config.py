"""`TrainConfig`: what `shardpass train` was asked to do, as plain data that can travel to other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardpass.core.ranks import Mode


@dataclass(frozen=True)
class TrainConfig:
    """The options of one training run. Every rank must have the same.

    Args:
        mask_prefix: before the names of the mask fields (``made_`` for ``made_train_mask``).
        split: the column of masks that have one per split.
        eval_every: epochs between two evaluations; the last epoch is always evaluated.
        events: print each log line to the standard output instead of the progress display, for programs.
        threads: computing threads per rank.
        profile: the file to write a trace of one epoch to.
        memory_budget: bytes per rank, for the mode "auto".
    """

    store: str
    model: str = "sage"
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    epochs: int = 100
    lr: float = 0.01
    weight_decay: float = 0.0
    dropout: float = 0.0
    batch_norm: bool = False
    mode: Mode | Literal["auto"] = "sar"
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float32"
    mask_prefix: str = ""
    split: int = 0
    eval_every: int = 1
    log: str | None = None
    checkpoint: str | None = None
    checkpoint_every: int = 1
    resume: bool = False
    events: bool = False
    threads: int = 1
    shared_process: bool = False
    profile: str | None = None
    memory_budget: str | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "epochs", "eval_every", "checkpoint_every", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is at least 1, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout is in [0, 1), got {self.dropout}")
        if self.lr <= 0:
            raise ValueError(f"--lr is above 0, got {self.lr}")
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"--dtype is float32 or float64, got {self.dtype!r}")
        if self.resume and self.checkpoint is None:
            raise ValueError("--resume continues from the file of --checkpoint: give its name")
