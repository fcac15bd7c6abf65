"""The DGL modules that cannot be exact on a sharded graph. `wrap` refuses them by name."""

from __future__ import annotations

import dgl.nn.pytorch as dnn
from torch import nn

from shardpass.core.ranks import torch_private
from shardpass.core.training import DistributedBatchNorm
from shardpass.errors import RefusedError

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
_TORCH_NORMS = (nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def refuse_unsupported(model: nn.Module) -> None:
    """Raise if `model` holds a module known to be wrong on a sharded graph.

    Raises:
        RefusedError: naming the first such module, the reason, and what to do.
    """
    for name, module in model.named_modules():
        reason = reason_to_refuse(module)
        if reason:
            where = f" (at {name!r})" if name else ""
            raise RefusedError(f"{type(module).__name__}{where} cannot be exact on a sharded graph: {reason}")


def reason_to_refuse(module: nn.Module) -> str | None:
    """Why `module` cannot be exact, or `None` if it can."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("dgl.") and kind.__name__ in REFUSED:
            return REFUSED[kind.__name__]
    norms = torch_private.AnyBatchNorm
    if isinstance(module, dnn.GroupRevRes) and any(isinstance(part, norms) for part in module.modules()):
        return _GROUPS
    known = type(module) in (nn.BatchNorm1d, nn.SyncBatchNorm) or isinstance(module, DistributedBatchNorm)
    derived = isinstance(module, torch_private.AnyBatchNorm) and not known
    return _STATISTICS if derived or isinstance(module, _TORCH_NORMS) else None
