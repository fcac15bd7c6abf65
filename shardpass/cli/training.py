"""`train_rank`: one rank's part of `shardpass train`. It is the script that a user would write, plus bookkeeping."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import shardpass as sp
from shardpass.cli.config import TrainConfig
from shardpass.cli.logs import Record, prepare_logs
from shardpass.cli.memory import PeakMeter
from shardpass.cli.models import in_degrees_for
from shardpass.cli.reporter import Reporter
from shardpass.cli.task import SPLITS, loaded
from shardpass.core.ranks import Ranks, fail_together, prepare_target
from shardpass.errors import MissingDependencyError
from shardpass.planning.sizes import known_sizes


class TrainingRun:
    """A training run on one rank: what is trained, on what, and how far it has come."""

    def __init__(self, comm: Ranks, config: TrainConfig) -> None:
        self.comm, self.config = comm, config
        plan = plan_of(comm, config) if config.mode == "auto" else None
        self.estimate = plan.best if plan is not None else None
        options = sp.Options(mode=config.mode) if plan is None else plan.options
        self.graph = loaded(config.store, comm, options)
        self.task = config.task(self.graph)
        in_degrees = in_degrees_for(config, self.graph)
        with sp.seed(config.seed, comm):
            model = config.build(self.task.x.size(1), self.task.num_classes, in_degrees)
        self.model = sp.pyg.wrap(model, comm, checkpoint=config.checkpoint_of_wrap)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self.first_epoch = 1
        self.best: Record = {"epoch": 0, "val": -1.0}

    def resume(self) -> str:
        """Continue where the checkpoint stands, or begin if there is none yet; says which. Collective."""
        path = self.config.checkpoint
        if not self.comm.all_gather_object(os.path.exists(path), "checkpoint exists")[0]:
            return f"no checkpoint at {path} yet: starting at epoch 1"
        found = sp.load_checkpoint(path, self.comm, self.model, self.optimizer, graph=self.graph)
        self._require_same_run(found["extra"])
        self.first_epoch, self.best = found["epoch"] + 1, found["extra"]["best"]
        best = self.config.best
        if best and self.best["epoch"] and not self.comm.all_gather_object(os.path.exists(best), "best exists")[0]:
            raise ValueError(
                f"--best {best}: there is no such file, and the best epoch so far, {self.best['epoch']}, was before "
                f"{path}: give the --best of that run, or leave it away"
            )
        return f"continuing from {path} at epoch {self.first_epoch}"

    def _require_same_run(self, extra: Any) -> None:
        """Refuse options that a continued run would ignore, or that would mix two runs in its best epoch."""
        path = self.config.checkpoint
        if not isinstance(extra, dict) or "best" not in extra:
            raise ValueError(f"--resume: {path} is not of shardpass train, but of a script: continue it there")
        rates = {name: self.optimizer.param_groups[0][name] for name in ("lr", "weight_decay")}
        before = {**rates, **extra.get("options", {})}  # earlier versions wrote no options
        for name, value in self.config.lasting.items():
            if name in before and before[name] != value:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"--resume: the run in {path} has {option} {before[name]!r}, and {value!r} would not take effect: "
                    f"give {option} {before[name]!r}, or begin a run with another --checkpoint"
                )

    def save(self, epoch: int) -> None:
        """Write the checkpoint. Collective."""
        path, extra = self.config.checkpoint, {"best": self.best, "options": self.config.lasting}
        sp.save_checkpoint(path, self.comm, self.model, self.optimizer, epoch=epoch, graph=self.graph, extra=extra)

    def step(self) -> float:
        """The loss over all training nodes in one epoch: forward, backward, update. Collective."""
        self.model.train()
        logits = self.task.output(self.model, self.graph)
        loss = sp.cross_entropy(logits, self.task.y, self.task.masks["train"], self.comm)
        self._require_finite(loss)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def _require_finite(self, loss: Tensor) -> None:
        """Refuse to go on with a loss that no later epoch can mend. All ranks have the same loss. Collective then."""
        if math.isfinite(value := float(loss.detach())):
            return
        inputs = {"x": self.task.x, "the weights of edges": self.task.edge_weight}
        counts = torch.stack([(~torch.isfinite(tensor)).sum() for tensor in inputs.values() if tensor is not None])
        wrong = zip(inputs, self.comm.all_reduce(counts, "sum", "values that are not finite").tolist())
        found = " and ".join(f"{count} values of {name}" for name, count in wrong if count)
        hint = f"{found} are NaN or infinite: partition with numbers in their place" if found else "try a lower --lr"
        raise ValueError(f"the loss is {value}, and training has ended, since it would stay so: {hint}")

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The accuracy in each split that has a mask. Collective."""
        self.model.eval()
        logits = self.task.output(self.model, self.graph)
        return {name: sp.accuracy(logits, self.task.y, mask, self.comm) for name, mask in self.task.masks.items()}

    def has_waited_enough(self, epoch: int) -> bool:
        """Whether training ends after `epoch`, since no better validation accuracy was found for long."""
        config = self.config
        is_evaluated = epoch % config.eval_every == 0
        return bool(config.patience) and is_evaluated and epoch - int(self.best["epoch"]) >= config.patience

    def train(self, reporter: Reporter) -> Record:
        """Train to the last epoch and return its record. Collective."""
        config, last = self.config, self.config.epochs
        record: Record = {"epoch": self.first_epoch - 1}
        for epoch in range(self.first_epoch, last + 1):
            if self.has_waited_enough(epoch - 1):
                break
            start, sent = perf_counter(), self.comm.bytes_sent
            # not the first epochs: they build what is kept, and check the model
            with profiled(config, self.comm, epoch == min(self.first_epoch + 2, last)):
                record = {"event": "epoch", "epoch": epoch, "loss": self.step()}
            record["seconds"], record["bytes_sent"] = perf_counter() - start, self.comm.bytes_sent - sent
            if epoch % config.eval_every == 0 or epoch == last:
                record |= self.evaluate()
                if record.get("val", -1.0) > self.best["val"]:
                    self.best = {"epoch": epoch, "val": record["val"], "test": record.get("test")}
                    if config.best:
                        extra = {"options": config.lasting}
                        sp.save_checkpoint(
                            config.best, self.comm, self.model, epoch=epoch, graph=self.graph, extra=extra
                        )
            reporter.epoch(record)
            # after the log line: a kill between the two repeats an epoch in the log instead of losing it
            is_last = epoch == last or self.has_waited_enough(epoch)
            if config.checkpoint and (epoch % config.checkpoint_every == 0 or is_last):
                self.save(epoch)
        return record if record["epoch"] >= self.first_epoch else record | self.evaluate()


