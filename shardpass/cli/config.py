"""`TrainConfig`: what `shardpass train` was asked to do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from shardpass.cli.models import ModelConfig
from shardpass.cli.options import StoreFolder, Threads
from shardpass.cli.task import Task, read_task
from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import Mode

_LOG = ("--log", "--log-file")  # torchrun takes the first, even after the program's name, for options of its own


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ModelConfig):
    """The options of a training run, as plain data that can travel to other processes.

    Every rank must have the same. An empty text means that there is no such file. `shared_process` says that the ranks
    are threads of one process.
    """

    store: StoreFolder
    epochs: Annotated[int, typer.Option(min=1, help="The epoch to train up to.")] = 100
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of Adam.")] = 0.01
    weight_decay: Annotated[float, typer.Option(help="Weight decay of Adam.")] = 0.0
    mode: Annotated[Literal[Mode, "auto"], typer.Option(help="sar needs the least memory. The numbers agree.")] = "sar"
    memory_budget: Annotated[str | None, typer.Option(help="With --mode auto: bytes per rank, as in 6GiB.")] = None
    threads: Threads = 1
    seed: Annotated[int, typer.Option(help="Of the parameters.")] = 0
    mask_prefix: Annotated[str, typer.Option(help="Before train_mask, val_mask and test_mask in field names.")] = ""
    split: Annotated[int, typer.Option(help="The column of masks that have one per split.")] = 0
    eval_every: Annotated[int, typer.Option(min=1, help="Epochs between two evaluations.")] = 1
    patience: Annotated[int, typer.Option(min=0, help="Epochs without a better accuracy; 0: no end.")] = 0
    log: Annotated[str, typer.Option(*_LOG, help="JSON lines; - shows them and nothing else.")] = ""
    log_csv: Annotated[str, typer.Option(help="A table with a row per epoch.")] = ""
    tensorboard: Annotated[str, typer.Option(help="The folder for TensorBoard.")] = ""
    plot: Annotated[str, typer.Option(help="Draw loss, accuracy and memory since the start into this file.")] = ""
    best: Annotated[str, typer.Option(help="The file for the parameters of the best epoch so far.")] = ""
    checkpoint: Annotated[str, typer.Option(help="The file to write while training.")] = ""
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Epochs between two checkpoints.")] = 1
    overwrite: Annotated[bool, typer.Option(help="Begin anew, and replace the files of --checkpoint and --best.")] = (
        False
    )
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint, on any ranks.")] = False
    profile: Annotated[str, typer.Option(help="Trace one epoch of each rank, for Perfetto or chrome://tracing.")] = ""
    shared_process: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume and not self.checkpoint:
            raise ValueError("--resume continues from the file of --checkpoint: give its name")
        if self.resume and self.overwrite:
            raise ValueError(
                "--resume goes on with the files of --checkpoint and --best, which --overwrite begins anew"
            )
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

    @property
    def lasting(self) -> dict[str, Any]:
        """The options that stay as they are when a run is continued: it would ignore others, or mix two runs."""
        names = ("seed", "lr", "weight_decay", "edge_weight", "mask_prefix", "split")
        return {name: getattr(self, name) for name in names}

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
