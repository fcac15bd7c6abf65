"""Compare the planner's estimates with measured peaks: benchmarks/reports/planner-YYYY-MM-DD.md, .json and .png.

    python -m benchmarks.planner

Each combination of graph, model, mode and number of ranks is planned from the store on disk, then run and measured
(`benchmarks.run`, exact allocator, the largest rank's): resident memory above the loaded baseline, and in all, which is
that and what the loaded graph, its fields and the model took. Each rank has two parts of the store or more, so that its
structure is in memory of its own and not pages of the mapped file. The planner was fitted to none of them: its
constants are those of a process on a graph of 400 nodes. Every error is shown.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import shardpass as sp
from benchmarks.graphs import NUM_CLASSES, NUM_FEATURES
from benchmarks.machine import REPORTS, machine
from benchmarks.run import MIB, Bench, Record
from benchmarks.worker import HIDDEN, DGLModel, build_model
from shardpass.core.dryrun import COMPILED_BYTES, PROCESS_BYTES

POWERLAW, DENSE, COMMUNITY = "powerlaw:30000:8", "dense:24000:50", "community:30000:8"
TINY = "dense:400:10"


@dataclass(frozen=True)
class Combination:
    """What is planned and run; `hidden` is the width of the layers, None: the model's usual one."""

    graph: str
    model: str
    mode: Any
    ranks: int
    share_memory: bool = False
    hidden: int | None = None
    frontend: Any = "pyg"


COMBINATIONS = (
    Combination("powerlaw:60000:20", "sage", "sar", 1),
    Combination("powerlaw:60000:20", "sage", "sar", 4),
    Combination(DENSE, "sage", "keep", 4),
    Combination(DENSE, "sage", "sar", 4, share_memory=True),
    Combination(DENSE, "gin", "halo", 4),
    Combination(DENSE, "gat", "sar", 2, share_memory=True),
    Combination(DENSE, "gcn", "sar", 4, hidden=64),
    Combination(DENSE, "gcn", "sar", 4, share_memory=True, hidden=64),
    Combination(COMMUNITY, "gin", "sar", 1),
    Combination(POWERLAW, "gcn", "halo", 2, hidden=512),
    Combination(COMMUNITY, "sage", "halo", 2, share_memory=True),
    Combination(COMMUNITY, "gcn", "sar", 1, hidden=384),
    Combination(POWERLAW, "transformer", "sar", 2),
    Combination(POWERLAW, "gat", "keep", 2, share_memory=True),
    Combination(POWERLAW, "sage", "keep", 2, frontend="dgl"),
    Combination(DENSE, "gat", "sar", 2, share_memory=True, frontend="dgl"),
)
EPOCHS, PARTS, BOUND = 2, 8, 0.15


def find(records: list[Record], combination: Combination) -> Record | None:
    """The record of a combination, if it is there."""
    wanted = {**asdict(combination), "epochs": EPOCHS}
    return next((record for record in records if all(record[key] == wanted[key] for key in wanted)), None)


def compare(bench: Bench, combination: Combination, earlier: list[Record]) -> Record:
    """Estimate and measured peak of one combination, in bytes; not measured again if it is among the `earlier`."""
    one = combination
    _, store = bench.files(one.graph, PARTS)
    torch.manual_seed(0)
    model = (DGLModel if one.frontend == "dgl" else build_model)(one.model, NUM_FEATURES, NUM_CLASSES, one.hidden)
    per_host = one.ranks if one.share_memory else 1
    planned = sp.plan(model, store, [one.ranks], [one.mode], frontend=one.frontend, ranks_per_host=per_host).rows[0]
    config = {**asdict(one), "epochs": EPOCHS}
    known = find(earlier, one)
    whole = {**config, "backend": "processes", "peer": None, "backward": "auto", "load_code": False}
    if not known and planned.terms["process"] > COMPILED_BYTES:  # loops compiled once are read from disk later
        bench.measure({**whole, "graph": TINY, "ranks": min(2, one.ranks)}, PARTS, ("memory",))
    measured = known["measured_ranks"] if known else bench.measure(whole, PARTS, ("memory",))["ranks"]
    peak = max(rank["peak_bytes"] for rank in measured)
    total = max(rank["peak_bytes"] + rank["loaded_bytes"] for rank in measured)
    return {
        **config,
        "estimate": planned.above_loaded,
        "measured": peak,
        "error": planned.above_loaded / peak - 1,
        "total_estimate": planned.training,
        "total_measured": total,
        "total_error": planned.training / total - 1,
        "terms": planned.terms,
        "loaded": planned.loaded,
        "phase": planned.phase,
        "measured_ranks": measured,
    }


