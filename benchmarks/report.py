"""Measure what is claimed about memory and write it down: benchmarks/reports/memory-YYYY-MM-DD.md, .json and .png.

    python -m benchmarks.report

Two claims, each checked for GraphSAGE and GAT in sar mode on dense random graphs, where every part needs rows of every
other part: the peak per rank on 4 ranks is at most a third of that on 1 rank; and what an epoch needs transiently does
not grow with the number of edges. Takes some minutes, and about 10 GiB for plain PyG (``--without-pyg`` leaves it out).
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import REPORTS, machine
from benchmarks.run import MIB, Bench, Record, row

MODELS = ("sage", "gat")
NODES, DEGREES, RANKS = 20_000, (25, 50, 100, 200), (1, 2, 4)
EPOCHS = 3
DENSE = f"dense:{NODES}:150"
_HEADER = ("graph", "model", "system", "W", "peak MiB/rank", "kept MiB", "transient MiB", "MB sent/epoch", "last loss")


def configurations(with_pyg: bool) -> list[Record]:
    """All that is measured, cheapest claims first."""
    base = {"mode": "sar", "backend": "processes", "epochs": EPOCHS}
    found = []
    for model in MODELS:
        found += [{**base, "model": model, "graph": DENSE, "ranks": ranks, "peer": None} for ranks in RANKS]
        found += [
            {**base, "model": model, "graph": f"dense:{NODES}:{degree}", "ranks": max(RANKS), "peer": None}
            for degree in DEGREES
        ]
    if with_pyg:  # last, since it needs the most memory
        found += [{**base, "model": model, "graph": DENSE, "ranks": 1, "peer": "pyg"} for model in MODELS]
    return found


def largest(record: Record, name: str) -> float:
    """The largest rank's figure, in MiB."""
    return float(max(rank[name] for rank in record["ranks"]) / MIB)


def of(records: list[Record], **wanted: Any) -> list[Record]:
    """The records whose fields are as given."""
    return [record for record in records if all(record[key] == value for key, value in wanted.items())]


def by_degree(records: list[Record], model: str) -> list[Record]:
    """The records of the second claim, by ascending degree."""
    return [of(records, model=model, graph=f"dense:{NODES}:{d}", world=max(RANKS), peer=None)[0] for d in DEGREES]


def findings(records: list[Record]) -> list[str]:
    """One sentence per claim and model: the measured figures, and whether they bear the claim out."""
    out = []
    for model in MODELS:
        one, four = (of(records, model=model, graph=DENSE, world=ranks, peer=None)[0] for ranks in (1, max(RANKS)))
        ratio = largest(four, "peak_bytes") / largest(one, "peak_bytes")
        verdict = "holds" if ratio <= 1 / 3 else "does NOT hold"
        out.append(
            f"{model}: peak per rank {largest(four, 'peak_bytes'):.1f} MiB at W = 4 against "
            f"{largest(one, 'peak_bytes'):.1f} MiB at W = 1, a ratio of {ratio:.3f}. At most a third: **{verdict}**."
        )
    for model in MODELS:
        series = by_degree(records, model)
        figures = [largest(record, "transient_bytes") for record in series]
        verdict = "holds" if figures[-1] <= 1.1 * figures[0] else "does NOT hold"
        text = ", ".join(f"{figure:.1f}" for figure in figures)
        out.append(
            f"{model}: transient memory per rank {text} MiB at degrees {', '.join(map(str, DEGREES))}. "
            f"Does not grow with the edges (within 10 per cent): **{verdict}**."
        )
    for model in MODELS:
        for peer in of(records, model=model, peer="pyg"):
            four = of(records, model=model, graph=DENSE, world=max(RANKS), peer=None)[0]
            times = largest(peer, "peak_bytes") / largest(four, "peak_bytes")
            out.append(
                f"{model}: plain PyG in one process needs {largest(peer, 'peak_bytes'):.0f} MiB on the same graph, "
                f"{times:.1f} times the peak of a rank at W = 4."
            )
    return out


