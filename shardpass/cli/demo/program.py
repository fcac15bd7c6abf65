"""What the two programs of a stage printed, and the table that compares them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from rich.table import Table

from shardpass.cli.demo.child import Record
from shardpass.core.ranks import bytes_text


@dataclass(frozen=True)
class Program:
    """What one of the two programs of a stage printed."""

    records: list[Record]

    @property
    def losses(self) -> list[float]:
        """The loss of every epoch."""
        return [record["loss"] for record in self.records if record["event"] == "epoch"]

    @property
    def seconds(self) -> float:
        """The median seconds of a training step (forward, backward, update)."""
        return statistics.median_high(r["seconds"] for r in self.records if r["event"] == "epoch")

    @property
    def peaks(self) -> list[int]:
        """Bytes of each process at its peak, above the loaded graph."""
        found: list[int] = self.records[-1]["peak_bytes"]
        return found


@dataclass(frozen=True)
class Stage:
    """The two programs of a stage."""

    plain: Program
    sharded: Program
    launcher: str

    @property
    def gap(self) -> float:
        """The largest difference of the losses of an epoch."""
        return max(abs(a - b) for a, b in zip(self.plain.losses, self.sharded.losses))

    def table(self, has_learnt: bool) -> Table:
        """The two programs side by side, memory first; with the accuracy if the model has learnt something."""
        table = Table()
        ranks = len(self.sharded.peaks)
        for title in ("", "plain PyG, 1 process", f"shardpass, {ranks} ranks ({self.launcher})"):
            table.add_column(title, justify="right" if title else "left")
        sides = (self.plain, self.sharded)
        table.add_row("peak memory, the largest process", *(bytes_text(max(side.peaks)) for side in sides))
        table.add_row("peak memory, all processes", *(bytes_text(sum(side.peaks)) for side in sides))
        table.add_row("loss, first epoch", *(f"{side.losses[0]:.6f}" for side in sides))
        table.add_row("loss, last epoch", *(f"{side.losses[-1]:.6f}" for side in sides))
        if has_learnt:
            table.add_row("test accuracy", *(f"{side.records[-1]['test']:.4f}" for side in sides))
        table.add_row("seconds per epoch (training)", *(f"{side.seconds:.2f}" for side in sides))
        return table
