"""Runs the parity check of every layer and readout of `dgl.nn` and writes the table docs/dgl-layers.md.

    python -m tests.frontends.dgl_layer_table [--ranks 1 2 3 4]

Takes some minutes. A layer that is not exact ends the run with an error, and no table is written.
"""

from __future__ import annotations

import argparse
import platform
import warnings
from pathlib import Path

import dgl
import torch
from rich.progress import track

import shardpass as sp
from shardpass.frontends.dgl.refusals import REFUSED

from . import test_dgl_hetero as hetero
from . import test_dgl_modules as modules
from .dgl_cases import CONVS, FLOAT32, graph_of
from .dgl_parity import BOUND, caller
from .how_much import largest_error
from .layer_lists import lists_of_layers, rows_by_reason

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dgl-layers.md"
AT_ONCE = ("SAGEConv lstm", "PNAConv", "DGNConv", "AtomicConv")
AS_THEY_ARE = "Computed as they are"
OUT_EDGES = "Sums of weights over out-edges come from all ranks"
CHANGED = {
    **dict.fromkeys(
        ["APPNPConv weighted", "GCN2Conv weighted", "SGConv weighted", "TAGConv weighted", "EdgeWeightNorm both"],
        OUT_EDGES,
    ),
    "LabelPropagation": "In float32, as DGL computes it; the number of classes is that of all ranks",
}
HEAD = """# Layers of DGL, one by one

Every module class of `dgl.nn` is here: exact in the modes `sar`, `keep` and `halo`, or refused by name. The program
`python -m tests.frontends.dgl_layer_table` makes this page. It runs each layer in one process and on {ranks} ranks, in
float64. It compares outputs, buffers, and the gradients of inputs, edge tensors and parameters with those of DGL on the
whole graph. The graph is small and awkward: self-loops, duplicate edges, isolated nodes, ties; an empty part, a rank
without edges.

{versions}. Largest error of all in float64: {largest:.0e}, relative to the largest entry where that is above 1; the
bound is 1e-10.

*at once*: the layer has a reduce function of its own, which sees all messages of a node together. It is exact in every
mode, but the halo rows of that call are fetched together and all its messages are held, whatever the mode; a warning
says how many.

The lists have the layers with their largest errors.

"""


def errors(ranks: list[int]) -> list[tuple[str, str, float]]:
    """``(layer, remark, error)`` of each layer."""
    jobs = [(name, case, graph_of(name)) for name, case in CONVS.items()]
    jobs += [(name, modules.readout_case(name), graph_of(name)) for name in modules.READOUTS]
    found = []
    for name, case, graph in track(jobs, "layers"):
        kind = name.split()[0]
        bound = 1e-5 if kind in FLOAT32 else BOUND
        error = largest_error(
            (case[0], caller(case[1], graph.num_nodes)), graph, sp.dgl.wrap, ranks, 512, relative=True
        )
        if not error <= bound:
            raise SystemExit(f"{name} is not exact: {error:.1e}")
        remark = "at once" if name.startswith(AT_ONCE) else CHANGED.get(name, CHANGED.get(kind, AS_THEY_ARE))
        found.append((name, remark, error))
    for name in track(hetero.CASES, "layers of several types"):
        if isinstance(hetero.CASES[name][0](), dgl.nn.HeteroGraphConv):
            error = largest_error(hetero.CASES[name], hetero.graph_of(name), sp.dgl.wrap, ranks, 512)
            if not error <= BOUND:
                raise SystemExit(f"HeteroGraphConv of {name} is not exact: {error:.1e}")
            name = f"HeteroGraphConv {name}".replace("own aggregate", "with an aggregate function")
            found.append((name, AS_THEY_ARE, error))
    return found


def page(ranks: list[int]) -> str:
    """The page."""
    found = errors(ranks)
    versions = f"DGL {dgl.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    largest = max(error for name, _, error in found if name.split()[0] not in FLOAT32)
    text = HEAD.format(ranks=", ".join(map(str, ranks)), versions=versions, largest=largest)
    text += lists_of_layers(found)
    text += "\n\n## Parts of layers, and layers that take each row alone\n\n| class | |\n|---|---|\n"
    parts = [(name, f"part of {whole}") for name, whole in sorted(modules.PARTS.items())]
    alone = [(name, "each row alone") for name in sorted(modules.ROW_WISE | modules.TYPED - {"HeteroGraphConv"})]
    text += "\n".join(rows_by_reason([*parts, *alone]))
    text += "\n\n## Refused by name\n\n| class | reason |\n|---|---|\n"
    refused = sorted(set(REFUSED) & set(modules.CLASSES))
    return text + "\n".join(rows_by_reason((name, REFUSED[name]) for name in refused)) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    PAGE.write_text(page(parser.parse_args().ranks))
    print(f"wrote {PAGE}")
