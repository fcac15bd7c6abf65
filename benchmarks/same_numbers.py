"""Whether a change of the code changes a number: the losses, gradients, outputs and bytes sent of a fixed set of runs.

    python -m benchmarks.same_numbers --out before.jsonl          # then change the code
    python -m benchmarks.same_numbers --out after.jsonl
    python -m benchmarks.same_numbers --compare before.jsonl after.jsonl

Each run trains a small model for three steps; its numbers are kept to the last bit. They depend on the machine and on
the versions of its packages: make both records in the same place. Where the peak of live tensors (taken in some runs)
has moved, that is told, and is no difference. Only public names are used: it runs before and after a change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dgl.function as fn
import torch
import torch_geometric.nn as gnn
from dgl import nn as dnn
from dgl.nn.functional import edge_softmax
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.utils import softmax

import shardpass as sp
from shardpass.testing.live_bytes import LiveBytes

PARTS, WORLDS, STEPS = 4, (4, 3, 1), 3
FEATURES, HIDDEN, WIDTH, EDGE_FEATURES, CLASSES = 6, 8, 4, 3, 5
RUN, COMPARED = ("backend", "ranks", "model", "mode", "variant"), ("losses", "gradients", "outputs", "bytes_sent")
PEAK_TOLERANCE = 0.03
NODES = {"paper": 300, "author": 120}
TYPES = [("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "by", "author")]
METADATA = (list(NODES), TYPES)
Make = Callable[[int, int], nn.Module]
Line = dict[str, Any]


class Net(nn.Module):
    """Two layers with a ReLU between them, and a linear one. With `dropout` there is BatchNorm too."""

    def __init__(self, make: Make, graph: Any, dropout: float | None = None) -> None:
        super().__init__()
        self.first, self.second, self.head = make(FEATURES, HIDDEN), make(HIDDEN, WIDTH), nn.Linear(WIDTH, CLASSES)
        norm = [] if dropout is None else [nn.BatchNorm1d(HIDDEN), nn.Dropout(dropout)]
        self.between = nn.Sequential(*norm, nn.ReLU())

    def forward(self, x: Tensor, graph: Any, *edge: Tensor) -> Tensor:
        hidden = self.between(self.first(x, graph, *edge).flatten(1))
        return self.head(self.second(hidden, graph, *edge).flatten(1))


class DGLNet(Net):
    """The same, of layers of DGL, which take the graph first; of one type or several."""

    def forward(self, graph: Any, x: Any, *edge: Tensor) -> Tensor:
        hidden = self.first(graph, x, *edge)
        if isinstance(hidden, dict):
            return self.head(self.second(graph, {kind: rows.relu() for kind, rows in hidden.items()})["paper"])
        return self.head(self.second(graph, self.between(hidden.flatten(1)), *edge).flatten(1))


class Hetero(Net):
    """Of layers that take and return rows by type."""

    def forward(self, x_dict: Any, graph: Any) -> Tensor:
        hidden = {kind: rows.relu() for kind, rows in self.first(x_dict, graph).items()}
        return self.head(self.second(hidden, graph)["paper"])


class Pooled(Net):
    """Rows of the whole graph, handed back to its nodes; and a learnable row for each node."""

    def __init__(self, make: Make, graph: Any) -> None:
        super().__init__(make, graph)
        self.rows = sp.NodeEmbedding(graph, FEATURES)

    def forward(self, x: Tensor, graph: Any, batch: Any) -> Tensor:
        hidden = self.first(x + self.rows(), graph).relu()
        pooled = gnn.global_mean_pool(hidden, batch) + gnn.global_max_pool(hidden, batch)
        return self.head(self.second(hidden + pooled[batch], graph))


class Gated(gnn.MessagePassing):
    """A learnable message with a softmax of its own."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(aggr="sum")
        self.gate = nn.Linear(2 * inside + EDGE_FEATURES, 1)
        self.mix = nn.Bilinear(inside, EDGE_FEATURES, outside)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor, index: Tensor, dim_size: int | None) -> Tensor:
        score = self.gate(torch.cat([x_i, x_j, edge_attr], -1))
        return softmax(score, index, num_nodes=dim_size) * self.mix(x_j, edge_attr)


