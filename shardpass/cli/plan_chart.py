"""`shardpass plan --plot`: the table of a plan as a picture."""

from __future__ import annotations

from pathlib import Path

import shardpass as sp
from shardpass.cli.planning import COLOURS, segments
from shardpass.core.ranks import bytes_text


def draw_plan(planned: sp.Plan, title: str, path: Path) -> None:
    """Write a bar per number of ranks and mode, in pieces for its terms, and a line for the budget."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows, unit = planned.rows, 2**30 if max((row.peak for row in planned.rows), default=0) >= 2**30 else 2**20
    figure = Figure(figsize=(11, 2.4 + 0.36 * len(rows)), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        left = 0.0
        for term, count in segments(row).items():
            axes.barh(place, count / unit, left=left / unit, color=COLOURS[term], height=0.72)
            left += count
        fits = planned.budget is None or row.peak <= planned.budget
        mark = "  take this" if row is planned.best else ("" if fits else "  too large")
        axes.annotate(
            bytes_text(row.peak) + mark, (row.peak / unit, place), (6, 0), textcoords="offset points", va="center",
            fontweight="bold" if row is planned.best else "normal", color="#222222" if fits else "#6b6b6b",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    if planned.budget is not None:
        axes.axvline(planned.budget / unit, color="#222222", linestyle="--", linewidth=1.2)
        axes.set_title(f"{title}\nbudget {bytes_text(planned.budget)} per rank", loc="left")
    else:
        axes.set_title(title, loc="left")
    names = [f"{row.ranks} rank{'s' if row.ranks > 1 else ''}, {row.mode}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlabel(f"estimated peak memory per rank ({'GiB' if unit == 2**30 else 'MiB'})")
    axes.spines[["top", "right"]].set_visible(False)
    used = [term for term in COLOURS if any(term in segments(row) for row in rows)]
    patches = [Patch(color=COLOURS[term], label=term) for term in used]
    figure.legend(handles=patches, loc="outside lower left", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)
