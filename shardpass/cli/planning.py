"""`shardpass plan`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

import shardpass as sp
from shardpass.cli.console import Steps
from shardpass.cli.models import ModelConfig
from shardpass.cli.pictures import prepare_picture
from shardpass.core.dryrun import Estimate
from shardpass.core.ranks import parse_count, prepare_target
from shardpass.data import open_store

_RANKS = (1, 2, 4, 8)


def graph_of(store: Path | None, nodes: str | None, edges: str | None, *counts: float | None) -> Path | sp.GraphCounts:
    """The store, or the counts: of nodes and edges as text, then the further ones of `GraphCounts`.

    Raises:
        ValueError: both or neither were given.
    """
    if store is not None and nodes is None and edges is None:
        return store
    if store is not None or nodes is None or edges is None:
        given = "nothing" if store is None else f"the store {store}"
        given += "".join(f" and {name}" for name, text in {"--nodes": nodes, "--edges": edges}.items() if text)
        raise ValueError(
            f"plan takes a store, or --nodes and --edges of a graph known by its counts, and was given {given}"
        )
    return sp.GraphCounts(_count("--nodes", nodes), _count("--edges", edges), *counts)  # type: ignore[arg-type]


def _count(option: str, text: str) -> int:
    try:
        return parse_count(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def ranks_for(graph: Path | sp.GraphCounts) -> list[int]:
    """The numbers of ranks to plan for where none was given: those that a store has parts for."""
    parts = max(_RANKS) if isinstance(graph, sp.GraphCounts) else open_store(graph).num_parts
    return [count for count in _RANKS if count <= parts]


@contextmanager
def estimates_told() -> Iterator[Callable[[int, int], None]]:
    """A block in which a plan is made; what tells how many estimates are done, on the standard error."""
    console = Console(stderr=True, highlight=False)
    steps = Steps(console)
    with console.status("estimating") as status:

        def progress(done: int, total: int) -> None:
            status.update(f"estimating: {done} of {total}")
            steps.tell("estimates", done, total)

        yield progress


def prepare_files(plot: Path | None, page: Path | None) -> None:
    """Raise an error if a picture or a page could not be written in the end, before a plan is made for it."""
    if plot is not None:
        prepare_picture(plot, "plan --plot", "write a page with --page")
    if page is not None:
        prepare_target(page)


COLOURS = {
    "store": "#4e79a7", "features": "#76b7b2", "parameters": "#af7aa1", "gradients": "#d37295", "optimizer": "#fabfd2",
    "activations": "#f28e2b", "halo": "#59a14f", "temporaries": "#edc948", "process": "#bab0ac", "loading": "#9c755f",
}  # fmt: skip
"""Of the pieces of a bar, by term."""


def segments(row: Estimate) -> dict[str, int]:
    """The pieces of the peak of an estimate that are not empty, by term; what loading needs beyond training is one."""
    pieces = {**row.terms, "loading": row.peak - row.training}
    return {term: count for term, count in pieces.items() if count > 0}


def row_of(row: Estimate) -> dict[str, object]:
    """An estimate as plain data."""
    return {**asdict(row), "peak": row.peak, "above_loaded": row.above_loaded, "seconds": row.seconds}


def as_json(planned: sp.Plan) -> str:
    """A plan as JSON."""
    rows = [{**row_of(row), "best": row is planned.best} for row in planned.rows]
    left_out, verdict = planned.left_out, planned.verdict
    told = {"left_out": left_out, "verdict": verdict, "ranks_per_host": planned.per_host}
    return json.dumps({"budget": planned.budget, "rows": rows, **told}, indent=1)


def title_of(config: ModelConfig, graph: Path | sp.GraphCounts) -> str:
    """What was planned, in words."""
    if isinstance(graph, Path):
        size = str(graph)
    else:
        size = f"{graph.nodes:,} nodes and {graph.edges:,} edges"
    return f"{config.model}, {config.layers} layers, hidden {config.hidden}, on {size}"
