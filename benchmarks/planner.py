"""Compare the planner's estimates with measured peaks: benchmarks/reports/planner-YYYY-MM-DD.md and .json.

    python -m benchmarks.planner

Each combination of graph, model, mode and number of ranks is planned from the store on disk, then run and measured
(`benchmarks.run`, resident memory above the loaded baseline, exact allocator, the largest rank's). The planner was
fitted to none of them: its one constant is that of a process on a graph of 400 nodes. Every error is shown.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import shardpass as sp
from benchmarks.graphs import NUM_CLASSES, NUM_FEATURES
from benchmarks.report import REPORTS, machine
from benchmarks.run import MIB, Bench, Record
from benchmarks.worker import build_model

POWERLAW, DENSE, RMAT = "powerlaw:60000:20", "dense:30000:40", "50k30"
COMBINATIONS = (
    (POWERLAW, "sage", "sar", 1), (POWERLAW, "sage", "sar", 4), (POWERLAW, "gat", "keep", 4),
    (POWERLAW, "gcn", "halo", 2), (POWERLAW, "gin", "sar", 4),
    (DENSE, "sage", "keep", 4), (DENSE, "gat", "sar", 2), (DENSE, "gcn", "sar", 4), (DENSE, "gin", "halo", 4),
    (RMAT, "gat", "sar", 4), (RMAT, "gcn", "keep", 4), (RMAT, "sage", "halo", 2), (RMAT, "gin", "sar", 1),
    (RMAT, "gat", "sar", 1),
)  # fmt: skip
EPOCHS, PARTS, BOUND = 2, 4, 0.15


def compare(bench: Bench, graph: str, model: str, mode: Any, ranks: int, earlier: list[Record]) -> Record:
    """Estimate and measured peak of one combination, in bytes; not measured again if it is among the `earlier`."""
    _, store = bench.files(graph, PARTS)
    torch.manual_seed(0)
    planned = sp.plan(build_model(model, NUM_FEATURES, NUM_CLASSES), store, [ranks], [mode]).rows[0]
    config = {"graph": graph, "model": model, "ranks": ranks, "mode": mode, "epochs": EPOCHS}
    known = [record["measured_ranks"] for record in earlier if all(record[key] == config[key] for key in config)]
    whole = {**config, "backend": "processes", "peer": None, "backward": "auto", "share_memory": False}
    measured = known[0] if known else bench.measure(whole, PARTS, ("memory",))["ranks"]
    peak = max(rank["peak_bytes"] for rank in measured)
    return {
        **config,
        "estimate": planned.above_loaded,
        "measured": peak,
        "error": planned.above_loaded / peak - 1,
        "terms": planned.terms,
        "loaded": planned.loaded,
        "phase": planned.phase,
        "measured_ranks": measured,
    }


def row(record: Record) -> list[str]:
    """One comparison as text."""
    sizes = [f"{record[name] / MIB:.1f}" for name in ("estimate", "measured")]
    cells = [record["graph"], record["model"], record["mode"], str(record["ranks"])]
    return [*cells, *sizes, f"{record['error']:+.1%}"]


def markdown(found: Record) -> str:
    """The report."""
    records, where = found["records"], found["machine"]
    errors = [abs(record["error"]) for record in records]
    within = sum(error <= BOUND for error in errors)
    head = ("graph", "model", "mode", "W", "estimate MiB", "measured MiB", "error")
    lines = [
        f"# Planner against measurement, {found['date']}",
        "",
        f"{within} of {len(errors)} estimates are within {BOUND:.0%} of the measured peak; the largest error is "
        f"{max(errors):.1%}. Every combination that was tried is in the table.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row(record)) + " |" for record in records),
        "",
        "Both figures are of the largest rank, above the loaded baseline (graph, features, labels and model in",
        f"memory), over {EPOCHS} epochs. The estimate is that of `shardpass.plan` from the store on disk, by dry runs",
        "on a made-up rank; it includes a constant for what a process needs outside torch's tensors. Measured: peak",
        "resident set, as `benchmarks/meter.py` says, one process per rank (gloo), one computing thread each. Rows",
        "travel as messages (`share_memory=False`), as between hosts, which is what the planner expects. Graphs",
        "have 128 features and 32 classes and are randomly partitioned into 4 parts. Models: three layers with",
        "BatchNorm, 256 wide (GAT: 4 heads x 32), Adam. The JSON file holds the terms of each estimate.",
        "",
        "The constants of a process (22 MiB, and 52 MiB where loops compiled by numba run) were taken from a graph of",
        "400 nodes and 10 edges per node, which is not in the table. The second was told apart from the first after",
        "GAT had been seen to be estimated 25 to 35 per cent too low for want of it, on combinations of this table; so",
        "the table is not wholly independent of it.",
        "",
        f"Machine: {where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, {where['system']}. Python "
        f"{where['python']}, torch {where['torch']}, torch_geometric {where['torch_geometric']}, shardpass "
        f"{where['shardpass']}.",
        "",
        "Command: `python -m benchmarks.planner`",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compare, then write the report; exit code 1 if fewer than 12 estimates are within the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=REPORTS)
    parser.add_argument("--folder", type=Path, help="where graphs are kept between calls (default: a temporary one)")
    parser.add_argument("--again", type=Path, metavar="JSON", help="estimate anew, with these earlier measurements")
    args = parser.parse_args()
    earlier = json.loads(args.again.read_text())["records"] if args.again else []
    found: Record = {"date": datetime.date.today().isoformat(), "machine": machine(), "records": []}
    args.output.mkdir(parents=True, exist_ok=True)
    stem = args.output / f"planner-{found['date']}"
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args.folder or Path(scratch))
        bench.folder.mkdir(parents=True, exist_ok=True)
        for combination in COMBINATIONS:
            found["records"].append(compare(bench, *combination, earlier))
            print(" | ".join(row(found["records"][-1])), file=sys.stderr, flush=True)
            stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
            stem.with_suffix(".md").write_text(markdown(found))
    within = sum(abs(record["error"]) <= BOUND for record in found["records"])
    print(f"{within} of {len(found['records'])} within {BOUND:.0%}; wrote {stem}.md and .json")
    raise SystemExit(within < min(12, len(found["records"])))


if __name__ == "__main__":
    main()
