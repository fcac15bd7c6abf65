"""All bars of large graphs and of small ones, one benchmark after the other, in one dated report.

    python -m benchmarks.large_and_small [--data FOLDER] [--only overhead messages]

Each line of `BARS` is a benchmark of this folder, which prints its figures and says what they should be. It runs in a
process of its own. Needs a quiet machine for about an hour; sections of the same day that ``--only`` leaves out stay.
Only a billion edges are not among them: `benchmarks.scale` has a report of its own. ``--data`` is a folder with
``cora.npz`` and others, in the layout of `benchmarks.graphs`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from benchmarks.machine import REPORTS, machine

BARS = (
    ("Edges cut, and balance", "partitioning --graph community:100000:20 50k30 {data} --method kaminpar metis"),
    ("Planned bytes of parts, measured peaks of ranks", "rank_balance"),
    ("Structure, bytes per edge", "edge_bytes"),
    ("Stores written by 1, 2 and 4 processes", "many_processes --edges 8000000 --nodes 400000"),
    ("Ten million strings as ids", "names"),
    ("Inference for all nodes", "inference_peak"),
    ("Overhead on small graphs", "overhead {folder}"),
    (
        "GraphSAGE on 1, 2 and 8 ranks",
        "run --model sage --graph 50k30 --ranks 1 2 8 --backend mpi --measure time --epochs 12",
    ),
    ("General messages", "messages"),
)


def measured(command: str, console: Console) -> str:
    """What the benchmark printed, and how long it took."""
    start = time.monotonic()
    with console.status(command):
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{command.split()[0]}", *command.split()[1:]],
            capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "160"},
        )  # fmt: skip
    text = done.stdout.strip() if done.returncode == 0 else f"{done.stdout}\n{done.stderr[-2000:]}".strip()
    console.print(f"{command}: {time.monotonic() - start:.0f} s", "" if done.returncode == 0 else "FAILED")
    return f"```text\n{text}\n```\n\n{time.monotonic() - start:.0f} s."


def written(path: Path) -> Iterator[tuple[str, str]]:
    """The title and the text of each section of a report that is there."""
    for section in path.read_text().split("\n## ")[1:] if path.exists() else ():
        title, _, text = section.partition("\n")
        yield title, text.strip()


def main() -> None:
    """Run them and write the report after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with real graphs")
    parser.add_argument("--only", nargs="+", choices=[command.split()[0] for _, command in BARS], help="benchmarks")
    args = parser.parse_args()
    graphs = sorted(path for path in args.data.glob("*.npz") if "hetero" not in path.stem) if args.data else []
    values = {"data": " ".join(map(str, graphs)), "folder": f"--data {args.data}" if args.data else ""}
    path, console = REPORTS / f"large-and-small-{datetime.date.today()}.md", Console()
    head = [f"# Large and small, {datetime.date.today()}", "\n".join(f"- {k}: {v}" for k, v in machine().items())]
    sections = dict(written(path))
    for title, command in BARS:
        if not args.only or command.split()[0] in args.only:
            command = command.format(**values).strip()
            said = command.replace(str(args.data), "FOLDER") if args.data else command
            sections[title] = f"`python -m benchmarks.{said}`\n\n{measured(command, console)}"
            found = [f"## {title}\n\n{sections[title]}" for title, _ in BARS if title in sections]
            path.write_text("\n\n".join([*head, *found]) + "\n")
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
