"""The rows of docs/layer-table.md for `dgl.nn`."""

from __future__ import annotations

import dgl
import torch
from rich.progress import track

import shardpass as sp
from shardpass.frontends.dgl.refusals import REFUSED

from . import test_dgl_hetero as hetero
from . import test_dgl_modules as modules
from .dgl_cases import CONVS, FLOAT32, graph_of
from .dgl_parity import BOUND, caller
from .how_much import MODES
from .layer_lists import Layer, measured, rows_by_reason, rows_of_layers

OF_OTHERS = {
    **dict.fromkeys(("GroupRevRes", "HeteroGraphConv", "Sequential"), "its layers"),
    **dict.fromkeys(("EdgePredictor", "TransE", "TransR"), "each edge alone"),
    **dict.fromkeys(("JumpingKnowledge", *modules.ROW_WISE, *(modules.TYPED - {"HeteroGraphConv"})), "each row alone"),
    **dict.fromkeys((name.split()[0] for name in modules.READOUTS), "a readout over all ranks"),
    **{name: f"part of {whole}" for name, whole in modules.PARTS.items()},
}


def layers(ranks: list[int], modes: tuple[str, ...] = MODES) -> list[Layer]:
    """Every exact layer and readout, as measured. One that is not exact ends the run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # DGL makes some tensors in the default dtype
    try:
        return [*_layers(ranks, modes), *_of_several_types(ranks, modes)]
    finally:
        torch.set_default_dtype(before)


def _layers(ranks: list[int], modes: tuple[str, ...]) -> list[Layer]:
    jobs = [(name, case, graph_of(name)) for name, case in CONVS.items()]
    jobs += [(name, modules.readout_case(name), graph_of(name)) for name in modules.READOUTS]
    found = []
    for name, (make, call), graph in track(jobs, "layers of DGL"):
        case = make, caller(call, graph.num_nodes)
        layer = measured(name, case, graph, sp.dgl.wrap, ranks, 512, modes, relative=True)
        _require(layer, 1e-5 if name.split()[0] in FLOAT32 else BOUND)
        found.append(layer)
    return found


def _of_several_types(ranks: list[int], modes: tuple[str, ...]) -> list[Layer]:
    found = []
    for name, case in track(hetero.CASES.items(), "layers of several types"):
        if isinstance(case[0](), dgl.nn.HeteroGraphConv):
            graph = hetero.graph_of(name)
            layer = measured(f"HeteroGraphConv {name}", case, graph, sp.dgl.wrap, ranks, 512, modes)
            _require(layer, BOUND)
            found.append(layer)
    return found


def _require(layer: Layer, bound: float) -> None:
    if not layer.error <= bound:
        raise SystemExit(f"{layer.name} is not exact: {layer.error:.1e}")


def rows(found: list[Layer]) -> list[str]:
    """The rows of all classes."""
    own = [layer for layer in found if layer.name.split()[0] not in OF_OTHERS]
    others = rows_by_reason(sorted(OF_OTHERS.items(), key=lambda of: (of[1], of[0])))
    refused = sorted(set(REFUSED) & set(modules.CLASSES))
    return [*rows_of_layers(own), *others, *rows_by_reason((name, f"refused: {REFUSED[name]}") for name in refused)]
