"""`shardpass plan`."""

from __future__ import annotations

import html
import json
from dataclasses import asdict, replace
from pathlib import Path
from string import Template

import shardpass as sp
from shardpass.cli.models import ModelConfig
from shardpass.cli.pictures import prepare_picture
from shardpass.core.dryrun import TERMS, Estimate
from shardpass.core.ranks import bytes_text, parse_count, prepare_target
from shardpass.data import open_store

_RANKS = (1, 2, 4, 8)


def graph_of(store: Path | None, nodes: str | None, edges: str | None, *counts: float | None) -> Path | sp.GraphCounts:
    """The store, or the counts: of nodes and edges as text, then the further ones of `GraphCounts`."""
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


def as_json(planned: sp.Plan) -> str:
    """A plan as JSON."""
    rows = [
        {**asdict(row), "peak": row.peak, "above_loaded": row.above_loaded, "seconds": row.seconds,
         "best": row is planned.best}
        for row in planned.rows
    ]  # fmt: skip
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


def draw_plan(planned: sp.Plan, title: str, path: Path) -> None:
    """Write a bar per number of ranks and mode, in pieces for its terms, and a line for the budget."""
    from matplotlib.figure import Figure

    rows, unit = planned.rows, 2**30 if max((row.peak for row in planned.rows), default=0) >= 2**30 else 2**20
    figure = Figure(figsize=(11, 2.4 + 0.36 * len(rows)), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    left = [0.0] * len(rows)
    for term, colour in COLOURS.items():
        widths = [segments(row).get(term, 0) / unit for row in rows]
        if any(widths):
            axes.barh(range(len(rows)), widths, left=left, color=colour, height=0.72, label=term)
            left = [begin + width for begin, width in zip(left, widths)]
    for place, row in enumerate(rows):
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
    figure.legend(loc="outside lower left", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)


def plan_page(planned: sp.Plan, title: str) -> str:
    """An HTML file with sliders for ranks and budget, which needs nothing but a browser.

    What it recommends is the verdict of a plan for each of 200 budgets, which are made here, and for the given one.
    """
    if not planned.rows:
        raise ValueError(planned.verdict)
    low, high = min(row.peak for row in planned.rows) / 2, max(row.peak for row in planned.rows) * 2
    budgets = {round(low * (high / low) ** (step / 199)) for step in range(200)}
    every = [*sorted(budgets | ({planned.budget} - {None})), None]  # type: ignore[type-var]
    plans = [planned if budget == planned.budget else replace(planned, budget=budget, larger=None) for budget in every]
    steps = [
        {"budget": one.budget, "text": "no bound" if one.budget is None else bytes_text(one.budget),
         "verdict": one.verdict, "best": None if one.best is None else one.rows.index(one.best)}
        for one in plans
    ]  # fmt: skip
    rows = [
        {"ranks": row.ranks, "mode": row.mode, "peak": row.peak, "text": bytes_text(row.peak),
         "segments": [(term, count, bytes_text(count)) for term, count in segments(row).items()],
         "cells": [row.ranks, row.mode, *map(bytes_text, (row.peak, *row.terms.values(), row.loading, row.fetched))]}
        for row in planned.rows
    ]  # fmt: skip
    head = ["ranks", "mode", "peak", *TERMS, "process", "loading", "fetched/epoch", ""]
    data = {"steps": steps, "start": every.index(planned.budget), "head": head, "rows": rows, "colours": COLOURS}
    left_out = " ".join(f"{mode}: {reason}." for mode, reason in planned.left_out.items())
    told = {"assumed": planned.assumed, "left_out": left_out, "title": title}
    page = Template(Path(__file__).with_name("plan.html").read_text(encoding="utf-8"))
    return page.substitute(
        {name: html.escape(text) for name, text in told.items()}, plan=json.dumps(data).replace("</", "<\\/")
    )
