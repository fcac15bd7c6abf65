"""The bar chart of the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def memory_chart(plain: dict[str, Any], sharded: dict[str, Any], num_nodes: int, num_edges: int, path: Path) -> Path:
    """`path`, where a bar chart of peak memory has been written: one bar for plain PyG, one per rank."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    peaks = [*plain["peak_bytes"], *sharded["peak_bytes"]]
    count = len(sharded["peak_bytes"])
    names = ["plain PyG\n1 process"][: len(plain["peak_bytes"])] + [f"rank {rank}\nof {count}" for rank in range(count)]
    colours = ["tab:gray"] * len(plain["peak_bytes"]) + ["tab:blue"] * count
    bars = axes.bar(names, [peak / 2**20 for peak in peaks], color=colours)
    axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.set_ylabel("peak memory above the\nloaded graph (MiB)")
    axes.set_title(f"Full-graph GAT, {num_nodes:,} nodes, {num_edges / 1e6:.1f} M edges", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return path
