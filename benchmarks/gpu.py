"""A verdict on one GPU in about nine minutes: figures beside PyG, and the tests that need one. A dated report.

    make gpu                                 # or: python3 -m benchmarks.gpu
    python3 -m benchmarks.gpu --tiles        # instead, some minutes: other tiles of each kernel, to set `tile_of` from

It takes whatever Python, torch, triton and PyG are there, and installs nothing. Every step is a process of its own with
a limit of time, and is begun again after a case that ended it, so that whatever fails or hangs leaves the others their
results; the report is written anew after each. Four models make training steps (forward and backward, float32 and
autocast to bfloat16) by shardpass, by PyG as it is and by PyG under `torch.compile`. The bound of a step is the time in
which the card copies the bytes that its messages must move; see `kernels`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, SAGEConv, TransformerConv

import shardpass as sp
from benchmarks import kernels as single
from benchmarks.gpu_report import DTYPES, GRAPHS, MODELS, RUNS, SHORTAGE, SYSTEMS, Record, draw, save
from benchmarks.graphs import make_graph
from benchmarks.machine import REPORTS

CASES = tuple(product(GRAPHS, DTYPES, MODELS))  # the bars first
HIDDEN, HEADS, STEPS = 128, 4, 5
SHARE = {"kernels": 0.15, "shardpass": 0.2, "eager": 0.2, "bits": 0.1, "cap": 0.15, "tests": 0.5, "compiled": 0.95}
"""Of the time that is left, for each step in turn."""
TESTS = ("tests/frontends/test_device.py", "tests/core/kernels/test_triton_matrix.py")
TILES = ((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 4))  # edges and warps


class Two(nn.Module):
    """Two layers of a kind."""

    def __init__(self, kind: str, num_features: int) -> None:
        super().__init__()
        width = HIDDEN // HEADS
        make: Any = {
            "sage": lambda given: SAGEConv(given, HIDDEN),
            "gat": lambda given: GATConv(given, width, HEADS),
            "gatv2": lambda given: GATv2Conv(given, width, HEADS, share_weights=True),
            "transformer": lambda given: TransformerConv(given, width, HEADS),
        }[kind]
        self.first, self.second = make(num_features), make(HIDDEN)

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        """The rows of the second layer, ``[num_nodes, HIDDEN]``."""
        return self.second(torch.relu(self.first(x, edges)), edges)


def graph_data(name: str, small: bool) -> Data:
    """A graph of the benchmarks, or a mesh: a torus on which each node has eight neighbours and a long edge or two."""
    if name != "mesh":
        arrays = make_graph("dense:500:20" if small else name)
        return Data(x=torch.as_tensor(arrays["x"]), edge_index=torch.as_tensor(arrays["edge_index"]).long())
    side = 20 if small else 200
    at = np.arange(side * side)
    steps = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if (a, b) != (0, 0)]
    dst = [(at // side + a) % side * side + (at % side + b) % side for a, b in steps]
    far = np.random.default_rng(0).integers(0, side * side, (2, side * side // 4))
    edges = np.concatenate([np.stack([np.tile(at, 8), np.concatenate(dst)]), far], 1)
    return Data(x=torch.rand(side * side, 128), edge_index=torch.as_tensor(edges))


def bytes_moved(kind: str, num_edges: int, itemsize: int) -> int:
    """What the messages of two layers must move, forward and backward, in bytes: as `kernels` counts it."""
    row, heads = num_edges * itemsize * HIDDEN, num_edges * itemsize * HEADS
    rows, numbers = {"sage": (2, 0), "gat": (2, 6), "gatv2": (5, 0), "transformer": (6, 0)}[kind]
    return 2 * (rows * row + numbers * heads)


def on_one_rank(data: Data, device: torch.device) -> tuple[Any, Any]:
    """The graph as one rank of shardpass, and its communicator."""
    comm = sp.connect("local", device=device)
    with tempfile.TemporaryDirectory() as folder:
        sp.partition(data, f"{folder}/store", 1, "range")
        return sp.load(f"{folder}/store", comm), comm


def measure(system: str, device: torch.device, small: bool, first: int) -> Iterator[Record]:
    """The steps of one system from a case on: milliseconds, and the peak of memory beyond the graph and the model."""
    loaded = ""
    for name, dtype, kind in CASES[first:]:
        record: Record = {"system": system, "graph": name, "model": kind, "dtype": dtype}
        try:
            if loaded != name:
                data, loaded = graph_data(name, small), name
                graph, comm = on_one_rank(data, device)
                edges = graph if system == "shardpass" else data.edge_index.to(device)
            record["bytes_moved"] = bytes_moved(kind, data.num_edges, 4 if dtype == "float32" else 2)
            torch.manual_seed(0)
            model: Any = Two(kind, data.num_features).to(device)
            if system == "shardpass":
                model = sp.pyg.wrap(model, comm)
            elif system == "compiled":
                torch.compiler.reset()  # else too many models of one class are not compiled any more
                model = torch.compile(model)
            record |= steps(model, graph.x if system == "shardpass" else data.x.to(device), edges, dtype, device)
        except Exception as error:  # whatever torch or a compiler raises
            record["problem"] = single.what_failed(error)
        yield record
        if "problem" in record and is_lost(device):
            return  # `collected` begins a new process


def is_lost(device: torch.device) -> bool:
    """Whether a kernel of this process has failed such that every later call of the GPU fails like it."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def same_bits(device: torch.device, small: bool) -> Iterator[Record]:
    """How many of many steps of GAT give other bits than the first, in outputs or gradients."""
    data = graph_data("20k150", small)
    graph, comm = on_one_rank(data, device)
    model: Any = sp.pyg.wrap(Two("gat", data.num_features).to(device), comm)
    first: list[Tensor] = []
    for run in range(1 + (3 if small else RUNS)):
        model.zero_grad()
        out = model(graph.x, graph)
        out.square().mean().backward()
        found = [out.detach(), *(parameter.grad for parameter in model.parameters())]
        first = first or found
        if not all(map(torch.equal, first, found)):
            yield {"system": "bits", "differs": run}
    yield {"system": "bits", "runs": run}


