"""Strings as node ids, from tables to a store and back to a table with these ids: memory and time.

    python -m benchmarks.names --nodes 10_000_000

Tables of nodes and of edges (two per node) with strings of 24 characters as ids are made first. Then a process of its
own partitions them, writes a table with a number for each node from the store, as `infer` and `gather` do, and compares
the ids in it with those of the table of nodes. "peak" is the largest resident set of that process (VmHWM), with Python,
torch and pyarrow, of which "imports" tells how much was there before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.meter import resident

_BLOCK = 1 << 20


def write_tables(folder: Path, num_nodes: int, num_edges: int) -> None:
    """`nodes.parquet` (id, a, b, label) and `edges.parquet` (src, dst) in a folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    numbers = np.arange(num_nodes) * 0x9E3779B1 % 2**40  # an odd factor: no two are alike
    names = pa.array([f"user-{number:010x}@home.net" for number in numbers.tolist()])
    kinds = [("id", pa.string()), ("a", pa.float32()), ("b", pa.float32()), ("label", pa.int8())]
    with pq.ParquetWriter(folder / "nodes.parquet", pa.schema(kinds)) as writer:
        for start in range(0, num_nodes, _BLOCK):
            part = names[start : start + _BLOCK]
            features = rng.standard_normal((2, len(part)), dtype=np.float32)
            columns = [part, *features, rng.integers(0, 5, len(part), dtype=np.int8)]
            writer.write_table(pa.table(columns, schema=pa.schema(kinds)))
    kinds = [("src", pa.string()), ("dst", pa.string())]
    with pq.ParquetWriter(folder / "edges.parquet", pa.schema(kinds)) as writer:
        for start in range(0, num_edges, _BLOCK):
            ends = rng.integers(0, num_nodes, (2, min(_BLOCK, num_edges - start)))
            writer.write_table(pa.table([names.take(pa.array(end)) for end in ends], schema=pa.schema(kinds)))


def round_trip(folder: Path) -> dict[str, Any]:
    """What it took to partition the tables in a folder and to write a table with their ids again, in this process."""
    import pyarrow.parquet as pq
    import torch

    import shardpass as sp
    from shardpass.data.lookup import StoreTables

    torch.set_num_threads(1)
    imports, started = resident("VmHWM"), time.perf_counter()
    tables = sp.data.stream_tables(folder / "edges.parquet", folder / "nodes.parquet")
    sp.partition(tables, folder / "store", 2, "random")
    partitioned, peak_partitioned = time.perf_counter() - started, resident("VmHWM")
    np.save(folder / "rows.npy", np.arange(pq.ParquetFile(folder / "nodes.parquet").metadata.num_rows))
    writer = StoreTables(sp.data.open_store(folder / "store"))
    writer.write(folder / "out.parquet", np.load(folder / "rows.npy", mmap_mode="r"))
    seconds, peak = time.perf_counter() - started, resident("VmHWM")
    found, nodes = pq.read_table(folder / "out.parquet"), pq.read_table(folder / "nodes.parquet", columns=["id"])
    assert found["id"].equals(nodes["id"]) and np.array_equal(found["output"], np.arange(len(found)))
    size = (folder / "store" / "names.safetensors").stat().st_size
    return {
        "nodes": len(found), "imports": imports, "peak_partition": peak_partitioned, "peak": peak,
        "seconds_partition": partitioned, "seconds": seconds, "bytes_of_names": size,
    }  # fmt: skip


def measure(num_nodes: int, num_edges: int) -> dict[str, Any]:
    """`round_trip` in a process of its own, with tables of this size."""
    with tempfile.TemporaryDirectory() as folder:
        write_tables(Path(folder), num_nodes, num_edges)
        command = [sys.executable, "-m", "benchmarks.names", "--folder", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="of tables that are there already")
    arguments = parser.parse_args()
    of_folder = arguments.folder is not None
    print(json.dumps(round_trip(arguments.folder) if of_folder else measure(arguments.nodes, 2 * arguments.nodes)))
