"""Prints the figures of docs/comparison.md, from the report that `benchmarks.compare --bars` wrote last.

    python -m benchmarks.comparison

Nothing is measured here. A test compares the page with what this prints.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.bars import cpu, heap, pick
from benchmarks.run import Record

REPORTS = Path(__file__).parent / "reports"
GRAPHS = {"50k30": "50,000 nodes, 1.55 M edges", "20k150": "20,000 nodes, 3.02 M edges"}
JOBS = [("SAGE", "50k30", 8), ("GAT", "50k30", None), ("GAT", "20k150", 4)]
"""Model, graph, and the number of ranks that was measured besides one."""


def latest() -> Path:
    """The report of the last run."""
    return max(REPORTS.glob("bars-*.json"))


def table(records: list[Record]) -> str:
    """A row for each job: CPU seconds of an epoch, all ranks together, and the peak memory of a rank."""
    rows = ["| model and graph | PyG | DGL | shardpass, 1 rank | on several |", "|---|---|---|---|---|"]
    for model, graph, ranks in JOBS:
        job = {"model": model.lower(), "graph": graph}
        one = [{"peer": "pyg"}, {"peer": "dgl"}, {"in_memory": True}]
        cells = [_cell(pick(records, ranks=1, **job, **what)) for what in one]
        several = f"{ranks} ranks: {_cell(pick(records, ranks=ranks, **job))}" if ranks else ""
        rows.append(f"| {model}, {GRAPHS[graph]} | {' | '.join([*cells, several])} |")
    return "\n".join(rows)


def _cell(record: Record | None) -> str:
    if record is None:
        raise SystemExit(f"{latest()} lacks a run that the table shows; run `python -m benchmarks.compare --bars`")
    return f"{cpu(record):.1f} s, {heap(record):,.0f} MB"


def figures() -> str:
    """The sentence and the table as they stand on the page."""
    path = latest()
    found = json.loads(path.read_text(encoding="utf-8"))
    return f"Measured on {found['date']} (`benchmarks/reports/{path.stem}.md`):\n\n{table(found['records'])}"


if __name__ == "__main__":
    print(figures())
