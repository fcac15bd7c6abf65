"""Every class of `torch_geometric.nn.conv` that is exact on a sharded graph, with how to make and call it."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.utils import scatter

from shardpass.testing import WholeGraph

from .pyg_cases import GRAPH, LAYERS, Case, _attr, _plain, _weight, mlp

TYPES = torch.arange(GRAPH.edge_index.size(1)) % 3
NODE_TYPES = torch.arange(GRAPH.num_nodes) % 2
POSITIONS = torch.randn(GRAPH.num_nodes, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def own(rows: Tensor, graph: Any) -> Tensor:
    """The own rows of a node tensor of the whole graph."""
    return rows[graph.node_ids] if hasattr(graph, "node_ids") else rows


def edges(rows: Tensor, graph: Any) -> Tensor:
    """The own edges of an edge tensor of the whole graph."""
    return rows[graph.edge_ids] if hasattr(graph, "edge_ids") else rows[: graph.size(1)]


def _typed(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], g, edges(TYPES, g))


def _typed_narrow(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"][:, :4], g, edges(TYPES, g))


def _typed_attr(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], g, edges(TYPES, g), edge_attr=i["edge_attr"])


def _pair(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m((i["x"], i["x"] * 0.5), g)


def _positions(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], own(POSITIONS, g), g)


def _normals(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    positions = own(POSITIONS, g)
    return m(i["x"], positions, torch.nn.functional.normalize(positions.flip(1), dim=1), g)


def _initial(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], i["x"].flip(1), g)


def _pseudo(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], g, i["edge_attr"])


def _layers(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(torch.stack([i["x"][:, :4], i["x"][:, 1:]], 1), g)


def _signed(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], g, g)


def _heat(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], g, own(NODE_TYPES, g), edges(TYPES, g), i["edge_attr"])


def _attention(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    out, (edge_index, alpha) = m(i["x"], g, return_attention_weights=True)
    return out + scatter(alpha.square(), edge_index[1], dim_size=out.size(0)).sum(1, keepdim=True)


def _pdn(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], g, i["edge_attr"])


def _continuous(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], g, i["edge_weight"])


def _norm_mlp(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(channels, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, out))


MORE_CONVS: dict[str, Case] = {
    "SimpleConv": (lambda: gnn.SimpleConv("mean", combine_root="self_loop"), _plain),
    "ChebConv": (lambda: gnn.ChebConv(5, 6, 3), _plain),
    "ChebConv weighted rw": (lambda: gnn.ChebConv(5, 6, 3, normalization="rw"), _weight),
    "ChebConv unnormalised": (lambda: gnn.ChebConv(5, 6, 3, normalization=None), _weight),
    "SAGEConv normalised pair": (lambda: gnn.SAGEConv((5, 5), 6, normalize=True), _pair),
    "GatedGraphConv": (lambda: gnn.GatedGraphConv(6, 2), _plain),
    "ResGatedGraphConv": (lambda: gnn.ResGatedGraphConv(5, 6, edge_dim=3), _attr),
    "GATConv pair": (lambda: gnn.GATConv((5, 5), 4, heads=2, add_self_loops=False), _pair),
    "GATConv attention weights": (lambda: gnn.GATConv(5, 4, heads=2), _attention),
    "GATv2Conv attention weights": (lambda: gnn.GATv2Conv(5, 4, heads=2), _attention),
    "GATv2Conv shared": (lambda: gnn.GATv2Conv(5, 4, heads=2, share_weights=True, residual=True), _plain),
    "AGNNConv": (lambda: gnn.AGNNConv(), _plain),
    "TAGConv": (lambda: gnn.TAGConv(5, 6, 2), _weight),
    "SGConv": (lambda: gnn.SGConv(5, 6, 2, cached=True), _weight),
    "SSGConv": (lambda: gnn.SSGConv(5, 6, 0.1, 2), _weight),
    "MFConv": (lambda: gnn.MFConv(5, 6, 4), _plain),
    "RGCNConv": (lambda: gnn.RGCNConv(5, 6, 3, num_bases=2), _typed),
    "RGCNConv blocks": (lambda: gnn.RGCNConv(4, 6, 3, num_blocks=2), _typed_narrow),
    "FastRGCNConv": (lambda: gnn.FastRGCNConv(5, 6, 3), _typed),
    "FastRGCNConv blocks": (lambda: gnn.FastRGCNConv(4, 6, 3, num_blocks=2), _typed_narrow),
    "RGATConv": (lambda: gnn.RGATConv(5, 6, 3, heads=2, edge_dim=3), _typed_attr),
    "SignedConv": (lambda: gnn.SignedConv(5, 6, first_aggr=True), _signed),
    "DNAConv": (lambda: gnn.DNAConv(4, heads=2), _layers),
    "PointNetConv": (lambda: gnn.PointNetConv(mlp(8, 6), mlp(6, 4)), _positions),
    "GMMConv": (lambda: gnn.GMMConv(5, 6, 3, 2), _pseudo),
    "NNConv": (lambda: gnn.NNConv(5, 6, mlp(3, 30), aggr="mean"), _pseudo),
    "CGConv": (lambda: gnn.CGConv(5, 3), _pseudo),
    "CGConv with BatchNorm": (lambda: gnn.CGConv(5, 3, batch_norm=True), _pseudo),
    "EdgeConv with BatchNorm": (lambda: gnn.EdgeConv(_norm_mlp(10, 6)), _plain),
    "PPFConv": (lambda: gnn.PPFConv(mlp(9, 6), mlp(6, 4)), _normals),
    "FeaStConv": (lambda: gnn.FeaStConv(5, 6, heads=2), _plain),
    "PointTransformerConv": (lambda: gnn.PointTransformerConv(5, 6), _positions),
    "LEConv": (lambda: gnn.LEConv(5, 6), _weight),
    "ClusterGCNConv": (lambda: gnn.ClusterGCNConv(5, 6, diag_lambda=0.5), _plain),
    "GENConv powermean": (lambda: gnn.GENConv(5, 6, aggr="powermean", learn_p=True, norm="layer"), _plain),
    "GENConv with BatchNorm": (lambda: gnn.GENConv(5, 6, aggr="softmax", learn_t=True), _plain),
    "GCN2Conv": (lambda: gnn.GCN2Conv(5, 0.3, 0.5, 2), _initial),
    "WLConvContinuous": (lambda: gnn.WLConvContinuous(), _continuous),
    "FiLMConv": (lambda: gnn.FiLMConv(5, 6, 3), _typed),
    "FAConv": (lambda: gnn.FAConv(5), _initial),
    "EGConv": (lambda: gnn.EGConv(5, 8, ["symnorm", "mean", "max", "std"], num_heads=2, num_bases=2), _plain),
    "PDNConv": (lambda: gnn.PDNConv(5, 6, 3, 4), _pdn),
    "GeneralConv": (lambda: gnn.GeneralConv(5, 6, 3, attention=True, heads=2), _attr),
    "GeneralConv dot": (lambda: gnn.GeneralConv(5, 6, 3, attention=True, attention_type="dot_product"), _attr),
    "HEATConv": (lambda: gnn.HEATConv(5, 4, 2, 3, 4, 3, 4, heads=2), _heat),
    "LGConv": (lambda: gnn.LGConv(), _weight),
    "PointGNNConv": (lambda: gnn.PointGNNConv(mlp(5, 3), mlp(8, 6), mlp(6, 5)), _positions),
    "AntiSymmetricConv": (lambda: gnn.AntiSymmetricConv(5, num_iters=2), _plain),
    "MixHopConv": (lambda: gnn.MixHopConv(5, 4, [0, 1, 2]), _weight),
    "DirGNNConv": (lambda: gnn.DirGNNConv(gnn.SAGEConv(5, 6, root_weight=False)), _plain),
    "DirGNNConv of GCNConv": (lambda: gnn.DirGNNConv(gnn.GCNConv(5, 6)), _plain),
    "DirGNNConv of GATConv": (lambda: gnn.DirGNNConv(gnn.GATConv(5, 6, add_self_loops=True)), _plain),
    "HypergraphConv": (lambda: gnn.HypergraphConv(5, 6), lambda m, i, g: m(i["x"], g, num_edges=i["x"].size(0))),
    "HypergraphConv attention": (
        lambda: gnn.HypergraphConv(5, 6, use_attention=True, heads=2),
        lambda m, i, g: m(i["x"], g, hyperedge_attr=i["x"] * 0.3, num_edges=i["x"].size(0)),
    ),
    "SimpleConv deep sets": (lambda: gnn.SimpleConv(gnn.aggr.DeepSetsAggregation(mlp(5, 5), mlp(5, 5))), _plain),
    "GCNConv decomposed": (lambda: gnn.GCNConv(5, 6, decomposed_layers=2), _weight),
    "GCNConv against the edges": (lambda: gnn.GCNConv(5, 6, flow="target_to_source"), _weight),
    "GATv2Conv against the edges": (lambda: gnn.GATv2Conv(5, 4, heads=2, edge_dim=3, flow="target_to_source"), _attr),
    "EdgeConv against the edges": (lambda: gnn.EdgeConv(mlp(10, 6), flow="target_to_source"), _plain),
    "GINEConv against the edges": (lambda: gnn.GINEConv(mlp(5, 6), edge_dim=3, flow="target_to_source"), _attr),
}  # fmt: skip
CONVS: dict[str, Case] = {**LAYERS, **MORE_CONVS}

_EDGES = torch.unique(GRAPH.edge_index.flip(0), dim=1).flip(0)  # sorted by destination, without duplicates
SORTED = WholeGraph(
    GRAPH.num_nodes,
    _EDGES,
    {"x": torch.randn(GRAPH.num_nodes, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)},
    {name: rows[: _EDGES.size(1)] for name, rows in GRAPH.edge.items()},
)
"""A graph as layers that see whole neighbourhoods want it; without ties, which torch's sort breaks as it likes."""