def plan_of(comm: Ranks, config: TrainConfig) -> sp.Plan:
    """The plan that decides the mode ``"auto"``. Collective."""

    def call(model: nn.Module, graph: sp.ShardedGraph) -> Tensor:
        return config.task(graph).output(model, graph)

    def loss(logits: Tensor, graph: sp.ShardedGraph) -> Tensor:
        task = config.task(graph)
        return sp.cross_entropy(logits, task.y, task.masks["train"], graph.comm)

    model = config.build(*known_sizes(config.store))
    return sp.plan(
        model, config.store, comm=comm, budget=config.memory_budget, call=call, loss=loss,
        checkpoint=config.checkpoint_of_wrap,
    )  # fmt: skip


def train_rank(comm: Ranks, config: TrainConfig) -> Record:
    """Train as one rank of `comm`; the summary, the same on every rank. Collective."""
    torch.set_num_threads(config.threads)
    problems = (OSError, ValueError, MissingDependencyError)
    fail_together(comm, "train: files to write", lambda: prepare_files(comm, config), *problems)
    run = TrainingRun(comm, config)
    notes = [run.task.note(comm), run.resume() if config.resume else ""]
    meter, start = PeakMeter(), perf_counter()
    with closing(Reporter(config, run.graph, run.first_epoch, notes)) as reporter:
        last = run.train(reporter)
        summary = summarise(run, last, meter, perf_counter() - start)
        reporter.finish(summary)
    return summary


def prepare_files(comm: Ranks, config: TrainConfig) -> None:
    """Raise an error if this rank could not write one of its files in the end. Missing folders are made."""
    if comm.rank == 0:
        prepare_logs(config)
        for option, name in (("--checkpoint", config.checkpoint), ("--best", config.best)):
            if not name:
                continue
            prepare_target(Path(name))
            if os.path.exists(name) and not (config.resume or config.overwrite):
                goes_on = "--resume goes on with it, and " if config.checkpoint else ""
                raise ValueError(
                    f"{option} {name} is there already, from another run: {goes_on}--overwrite begins anew and "
                    f"replaces it; or give another name"
                )
    if config.profile:
        prepare_target(profile_of(comm, config))


def summarise(run: TrainingRun, last: Record, meter: PeakMeter, seconds: float) -> Record:
    """The closing record: results, and per rank the peak memory and the bytes sent. Collective."""
    comm, graph = run.comm, run.graph
    names = ("peak_bytes", "bytes_sent", "nodes", "edges")
    mine = (meter.peak(comm), comm.bytes_sent, graph.num_own_nodes, graph.num_own_edges)
    ranks = comm.all_gather_object(mine, "summary")
    count = last["epoch"] - run.first_epoch + 1
    return {
        "event": "summary",
        "ranks": comm.size,
        "backend": type(comm.inner).__name__.removesuffix("Communicator").lower(),
        "epochs": last["epoch"],
        "first_epoch": run.first_epoch,
        "ended_early": last["epoch"] < run.config.epochs,
        **{key: last[key] for key in ("loss", *SPLITS) if key in last},
        "best": run.best if run.best["epoch"] else None,
        "seconds": seconds,
        "seconds_per_epoch": seconds / count if count > 0 else None,
        "peak_is_of_all_ranks": run.config.shared_process,
        "mode": graph.options.mode,
        "estimated_peak_bytes": None if run.estimate is None else run.estimate.above_loaded,
        **{name: list(counts) for name, counts in zip(names, zip(*ranks))},
        "config": asdict(run.config),
    }


@contextmanager
def profiled(config: TrainConfig, comm: Ranks, is_traced: bool) -> Iterator[None]:
    """Trace the block with torch's profiler into the file that `config` names, if it is the one to be traced.

    The engine's rounds are in the trace as "send", "wait for" and "compute", with the call and the block.
    """
    if not (config.profile and is_traced):
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        yield
    trace.export_chrome_trace(str(profile_of(comm, config)))


def profile_of(comm: Ranks, config: TrainConfig) -> Path:
    """The file of this rank's trace."""
    file = Path(config.profile)
    return file.with_name(f"{file.stem}.rank{comm.rank}{file.suffix or '.json'}") if comm.size > 1 else file
