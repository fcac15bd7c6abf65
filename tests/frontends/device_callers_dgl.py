"""As `device_callers`, with models of DGL on the stand-in for its graph."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import dgl.function as fn
import dgl.nn.pytorch as dgl_nn
import torch
from torch import Tensor, nn

import shardpass as sp
from shardpass.core.ranks import Ranks

from .device_callers import FEATURES, Case, Give, data, different, trained

LAYERS: tuple[Callable[[int], nn.Module], ...] = (
    lambda width: dgl_nn.GraphConv(width, 3, allow_zero_in_degree=True),
    lambda width: dgl_nn.GATConv(width, 3, 2, allow_zero_in_degree=True),
    lambda width: dgl_nn.SAGEConv(width, 3, "pool"),
    lambda width: dgl_nn.GATv2Conv(width, 3, 2, allow_zero_in_degree=True),
)
WEIGHTS: dict[str, Give] = {
    "the field": lambda g: g.edata["edge_weight"],
    "a copy": lambda g: g.edata["edge_weight"].clone(),
    "a column": lambda g: g.edata["edge_attr"][:, 1:2],
    "computed": lambda g: (g.edata["edge_attr"][:, 1] > 0).double(),
    "of integers": lambda g: g.edata["edge_type"].double(),
}


class Weighted(nn.Module):
    """Sums of weighted rows, of what a model puts into frames."""

    def __init__(self, give: Give) -> None:
        super().__init__()
        self.linear, self.give = nn.Linear(6, 3), give

    def forward(self, g: Any, x: Tensor) -> Tensor:
        """Classes of nodes."""
        with g.local_scope():
            degrees = (g.in_degrees() + g.out_degrees()).clamp(min=1)[:, None].to(x)
            g.ndata["h"] = torch.where(g.ndata["train_mask"].clone()[:, None], x[:, :], x / degrees)
            g.edata["w"] = self.give(g)
            g.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "sum"))
            g.update_all(lambda edges: {"m": edges.src["h"] * edges.dst["h"]}, fn.max("m", "max"))
            return self.linear(g.ndata["sum"] + g.ndata["max"])


def of_features(make: Callable[[int], nn.Module], give: Give) -> Case:
    """A model is trained with features of a kind."""

    def case(ranks: Ranks, graph: Any) -> Any:
        x = give(graph)
        return trained(sp.dgl.wrap(make(x.size(1)).to(ranks.device, x.dtype), ranks), ranks, graph, graph, x)

    return case


def of_the_original_order(ranks: Ranks, graph: Any) -> Any:
    """Features in the order of the graph before it was partitioned."""
    x = data().x[: graph.num_own_nodes].to(ranks.device)
    return sp.dgl.wrap(LAYERS[2](6).to(ranks.device, torch.float64), ranks)(graph, x)


CASES: dict[str, Case] = {
    **{f"features, {name}": of_features(make, give) for make, (name, give) in zip(cycle(LAYERS), FEATURES.items())},
    **{
        f"weights, {name}": of_features(lambda _, give=give: Weighted(give), FEATURES["a copy"])
        for name, give in WEIGHTS.items()
    },
    "the original order": of_the_original_order,
}


def different_of_dgl(comm: Ranks, kind: str, store: str, options: sp.Options, step: int) -> dict[str, str]:
    """`different`, of models of DGL."""
    return different(comm, kind, store, options, CASES, step)