def within_a_cap(device: torch.device, small: bool) -> Iterator[Record]:
    """Whether a step fits into a third of the memory that PyG needs for it, where PyG's own does not."""
    if device.type != "cuda":
        raise RuntimeError("a cap of memory needs a GPU")
    data = graph_data("20k150", small)
    graph, comm = on_one_rank(data, device)
    plain, x, edges = Two("gat", data.num_features).to(device), data.x.to(device), data.edge_index.to(device)
    torch.cuda.reset_peak_memory_stats()
    plain(x, edges).square().mean().backward()
    needed = torch.cuda.max_memory_allocated()
    plain.zero_grad()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(needed / SHORTAGE / total)
    record: Record = {"system": "cap", "needed": needed, "pyg_fits": True, "fits": False}
    try:
        plain(x, edges).square().mean().backward()
    except torch.OutOfMemoryError:
        record["pyg_fits"] = False
    plain.zero_grad()
    torch.cuda.empty_cache()
    del x, edges
    model: Any = sp.pyg.wrap(plain, comm)
    try:
        model(graph.x, graph).square().mean().backward()
        record["fits"] = True
    except torch.OutOfMemoryError:
        pass
    yield record


def tiles(device: torch.device, small: bool) -> Iterator[str]:
    """Milliseconds of each kernel with the tile that `tile_of` chooses, and with others: a table in Markdown."""
    from shardpass.core.kernels import triton_attention, triton_sums

    chosen = triton_sums.tile_of
    others = [f"{edges} edges, {warps} warps" for edges, warps in TILES]
    for heads, width in ((4, 32), (1, 128)):
        case = single.Case(*((6, 20) if small else (50_000, 1_500_000)), heads, width, torch.float32, device)
        yield "".join(f"| {cell} " for cell in (f"{heads} heads of {width}", f"chosen: {chosen(width)}", *others)) + "|"
        yield "|---" * (2 + len(TILES)) + "|"
        for name, (work, _) in case.kernels().items():
            cells = [name]
            for tile in (None, *TILES):

                def tile_of(width: int, tile: Any = tile) -> tuple[int, int, int]:
                    return chosen(width) if tile is None else (tile[0], chosen(width)[1], tile[1])

                with (
                    mock.patch.object(triton_sums, "tile_of", tile_of),
                    mock.patch.object(triton_attention, "tile_of", tile_of),
                ):
                    try:
                        cells.append(f"{1e3 * single.seconds(work, 1 if small else 5, device):.3f}")
                    except Exception as error:  # a tile that the card cannot hold, say
                        cells.append(single.what_failed(error))
            yield "".join(f"| {cell} " for cell in cells) + "|"


