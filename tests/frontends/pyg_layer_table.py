"""The rows of docs/layer-table.md for `torch_geometric.nn.conv`."""

from __future__ import annotations

import torch_geometric.nn.conv as pyg_convs
from rich.progress import track

import shardpass as sp
from shardpass.frontends.pyg.refusals import REFUSED

from . import hetero_cases
from .conv_cases import CONVS, ONE_SHOT, SORTED
from .how_much import MODES
from .layer_lists import AT_ONCE, Layer, measured, row, rows_by_reason, rows_of_layers
from .pyg_cases import GRAPH

BOUND = 1e-10
OF_OTHERS = {
    "HeteroConv": "its layers",
    "GPSConv": 'its layer; attention `"performer"` exact, `"multihead"` by `sp.pyg.gather_attention`',
}


def layers(ranks: list[int], modes: tuple[str, ...] = MODES) -> list[Layer]:
    """Every exact layer, as measured. One that is not exact ends the run."""
    jobs = [(name, case, GRAPH, modes) for name, case in CONVS.items() if name[0].isupper()]
    jobs += [(name, case, SORTED, ("halo",)) for name, case in ONE_SHOT.items()]
    jobs += [(name, case, hetero_cases.GRAPH, modes) for name, case in hetero_cases.LAYERS.items()]
    found = []
    for name, case, graph, some in track(jobs, "layers of PyG"):
        layer = measured(name, case, graph, sp.pyg.wrap, ranks, 700, some)
        if not layer.error <= BOUND:
            raise SystemExit(f"{name} is not exact: {layer.error:.1e}")
        found.append(layer._replace(ways=AT_ONCE) if name in ONE_SHOT else layer)
    return found


def rows(found: list[Layer]) -> list[str]:
    """The rows of all classes."""
    classes = [name for name in pyg_convs.__all__ if name != "MessagePassing"]
    kinds = {name: [kind.__name__ for kind in getattr(pyg_convs, name).__mro__] for name in classes}
    reasons = {name: next((REFUSED[kind] for kind in kinds[name] if kind in REFUSED), None) for name in classes}
    refused = rows_by_reason((name, f"refused: {why}") for name, why in reasons.items() if why)
    own = [layer for layer in found if layer.name.split()[0] not in OF_OTHERS]
    return [*rows_of_layers(own), *(row(*of) for of in OF_OTHERS.items()), *refused]
