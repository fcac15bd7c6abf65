"""PyG modules that mix nodes outside message passing, and would be silently wrong: refused by name."""

from __future__ import annotations

from torch import nn

from shardpass.core.norm import DistributedBatchNorm
from shardpass.errors import RefusedError

_STATISTICS = "its statistics run over all nodes of the graph; use BatchNorm or LayerNorm(mode='node')"
_POOLING = "it pools or drops nodes of the whole graph; apply it to gathered outputs (shardpass.gather)"
_ALL_NODES = "it mixes all nodes of the graph outside message passing"
_NEIGHBOURS = "it builds its own graph from node positions; build the graph before partitioning"

REFUSED: dict[str, str] = {
    "GraphNorm": _STATISTICS,
    "InstanceNorm": _STATISTICS,
    "PairNorm": _STATISTICS,
    "MeanSubtractionNorm": _STATISTICS,
    "GraphSizeNorm": _STATISTICS,
    "DiffGroupNorm": _STATISTICS,
    "HeteroBatchNorm": _STATISTICS,
    "HeteroLayerNorm": _STATISTICS,
    "GPSConv": "its global attention runs over all nodes",
    "HANConv": "its semantic attention takes a mean over all nodes of a type",
    "HGTConv": "it does arithmetic on node ids",
    "GravNetConv": _NEIGHBOURS,
    "DynamicEdgeConv": _NEIGHBOURS,
    "XConv": _NEIGHBOURS,
    "WLConv": "it sorts and hashes whole neighbourhoods",
    "PANConv": "it multiplies whole adjacency matrices",
    "MeshCNNConv": "its message relies on edges that come in groups of four",
    "SuperGATConv": "in training it draws negative edges among all nodes",
    "ChebConv": "its largest eigenvalue is a maximum over all edges",
    "HypergraphConv": "it sends messages against the direction of the edges",
    "QuantileAggregation": "where neighbours tie, its gradient depends on how all messages of the graph sort at once",
    "HeteroConv": "there is no frontend for graphs with several node or edge types yet",
    "DirGNNConv": "it sends messages against the direction of the edges",
    "FusedGATConv": "it needs a CSR graph of its own",
    "CuGraphSAGEConv": "it needs a graph of its own",
    "CuGraphGATConv": "it needs a graph of its own",
    "CuGraphRGCNConv": "it needs a graph of its own",
}
REFUSED_MODULES = {
    "torch_geometric.nn.pool": _POOLING,
    "torch_geometric.nn.unpool": _POOLING,
    "torch_geometric.nn.dense.diff_pool": _POOLING,
    "torch_geometric.nn.kge": _ALL_NODES,
    "torch_geometric.nn.attention": _ALL_NODES,
    "torch_geometric.nn.glob": _POOLING,
}
_BATCH_NORMS = (nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def refuse_unsupported(model: nn.Module) -> None:
    """Raise if `model` holds a module known to be wrong on a sharded graph.

    Raises:
        RefusedError: naming the first such module, the reason, and what to do.
    """
    for name, module in model.named_modules():
        reason = _reason(module)
        if reason:
            where = f" (at {name!r})" if name else ""
            raise RefusedError(f"{type(module).__name__}{where} cannot be exact on a sharded graph: {reason}")


def _reason(module: nn.Module) -> str | None:
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("torch_geometric."):
            continue
        if kind.__name__ in REFUSED:
            return REFUSED[kind.__name__]
        if kind.__name__ == "LayerNorm" and getattr(module, "mode", "graph") == "graph":
            return _STATISTICS
        for package, reason in REFUSED_MODULES.items():
            if kind.__module__ == package or kind.__module__.startswith(package + "."):
                return reason
    if getattr(module, "allow_single_element", False):
        return "with allow_single_element=True it behaves differently on a rank with one node; leave that option out"
    if isinstance(module, _BATCH_NORMS) or _is_unknown_batch_norm(module):
        return _STATISTICS
    return None


def _is_unknown_batch_norm(module: nn.Module) -> bool:
    """Whether `module` is of a class derived from a batch norm, whose statistics `wrap` does not know how to share."""
    known = (nn.BatchNorm1d, nn.SyncBatchNorm, DistributedBatchNorm)
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and type(module) not in known
