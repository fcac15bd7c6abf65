"""`shardpass plan`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import shardpass as sp
from shardpass.cli.config import TrainConfig
from shardpass.cli.console import output
from shardpass.cli.models import build_model
from shardpass.core.ranks import MODES, bytes_text, parse_count
from shardpass.planning.sizes import known_sizes

_WIDTH = 190  # the table has a column per term


@dataclass(frozen=True)
class Graph:
    """What the command was told of the graph: a store, or counts as text."""

    store: Path | None
    nodes: str | None
    edges: str | None
    features: int
    classes: int
    cut: float | None
    halo: float | None

    def resolve(self) -> Path | sp.GraphCounts:
        """The store, or the counts.

        Raises:
            ValueError: both or neither were given.
        """
        if self.store is not None and self.nodes is None and self.edges is None:
            return self.store
        if self.store is not None or self.nodes is None or self.edges is None:
            raise ValueError("plan takes a store, or --nodes and --edges of a graph known by its counts")
        return sp.GraphCounts(
            parse_count(self.nodes), parse_count(self.edges), self.features, self.classes, self.cut, self.halo
        )


def run_plan(
    graph: Graph,
    config: TrainConfig,
    ranks: list[int],
    modes: list[str] | None,
    budget: str | None,
    per_host: int,
    as_json: bool,
) -> None:
    """Print the plan, as a table or as JSON."""
    if config.model == "pna":
        raise ValueError("pna needs the degrees of the graph: make a plan in Python, with shardpass.plan")
    source = graph.resolve()
    features, classes = known_sizes(source)
    model = build_model(config, features, classes)
    torch.set_num_threads(1)  # dry runs are small
    chosen: Any = modes or MODES
    planned = sp.plan(model, source, ranks, chosen, budget=budget, ranks_per_host=per_host)
    if as_json:
        print(json.dumps(as_data(planned), indent=1))
        return
    console = output()
    console.width = max(console.width, _WIDTH)
    console.print(plan_table(planned))
    console.print(planned.verdict)
    for mode, reason in planned.left_out.items():
        console.print(f"{mode}: {reason}")


def as_data(planned: sp.Plan) -> dict[str, object]:
    """A plan as plain data."""
    rows = [
        {**asdict(row), "peak": row.peak, "above_loaded": row.above_loaded, "best": row is planned.best}
        for row in planned.rows
    ]
    return {"budget": planned.budget, "rows": rows, "left_out": planned.left_out, "verdict": planned.verdict}


def plan_table(planned: sp.Plan) -> Table:
    """One row per number of ranks and mode, a column per term, the chosen one marked."""
    table = Table(title="estimated bytes per rank at the peak", title_justify="left")
    terms = list(planned.rows[0].terms) if planned.rows else []
    for title in ("ranks", "mode", *terms, "loading", "peak", "fetched/epoch", ""):
        table.add_column(title, justify="right", no_wrap=True)
    for row in planned.rows:
        fits = planned.budget is None or row.peak <= planned.budget
        mark = "take" if row is planned.best else "" if fits else "too large"
        sizes = [bytes_text(count) for count in (*row.terms.values(), row.loading, row.peak, row.fetched)]
        style = "bold" if row is planned.best else None if fits else "dim"
        table.add_row(str(row.ranks), row.mode, *sizes, mark, style=style)
    return table
