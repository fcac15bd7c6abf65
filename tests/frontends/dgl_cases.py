"""Every module of DGL that is exact on a sharded graph, with how to make and call it."""

from __future__ import annotations

from typing import Any

import dgl.nn.pytorch as dnn
import torch
from torch import Tensor, nn

from shardpass.testing import WholeGraph

from .dgl_parity import GRAPH, LOOPED, LOOPLESS, NUM_EDGES, Case, Inputs, edges, onto_nodes, own

_GENERATOR = torch.Generator().manual_seed(4)
TYPES = torch.arange(NUM_EDGES) * 7 % 3
SORTED_TYPES = torch.arange(NUM_EDGES) * 3 // NUM_EDGES
NODE_TYPES = torch.arange(GRAPH.num_nodes) % 2
SORTED_NODE_TYPES = torch.arange(GRAPH.num_nodes) * 2 // GRAPH.num_nodes
POSITIONS = torch.randn(GRAPH.num_nodes, 3, generator=_GENERATOR, dtype=torch.float64)
LABELS = torch.randint(0, 3, (GRAPH.num_nodes,), generator=_GENERATOR)
LABELS[7] = 3  # one node has the last class: most ranks never see it
ATOMS = torch.tensor([6.0, 8.0])[NODE_TYPES].double().unsqueeze(1)

ZERO: dict[str, bool] = {"allow_zero_in_degree": True}


def narrow(i: Inputs) -> Tensor:
    return i["x"][:, :4]


def wide(i: Inputs) -> Tensor:
    return torch.cat([i["x"], i["x"][:, :1]], 1)


def rows(out: Tensor) -> Tensor:
    return out.reshape(out.size(0), out.shape[1:].numel())


def _plain(m: nn.Module, g: Any, i: Inputs) -> Tensor:
    return m(g, i["x"])


def _weight(m: nn.Module, g: Any, i: Inputs) -> Tensor:
    return m(g, i["x"], edge_weight=i["edge_weight"])


def _attr(m: nn.Module, g: Any, i: Inputs) -> Tensor:
    return m(g, i["x"], i["edge_attr"])


def _pair(m: nn.Module, g: Any, i: Inputs) -> Tensor:
    return m(g, (i["x"], i["x"] * 0.5))


def _typed(m: nn.Module, g: Any, i: Inputs) -> Tensor:
    return m(g, i["x"], edges(TYPES, g))


def _attention(m: nn.Module, g: Any, i: Inputs) -> Tensor:
    out, attention = m(g, i["x"], get_attention=True)
    return torch.cat([rows(out), onto_nodes(attention, g)], 1)


def _attr_attention(m: nn.Module, g: Any, i: Inputs) -> Tensor:
    out, attention = m(g, i["x"], i["edge_attr"], get_attention=True)
    return torch.cat([rows(out), onto_nodes(attention, g)], 1)


def _weight_attention(m: nn.Module, g: Any, i: Inputs) -> Tensor:
    out, attention = m(g, i["x"], edge_weight=i["edge_weight"], get_attention=True)
    return torch.cat([rows(out), onto_nodes(attention, g)], 1)


def _egat(m: nn.Module, g: Any, i: Inputs) -> Tensor:
    nodes, found = m(g, i["x"], i["edge_attr"])
    return torch.cat([rows(nodes), onto_nodes(found, g)], 1)


def _egat_attention(m: nn.Module, g: Any, i: Inputs) -> Tensor:
    nodes, found, attention = m(g, i["x"], i["edge_attr"], i["edge_weight"], get_attention=True)
    return torch.cat([rows(nodes), onto_nodes(found, g), onto_nodes(attention, g)], 1)


def _initial(m: nn.Module, g: Any, i: Inputs) -> Tensor:
    return m(g, i["x"], i["x"].flip(1))


def _wide(m: nn.Module, g: Any, i: Inputs) -> Tensor:
    return m(g, wide(i))


