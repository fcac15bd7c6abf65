"""A verdict on one GPU in about nine minutes: the tests that need one, then figures beside PyG. A dated report.

    make gpu        # or: python3 -m benchmarks.gpu

It takes whatever Python, torch, triton and PyG are there, and installs nothing. Every step is a process of its own with a
limit of time, so that one that fails or hangs leaves the others their results. Four models make training steps (forward
and backward, float32 and autocast to bfloat16) by shardpass, by PyG as it is and by PyG under `torch.compile`. The bound
of a step is the time in which the card copies the bytes that the messages of its layers must move; see `kernels`.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, SAGEConv, TransformerConv

import shardpass as sp
from benchmarks.graphs import make_graph
from benchmarks.kernels import copy_bandwidth
from benchmarks.report import REPORTS, machine

Record = dict[str, Any]
SYSTEMS = ("shardpass", "eager", "compiled")
GRAPHS, MODELS, DTYPES = ("20k150", "50k30", "mesh"), ("sage", "gat", "gatv2", "transformer"), ("float32", "bfloat16")
HIDDEN, HEADS, STEPS = 128, 4, 5
SHARE = {"tests": 0.4, "kernels": 0.1, "shardpass": 0.15, "eager": 0.15, "compiled": 0.2}
"""Of the time, for each step."""


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


def measure(system: str, device: torch.device, small: bool) -> Iterator[Record]:
    """The steps of one system: milliseconds, and the peak of memory beyond the graph and the model."""
    comm = sp.connect("local", device=device)
    for name in GRAPHS:
        data = graph_data(name, small)
        with tempfile.TemporaryDirectory() as folder:
            sp.partition(data, f"{folder}/store", 1, "range")
            graph: Any = sp.load(f"{folder}/store", comm)
            x = graph.x
        edges = graph if system == "shardpass" else data.edge_index.to(device)
        for kind in MODELS:
            for dtype in DTYPES:
                torch.manual_seed(0)
                model: Any = Two(kind, data.num_features).to(device)
                if system == "shardpass":
                    model = sp.pyg.wrap(model, comm)
                elif system == "compiled":
                    model = torch.compile(model)
                record = {"system": system, "graph": name, "model": kind, "dtype": dtype}
                try:
                    record |= steps(model, x, edges, dtype, device)
                except (RuntimeError, torch.OutOfMemoryError) as error:  # whatever torch or a compiler raises
                    record["problem"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                moved = bytes_moved(kind, data.num_edges, 4 if dtype == "float32" else 2)
                yield {**record, "bytes_moved": moved}


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


def ratio(records: list[Record], graph: str, model: str, system: str, key: str) -> float | None:
    """A system's figure over that of shardpass, in float32."""
    found = {
        r["system"]: r.get(key) for r in records if (r["graph"], r["model"], r["dtype"]) == (graph, model, "float32")
    }
    mine, other = found.get("shardpass"), found.get(system)
    return other / mine if mine and other else None


def bars(records: list[Record], kernels: list[Record], tests: tuple[int, str]) -> list[str]:
    """One line for each bar."""

    def line(what: str, value: float | None, met: bool) -> str:
        if value is None:
            return f"not measured: {what}"
        return f"{'met' if met else 'MISSED'}: {what}: {value:.2f}"

    attention = [r["ratio"] for r in kernels if r["name"].startswith("attention")]
    worst = max(attention, default=None)
    found = [line("attention over its bound, at most 3", worst, (worst or 9) <= 3)]
    for system, least in (("eager", 5.0), ("compiled", 1.5)):
        value = ratio(records, "20k150", "gat", system, "ms")
        found.append(line(f"GAT on 20k150, {system} over shardpass, at least {least:g}", value, (value or 0) >= least))
    value = ratio(records, "20k150", "gat", "eager", "peak_bytes")
    found.append(line("peak of GAT on 20k150, eager over shardpass, at least 20", value, (value or 0) >= 20))
    code, text = tests
    last = next((one for one in reversed(text.splitlines()) if " passed" in one or " failed" in one), "no result")
    return [*found, f"{'met' if code == 0 and ' passed' in last else 'MISSED'}: tests on the GPU: {last.strip('= ')}"]


