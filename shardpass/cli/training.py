"""`train_rank`: one rank's part of `shardpass train`. The same script that a user would write, plus bookkeeping."""

from __future__ import annotations

import os
from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import shardpass as sp
from shardpass.cli.config import TrainConfig
from shardpass.cli.memory import PeakMeter
from shardpass.cli.models import build_model
from shardpass.cli.profile import profiled
from shardpass.cli.reporter import Reporter
from shardpass.cli.task import Task, in_degree_histogram, read_task
from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import Ranks

Record = dict[str, Any]


class Run:
    """A training run on one rank: what is trained, on what, and where it stands."""

    def __init__(self, comm: Ranks, config: TrainConfig) -> None:
        self.comm, self.config = comm, config
        options = sp.Options(mode=config.mode, memory_budget=config.memory_budget)
        self.graph: ShardedGraph = sp.load(config.store, comm, options)
        self.task: Task = read_task(self.graph, config)
        histogram = in_degree_histogram(self.graph) if config.model == "pna" else None
        with sp.seed(config.seed, comm):
            model = build_model(config, self.task.x.size(1), self.graph.num_classes, histogram)
        self.model: nn.Module = sp.pyg.wrap(model, comm)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self.first_epoch = 1
        self.best: Record = {"epoch": 0, "val": -1.0}
        self.note = ""

    def resume(self) -> None:
        """Continue where the checkpoint stands; from the first epoch if there is none yet. Collective."""
        path = self.config.checkpoint
        assert path is not None
        if not self.comm.all_gather_object(os.path.exists(path), "checkpoint exists")[0]:
            self.note = f"no checkpoint at {path} yet: starting at epoch 1"
            return
        found = sp.load_checkpoint(path, self.comm, self.model, self.optimizer, graph=self.graph)
        self.first_epoch, self.best = found["epoch"] + 1, found["extra"]["best"]
        self.note = f"continuing from {path} at epoch {self.first_epoch}"

    def save(self, epoch: int) -> None:
        """Write the checkpoint. Collective."""
        assert self.config.checkpoint is not None
        extra = {"best": self.best}
        sp.save_checkpoint(
            self.config.checkpoint, self.comm, self.model, self.optimizer, epoch=epoch, graph=self.graph, extra=extra
        )

    def step(self) -> float:
        """One epoch: forward, backward, update. The loss over all training nodes. Collective."""
        self.model.train()
        logits = self.model(self.task.x, self.graph)
        loss = sp.cross_entropy(logits, self.task.y, self._labelled("train"), self.comm)
        self.optimizer.zero_grad()
        loss.backward()
        sp.sync_gradients(self.model, self.comm)
        self.optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The accuracy of each stored split, by the parameters as they are. Collective."""
        self.model.eval()
        logits = self.model(self.task.x, self.graph)
        return {split: sp.accuracy(logits, self.task.y, self._labelled(split), self.comm) for split in self.task.masks}

    def _labelled(self, split: str) -> Tensor:
        return self.task.masks[split] & (self.task.y >= 0)  # -1: unlabelled

    def epochs(self, reporter: Reporter | None) -> Record:
        """Every epoch from where the run stands. The last epoch's record. Collective."""
        config, record = self.config, {}
        for epoch in range(self.first_epoch, config.epochs + 1):
            start, sent = perf_counter(), self.comm.bytes_sent
            # not the first: it builds what is kept, and checks the model
            traced = config.profile if epoch == min(self.first_epoch + 2, config.epochs) else None
            with profiled(traced, self.comm, config.shared_process):
                record = {"event": "epoch", "epoch": epoch, "loss": self.step()}
            record["seconds"], record["bytes_sent"] = perf_counter() - start, self.comm.bytes_sent - sent
            if epoch % config.eval_every == 0 or epoch == config.epochs:
                record.update(self.evaluate())
                self._note_best(record)
            if reporter:
                reporter.epoch(record)
            # After the log line: a kill between the two repeats an epoch in the log instead of losing it.
            if config.checkpoint and (epoch % config.checkpoint_every == 0 or epoch == config.epochs):
                self.save(epoch)
        return record

    def _note_best(self, record: Record) -> None:
        if record.get("val", -1.0) > self.best["val"]:
            self.best = {"epoch": record["epoch"], "val": record["val"], "test": record.get("test")}


def train_rank(comm: Ranks, config: TrainConfig) -> Record:
    """Train as one rank of `comm`; the summary, the same on every rank. Collective."""
    torch.set_num_threads(config.threads)
    run = Run(comm, config)
    if config.resume:
        run.resume()
    meter = PeakMeter()
    reporter = Reporter(config, run.first_epoch) if comm.rank == 0 else None
    start = perf_counter()
    try:
        if reporter:
            reporter.begin(run.graph, run.note)
        last = run.epochs(reporter) or {"epoch": run.first_epoch - 1, **run.evaluate()}
        summary = summarise(run, last, meter, perf_counter() - start)
        if reporter:
            reporter.finish(summary)
    finally:
        if reporter:
            reporter.close()
    return summary


def summarise(run: Run, last: Record, meter: PeakMeter, seconds: float) -> Record:
    """The closing record: results, and per rank the peak memory and the bytes sent. Collective."""
    comm = run.comm
    mine = {
        "peak": meter.peak(comm),
        "sent": comm.bytes_sent,
        "nodes": run.graph.num_nodes,
        "edges": run.graph.num_edges,
    }
    ranks = comm.all_gather_object(mine, "summary")
    chosen = run.graph.options.chosen.estimate
    first, count = run.first_epoch, max(0, last["epoch"] - run.first_epoch + 1)
    return {
        "event": "summary",
        "ranks": comm.size,
        "backend": type(comm).__name__.removesuffix("Communicator").lower(),
        "epochs": last["epoch"],
        "first_epoch": first,
        **{key: last[key] for key in ("loss", "train", "val", "test") if key in last},
        "best": run.best if run.best["epoch"] else None,
        "seconds": seconds,
        "seconds_per_epoch": seconds / count if count else None,
        "peak_bytes": [rank["peak"] for rank in ranks],
        "peak_is_of_all_ranks": run.config.shared_process,
        "peak_method": meter.method,
        "mode": run.graph.options.runs_as,
        "estimated_peak_bytes": None if chosen is None else chosen.above_loaded,
        "bytes_sent": [rank["sent"] for rank in ranks],
        "nodes": [rank["nodes"] for rank in ranks],
        "edges": [rank["edges"] for rank in ranks],
        "config": asdict(run.config),
    }