def steps(model: Any, x: Tensor, edges: Any, dtype: str, device: torch.device) -> Record:
    """Milliseconds of a step, the median of some after two, its peak in bytes and the loss."""
    on_gpu, taken = device.type == "cuda", []
    for number in range(2 + STEPS):
        if on_gpu:
            torch.cuda.synchronize()
        if number == 2 and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated() if on_gpu else 0
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(x, edges).float().square().mean()
        loss.backward()
        if on_gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
        for parameter in model.parameters():
            parameter.grad = None
    peak = torch.cuda.max_memory_allocated() - base if on_gpu else 0
    return {"ms": 1e3 * sorted(taken[2:])[STEPS // 2], "peak_bytes": peak, "loss": float(loss.detach())}


def child(arguments: list[str], limit: float) -> tuple[int, str]:
    """The exit code and the output of a process, or what it had said when its time was over."""
    root = str(REPORTS.parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryFile("w+") as said:
        try:
            done = subprocess.run(
                [sys.executable, *arguments], stdout=said, stderr=subprocess.STDOUT, cwd=root, env=environment,
                timeout=limit, check=False,
            )  # fmt: skip
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = 124
        said.seek(0)
        return code, said.read()


def collected(step: str, count: int, options: list[str], until: float) -> list[Record]:
    """The records of a step, as many as `count`, begun again at the case that ended the process, then after it."""
    found: list[Record] = []
    while len(found) < count and until - time.monotonic() > 5:
        given = ["-m", "benchmarks.gpu", "--child", step, "--first", str(len(found)), *options]
        code, text = child(given, until - time.monotonic())
        new = [json.loads(one) for one in text.splitlines() if one.startswith('{"system"')]
        found += new
        if code == 124:
            break
        if code and not new:
            last = next((one for one in reversed(text.splitlines()) if one.strip()), "")
            graph, dtype, model = CASES[len(found)]
            why = f"the process ended with {code}: {last[:200]}"
            found.append({"system": step, "graph": graph, "model": model, "dtype": dtype, "problem": why})
    failed = sum("problem" in one for one in found)
    print(f"{step}: {len(found)} of {count} records, {failed} with a problem", flush=True)
    return found


def run(device: torch.device, minutes: float, small: bool, folder: Path) -> None:
    """Run all steps, write the report after each and print a line for each bar."""
    end = time.monotonic() + 60 * minutes
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--device", str(device), *(["--small"] if small else [])]
    kernels: list[Record] = []
    records: list[Record] = []
    tests, found = (1, "not run"), [""]
    for step, share in SHARE.items():
        limit = share * (end - time.monotonic())
        if step == "kernels":
            with tempfile.TemporaryDirectory() as scratch:
                size = ["--nodes", "2000", "--edges", "20000"] if small else []
                name = Path(scratch) / "kernels.json"
                said = child(["-m", "benchmarks.kernels", *options[:2], "--json", str(name), *size], limit)
                print(said[1][-5000:], flush=True)
                kernels = json.loads(name.read_text())["kernels"] if name.exists() else []
        elif step == "tests":
            given = ["-v", "--tb=short", "-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=", *TESTS]
            tests = child(["-m", "pytest", *given], limit)
            print(tests[1][-3000:], flush=True)
        else:
            records += collected(step, len(CASES) if step in SYSTEMS else 1, options, time.monotonic() + limit)
        found = save(folder, device, kernels, records, tests)
    print("\n".join(found), flush=True)
    draw([r for r in records if "graph" in r], folder / f"gpu-{datetime.date.today()}.png")


def main() -> None:
    """Run all, or be one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--small", action="store_true", help="tiny graphs, to try this program out; also on a CPU")
    parser.add_argument("--folder", type=Path, default=REPORTS, help="where the report is written")
    parser.add_argument("--tiles", action="store_true", help="print the milliseconds of each kernel with other tiles")
    parser.add_argument("--child", choices=(*SYSTEMS, "bits", "cap"), help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU of CUDA is here (torch.cuda.is_available() is false): nothing was measured")
    if args.tiles:
        for row in tiles(args.device, args.small):
            print(row, flush=True)
        return
    if args.child:
        other = {"bits": same_bits, "cap": within_a_cap}.get(args.child)
        found = other(args.device, args.small) if other else measure(args.child, args.device, args.small, args.first)
        for record in found:
            print(json.dumps(record), flush=True)
        return
    run(args.device, args.minutes, args.small, args.folder)


if __name__ == "__main__":
    main()
