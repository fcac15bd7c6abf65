"""`TrainConfig`: what `shardpass train` was asked to do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from shardpass.cli.models import ModelConfig
from shardpass.cli.task import Task, read_task
from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import Mode


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ModelConfig):
    """The options of a training run, as plain data that can travel to other processes.

    Every rank must have the same. An empty text means that there is no such file. `shared_process` says that the ranks
    are threads of one process.
    """

    store: str
    epochs: int = 100
    lr: float = 0.01
    weight_decay: float = 0.0
    mode: Mode | Literal["auto"] = "sar"
    memory_budget: str | None = None
    seed: int = 0
    mask_prefix: str = ""
    split: int = 0
    eval_every: int = 1
    patience: int = 0
    log: str = ""
    log_csv: str = ""
    tensorboard: str = ""
    plot: str = ""
    best: str = ""
    checkpoint: str = ""
    checkpoint_every: int = 1
    resume: bool = False
    threads: int = 1
    shared_process: bool = False
    profile: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume and not self.checkpoint:
            raise ValueError("--resume continues from the file of --checkpoint: give its name")
        if self.profile and self.shared_process:
            raise ValueError(
                "--profile cannot trace ranks that are threads, since they share one profiler: leave --backend away, "
                "and they are processes"
            )
        named = [self.log, self.log_csv, self.plot, self.best, self.checkpoint]
        files = [os.path.realpath(name) for name in named if name not in ("", "-") and not name.startswith("/dev/")]
        if len(set(files)) < len(files):
            raise ValueError(
                "--log, --log-csv, --plot, --best and --checkpoint are files of their own: give them different names"
            )
        if (self.mode == "auto") != (self.memory_budget is not None):
            raise ValueError("--mode auto and --memory-budget go together: give both or neither")

    def task(self, graph: ShardedGraph) -> Task:
        """What the run trains on; a `ValueError` says what is missing that the options need."""
        task = read_task(graph, self.torch_dtype, self.mask_prefix, self.split, self.edge_weight)
        if (self.patience or self.best) and "val" not in task.masks:
            field = f"{self.mask_prefix}val_mask"
            lack = f"the store has no node field {field!r}"
            if field in graph.node:
                lack = f"{field} selects no node with a label"
            raise ValueError(
                f"--patience and --best go by the validation accuracy, but {lack}: partition with one, or leave them "
                f"away"
            )
        return task
