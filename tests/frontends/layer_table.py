"""Runs the parity check of every layer of PyG and DGL and writes docs/layer-table.md.

    python -m tests.frontends.layer_table

Takes some minutes. A layer that is not exact ends the run with an error, and no table is written.
"""

from __future__ import annotations

import platform
import warnings
from pathlib import Path

import dgl
import torch
import torch_geometric

from . import dgl_layer_table, pyg_layer_table
from .dgl_cases import FLOAT32
from .layer_lists import Layer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "layer-table.md"
TEXT = """# Every layer of PyG and DGL

Every class of `torch_geometric.nn.conv` and every module of `dgl.nn` is here: exact, or refused by name. The program
`python -m tests.frontends.layer_table` makes this page, and a test compares it with the layers.

It runs each layer in one process and on 1, 2, 3 and 4 ranks, in float64, in the modes `sar`, `keep` and `halo`. It
compares outputs, buffers, and the gradients of inputs, edge tensors and parameters. The graph is small and awkward:
self-loops, duplicate edges, isolated nodes, ties; an empty part, a rank without edges. Errors stay below 1e-10, except
for DGL's `LabelPropagation`, which computes in float32.

A layer that is not refused is exact, computed as the second column says:

* **kernel**: fused kernels add its messages, which are source rows, or those times an edge scalar.
* **softmax**: a fused edge softmax takes one pass over the source blocks.
* **traced**: the layer's own functions run on a chunk of edges at a time.
* **at once**: its functions see all messages of a node together, with all halo rows there. With PyG this needs the
  mode `halo`, and `sar` and `keep` refuse it by name. With DGL it runs in every mode, and a warning tells the memory.

Two ways with a comma are steps of one layer. The options in brackets go another way than the rest.

## PyG

PyG {pyg}, torch {torch}, Python {python}. The largest error is {pyg_error:.0e}.

|layer|computed by|
|---|---|
{pyg_rows}

## DGL

DGL {dgl}. The largest error is {dgl_error:.0e}, relative to the largest entry where that is above 1.

|class|computed by|
|---|---|
{dgl_rows}
"""


def _largest(layers: list[Layer]) -> float:
    return max(layer.error for layer in layers if layer.name.split()[0] not in FLOAT32)


def page() -> str:
    """The page."""
    ranks = [1, 2, 3, 4]
    of_pyg, of_dgl = pyg_layer_table.layers(ranks), dgl_layer_table.layers(ranks)
    return TEXT.format(
        pyg=torch_geometric.__version__,
        dgl=dgl.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        pyg_error=_largest(of_pyg),
        dgl_error=_largest(of_dgl),
        pyg_rows="\n".join(pyg_layer_table.rows(of_pyg)),
        dgl_rows="\n".join(dgl_layer_table.rows(of_dgl)),
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