def _labels(m: nn.Module, g: Any, i: Inputs) -> Tensor:
    known = own(torch.arange(GRAPH.num_nodes) % 3 > 0, g)
    return m(g, own(LABELS, g), known).to(i["x"].dtype) + i["x"][:, :1]


def _norms(m: nn.Module, g: Any, i: Inputs) -> Tensor:
    return onto_nodes(m(g, i["edge_weight"]), g)


class Bases(nn.Module):
    """A GraphConv whose weight comes from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.basis, self.conv = dnn.WeightBasis((5, 6), 2, 3), dnn.GraphConv(5, 6, weight=False, **ZERO)


class Jumping(nn.Module):
    """Two layers and their outputs together."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.first, self.second = dnn.SAGEConv(5, 6, "mean"), dnn.SAGEConv(6, 6, "gcn")
        self.jump = dnn.JumpingKnowledge(mode, 6, 2)

    def forward(self, g: Any, x: Tensor) -> Tensor:
        first = self.first(g, x).relu()
        return self.jump([first, self.second(g, first)])


class Scores(nn.Module):
    """Scores of edges from the rows of both ends."""

    def __init__(self, scorer: nn.Module, typed: bool = True) -> None:
        super().__init__()
        self.conv, self.scorer, self.typed = dnn.SAGEConv(5, 4, "mean"), scorer, typed

    def forward(self, g: Any, x: Tensor) -> Tensor:
        with g.local_scope():
            g.ndata["h"] = self.conv(g, x)
            g.apply_edges(lambda batch: {"u": batch.src["h"], "v": batch.dst["h"]})
            kinds = (edges(TYPES, g),) if self.typed else ()
            return onto_nodes(self.scorer(g.edata["u"], g.edata["v"], *kinds), g)