def markdown(records: list[Record], date: str, where: dict[str, Any]) -> str:
    """The report."""
    lines = [f"# Memory per rank, {date}", "", *(f"- {text}" for text in findings(records)), ""]
    lines += [f"![peak and transient memory](memory-{date}.png)", "", "| " + " | ".join(_HEADER) + " |"]
    lines += ["|" + "---|" * len(_HEADER)]
    for record in records:
        cells = row(record)
        lines.append("| " + " | ".join(cells[:4] + cells[5:]) + " |")
    lines += [
        "",
        "Graphs: uniformly random directed edges, 128 features, 32 classes, randomly partitioned into 4 parts. SAGE: 3",
        "layers of 256, mean; GAT: 3 layers of 4 heads x 32, the last averaged over heads; both with BatchNorm, Adam,",
        f"float32; {EPOCHS} epochs. One process per rank (gloo), one computing thread each.",
        "",
        "Memory is resident memory above the loaded baseline (graph, features, labels and model in memory, before",
        "the first epoch), the largest rank's. peak: the highest point of all epochs; structure that is built at first",
        "use, gradients, Adam's state and transport buffers count. kept: what is left between epochs. transient: the",
        "peak of the epochs after the first minus kept. The processes ran with MALLOC_MMAP_THRESHOLD_=65536, so that",
        "freed tensors leave the resident set at once; `benchmarks/meter.py` says more. The JSON file holds every",
        "rank's figures, and glibc's own count of the live heap between epochs (`kept_heap_bytes`) as a check of kept.",
        "",
        f"Machine: {where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, {where['system']}. Python "
        f"{where['python']}, torch {where['torch']}, torch_geometric {where['torch_geometric']}, shardpass "
        f"{where['shardpass']}.",
        "",
        "Command: `python -m benchmarks.report`",
    ]
    return "\n".join(lines) + "\n"


def chart(records: list[Record], path: Path) -> None:
    """Two panels: peak by number of ranks, transient memory by number of edges."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for model, marker in zip(MODELS, "os"):
        runs = [of(records, model=model, graph=DENSE, world=ranks, peer=None)[0] for ranks in RANKS]
        left.plot(RANKS, [largest(run, "peak_bytes") for run in runs], marker=marker, label=model)
        series = by_degree(records, model)
        edges = [run["num_edges"] / 1e6 for run in series]
        right.plot(edges, [largest(run, "transient_bytes") for run in series], marker=marker, label=model)
    left.set(xlabel="ranks", ylabel="MiB per rank", title=f"peak, {NODES:,} nodes and 3 M edges", xticks=RANKS)
    right.set(xlabel="million edges", title=f"transient, {NODES:,} nodes on {max(RANKS)} ranks", xlim=(0, None))
    for axes in (left, right):
        axes.set_ylim(0, None)
        axes.legend()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def measure_all(with_pyg: bool) -> Record:
    """The date, the machine, and a record per configuration."""
    where, records = machine(), []  # the machine first: files may change while this runs
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch))
        for config in configurations(with_pyg):
            records.append(bench.measure(config, max(RANKS), ("memory",)))
            print(" | ".join(row(records[-1])), file=sys.stderr, flush=True)
    return {"date": datetime.date.today().isoformat(), "machine": where, "records": records}


def main() -> None:
    """Measure, then write the report; exit code 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-pyg", action="store_true", help="leave plain PyG out")
    parser.add_argument("--output", type=Path, default=REPORTS)
    parser.add_argument("--again", type=Path, metavar="JSON", help="write the report of earlier measurements again")
    args = parser.parse_args()
    found = json.loads(args.again.read_text()) if args.again else measure_all(not args.without_pyg)
    args.output.mkdir(parents=True, exist_ok=True)
    stem = args.output / f"memory-{found['date']}"
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    stem.with_suffix(".md").write_text(markdown(found["records"], found["date"], found["machine"]))
    chart(found["records"], stem.with_suffix(".png"))
    print("\n".join(findings(found["records"])))
    print(f"wrote {stem}.md, .json and .png")
    raise SystemExit(any("NOT" in text for text in findings(found["records"])))


if __name__ == "__main__":
    main()
