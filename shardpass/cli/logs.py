"""Where rank 0 puts the numbers of a training run: JSON lines, a CSV table, TensorBoard, a picture at the end."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardpass.cli.config import TrainConfig
from shardpass.cli.pictures import prepare_picture
from shardpass.cli.task import SPLITS
from shardpass.core.ranks import prepare_target
from shardpass.errors import require

Record = dict[str, Any]
COLUMNS = ("epoch", "loss", *SPLITS, "seconds", "bytes_sent")
"""Of a CSV table. A split has no number in an epoch without an evaluation."""


class Log:
    """Takes one record per epoch, and the summary of a run that has come to its end. It is closed in any case."""

    def epoch(self, record: Record) -> None: ...

    def finish(self, summary: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines(Log):
    """A line per epoch and one at the end, to a file or to the standard output (``"-"``)."""

    def __init__(self, path: str, continues: bool) -> None:
        self.file = None if path == "-" else open(path, "a" if continues else "w", encoding="utf-8")  # noqa: SIM115

    def epoch(self, record: Record) -> None:
        print(json.dumps(record), file=self.file, flush=True)

    def finish(self, summary: Record) -> None:
        self.epoch(summary)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class CsvTable(Log):
    """A row per epoch, below the names of `COLUMNS`."""

    def __init__(self, path: str, continues: bool) -> None:
        self.file = open(path, "a" if continues else "w", encoding="utf-8", newline="")  # noqa: SIM115
        self.table = csv.DictWriter(self.file, COLUMNS, extrasaction="ignore")
        if self.file.tell() == 0:
            self.table.writeheader()

    def epoch(self, record: Record) -> None:
        self.table.writerow(record)
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard(Log):
    """A curve per column, and the peak memory of each rank, with ranks for steps."""

    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter  # its package is optional

        self.writer = SummaryWriter(folder)

    def epoch(self, record: Record) -> None:
        for name in record.keys() & COLUMNS[1:]:
            self.writer.add_scalar(name, record[name], record["epoch"])

    def finish(self, summary: Record) -> None:
        for rank, peak in enumerate(summary["peak_bytes"]):
            self.writer.add_scalar("peak_bytes_of_rank", peak, rank)

    def close(self) -> None:
        self.writer.close()


class Plot(Log):
    """A picture of the loss, the accuracies and the memory of each rank, drawn at the end."""

    def __init__(self, path: str) -> None:
        self.path, self.epochs = path, list[Record]()

    def epoch(self, record: Record) -> None:
        self.epochs.append(record)

    def finish(self, summary: Record) -> None:
        if not self.epochs:
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 3.4), layout="constrained")
        loss, accuracy, memory = figure.subplots(1, 3)
        loss.plot([record["epoch"] for record in self.epochs], [record["loss"] for record in self.epochs])
        loss.set(title="loss", xlabel="epoch")
        for split in SPLITS:
            points = [(record["epoch"], record[split]) for record in self.epochs if split in record]
            if points:
                accuracy.plot(*zip(*points), label=split)
        if summary["best"]:
            accuracy.axvline(summary["best"]["epoch"], color="grey", linestyle=":", label="best")
        accuracy.set(title="accuracy", xlabel="epoch")
        if accuracy.lines:
            accuracy.legend()
        peaks = [peak / 2**20 for peak in summary["peak_bytes"]]
        if summary["peak_is_of_all_ranks"]:
            memory.bar(["all ranks,\none process"], [max(peaks)], width=0.4)
            memory.margins(x=1)
        else:
            memory.bar(range(len(peaks)), peaks)
            memory.set_xlabel("rank")
            memory.locator_params(axis="x", integer=True)
        if summary["estimated_peak_bytes"] is not None:
            memory.axhline(summary["estimated_peak_bytes"] / 2**20, color="grey", linestyle=":", label="estimated")
            memory.legend()
        memory.set(title="peak memory", ylabel="MiB above the loaded graph")
        for axes in (loss, accuracy, memory):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(self.path, dpi=150)


def prepare_logs(config: TrainConfig) -> None:
    """Make the folders of the logs of `config`, and raise an error if one of them could not be written."""
    if config.tensorboard:
        require("tensorboard", "", "--tensorboard", "write --log-csv in its place")
    if config.plot:
        prepare_picture(Path(config.plot), "--plot", "draw from --log-csv yourself")
    for name in (config.log, config.log_csv):
        file = Path(name)
        if name not in ("", "-") and not (file.is_fifo() or file.is_char_device()):  # these are written to as they are
            prepare_target(file)


def logs_of(config: TrainConfig) -> list[Log]:
    """The logs that `config` asks for, opened."""
    wanted: list[tuple[str, Callable[[str], Log]]] = [
        (config.log, lambda path: JsonLines(path, config.resume)),
        (config.log_csv, lambda path: CsvTable(path, config.resume)),
        (config.tensorboard, TensorBoard),
        (config.plot, Plot),
    ]
    return [kind(path) for path, kind in wanted if path]
