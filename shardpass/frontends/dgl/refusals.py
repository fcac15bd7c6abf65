"""The DGL modules that cannot be exact on a sharded graph. `wrap` refuses them by name."""

from __future__ import annotations

import dgl.nn.pytorch as dnn
from torch import nn

from shardpass.core.ranks import torch_private
from shardpass.core.wrapping import has_unknown_statistics, refuse_modules, refuse_other_library

_STATISTICS = "its statistics run over all nodes of the graph. BatchNorm1d is exact, but not a class derived from it"
_EXPLAINS = "it explains a model on subgraphs that it cuts out of a whole graph"
_BUILDS = "it builds a graph from node positions; build the graph before partitioning"
_WALKS = "it walks over the whole graph; use one process"
_DENSE = "it takes a dense adjacency matrix, not a graph"
_PAIRS = "it relates all pairs of nodes of a graph"
_CUDA = "it needs a graph and kernels of cuGraph's own"
_GROUPS = "a BatchNorm inside it updates its running statistics once per pass over the layer; use LayerNorm there"

REFUSED: dict[str, str] = {
    "TWIRLSConv": "it changes the graph in forward; use TWIRLSUnfoldingAndAttention on a graph with self-loops",
    "CuGraphGATConv": _CUDA,
    "CuGraphRelGraphConv": _CUDA,
    "CuGraphSAGEConv": _CUDA,
    "DenseChebConv": _DENSE,
    "DenseGraphConv": _DENSE,
    "DenseSAGEConv": _DENSE,
    "GNNExplainer": _EXPLAINS,
    "HeteroGNNExplainer": _EXPLAINS,
    "SubgraphX": _EXPLAINS,
    "HeteroSubgraphX": _EXPLAINS,
    "PGExplainer": _EXPLAINS,
    "HeteroPGExplainer": _EXPLAINS,
    "KNNGraph": _BUILDS,
    "SegmentedKNNGraph": _BUILDS,
    "RadiusGraph": _BUILDS,
    "DeepWalk": _WALKS,
    "MetaPath2Vec": _WALKS,
    "CuGraphBaseConv": _CUDA,
    "MultiHeadAttention": _PAIRS,
    "SetAttentionBlock": _PAIRS,
    "InducedSetAttentionBlock": _PAIRS,
    "PMALayer": _PAIRS,
    "SetTransformerEncoder": _PAIRS,
    "SetTransformerDecoder": _PAIRS,
    "BiasedMHA": _PAIRS,
    "GraphormerLayer": _PAIRS,
    "EGTLayer": _PAIRS,
    "DegreeEncoder": _PAIRS,
    "PathEncoder": _PAIRS,
    "SpatialEncoder": _PAIRS,
    "SpatialEncoder3d": _PAIRS,
    "LapPosEncoder": "its sign flips are drawn per rank; add the encodings as node fields before partitioning",
    "SortPooling": "it sorts all nodes of the graph",
}


def refuse_unsupported(model: nn.Module) -> None:
    """Raise `RefusedError` if `model` has a module that is known to be wrong on a sharded graph."""
    refuse_other_library(model, "torch_geometric.nn.conv.", "PyG", "shardpass.pyg.wrap")
    refuse_modules(model, _reason)


def _reason(module: nn.Module) -> str | None:
    """Why `module` cannot be exact, or `None` if it can."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("dgl.") and kind.__name__ in REFUSED:
            return REFUSED[kind.__name__]
    norms = torch_private.AnyBatchNorm
    if isinstance(module, dnn.GroupRevRes) and any(isinstance(part, norms) for part in module.modules()):
        return _GROUPS
    return _STATISTICS if has_unknown_statistics(module) else None