def table(records: list[Record], bandwidth: float) -> list[str]:
    """The steps in Markdown."""
    rows = [
        "| graph | model | dtype | system | ms | over bound | peak MiB | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        what = f"| {r['graph']} | {r['model']} | {r['dtype']} | {r['system']} |"
        if "problem" in r:
            rows.append(f"{what} {r['problem']} | | | |")
            continue
        bound = 1e3 * r["bytes_moved"] / bandwidth
        rows.append(f"{what} {r['ms']:.2f} | {r['ms'] / bound:.1f} | {r['peak_bytes'] / 2**20:.0f} | {r['loss']:.5f} |")
    return rows


def draw(records: list[Record], path: Path) -> None:
    """Milliseconds of steps in float32, by graph, model and system; nothing without matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axes = pyplot.subplots(1, len(GRAPHS), figsize=(12, 4), sharey=True, squeeze=False)
    for axis, graph in zip(axes[0], GRAPHS):
        for number, system in enumerate(SYSTEMS):
            found = {r["model"]: r.get("ms", 0) for r in records if (r["graph"], r["system"]) == (graph, system)
                     and r["dtype"] == "float32"}  # fmt: skip
            places = np.arange(len(MODELS)) + 0.27 * (number - 1)
            axis.bar(places, [found.get(model, 0) for model in MODELS], 0.25, label=system)
        axis.set(title=graph, yscale="log", xticks=range(len(MODELS)), xticklabels=MODELS)
    axes[0, 0].set_ylabel("milliseconds of a step")
    axes[0, -1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def run(device: torch.device, minutes: float, small: bool, folder: Path) -> list[str]:
    """Run all steps, write the report and return a line for each bar."""
    seconds = {name: 60 * minutes * share for name, share in SHARE.items()}
    tests = child(["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"], seconds["tests"])
    print(tests[1][-3000:], flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        size = ["--nodes", "2000", "--edges", "20000"] if small else []
        name = f"{scratch}/kernels.json"
        said = child(["-m", "benchmarks.kernels", "--device", str(device), "--json", name, *size], seconds["kernels"])
        print(said[1][-5000:], flush=True)
        kernels = json.loads(Path(name).read_text())["kernels"] if Path(name).exists() else []
    records: list[Record] = []
    for system in SYSTEMS:
        options = ["--child", system, "--device", str(device), *(["--small"] if small else [])]
        code, text = child(["-m", "benchmarks.gpu", *options], seconds[system])
        records += [json.loads(one) for one in text.splitlines() if one.startswith('{"system"')]
        print(f"{system}: {sum(r['system'] == system for r in records)} of {len(GRAPHS) * len(MODELS) * len(DTYPES)} "
              f"cases, exit code {code}" + f"\n{text[-2000:]}" * bool(code), flush=True)  # fmt: skip
    large = torch.ones(1 << (20 if small else 28), device=device)
    bandwidth = copy_bandwidth(large, torch.empty_like(large), 5)
    found = bars(records, kernels, tests)
    where = {**machine(), "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "none"}
    stem = folder / f"gpu-{datetime.date.today()}"
    content = {"machine": where, "bandwidth": bandwidth, "bars": found, "kernels": kernels, "steps": records}
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1))
    text = [
        f"# GPU, {datetime.date.today()}",
        "",
        "`python3 -m benchmarks.gpu`",
        "",
        *(f"- {one}" for one in found),
        "",
    ]
    text += [f"- {name}: {value}" for name, value in where.items()] + [f"- copies: {bandwidth / 1e9:.0f} GB/s", ""]
    stem.with_suffix(".md").write_text("\n".join([*text, *table(records, bandwidth)]) + "\n")
    draw(records, stem.with_suffix(".png"))
    return found


def main() -> None:
    """Run all, or be one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--small", action="store_true", help="tiny graphs, to try this program out; also on a CPU")
    parser.add_argument("--folder", type=Path, default=REPORTS, help="where the report is written")
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU of CUDA is here (torch.cuda.is_available() is false): nothing was measured")
    if args.child:
        for record in measure(args.child, args.device, args.small):
            print(json.dumps(record), flush=True)
        return
    print("\n".join(run(args.device, args.minutes, args.small, args.folder)))


if __name__ == "__main__":
    main()
