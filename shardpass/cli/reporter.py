"""`Reporter`: what rank 0 shows of a training run, and its JSON-lines log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shardpass.cli.config import TrainConfig
from shardpass.cli.console import bytes_text, output
from shardpass.core.graphs import ShardedGraph

_METRICS = ("train", "val", "test")


class Reporter:
    """A progress bar on a terminal, about ten lines elsewhere; one log line per epoch and one at the end."""

    def __init__(self, config: TrainConfig, first_epoch: int) -> None:
        self.config, self.first_epoch = config, first_epoch
        self.console = output()
        self.log: TextIO | None = None
        if config.log:
            Path(config.log).parent.mkdir(parents=True, exist_ok=True)
            self.log = open(config.log, "a" if config.resume else "w", encoding="utf-8")  # noqa: SIM115
        self.bar: Progress | None = None

    def begin(self, graph: ShardedGraph, note: str) -> None:
        """Say what is about to run."""
        if self.config.events:
            return
        ranks = f"{graph.comm.size} rank{'s' if graph.comm.size > 1 else ''}"
        self.console.print(
            f"{self.config.model} ({self.config.layers} layers, hidden {self.config.hidden}) on {graph.total_nodes:,} "
            f"nodes and {graph.total_edges:,} edges, {ranks} ({type(graph.comm).__name__}), mode {self.config.mode}"
        )
        if note:
            self.console.print(note)
        if self.console.is_terminal:
            columns = (MofNCompleteColumn(), BarColumn(12), TextColumn("{task.description}"))
            self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console)
            self.bar.add_task("", total=self.config.epochs, completed=self.first_epoch - 1)
            self.bar.start()

    def epoch(self, record: dict[str, Any]) -> None:
        """Show and log one epoch."""
        self._write(record)
        text = f"loss {record['loss']:.4f}" + "".join(f"  {m} {record[m]:.4f}" for m in _METRICS if m in record)
        if self.config.events:
            print(json.dumps(record), flush=True)
        elif self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=record["epoch"], description=text)
        elif self._is_shown(record["epoch"]):
            self.console.print(f"epoch {record['epoch']:>4}/{self.config.epochs}  {text}  {record['seconds']:.2f} s")

    def _is_shown(self, epoch: int) -> bool:
        step = max(1, (self.config.epochs - self.first_epoch + 1) // 10)
        return epoch in (self.first_epoch, self.config.epochs) or epoch % step == 0

    def finish(self, summary: dict[str, Any]) -> None:
        """Log the summary and show it as a table."""
        self._write(summary)
        if self.bar is not None:
            self.bar.stop()
        if self.config.events:
            print(json.dumps(summary), flush=True)
        else:
            self.console.print(summary_table(summary))

    def close(self) -> None:
        """Give back the terminal and the log file."""
        if self.bar is not None:
            self.bar.stop()
        if self.log is not None:
            self.log.close()

    def _write(self, record: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.write(json.dumps(record) + "\n")
            self.log.flush()


def summary_table(summary: dict[str, Any]) -> Table:
    """The summary of a run, for people."""
    table = Table(title="summary", show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("value")
    table.add_row("epochs", f"{summary['epochs']} (from {summary['first_epoch']})")
    for key in ("loss", *_METRICS):
        if key in summary:
            table.add_row("loss" if key == "loss" else f"{key} accuracy", f"{summary[key]:.6g}")
    if summary["best"]:
        best = summary["best"]
        test = "" if best.get("test") is None else f", test {best['test']:.4f}"
        table.add_row("best validation", f"{best['val']:.4f} at epoch {best['epoch']}{test}")
    if summary["seconds_per_epoch"] is not None:
        table.add_row("seconds per epoch", f"{summary['seconds_per_epoch']:.3f} (evaluation included)")
    table.add_row("messages sent per rank", _per_rank(summary["bytes_sent"]))
    if summary["peak_is_of_all_ranks"]:
        table.add_row("peak memory", f"{bytes_text(max(summary['peak_bytes']))} for all ranks: they share one process")
    else:
        table.add_row("peak memory per rank", _per_rank(summary["peak_bytes"]) + " above the loaded graph")
    if summary["estimated_peak_bytes"] is not None:
        table.add_row("estimated", f"{bytes_text(summary['estimated_peak_bytes'])} per rank, mode {summary['mode']}")
    return table


def _per_rank(counts: list[int]) -> str:
    if len(counts) > 8:
        return f"{bytes_text(min(counts))} to {bytes_text(max(counts))}"
    return ", ".join(bytes_text(count) for count in counts)
