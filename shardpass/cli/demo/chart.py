"""The picture of the demo: the memory of each process on a larger graph, and the losses, which are the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardpass.cli.demo.program import Stage
from shardpass.core.ranks import bytes_text

_PLAIN, _SHARDED, _INK = "#9a9a9a", "#1f77b4", "#222222"
_MOST_BARS = 8


def draw(memory: Stage, losses: Stage, size: str, path: Path) -> None:
    """Write the picture: `memory` on the left, of a graph whose `size` is given in words, and `losses` on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.75), layout="constrained", facecolor="white")
    plain, largest = max(memory.plain.peaks), max(memory.sharded.peaks)
    figure.suptitle(
        f"The same model, the same losses: {bytes_text(plain)} become {bytes_text(largest)} per rank",
        fontsize=20, fontweight="bold", color=_INK,
    )  # fmt: skip
    figure.get_layout_engine().set(w_pad=0.25, h_pad=0.2, wspace=0.06)  # type: ignore[union-attr,call-arg]
    figure.supxlabel(
        f"Memory above the loaded graph. An epoch of it takes {memory.plain.seconds:.1f} s in plain PyG and "
        f"{memory.sharded.seconds:.1f} s in shardpass, on {os.cpu_count()} cores.",
        fontsize=12, color="#555555", x=0.02, ha="left",
    )  # fmt: skip
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _bars(left, memory, size)
    _curves(right, losses)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=13, colors=_INK)
    figure.savefig(path, dpi=150)


def _bars(axes: Any, stage: Stage, size: str) -> None:
    """A bar for plain PyG, and one for each rank; of many ranks the largest ones."""
    shown = sorted(enumerate(stage.sharded.peaks), key=lambda entry: -entry[1])[:_MOST_BARS]
    peaks = [*stage.plain.peaks, *(peak for _, peak in sorted(shown))]
    names = ["plain PyG", *(f"rank {rank}" for rank, _ in sorted(shown))]
    bars = axes.barh(names, [peak / 2**20 for peak in peaks], color=[_PLAIN] + [_SHARDED] * len(shown), height=0.7)
    axes.bar_label(bars, [bytes_text(peak) for peak in peaks], padding=6, fontsize=15, color=_INK)
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title(f"Peak memory of training a GAT\n{size}", fontsize=15, color=_INK, loc="left")


def _curves(axes: Any, stage: Stage) -> None:
    epochs = range(1, len(stage.plain.losses) + 1)
    axes.plot(epochs, stage.plain.losses, color=_PLAIN, linewidth=7, label="plain PyG, one process", alpha=0.8)
    label = f"shardpass, {len(stage.sharded.peaks)} ranks"
    axes.plot(epochs, stage.sharded.losses, color=_SHARDED, linewidth=2, label=label)
    axes.legend(fontsize=14, frameon=False)
    axes.set_xlabel("epoch", fontsize=13, color=_INK)
    axes.set_title(
        f"Loss on handwritten digits\nlargest difference {stage.gap:.0e}", fontsize=15, color=_INK, loc="left"
    )
    axes.set_ylim(bottom=0)