ONE_SHOT: dict[str, Case] = {
    "SAGEConv median": (lambda: gnn.SAGEConv(5, 6, aggr="median"), _plain),
    "SimpleConv quantiles": (lambda: gnn.SimpleConv(gnn.aggr.QuantileAggregation([0.2, 0.7])), _plain),
    "SAGEConv lstm": (lambda: gnn.SAGEConv(5, 6, aggr="lstm"), _plain),
    "SAGEConv gru": (lambda: gnn.SAGEConv(5, 6, aggr=gnn.aggr.GRUAggregation(5, 5)), _plain),
    "GraphConv sort": (lambda: gnn.GraphConv(5, 6, aggr=gnn.aggr.SortAggregation(1)), _plain),
    "GraphConv set transformer": (lambda: gnn.GraphConv(5, 6, aggr=gnn.aggr.SetTransformerAggregation(5)), _plain),
    "RGATConv within": (lambda: gnn.RGATConv(5, 6, 3, attention_mechanism="within-relation", edge_dim=3), _typed_attr),
    "SAGEConv list with median": (lambda: gnn.SAGEConv(5, 6, aggr=["mean", "median"]), _plain),
}  # fmt: skip
"""Layers that see whole neighbourhoods: exact in halo mode."""

ELSEWHERE = {"HeteroConv", "HGTConv", "HANConv", "GPSConv"}
"""Exact as well: see test_pyg_hetero.py and test_pyg_attention.py."""
