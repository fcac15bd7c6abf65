"""How evenly parts of the default method load the ranks: planned bytes, and the measured peaks of training.

    python -m benchmarks.rank_balance --graph powerlaw:60000:20

Bars: the heaviest part has at most 1.05 times the mean of the planned bytes (fields, in-edges and structure, as
`shardpass.partition` weighs nodes), and the largest rank peaks at most 1.15 times the mean of the ranks.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.graphs import KINDS
from benchmarks.run import MIB, Bench
from shardpass.data import EDGE, NODE, inspect
from shardpass.data.streaming.adjacency import EDGE_BYTES, NODE_BYTES

WEIGHT_BAR, PEAK_BAR = 1.05, 1.15


def spread(values: list[float]) -> float:
    """The largest over the mean."""
    return max(values) * len(values) / sum(values)


def measure(graph: str, model: str, ranks: int, bench: Bench) -> bool:
    """Print both figures beside their bars; whether they are kept."""
    _, store = bench.files(graph, ranks)
    report = inspect(store, ranks)
    fields = report.manifest.node_fields[NODE].values()
    of_node = NODE_BYTES + sum(info.dtype.itemsize * (info.shape[0] if info.shape else 1) for info in fields)
    planned = [float(group.nodes[NODE] * of_node + group.edges[EDGE] * EDGE_BYTES) for group in report.groups]
    config = {"graph": graph, "model": model, "mode": "sar", "ranks": ranks, "share_memory": False, "hidden": None}
    config |= {"frontend": "pyg", "epochs": 2, "backend": "processes", "peer": None, "backward": "auto"}
    found = bench.measure(config, ranks, ("memory",))["ranks"]
    peaks = [float(rank["peak_bytes"] + rank["loaded_bytes"]) for rank in found]
    kept = spread(planned) <= WEIGHT_BAR and spread(peaks) <= PEAK_BAR
    print(
        f"{graph}, {model} on {ranks} ranks, cut {report.num_cut_edges / sum(report.manifest.num_edges.values()):.1%}:"
    )
    print(f"  planned bytes: largest {spread(planned):.3f} of the mean, bar {WEIGHT_BAR}")
    print(f"  measured peaks: {', '.join(f'{peak / MIB:.0f}' for peak in peaks)} MiB,", end=" ")
    print(f"largest {spread(peaks):.3f} of the mean, bar {PEAK_BAR}: {'kept' if kept else 'NOT kept'}", flush=True)
    return kept


def main() -> None:
    """Measure and print; exit code 1 if a bar is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", nargs="+", default=["powerlaw:60000:20", "50k30"], help=KINDS)
    parser.add_argument("--model", default="sage")
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), "kaminpar")
        kept = [measure(graph, args.model, args.ranks, bench) for graph in args.graph]
    raise SystemExit(not all(kept))


if __name__ == "__main__":
    main()
