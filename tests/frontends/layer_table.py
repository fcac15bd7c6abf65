"""Runs the parity check of every layer of `torch_geometric.nn.conv` and writes the table docs/pyg-layers.md.

    python -m tests.frontends.layer_table [--ranks 1 2 3 4]

Takes some minutes. A layer whose largest error is above 1e-10 ends the run with an error, and no table is written.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import torch
import torch_geometric
import torch_geometric.nn.conv as pyg_convs
from rich.progress import track

import shardpass as sp
from shardpass.frontends.pyg.refusals import REFUSED

from . import hetero_cases
from .conv_cases import CONVS, KERNEL, ONE_PASS_SOFTMAX, ONE_SHOT, SORTED
from .how_much import largest_error
from .layer_lists import lists_of_layers, rows_by_reason
from .pyg_cases import GRAPH

BOUND = 1e-10
PAGE = Path(__file__).resolve().parents[2] / "docs" / "pyg-layers.md"
HEAD = """# Layers of PyG, one by one

Every class of `torch_geometric.nn.conv` is here: exact, or refused by name. The program `python -m
tests.frontends.layer_table` makes this page. It runs each layer in one process and on {ranks} ranks, in float64, and
compares outputs and the gradients of inputs, edge tensors and parameters. The graph is small and awkward: self-loops,
duplicate edges, isolated nodes, ties; an empty part, a rank without edges.

{versions}. Largest error of all: {largest:.0e}; the bound is 1e-10.

All run in the modes `sar`, `keep` and `halo`, except for those *at once*. These need whole neighbourhoods: the message
function runs once on all edges of a rank, with all halo rows there. Only `halo` does this; `sar` and `keep` refuse it
by name. *kernel*: messages are source rows, or those times an edge scalar, which fused kernels compute. *softmax*: edge
softmax in one pass over the source blocks. *traced*: the layer's own message function, run on a chunk of edges at a
time.

The lists have the layers with their largest errors, by how they are computed.

"""


def errors(ranks: list[int]) -> list[tuple[str, str, float]]:
    """``(layer, how it is computed, error)`` of each layer."""
    found = []
    jobs = [(n, c, "at once" if n in ONE_SHOT else _path(n)) for n, c in {**CONVS, **ONE_SHOT}.items()]
    jobs += [(name, case, "several types") for name, case in hetero_cases.LAYERS.items()]
    for name, case, path in track(jobs, "layers"):
        if path == "several types":
            error = largest_error(case, hetero_cases.GRAPH, sp.pyg.wrap, ranks, 700)
        elif path == "at once":
            error = largest_error(case, SORTED, sp.pyg.wrap, ranks, 700, ("halo",))
        else:
            error = largest_error(case, GRAPH, sp.pyg.wrap, ranks, 700)
        if not error <= BOUND:
            raise SystemExit(f"{name} is not exact: {error:.1e}")
        found.append((name, path, error))
    return found


def _path(name: str) -> str:
    return "kernel" if name in KERNEL else ("softmax" if name in ONE_PASS_SOFTMAX else "traced")


def page(ranks: list[int]) -> str:
    """The page."""
    found = errors(ranks)
    versions = f"PyG {torch_geometric.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    largest = max(error for _, _, error in found)
    text = HEAD.format(ranks=", ".join(map(str, ranks)), versions=versions, largest=largest)
    classes = [name for name in pyg_convs.__all__ if name != "MessagePassing"]
    text += lists_of_layers(found)
    text += "\n\n## Refused by name\n\n| layer | reason |\n|---|---|\n"
    kinds = {name: [kind.__name__ for kind in getattr(pyg_convs, name).__mro__] for name in classes}
    reasons = {name: next((REFUSED[kind] for kind in kinds[name] if kind in REFUSED), None) for name in classes}
    return text + "\n".join(rows_by_reason((name, why) for name, why in reasons.items() if why)) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    PAGE.write_text(page(parser.parse_args().ranks))
    print(f"wrote {PAGE}")