class UserDefined(nn.Module):
    """DGL functions of our own: a score, its softmax, and a message with parameters in it."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.score, self.value = nn.Linear(2 * inside, 1), nn.Linear(inside + EDGE_FEATURES, outside)

    def message(self, edges: Any) -> dict[str, Tensor]:
        return {"m": self.value(torch.cat([edges.src["x"], edges.data["e"]], 1)).tanh() * edges.data["weight"]}

    def forward(self, g: Any, x: Tensor, edge_attr: Tensor) -> Tensor:
        with g.local_scope():
            g.ndata["x"], g.edata["e"] = x, edge_attr
            g.apply_edges(lambda e: {"score": self.score(torch.cat([e.src["x"], e.dst["x"]], 1)).tanh()})
            g.edata["weight"] = edge_softmax(g, g.edata["score"])
            g.update_all(self.message, fn.sum("m", "out"))
            return g.ndata["out"]


def mlp(inside: int, outside: int) -> nn.Module:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(inside, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outside))


ATTR, WEIGHT, ZERO = "edge_attr", "edge_weight", {"allow_zero_in_degree": True}
EDGES, DEGREES = {"edge_dim": EDGE_FEATURES}, torch.tensor([10, 40, 60, 90, 80, 60, 30, 20, 10])
SEVERAL, SCALERS = ["mean", "max", "std", "min"], ["identity", "amplification"]
HALO_ONLY = ("sage_median", "dgl_lstm")
MODELS: dict[str, tuple[Make, str, Callable[[Make, Any], nn.Module]]] = {  # a layer, its edge field, the model
    "gcn": (gnn.GCNConv, WEIGHT, Net),
    "sage": (gnn.SAGEConv, "", Net),
    "sage_median": (lambda i, o: gnn.SAGEConv(i, o, aggr="median"), "", Net),
    "gat": (lambda i, o: gnn.GATConv(i, o // 2, 2), "", Net),
    "gat_edges": (lambda i, o: gnn.GATConv(i, o // 2, 2, **EDGES), ATTR, Net),
    "gatv2": (lambda i, o: gnn.GATv2Conv(i, o // 2, 2), "", Net),
    "transformer": (lambda i, o: gnn.TransformerConv(i, o // 2, 2, **EDGES), ATTR, Net),
    "gin": (lambda i, o: gnn.GINConv(mlp(i, o), train_eps=True), "", Net),
    "pna": (lambda i, o: gnn.PNAConv(i, o, SEVERAL, SCALERS, DEGREES, **EDGES), ATTR, Net),
    "edge": (lambda i, o: gnn.EdgeConv(mlp(2 * i, o)), "", Net),
    "gated": (Gated, ATTR, Net),
    "cheb": (lambda i, o: gnn.ChebConv(i, o, 3), WEIGHT, Net),
    "norm": (gnn.SAGEConv, "", lambda make, graph: Net(make, graph, 0.0)),
    "dropout": (lambda i, o: gnn.GATConv(i, o // 2, 2, dropout=0.3), "", lambda *args: Net(*args, 0.2)),
    "pooled": (gnn.GraphConv, "", Pooled),
    "hetero_hgt": (lambda i, o: gnn.HGTConv(i, o, METADATA, heads=2), "", Hetero),
    "hetero_traced": (lambda i, o: gnn.to_hetero(gnn.GraphSAGE(i, HIDDEN, 1, o), METADATA), "", Hetero),
    "dgl_graphconv": (lambda i, o: dnn.GraphConv(i, o, **ZERO), "", DGLNet),
    "dgl_sage": (lambda i, o: dnn.SAGEConv(i, o, "pool"), "", DGLNet),
    "dgl_lstm": (lambda i, o: dnn.SAGEConv(i, o, "lstm"), "", DGLNet),
    "dgl_gat": (lambda i, o: dnn.GATConv(i, o // 2, 2, **ZERO), "", DGLNet),
    "dgl_gatv2": (lambda i, o: dnn.GATv2Conv(i, o // 2, 2, **ZERO), "", DGLNet),
    "dgl_nnconv": (lambda i, o: dnn.NNConv(i, o, nn.Linear(EDGE_FEATURES, i * o), "mean"), ATTR, DGLNet),
    "dgl_user": (UserDefined, ATTR, DGLNet),
    "dgl_hetero": (lambda i, o: dnn.HeteroGraphConv({t[1]: dnn.SAGEConv(i, o, "mean") for t in TYPES}), "", DGLNet),
}
NO_OPTIONS = ("modes", "dtype", "store", "leaves", "check", "checkpoint")
ALL, BLOCKS, BFLOAT16 = ("sar", "keep", "halo"), ("sar", "keep"), torch.bfloat16
VARIANTS: dict[str, dict[str, Any]] = {  # options, and how a run differs besides
    "": {"modes": ALL},
    "float32": {"modes": ALL, "dtype": torch.float32},
    "leaves": {"modes": ALL, "leaves": True},
    "pieces": {"block_rows": 40, "chunk_bytes": 1 << 15, "prefetch": 2, "leaves": True, "modes": BLOCKS},
    "push": {"backward": "push", "prefetch": 0, "modes": BLOCKS},
    "pull": {"backward": "pull", "modes": ("sar", "halo")},
    "messages": {"share_memory": False, "modes": ALL},
    "bfloat16": {"wire_dtype": BFLOAT16, "modes": ALL, "dtype": torch.float32},
    "stream": {"stream_structure": True, "modes": BLOCKS},
    "unfused": {"fuse_attention": False, "cache_constant_inputs": False, "modes": BLOCKS},
    "empty part": {"modes": BLOCKS, "store": "empty"},
    "activations": {"modes": BLOCKS, "checkpoint": "activations"},
    "checked": {"modes": ("sar",), "check": True},
}
IN_THREADS = {  # the variants of a model; the others have the first alone
    "sage": ["", "float32", "leaves", "pieces", "push", "pull", "bfloat16", "stream", "unfused", "empty part"],
    "gat": [name for name in VARIANTS if name != "messages"],
    "transformer": ["", "pieces", "push", "stream", "unfused", "empty part"],
    "pna": ["", "leaves", "empty part"],
    "norm": ["", "float32", "activations"],
    "dgl_gat": ["", "leaves", "pieces", "push", "unfused", "bfloat16", "checked"],
    "dgl_user": ["", "leaves"],
}
IN_PROCESSES = {
    **{name: [""] for name in ("gcn", "pna", "hetero_hgt", "dgl_gatv2", "dgl_user")},
    "gat": ["", "float32", "messages", "bfloat16"],
    "dropout": ["", "activations"],
}


def runs_on(backend: str, ranks: int) -> Iterator[tuple[str, str, str]]:
    """Model, mode and variant of each run. Ranks that are threads share one random generator, and have no dropout."""
    threads = backend == "threads"
    for name in MODELS if threads else IN_PROCESSES:
        for what in (IN_THREADS if threads else IN_PROCESSES).get(name, [""]):
            if threads and ranks > 1 and (name == "dropout" or (ranks == 4 and what not in ("", "empty part"))):
                continue
            for mode in ("halo",) if name in HALO_ONLY else VARIANTS[what]["modes"]:
                yield name, mode, what


def train(comm: sp.Communicator, name: str, mode: str, what: str, folder: str, measured: bool) -> Line:
    """What one run gave, the same on every rank; its peak if it is `measured`. Collective."""
    (make, edge, net), variant = MODELS[name], VARIANTS[what]
    options = {key: variant[key] for key in variant if key not in NO_OPTIONS}
    hetero, package = "hetero" in name, sp.dgl if name.startswith("dgl") else sp.pyg
    dtype, store = variant.get("dtype", torch.float64), "hetero" if hetero else variant.get("store", "graph")
    graph: Any = sp.load(Path(folder, store), comm, sp.Options(**{"mode": mode, **options}))
    with sp.seed(0, comm):
        model = net(make, graph).to(dtype)
    comm.barrier()  # torch.fx patches the whole process while it traces
    package.wrap(model, comm, check=variant.get("check", False), checkpoint=variant.get("checkpoint"))
    labelled = graph["paper"] if hetero else graph
    fields = graph.x_dict if hetero else {"x": graph.x, ATTR: graph.edge[ATTR], WEIGHT: graph.edge[WEIGHT]}
    inputs = {key: t.to(dtype, copy=True).requires_grad_("leaves" in variant) for key, t in fields.items()}
    x = inputs if hetero else inputs["x"]
    args = [*((graph, x) if package is sp.dgl else (x, graph)), *([inputs[edge]] if edge else [])]
    args += [graph.batch] if net is Pooled else []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> str:
        optimizer.zero_grad()
        loss = sp.cross_entropy(model(*args), labelled.y, labelled.train_mask, comm)
        loss.backward()
        optimizer.step()
        return float(loss.detach()).hex()

    before = comm.bytes_sent
    losses = [step() for _ in range(STEPS)]
    gradients = digest({key: p.grad for key, p in [*model.named_parameters(), *inputs.items()]})
    model.eval()
    with torch.no_grad():
        outputs = digest({"": model(*args)})
    mine = {"gradients": gradients, "outputs": outputs, "bytes_sent": comm.bytes_sent - before}
    model.train()
    with LiveBytes() as live:  # which takes as long as all before
        if measured:
            step()
    ranks = comm.all_gather_object({**mine, "peak": live.peak}, "figures")
    found = {key: hashlib.sha256("".join(r[key] for r in ranks).encode()).hexdigest()[:16] for key in COMPARED[1:3]}
    return {"losses": losses, **found, "bytes_sent": sum(r["bytes_sent"] for r in ranks),
            "peak": max(r["peak"] for r in ranks)}  # fmt: skip


def digest(tensors: dict[str, Tensor | None]) -> str:
    """Of names, dtypes, shapes and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {None if tensor is None else (tensor.dtype, tuple(tensor.shape))}".encode())
        found.update(b"" if tensor is None else tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def run_all(comm: sp.Communicator, backend: str, folder: str) -> None:
    """All runs of a backend on this number of ranks; rank 0 writes their lines. Collective."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = []
    for run in runs_on(backend, comm.size):
        if comm.rank == 0:
            print(backend, comm.size, *run, file=sys.stderr)
        # the peaks of several threads depend on which of them is ahead
        measured = comm.size == (1 if backend == "threads" else 4) and run[0] in IN_THREADS and not run[2]
        lines.append({**dict(zip(RUN, (backend, comm.size, *run))), **train(comm, *run, folder, measured)})
    if comm.rank == 0:
        write(Path(folder, f"{backend}-{comm.size}"), lines)


def write(path: Path, lines: list[Line]) -> None:
    """As JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read(path: Path) -> list[Line]:
    """What `write` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make_stores(folder: Path) -> None:
    """Partition the fixed graphs: loops, duplicates, hubs, isolated nodes, ties; parts of several sizes."""
    generator = torch.Generator().manual_seed(0)

    def ends(src: int, dst: int, count: int) -> Tensor:
        edges = torch.rand(2, count, generator=generator)
        edges = (edges**1.5 * torch.tensor([[src - 8], [dst - 8]])).long()  # the last eight are isolated
        edges[:, :12] = torch.arange(12)
        edges[:, 12:40] = edges[:, 40:68]
        return edges

    def nodes(count: int) -> dict[str, Tensor]:
        x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
        x[: count // 3] = x[: count // 3].round()
        y = torch.randint(CLASSES, (count,), generator=generator)
        return {"x": x, "y": y, "train_mask": torch.rand(count, generator=generator) < 0.6}

    def parts(count: int, *weights: float) -> Tensor:
        return torch.multinomial(torch.tensor(weights), count, replacement=True, generator=generator)

    attr = torch.randn(3000, EDGE_FEATURES, generator=generator, dtype=torch.float64)
    graph = {"edge_index": ends(400, 400, 3000), **nodes(400), ATTR: attr, WEIGHT: attr[:, 0].abs() + 0.1}
    sp.partition(graph, folder / "graph", PARTS, assignment=parts(400, 0.4, 0.3, 0.2, 0.1))
    sp.partition(graph, folder / "empty", PARTS, assignment=parts(400, 0.5, 0.0, 0.4, 0.1))
    data = HeteroData({kind: nodes(count) for kind, count in NODES.items()})
    for kind in TYPES:
        data[kind].edge_index = ends(NODES[kind[0]], NODES[kind[2]], 900)
    assignment = {kind: parts(count, 0.4, 0.3, 0.2, 0.1) for kind, count in NODES.items()}
    sp.partition(data, folder / "hetero", PARTS, assignment=assignment)


def record(backend: str, ranks: int, folder: str) -> list[Line]:
    """The lines of one backend and number of ranks, run in processes of their own; none if that failed."""
    command = [sys.executable, "-m", "benchmarks.same_numbers", "--worker", backend, str(ranks), folder]
    if backend == "mpi":
        program = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
        command = [program, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks), *command]
    env, start = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}, time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    wrong = f"exit code {done.returncode}\n{done.stderr[-6000:]}" if done.returncode else ""
    print(f"{backend}, {ranks} ranks: {time.perf_counter() - start:.0f} s {wrong}", flush=True)
    return [] if wrong else read(Path(folder, f"{backend}-{ranks}"))


def compare(first: Path, second: Path) -> int:
    """The number of runs that differ. Prints them, and peaks that have moved."""
    a, b = ({tuple(line[key] for key in RUN): line for line in read(path)} for path in (first, second))
    different = 0
    for run in a | b:
        if run not in a or run not in b:
            wrong = [f"only in {first if run in a else second}"]
        else:
            wrong = [f"{key} {a[run][key]} {b[run][key]}" for key in COMPARED if a[run][key] != b[run][key]]
            before, after = a[run]["peak"], b[run]["peak"]
            if abs(after - before) > PEAK_TOLERANCE * before:
                print(*run, f"peak {before} {after}, which is no difference", sep="; ")
        if wrong:
            different += 1
            print(*run, *wrong, sep="; ")
    print(f"{different} of {len(a | b)} runs differ")
    return different


def main() -> None:
    """Record, or compare two records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record here")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FILE", help="exit with 1 where two records differ")
    parser.add_argument("--backends", nargs="+", default=["threads", "processes", "mpi"], help="default: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=WORLDS, help="default: 4, 3 and 1")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        backend, ranks, folder = args.worker
        if backend == "mpi":
            run_all(sp.connect("mpi"), backend, folder)
        else:
            sp.spawn(run_all, int(ranks), backend, args=(backend, folder))
        return
    if args.compare:
        raise SystemExit(int(compare(*args.compare) > 0))
    if args.out is None or find_spec("numba") is None:
        parser.error("--out FILE or --compare A B; and numba must be installed, so that its loops are compared")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        make_stores(Path(folder))
        kinds = [(backend, ranks) for backend in args.backends for ranks in args.ranks]
        found = list(pool.map(lambda kind: record(*kind, folder), kinds))
    write(args.out, [line for lines in found for line in lines])
    if not all(found):
        raise SystemExit(f"{args.out} has no lines of {[kind for kind, lines in zip(kinds, found) if not lines]}")


if __name__ == "__main__":
    from benchmarks.same_numbers import main as run_main  # processes find functions by the name of their module

    run_main()
