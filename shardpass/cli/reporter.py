"""`Reporter`: what rank 0 shows of a training run, and passes on to its logs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rich.table import Table

from shardpass.cli.config import TrainConfig
from shardpass.cli.console import Steps, output
from shardpass.cli.logs import Record, logs_of
from shardpass.cli.task import SPLITS, unused_edge_fields
from shardpass.core import kernels
from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import bytes_text


class Reporter:
    """A progress bar on a terminal and about ten lines elsewhere; every epoch and the summary go to the logs."""

    def __init__(self, config: TrainConfig, graph: ShardedGraph, first_epoch: int, notes: list[str]) -> None:
        """Say what is about to run, and `notes`. Other ranks than the first show and write nothing."""
        self.config, self.first_epoch = config, first_epoch
        is_first = graph.comm.rank == 0
        self.logs = logs_of(config) if is_first else []
        self.console = output()
        self.console.quiet = not is_first or config.log == "-"
        ranks = f"{graph.comm.size} rank{'s' if graph.comm.size > 1 else ''}"
        self.console.print(
            f"{config.model} ({config.layers} layers, hidden {config.hidden}) on {graph.total_nodes:,} nodes and "
            f"{graph.total_edges:,} edges, {ranks} ({type(graph.comm).__name__}), mode {graph.options.mode}"
        )
        for line in filter(None, (unused_edge_fields(graph, config.edge_weight), *notes, first_compilation())):
            self.console.print(line)
        self.steps = Steps(self.console)
        self.steps.start()

    def epoch(self, record: Record) -> None:
        """Show and log one epoch."""
        for log in self.logs:
            log.epoch(record)
        epoch, last = record["epoch"], self.config.epochs
        text = f"loss {record['loss']:.4f}" + "".join(f"  {m} {record[m]:.4f}" for m in SPLITS if m in record)
        step = max(1, (last - self.first_epoch + 1) // 10)
        if not self.steps.disable:
            self.steps.tell("epochs", epoch, last, f", {text}")
        elif epoch in (self.first_epoch, last) or epoch % step == 0:
            self.console.print(f"epoch {epoch:>4}/{last}  {text}  {record['seconds']:.2f} s")

    def finish(self, summary: Record) -> None:
        """Log the summary and show it as a table."""
        self.steps.stop()
        self.console.print(summary_table(summary))
        for log in self.logs:
            log.finish(summary)

    def close(self) -> None:
        """Give back the terminal and the logs."""
        self.steps.stop()
        for log in self.logs:
            log.close()


def first_compilation() -> str:
    """A line that says why the first epoch takes long where loops were never compiled, or an empty text."""
    compiled = Path(kernels.__file__).parent.joinpath("__pycache__").glob("*.nbc")
    if find_spec("numba") is None or any(compiled):
        return ""
    return "the first epoch on this machine compiles loops, which takes up to half a minute; later runs find them"


def summary_table(summary: Record) -> Table:
    """The summary of a run, for people."""
    table = Table(title="summary", show_header=False, title_justify="left")
    end = ", ended early: no better validation accuracy" if summary["ended_early"] else ""
    table.add_row("epochs", f"{summary['epochs']} (from {summary['first_epoch']}){end}")
    for key in ("loss", *SPLITS):
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