def row(record: Record) -> list[str]:
    """One comparison as text."""
    sizes = [f"{record[name] / MIB:.1f}" for name in ("estimate", "measured")]
    model = ("DGL " if record["frontend"] == "dgl" else "") + record["model"]
    width = str(record["hidden"] or HIDDEN[record["model"]])
    rows = "shared memory" if record["share_memory"] else "messages"
    cells = [record["graph"], model, width, record["mode"], str(record["ranks"]), rows if record["ranks"] > 1 else "-"]
    totals = [f"{record[name] / MIB:.1f}" for name in ("total_estimate", "total_measured")]
    return [*cells, *sizes, f"{record['error']:+.1%}", *totals, f"{record['total_error']:+.1%}"]


def chart(records: list[Record], path: Path) -> None:
    """Estimate against measurement, with the bound."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    top = 1.1 * max(max(record["estimate"], record["measured"]) for record in records) / MIB
    axes.fill_between([0, top], [0, (1 - BOUND) * top], [0, (1 + BOUND) * top], alpha=0.2, label=f"within {BOUND:.0%}")
    for shared, marker in ((False, "o"), (True, "s")):
        some = [record for record in records if record["share_memory"] == shared]
        xs, ys = ([record[name] / MIB for record in some] for name in ("measured", "estimate"))
        axes.plot(xs, ys, marker, label="shared memory" if shared else "messages")
    axes.set(xlabel="measured, MiB per rank", ylabel="estimate, MiB per rank", xlim=(0, top), ylim=(0, top))
    axes.legend()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def markdown(found: Record) -> str:
    """The report."""
    records, where = found["records"], found["machine"]
    errors = [abs(record["total_error"]) for record in records]
    within = sum(error <= BOUND for error in errors)
    above = sum(abs(record["error"]) <= BOUND for record in records)
    head = ("graph", "model", "width", "mode", "W", "rows travel in", "estimate MiB", "measured MiB", "error")
    head += ("total estimate MiB", "total measured MiB", "error of the total")
    lines = [
        f"# Planner against measurement, {found['date']}",
        "",
        f"{within} of {len(errors)} estimates of the total are within {BOUND:.0%} of the measured one; the largest",
        f"error is {max(errors):.1%}. Above the loaded graph, {above} of {len(errors)} are. Every combination that was",
        "tried is in the table.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row(record)) + " |" for record in records),
        "",
        "All figures are of the largest rank: above the loaded baseline (graph, features, labels and model in",
        f"memory, compiled loops not yet) over {EPOCHS} epochs, and in all. The estimate is that of `shardpass.plan`",
        "from the store on disk, by dry runs on a made-up rank, with a constant for what a process needs outside",
        "torch's tensors. Measured: peak resident set, as `benchmarks/meter.py` says, one process per rank (gloo), one",
        "computing thread each. A window of shared memory counts once, at its owner, in both. Graphs have 128 features",
        f"and 32 classes and are randomly partitioned into {PARTS} parts. Models: three layers with BatchNorm",
        "and Adam, as wide as the table says (GAT and",
        "TransformerConv: four heads together). The JSON file holds the terms of each estimate.",
        "",
        f"The constants of a process ({PROCESS_BYTES / MIB:.0f} MiB, and {COMPILED_BYTES / MIB:.0f} MiB where loops",
        "compiled by numba run) are those of `shardpass/core/dryrun/estimate.py`, taken from a graph of 400 nodes;",
        "nothing in the table had a part in them.",
        "",
        f"Machine: {where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, {where['system']}. Python "
        f"{where['python']}, torch {where['torch']}, torch_geometric {where['torch_geometric']}, shardpass "
        f"{where['shardpass']}.",
        "",
        "![estimate against measurement](" + f"planner-{found['date']}.png)",
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
    parser.add_argument("--only", type=int, nargs="*", metavar="NUMBER", help="of the combinations, from 0")
    parser.add_argument("--resume", type=Path, metavar="JSON", help="go on after what this file holds already")
    args = parser.parse_args()
    earlier = json.loads(args.again.read_text())["records"] if args.again else []
    found: Record = {"date": datetime.date.today().isoformat(), "machine": machine(), "records": []}
    args.output.mkdir(parents=True, exist_ok=True)
    stem = args.output / f"planner-{found['date']}"
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args.folder or Path(scratch))
        bench.folder.mkdir(parents=True, exist_ok=True)
        for combination in COMBINATIONS if args.only is None else [COMBINATIONS[k] for k in args.only]:
            kept = find(json.loads(args.resume.read_text())["records"], combination) if args.resume else None
            found["records"].append(kept or compare(bench, combination, earlier))
            print(" | ".join(row(found["records"][-1])), file=sys.stderr, flush=True)
            stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
            stem.with_suffix(".md").write_text(markdown(found))
            chart(found["records"], stem.with_suffix(".png"))
    within = sum(abs(record["total_error"]) <= BOUND for record in found["records"])
    print(f"{within} of {len(found['records'])} within {BOUND:.0%}; wrote {stem}.md, .json and .png")
    raise SystemExit(within < min(12, len(found["records"])))


if __name__ == "__main__":
    main()
