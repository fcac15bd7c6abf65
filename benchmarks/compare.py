"""Measure speed, memory and traffic beside PyG and DGL and write benchmarks/reports/compare-YYYY-MM-DD.md, .json, .png.

    python -m benchmarks.compare

GraphSAGE (3 x 256) and GAT (3 layers, 4 heads x 32) on two R-MAT graphs, W = 1, 2, 4, 8 in the modes sar, keep, halo,
and the kernels beside the bandwidth of memory. Every configuration is measured in this one run, in processes of its
own with one computing thread per rank. Needs a quiet machine for long, and 10 GiB for plain PyG.
``--bars`` measures only what the bars of `benchmarks/bars.py` on speed and memory speak of, and the kernels; its report
begins with bars- in place of compare-. ``--quick`` measures a few configurations, to try it out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.compare_report import chart, markdown
from benchmarks.machine import REPORTS, machine
from benchmarks.run import Bench, Record, huge_pages, row
from shardpass.core.ranks import MODES

GRAPHS, MODELS, RANKS, EPOCHS = ("50k30", "20k150"), ("sage", "gat"), (1, 2, 4, 8), 6


def configurations(quick: bool = False) -> list[Record]:
    """All that is measured; what needs the most memory comes last.

    Ranks are processes under mpirun that share memory, once also with messages in its place: only those send bytes.
    """
    base = {
        "backend": "mpi",
        "epochs": EPOCHS,
        "peer": None,
        "share_memory": True,
        "checkpoint": None,
        "backward": "auto",
    }
    ranks = (1, 4) if quick else RANKS
    found = []
    for graph in GRAPHS[:1] if quick else GRAPHS:
        for model in MODELS:
            this = {**base, "graph": graph, "model": model}
            for size in ranks:
                modes = ("sar",) if quick or size == 1 else MODES
                if size == 1:
                    found.append({**this, "ranks": 1, "mode": "sar", "in_memory": True})
                found += [{**this, "ranks": size, "mode": mode} for mode in modes]
                if size > 1:
                    found += [
                        {**this, "ranks": size, "mode": mode, "share_memory": False} for mode in modes if mode != "halo"
                    ]
            if size > 1 and model == "sage":
                found.append({**this, "ranks": size, "mode": "sar", "checkpoint": "activations"})
                small = {**this, "mode": "sar", "huge_pages": False}
                found += [{**small, "ranks": count} for count in (1, size)]
            for peer in ("dgl",) if quick else ("dgl", "pyg"):
                found.append({**this, "ranks": 1, "mode": "sar", "peer": peer})
    return sorted(found, key=lambda config: config["peer"] == "pyg")


def in_bars(config: Record) -> bool:
    """Whether a bar on speed or memory speaks of this configuration."""
    if config["peer"]:
        return config["model"] == "gat" or config["graph"] == "50k30"
    where = (config["graph"], config["model"])
    ranks = {("50k30", "sage"): (1, 8), ("50k30", "gat"): (1,), ("20k150", "gat"): (1, 4)}.get(where, ())
    return config["ranks"] in ranks and config["mode"] == "sar" and (config["share_memory"] or config["ranks"] == 8)


def measure_all(folder: Path, todo: list[Record]) -> Record:
    """The date, the machine, a record per configuration and one per kernel."""
    where, records = machine(), []
    bench = Bench(folder)
    for number, config in enumerate(todo, 1):
        records.append(bench.measure(config, config["ranks"]))
        print(f"{number}/{len(todo)}", " | ".join(row(records[-1])), file=sys.stderr, flush=True)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": where,
        "records": records,
        "kernels": _kernels(folder / "kernels.json"),
    }


def _kernels(path: Path) -> list[Record]:
    """A record per kernel, measured in a process of its own with huge pages, as all else."""
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.kernels", "--json", str(path)]
    subprocess.run(command, env={**os.environ, **huge_pages(True)}, stdout=subprocess.DEVNULL, check=True)
    found: list[Record] = json.loads(path.read_text())["kernels"]
    return found


def main() -> None:
    """Measure, then write the report; exit code 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few configurations, to try it out")
    parser.add_argument("--bars", action="store_true", help="only what bars on speed and memory speak of")
    parser.add_argument("--folder", type=Path, help="where graphs are kept between calls (default: a temporary one)")
    parser.add_argument("--output", type=Path, default=REPORTS)
    parser.add_argument("--note", help="a sentence for the report: what else ran on the machine, or changed since")
    parser.add_argument("--again", type=Path, metavar="JSON", help="write the report of earlier measurements again")
    args = parser.parse_args()
    todo = [config for config in configurations(args.quick) if not args.bars or in_bars(config)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        found = json.loads(args.again.read_text()) if args.again else measure_all(folder, todo)
    found |= {"note": args.note} if args.note else {}
    found |= {"kind": "bars"} if args.bars else {}
    args.output.mkdir(parents=True, exist_ok=True)
    stem = args.output / f"{found.get('kind', 'compare')}-{found['date']}"
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text := markdown(found))
    chart(found["records"], stem.with_suffix(".png"))
    print(f"wrote {stem}.md, .json and .png")
    raise SystemExit("does NOT hold" in text)


if __name__ == "__main__":
    main()
