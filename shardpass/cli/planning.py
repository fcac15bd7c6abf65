"""`shardpass plan`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import shardpass as sp
from shardpass.core.ranks import parse_count


def graph_of(store: Path | None, nodes: str | None, edges: str | None, *counts: float | None) -> Path | sp.GraphCounts:
    """The store, or the counts: of nodes and edges as text, then the further ones of `GraphCounts`.

    Raises:
        ValueError: both or neither were given.
    """
    if store is not None and nodes is None and edges is None:
        return store
    if store is not None or nodes is None or edges is None:
        raise ValueError("plan takes a store, or --nodes and --edges of a graph known by its counts")
    return sp.GraphCounts(parse_count(nodes), parse_count(edges), *counts)  # type: ignore[arg-type]


def as_json(planned: sp.Plan) -> str:
    """A plan as JSON."""
    rows = [
        {**asdict(row), "peak": row.peak, "above_loaded": row.above_loaded, "best": row is planned.best}
        for row in planned.rows
    ]
    left_out, verdict = planned.left_out, planned.verdict
    return json.dumps({"budget": planned.budget, "rows": rows, "left_out": left_out, "verdict": verdict}, indent=1)
