"""One graph in files, partitioned by 1, 2 and 4 processes: CPU seconds, memory, and whether the files are equal.

    python -m benchmarks.many_processes --edges 20_000_000 --nodes 1_000_000

The bar: the stores have the same files, to the byte.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import tempfile
import time
from pathlib import Path

import torch

import shardpass as sp
from benchmarks.limited import Peak
from benchmarks.scale import gib, make_files
from shardpass.data import stream_edge_list

PARTS = 8


def prepare(comm: sp.Communicator, folder: Path, method: str, memory: str) -> dict[str, float]:
    """What one rank spent on the store ``folder/SIZE``, its imports left out."""
    torch.set_num_threads(1)
    files = stream_edge_list(folder / "edges.npy", features=folder / "x.npy", labels=folder / "y.npy")
    peak, start, cpu = Peak(), time.monotonic(), time.process_time()
    sp.partition(files, folder / str(comm.size), PARTS, method, memory_bytes=memory, overwrite=True, comm=comm)
    child = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": time.monotonic() - start, "cpu": time.process_time() - cpu, "bytes": peak.bytes,
        "kaminpar": child.ru_utime + child.ru_stime,
    }  # fmt: skip


def digests(store: Path) -> dict[str, str]:
    """The SHA-256 of every file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in store.iterdir()}


def measure(folder: Path, sizes: list[int], method: str, memory: str) -> bool:
    """Print the figures for each number of processes; whether all stores are equal."""
    for size in sizes:
        ranks = sp.spawn(prepare, size, "processes", args=(folder, method, memory))
        print(
            f"{size} processes: {ranks[0]['seconds']:.1f} s; CPU s of a rank at most "
            f"{max(rank['cpu'] for rank in ranks):.1f}, of all {sum(rank['cpu'] for rank in ranks):.1f}, and KaMinPar "
            f"{ranks[0]['kaminpar']:.1f}; memory of a rank at most {gib(max(rank['bytes'] for rank in ranks))}",
            flush=True,
        )
    first, *others = (digests(folder / str(size)) for size in sizes)
    equal = all(other == first for other in others)
    print(f"the {len(first)} files are {'equal' if equal else 'NOT equal'}")
    return equal


def main() -> None:
    """Measure; fail unless the stores are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=int, default=5_000_000)
    parser.add_argument("--nodes", type=int, default=500_000)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--method", default="kaminpar")
    parser.add_argument("--memory", default="1GiB")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        make_files(Path(temporary), args.nodes, args.edges)
        if not measure(Path(temporary), args.processes, args.method, args.memory):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