class _Weighted(nn.Module):
    """A residual attention layer over edges with one feature."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = dnn.EdgeGATConv(2, 1, 2, 1, **ZERO)

    def forward(self, g: Any, x: Tensor, attr: Tensor) -> Tensor:
        return self.conv(g, x, attr).squeeze(1)


def _batch_norms(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU())


def _moments() -> list[str]:
    return ["mean", "max", "min", "sum", "std", "var"]


_SCALERS = ["identity", "amplification", "attenuation"]
_RADII = (torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.5]), torch.tensor([1.0, 2.0]))

CONVS: dict[str, Case] = {
    **{f"GraphConv {n}": (lambda n=n: dnn.GraphConv(5, 6, norm=n, **ZERO), _plain) for n in ("both", "right", "none")},
    "GraphConv left": (lambda: dnn.GraphConv(5, 3, norm="left", activation=torch.tanh, **ZERO), _plain),
    "GraphConv weighted": (lambda: dnn.GraphConv(5, 6, **ZERO), _weight),
    "GraphConv weighted narrow": (lambda: dnn.GraphConv(5, 3, norm="none", **ZERO), _weight),
    "GraphConv of WeightBasis": (Bases, lambda m, g, i: m.conv(g, i["x"], weight=m.basis()[1])),
    **{f"SAGEConv {a}": (lambda a=a: dnn.SAGEConv(5, 6, a), _plain) for a in ("mean", "gcn", "pool", "lstm")},
    "SAGEConv mean narrow": (lambda: dnn.SAGEConv(5, 3, "mean", activation=torch.relu), _plain),
    "SAGEConv mean weighted": (lambda: dnn.SAGEConv(5, 6, "mean"), _weight),
    "SAGEConv pool weighted": (lambda: dnn.SAGEConv(5, 6, "pool"), _weight),
    "SAGEConv lstm weighted": (lambda: dnn.SAGEConv(5, 6, "lstm"), _weight),
    "SAGEConv pool pair": (lambda: dnn.SAGEConv((5, 5), 6, "pool", norm=nn.functional.normalize), _pair),
    "GATConv": (lambda: dnn.GATConv(5, 3, 2, residual=True, **ZERO), _plain),
    "GATConv attention": (lambda: dnn.GATConv(5, 3, 2, **ZERO), _attention),
    "GATConv weighted": (lambda: dnn.GATConv(5, 3, 2, **ZERO), _weight_attention),
    "GATConv pair": (lambda: dnn.GATConv((5, 5), 3, 2, residual=True, **ZERO), _pair),
    "GATv2Conv": (lambda: dnn.GATv2Conv(5, 3, 2, residual=True, **ZERO), _plain),
    "GATv2Conv attention": (lambda: dnn.GATv2Conv(5, 3, 2, share_weights=True, **ZERO), _attention),
    "GATv2Conv pair": (lambda: dnn.GATv2Conv((5, 5), 3, 2, **ZERO), _pair),
    "EdgeGATConv": (lambda: dnn.EdgeGATConv(5, 3, 4, 2, **ZERO), _attr),
    "EdgeGATConv attention": (lambda: dnn.EdgeGATConv(5, 3, 4, 2, residual=False, **ZERO), _attr_attention),
    "EGATConv": (lambda: dnn.EGATConv(5, 3, 4, 2, 2), _egat),
    "EGATConv attention": (lambda: dnn.EGATConv(5, 3, 4, 2, 2), _egat_attention),
    "DotGatConv": (lambda: dnn.DotGatConv(5, 3, 2, **ZERO), _plain),
    "DotGatConv attention": (lambda: dnn.DotGatConv(5, 3, 2, **ZERO), _attention),
    "DotGatConv pair": (lambda: dnn.DotGatConv((5, 5), 3, 2, **ZERO), _pair),
    "AGNNConv": (lambda: dnn.AGNNConv(**ZERO), _plain),
    **{
        f"GINConv {a}": (lambda a=a: dnn.GINConv(nn.Linear(5, 6), a, learn_eps=True), _plain)
        for a in ("sum", "mean", "max")
    },
    "GINConv max weighted": (lambda: dnn.GINConv(None, "max", init_eps=0.3),
        lambda m, g, i: m(g, i["x"], edge_weight=i["edge_weight"].unsqueeze(-1))),
    "GINConv with BatchNorm": (lambda: dnn.GINConv(_batch_norms(), "sum"), _plain),
    "GINEConv": (lambda: dnn.GINEConv(nn.Linear(3, 6), learn_eps=True),
        lambda m, g, i: m(g, i["x"][:, :3], i["edge_attr"])),
    "EdgeConv": (lambda: dnn.EdgeConv(5, 6, **ZERO), _plain),
    "EdgeConv with BatchNorm": (lambda: dnn.EdgeConv(5, 6, batch_norm=True, **ZERO), _plain),
    "EdgeConv evaluated": (lambda: dnn.EdgeConv(5, 6, batch_norm=True, **ZERO).eval(), _plain),
    **{f"NNConv {a}": (lambda a=a: dnn.NNConv(5, 4, nn.Linear(3, 20), a), _attr) for a in ("sum", "mean", "max")},
    "NNConv residual": (lambda: dnn.NNConv(5, 5, nn.Linear(3, 25), "mean", residual=True), _attr),
    **{f"GMMConv {a}": (lambda a=a: dnn.GMMConv(5, 4, 3, 2, a, **ZERO), _attr) for a in ("sum", "mean", "max")},
    "GMMConv residual": (lambda: dnn.GMMConv(5, 4, 3, 2, residual=True, **ZERO), _attr),
    "CFConv": (lambda: dnn.CFConv(5, 3, 6, 4), _attr),
    "APPNPConv": (lambda: dnn.APPNPConv(3, 0.1), _plain),
    "APPNPConv weighted": (lambda: dnn.APPNPConv(3, 0.1), _weight),
    "SGConv": (lambda: dnn.SGConv(5, 6, 2, norm=torch.tanh, **ZERO), _plain),
    "SGConv weighted": (lambda: dnn.SGConv(5, 6, 2, **ZERO), _weight),
    "TAGConv": (lambda: dnn.TAGConv(5, 6, 2, activation=torch.relu), _plain),
    "TAGConv weighted": (lambda: dnn.TAGConv(5, 6, 2), _weight),
    "GCN2Conv": (lambda: dnn.GCN2Conv(5, 2, 0.3, 0.5, **ZERO), _initial),
    "GCN2Conv two weights": (lambda: dnn.GCN2Conv(5, 2, project_initial_features=False, **ZERO), _initial),
    "GCN2Conv weighted": (lambda: dnn.GCN2Conv(5, 1, activation=torch.tanh, **ZERO),
        lambda m, g, i: m(g, i["x"], i["x"].flip(1), edge_weight=i["edge_weight"])),
    "ChebConv": (lambda: dnn.ChebConv(5, 6, 3), _plain),
    "ChebConv lambda_max": (lambda: dnn.ChebConv(5, 6, 3), lambda m, g, i: m(g, i["x"], torch.tensor([1.7]))),
    "ChebConv lambda_max list": (lambda: dnn.ChebConv(5, 6, 2), lambda m, g, i: m(g, i["x"], [1.7])),
    "EdgeWeightNorm both": (lambda: dnn.EdgeWeightNorm("both"), _norms),
    "EdgeWeightNorm right": (lambda: dnn.EdgeWeightNorm("right", eps=0.1), _norms),
    "TWIRLSUnfoldingAndAttention": (lambda: dnn.TWIRLSUnfoldingAndAttention(5, 1.0, 1.0, 2), _plain),
    "TWIRLSUnfoldingAndAttention attention": (
        lambda: dnn.TWIRLSUnfoldingAndAttention(5, 1.0, 1.0, 3, attn_aft=1, tau=0.2, T=5.0, p=1.0, use_eta=True),
        _plain,
    ),
    "TWIRLSUnfoldingAndAttention plain": (
        lambda: dnn.TWIRLSUnfoldingAndAttention(5, 0.4, 0.6, 2, init_att=True, precond=False, attn_aft=1), _plain,
    ),
    "GatedGraphConv one type": (lambda: dnn.GatedGraphConv(5, 6, 2, 1), _plain),
    "GatedGraphConv three types": (lambda: dnn.GatedGraphConv(5, 6, 2, 3), _typed),
    "GatedGraphConv rare types": (
        lambda: dnn.GatedGraphConv(5, 6, 2, 5),
        lambda m, g, i: m(g, i["x"], edges(torch.where(torch.arange(NUM_EDGES) == 11, 4, TYPES), g)),
    ),
    "RelGraphConv": (lambda: dnn.RelGraphConv(5, 6, 3), _typed),
    "RelGraphConv basis": (lambda: dnn.RelGraphConv(5, 6, 3, "basis", 2, self_loop=False), _typed),
    "RelGraphConv bdd": (lambda: dnn.RelGraphConv(4, 6, 3, "bdd", 2, layer_norm=True),
        lambda m, g, i: m(g, narrow(i), edges(TYPES, g), i["edge_weight"].unsqueeze(-1))),
    "RelGraphConv presorted": (lambda: dnn.RelGraphConv(5, 6, 3, "basis", 2),
        lambda m, g, i: m(g, i["x"], edges(SORTED_TYPES, g), presorted=True)),
    "HGTConv": (lambda: dnn.HGTConv(5, 4, 2, 2, 3, dropout=0.0, use_norm=True),
        lambda m, g, i: m(g, i["x"], own(NODE_TYPES, g), edges(TYPES, g))),
    "HGTConv presorted": (lambda: dnn.HGTConv(5, 4, 2, 2, 3, dropout=0.0),
        lambda m, g, i: m(g, i["x"], own(SORTED_NODE_TYPES, g), edges(SORTED_TYPES, g), presorted=True)),
    "EGNNConv": (lambda: dnn.EGNNConv(5, 6, 4),
        lambda m, g, i: torch.cat(m(g, i["x"], i["x"][:, 2:] + own(POSITIONS, g)), 1)),
    "EGNNConv edges": (lambda: dnn.EGNNConv(5, 6, 4, 3),
        lambda m, g, i: torch.cat(m(g, i["x"], i["x"][:, 2:] + own(POSITIONS, g), i["edge_attr"]), 1)),
    "PNAConv": (lambda: dnn.PNAConv(6, 6, _moments(), _SCALERS, 2.5, num_towers=2), _wide),
    "PNAConv edges": (lambda: dnn.PNAConv(6, 4, ["mean", "max"], _SCALERS, 2.5, edge_feat_size=3),
        lambda m, g, i: m(g, wide(i), i["edge_attr"])),
    "PNAConv evaluated": (lambda: dnn.PNAConv(6, 6, [*_moments(), "moment3"], ["identity"], 2.5).eval(), _wide),
    "DGNConv": (
        lambda: dnn.DGNConv(6, 6, ["dir1-av", "dir2-dx", "sum", "max"], _SCALERS, 2.5, num_towers=2),
        lambda m, g, i: m(g, wide(i), eig_vec=own(POSITIONS, g)),
    ),
    "AtomicConv": (lambda: dnn.AtomicConv(*_RADII, features_to_use=torch.tensor([6.0, 8.0])),
        lambda m, g, i: rows(m(g, own(ATOMS, g), i["edge_weight"].unsqueeze(1))) + i["x"][:, :1]),
    "AtomicConv features": (lambda: dnn.AtomicConv(*_RADII),
        lambda m, g, i: rows(m(g, i["x"][:, :1], i["edge_weight"].unsqueeze(1)))),
    "LabelPropagation": (lambda: dnn.LabelPropagation(3, 0.5), _labels),
    "LabelPropagation reset": (lambda: dnn.LabelPropagation(3, 0.5, "row", normalize=True, reset=True), _labels),
    "LabelPropagation multi-label": (lambda: dnn.LabelPropagation(2, 0.5, clamp=False),
        lambda m, g, i: m(g, own(torch.nn.functional.one_hot(LABELS), g)).to(i["x"].dtype) + i["x"][:, :1]),
    **{f"JumpingKnowledge {mode}": (lambda mode=mode: Jumping(mode), _plain) for mode in ("cat", "max", "lstm")},
    "Sequential": (lambda: dnn.Sequential(dnn.GraphConv(5, 6, **ZERO), dnn.GATConv(6, 4, 2, **ZERO)), _plain),
    # DGL frees the output of the next two in backward
    "GroupRevRes": (lambda: dnn.GroupRevRes(dnn.GraphConv(3, 3, **ZERO), 2), lambda m, g, i: m(g, wide(i)) * 1.0),
    "GroupRevRes edges": (lambda: dnn.GroupRevRes(_Weighted(), 3),
        lambda m, g, i: m(g, wide(i), i["edge_attr"]) * 1.0),
    "EdgePredictor": (lambda: Scores(dnn.EdgePredictor("cos", 4, 3), typed=False), _plain),
    "TransE": (lambda: Scores(dnn.TransE(3, 4)), _plain),
    "TransR": (lambda: Scores(dnn.TransR(3, 2, 4)), _plain),
}  # fmt: skip
"""By class and options."""

FLOAT32 = {"LabelPropagation"}
"""Classes that compute in float32 whatever they are given."""

GRAPHS = {"EGATConv": LOOPED, "TWIRLSUnfoldingAndAttention": LOOPED, "EGNNConv": LOOPLESS}
"""By class; `GRAPH` for all others."""


def graph_of(name: str) -> WholeGraph:
    """On what a case runs."""
    return GRAPHS.get(name.split()[0], GRAPH)
