"""Runs the parity check of every layer and readout of `dgl.nn` and writes the table docs/dgl-layers.md.

    python -m tests.frontends.dgl_layer_table [--ranks 1 2 3 4]

Takes some minutes. A layer that is not exact ends the run with an error, and no table is written.
"""

from __future__ import annotations

import argparse
import platform
import warnings
from collections import defaultdict
from pathlib import Path

import dgl
import torch
from rich.progress import track

import shardpass as sp
from shardpass.frontends.dgl.refusals import REFUSED
from shardpass.testing import WholeGraph, assignments
from shardpass.testing.hetero import evaluate_sharded_hetero, evaluate_whole_hetero, hetero_assignments
from shardpass.testing.parity import Outcome, differences, evaluate_sharded, evaluate_whole

from . import test_dgl_hetero as hetero
from . import test_dgl_modules as modules
from .dgl_cases import CONVS, FLOAT32, graph_of
from .dgl_parity import BOUND, UNCHECKED, Case, caller
from .how_much import MODES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dgl-layers.md"
AT_ONCE = ("SAGEConv lstm", "PNAConv", "DGNConv", "AtomicConv")
CHANGED = {
    "APPNPConv weighted": "sums of weights over out-edges come from all ranks",
    "GCN2Conv weighted": "as APPNPConv",
    "SGConv weighted": "as APPNPConv",
    "TAGConv weighted": "as APPNPConv",
    "EdgeWeightNorm both": "as APPNPConv",
    "LabelPropagation": "in float32, as DGL computes it; the number of classes is that of all ranks",
}
HEAD = """# Layers of DGL, one by one

Every module class of `dgl.nn`: exact in the modes shown, or refused by name. Made by
`python -m tests.frontends.dgl_layer_table`, which runs each layer on a small awkward graph (self-loops, duplicate
edges, isolated nodes, ties; an empty part, a rank without edges) in one process and on {ranks} ranks, in float64, and
compares outputs and the gradients of inputs, edge tensors and parameters, and buffers, with those of DGL on the whole
graph.

{versions}.
Largest error of all in float64: {largest:.0e}, relative to the largest entry where that is above 1; the bound is 1e-10.

*at once*: the layer has a reduce function of its own, which sees all messages of a node together. It is exact in every
mode, but the halo rows of that call are fetched together and all its messages are held, whatever the mode; a warning
says how many.

| layer | modes | largest error | remark |
|---|---|---|---|
"""


def rows(ranks: list[int]) -> tuple[list[str], float]:
    """Table rows, and the largest error of all in float64."""
    jobs = [(name, case, graph_of(name)) for name, case in CONVS.items()]
    jobs += [(name, modules.readout_case(name), graph_of(name)) for name in modules.READOUTS]
    found: dict[str, list[str]] = defaultdict(list)
    top = 0.0
    for name, case, graph in track(jobs, "layers"):
        kind = name.split()[0]
        bound = 1e-5 if kind in FLOAT32 else BOUND
        error = largest_error(case, graph, ranks)
        if not error <= bound:
            raise SystemExit(f"{name} is not exact: {error:.1e}")
        top = top if kind in FLOAT32 else max(top, error)
        remark = "at once" if name.startswith(AT_ONCE) else CHANGED.get(name, CHANGED.get(kind, ""))
        found[kind].append(f"| {name} | {', '.join(MODES)} | {error:.0e} | {remark} |")
    for name in track(hetero.CASES, "layers of several types"):
        if isinstance(hetero.CASES[name][0](), dgl.nn.HeteroGraphConv):
            error = _hetero_error(name, ranks)
            top = max(top, error)
            text = f"HeteroGraphConv of {name}".replace("of own aggregate", "with an aggregate function")
            found["HeteroGraphConv"].append(f"| {text} | {', '.join(MODES)} | {error:.0e} | |")
    return [line for kind in sorted(found) for line in found[kind]], top


def largest_error(case: Case, graph: WholeGraph, ranks: list[int]) -> float:
    """Of a layer on one node type, over all ranks, assignments and modes."""
    make, call = case
    torch.manual_seed(0)
    model, worst, called = make().double(), 0.0, caller(call, graph.num_nodes)
    whole = evaluate_whole(model, graph, called)
    for count in ranks:
        for owners in assignments(graph.num_nodes, count, graph.edge_index).values():
            for mode in MODES:
                options = sp.Options(mode=mode, chunk_bytes=512)
                found = evaluate_sharded(model, graph, called, owners, count, UNCHECKED, options, whole)
                worst = max(worst, *_relative(whole, found).values())
    return worst


def _relative(whole: Outcome, sharded: Outcome) -> dict[str, float]:
    """The largest error of every tensor, relative to its largest entry where that is above 1."""
    sizes = {"output": whole.output}
    for kind in ("inputs", "parameters", "buffers"):
        sizes |= {f"{kind}.{name}": tensor for name, tensor in getattr(whole, kind).items()}
    found = differences(whole, sharded)
    return {n: e / max(1.0, float(sizes[n].abs().max()) if sizes[n].numel() else 1.0) for n, e in found.items()}


def _hetero_error(name: str, ranks: list[int]) -> float:
    make, call = hetero.CASES[name]
    graph = hetero.graph_of(name)
    torch.manual_seed(0)
    model, worst = make().double(), 0.0
    whole = evaluate_whole_hetero(model, graph, call)
    for count in ranks:
        for owners in hetero_assignments(graph, count).values():
            for mode in MODES:
                options = sp.Options(mode=mode, chunk_bytes=512)
                found = evaluate_sharded_hetero(model, graph, call, owners, count, UNCHECKED, options, whole)
                worst = max(worst, *differences(whole, found).values())
    if not worst <= BOUND:
        raise SystemExit(f"HeteroGraphConv of {name} is not exact: {worst:.1e}")
    return worst


def page(ranks: list[int]) -> str:
    """The page."""
    lines, top = rows(ranks)
    versions = f"DGL {dgl.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    text = HEAD.format(ranks=", ".join(map(str, ranks)), versions=versions, largest=top) + "\n".join(lines)
    text += "\n\n## Parts of layers, and layers that take each row alone\n\n| class | |\n|---|---|\n"
    text += "".join(f"| {name} | part of {whole} |\n" for name, whole in sorted(modules.PARTS.items()))
    alone = sorted(modules.ROW_WISE | modules.TYPED - {"HeteroGraphConv"})
    text += "".join(f"| {name} | each row alone |\n" for name in alone)
    text += "\n## Refused by name\n\n| class | reason |\n|---|---|\n"
    return text + "".join(f"| {name} | {REFUSED[name]} |\n" for name in sorted(set(REFUSED) & set(modules.CLASSES)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    PAGE.write_text(page(parser.parse_args().ranks))
    print(f"wrote {PAGE}")
