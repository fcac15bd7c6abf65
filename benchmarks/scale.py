"""Big graphs on one machine: partition, load and train an epoch, with a bound on memory. A dated report.

    python -m benchmarks.scale --edges 1_000_000_000 --nodes 50_000_000 --parts 4 --offload --folder /data/scale

A planted graph (most edges stay within a community) with 16 features is written to files. One process partitions it in
a control group of its own, whose resident memory the kernel bounds, its child KaMinPar and cached files included; that
needs the right to make one (root, or a group that was delegated). Then fresh ranks load it and train one epoch of
GraphSAGE, in another group. With as many parts as ranks, edges and features are read where their files are mapped.
The peak of a process is its VmHWM, with libraries and with mapped pages, which the kernel may drop; anonymous memory
(RssAnon, looked at every few milliseconds) cannot be dropped. The other bars of large and small graphs are
measured by `edge_bytes`, `names`, `inference_peak`, `rank_balance`, `partitioning`, `many_processes`, `overhead` and
`messages`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.nn.models import GraphSAGE

import shardpass as sp
from benchmarks.limited import Peak, status
from benchmarks.machine import REPORTS, machine
from shardpass.data import stream_edge_list

FEATURES, CLASSES, BLOCK = 16, 8, 4_000_000
Record = dict[str, Any]


def make_files(folder: Path, num_nodes: int, num_edges: int, inside: float = 0.85, communities: int = 1000) -> None:
    """Write ``edges.npy`` int32 [2, num_edges], ``x.npy`` float32 and ``y.npy``, block by block."""
    rng = np.random.default_rng(0)
    edges = np.lib.format.open_memmap(folder / "edges.npy", "w+", np.int32, (2, num_edges))
    size = -(-num_nodes // communities)
    for start in range(0, num_edges, BLOCK):
        count = min(BLOCK, num_edges - start)
        dst = rng.integers(0, num_nodes, count)
        near = np.minimum(dst // size * size + rng.integers(0, size, count), num_nodes - 1)
        src = np.where(rng.random(count) < inside, near, rng.integers(0, num_nodes, count))
        edges[0, start : start + count], edges[1, start : start + count] = src, dst
    features = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (num_nodes, FEATURES))
    for start in range(0, num_nodes, BLOCK):
        features[start : start + BLOCK] = rng.random((min(BLOCK, num_nodes - start), FEATURES), dtype=np.float32)
    np.save(folder / "y.npy", rng.integers(0, CLASSES, num_nodes))


def peaks(anonymous: Peak) -> Record:
    """The highest RssAnon of this process since `anonymous` began, and VmHWM, in bytes."""
    return {"anonymous_bytes": anonymous.start + anonymous.bytes, "resident_bytes": status("VmHWM")}


class Group:
    """A control group for processes that together have at most `limit` bytes of resident memory, cached files included.

    Attributes:
        path: its folder, where a process writes its number to join.
        peak: the most anonymous memory that was seen, in bytes.
    """

    def __init__(self, limit: int) -> None:
        root, lines = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text().splitlines()
        is_old = (root / "memory").is_dir()  # version 1
        own = next(line.split(":", 2)[2] for line in lines if (":memory:" if is_old else "0::") in line)
        self.path = root / ("memory" if is_old else "") / own.lstrip("/") / f"shardpass-scale-{os.getpid()}"
        self._field, self.peak = "total_rss" if is_old else "anon", 0
        self.path.mkdir()
        (self.path / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(limit))
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while self.path.is_dir():
            with contextlib.suppress(OSError):
                lines = (self.path / "memory.stat").read_text().splitlines()
                self.peak = max(self.peak, *(int(n) for name, n in map(str.split, lines) if name == self._field))
            time.sleep(0.05)

    def remove(self) -> None:
        """Remove it, once its processes have ended."""
        self.path.rmdir()


def partition_files(folder: Path, num_nodes: int, parts: int, limit: int) -> Record:
    """Partition within `limit` bytes."""
    start = time.monotonic()
    graph = stream_edge_list(
        folder / "edges.npy", features=folder / "x.npy", labels=folder / "y.npy", num_nodes=num_nodes
    )
    manifest = sp.partition(graph, folder / "store", parts, memory_bytes=limit // 5, overwrite=True)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "seconds": time.monotonic() - start, "cpu_seconds": sum(one.ru_utime + one.ru_stime for one in used),
        "store_bytes": sum(file.stat().st_size for file in (folder / "store").iterdir()),
        "cut": sum(manifest.cut_edges.values()) / max(1, sum(manifest.num_edges.values())),
    }  # fmt: skip


def train(folder: Path, offloads: bool) -> None:
    """One rank: load, one epoch; rank 0 prints what all ranks found."""
    comm, peak, start = sp.connect(), Peak(), time.monotonic()
    graph = sp.load(folder / "store", comm)
    loaded, cpu = time.monotonic() - start, time.process_time()
    torch.manual_seed(0)
    model = sp.pyg.wrap(GraphSAGE(FEATURES, 16, 2, CLASSES), comm, checkpoint="activations")
    start = time.monotonic()
    with sp.offload(folder / "scratch") if offloads else contextlib.nullcontext():
        loss = sp.cross_entropy(model(graph.x, graph), graph.y, None, comm)
        loss.backward()
    mine = {
        "nodes": graph.num_own_nodes, "load_seconds": loaded, "epoch_seconds": time.monotonic() - start,
        "epoch_cpu_seconds": time.process_time() - cpu, **peaks(peak),
    }  # fmt: skip
    every = comm.all_gather_object(mine, "figures")
    if comm.rank == 0:
        print(json.dumps(every), flush=True)


def child(limit_gib: float, *arguments: str, ranks: int = 1) -> tuple[Any, int]:
    """The JSON that this module prints in fresh processes, and the most anonymous memory they had, in bytes.

    All of them together have at most `limit_gib` of resident memory.
    """
    start = [sys.executable, "-m", "benchmarks.scale"]
    if ranks > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *start[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}
    group = Group(int(limit_gib * 2**30))
    try:
        command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.path / "cgroup.procs"), *start, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        return json.loads(done.stdout.splitlines()[-1]), group.peak
    finally:
        group.remove()


def gib(num_bytes: float) -> str:
    """In words."""
    return f"{num_bytes / 2**30:.2f} GiB"


def report(args: argparse.Namespace, cut: Record, ranks: list[Record]) -> str:
    """The report in Markdown."""
    num_nodes, num_edges = args.nodes, args.edges
    anonymous, resident = (sum(rank[name] for rank in ranks) for name in ("anonymous_bytes", "resident_bytes"))
    lines = [
        f"# Scale, {datetime.date.today()}", "", f"`{' '.join(['python -m benchmarks.scale', *sys.argv[1:]])}`", "",
        f"{num_nodes:,} nodes, {num_edges:,} directed edges, {FEATURES} features (float32), {args.parts} parts.", "",
        f"- partitioned in {cut['seconds']:.0f} s ({cut['cpu_seconds']:.0f} CPU s) within {args.gib} GiB of resident "
        f"memory, which the kernel enforced: at most {gib(cut['anonymous_bytes'])} of it anonymous, KaMinPar included. "
        f"{cut['cut']:.1%} of the edges are cut.",
        f"- the store has {gib(cut['store_bytes'])}, {cut['store_bytes'] / num_edges:.1f} B per edge with features.",
        f"- {len(ranks)} ranks load it in {max(rank['load_seconds'] for rank in ranks):.0f} s, and train an epoch of "
        f"GraphSAGE in {max(rank['epoch_seconds'] for rank in ranks):.0f} s "
        f"({sum(rank['epoch_cpu_seconds'] for rank in ranks):.0f} CPU s).",
        f"- it ran within {args.train_gib} GiB of resident memory of all ranks, cached files included, which the "
        f"kernel enforced; saved tensors {'on disk' if args.offload else 'in memory'}.",
        f"- peaks of all ranks: {gib(anonymous)} of anonymous memory ({anonymous / num_edges:.1f} B per edge), "
        f"{gib(resident)} resident with mapped files and libraries.",
        "", *(f"- {name}: {value}" for name, value in machine().items()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write, or be a child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=int, default=100_000_000)
    parser.add_argument("--nodes", type=int, default=6_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--offload", action="store_true", help="train with what autograd saves in files")
    parser.add_argument("--gib", type=float, default=8.0, help="resident memory while partitioning")
    parser.add_argument("--train-gib", type=float, default=20.0, help="resident memory of all ranks that train")
    parser.add_argument("--folder", type=Path, help="where the files are kept (default: a temporary one)")
    parser.add_argument("--child", choices=["partition", "train"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "partition":
        print(json.dumps(partition_files(args.folder, args.nodes, args.parts, int(args.gib * 2**30))), flush=True)
    elif args.child == "train":
        train(args.folder, args.offload)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            folder = args.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            make_files(folder, args.nodes, args.edges)
            here = ["--folder", str(folder), "--nodes", str(args.nodes), "--parts", str(args.parts)]
            here += ["--gib", str(args.gib), *(["--offload"] if args.offload else [])]
            cut, cut["anonymous_bytes"] = child(args.gib, "--child", "partition", *here)
            print(json.dumps(cut), flush=True)
            ranks, _ = child(args.train_gib, "--child", "train", *here, ranks=args.ranks)
        text = report(args, cut, ranks)
        (REPORTS / f"scale-{args.edges // 10**6}M-{datetime.date.today()}.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
