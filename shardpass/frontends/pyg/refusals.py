"""What would be silently wrong on a sharded graph: refused by name, when a model is wrapped or called."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing, RGCNConv

from shardpass.core.following import whole_graph
from shardpass.core.graphs import BatchIndex, GraphArgument, ShardedEdgeIndex, ShardedGraph
from shardpass.core.ranks import OnRanks, Ranks, is_local, torch_private
from shardpass.core.training import DistributedBatchNorm
from shardpass.core.wrapping import has_unknown_statistics, ordinary_graph, refuse_modules, refuse_other_library
from shardpass.errors import RefusedError
from shardpass.frontends.pyg import attention, models, modules, private
from shardpass.frontends.pyg.adjacency import check_weights, refuse_matrices, refuse_sparse_buffers
from shardpass.frontends.pyg.norms import is_unknown_norm

_STATISTICS = (
    "its statistics run over all nodes of the graph. Norms of torch_geometric.nn and BatchNorm1d are exact, but not "
    "classes derived from them"
)
_UNKNOWN = "this release of shardpass does not know it, so it may mix nodes; write it with layers that are known"
_CONVS = (
    ("GravNetConv DynamicEdgeConv XConv", "it builds its own graph from node positions; build the graph before "
     "partitioning"),
    ("SplineConv", "it needs pyg-lib, which was not at hand when layers were proved exact"),
    ("WLConv", "it sorts and hashes whole neighbourhoods"),
    ("PANConv", "it multiplies whole adjacency matrices"),
    ("MeshCNNConv", "its message relies on edges that come in groups of four"),
    ("SuperGATConv", "in training it draws negative edges among all nodes"),
    ("FusedGATConv", "it needs a CSR graph of its own"),
    ("CuGraphSAGEConv CuGraphGATConv CuGraphRGCNConv", "it needs a graph of its own"),
)  # fmt: skip
REFUSED: dict[str, str] = {
    **{name: reason for names, reason in _CONVS for name in names.split()},
    **modules.REFUSED,
    **models.REFUSED,
}
_KNOWN = models.EXACT.union(
    models.ROW_WISE, modules.ROW_WISE, modules.NORMS, modules.ATTENTION, modules.READOUTS, modules.WHOLE_SETS
)


def refuse_unsupported(model: nn.Module) -> None:
    """Raise `RefusedError` if `model` has a module that is known to be wrong on a sharded graph."""
    refuse_other_library(model, "dgl.nn.pytorch.conv.", "DGL", "shardpass.dgl.wrap")
    refuse_modules(model, _reason)
    refuse_sparse_buffers(model)


def refuse_ordinary(name: str, edge_index: Any) -> None:
    """Raise if a layer is given edges that are not those of a sharded graph.

    Raises:
        RefusedError: it is.
    """
    if not isinstance(edge_index, ShardedEdgeIndex):
        found = f"{name}: edge_index is an ordinary {type(edge_index).__name__}"
        raise ordinary_graph(found, " where edge_index went")


def no_explanations(who: str = "") -> RefusedError:
    """The error for a model that an explainer runs, or for the layer `who`."""
    return RefusedError(
        f"{who}explanations are not supported on a sharded graph, since explainers average over own nodes and edges: "
        f"set explain=False, or load the state_dict into a model that is not wrapped, and explain that"
    )


def check_arguments_of(layer: MessagePassing, name: str) -> None:
    """Let `layer` look at the arguments of each call before its own code indexes nodes by them."""
    _, *names = signature(type(layer).forward).parameters
    layer.register_forward_pre_hook(partial(_check_arguments, name, names), with_kwargs=True)


def _check_arguments(
    name: str, names: list[str], layer: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = {**dict(zip(names, args)), **kwargs}
    edge_index, x = given.get("edge_index"), given.get("x")
    if isinstance(edge_index, Tensor):
        refuse_ordinary(name, edge_index)
    is_sharded = isinstance(edge_index, (ShardedGraph, ShardedEdgeIndex))
    if isinstance(layer, RGCNConv) and is_sharded and (x[0] if isinstance(x, tuple) else x) is None:
        raise RefusedError(
            f"{type(layer).__name__} without x numbers the nodes from 0 on every rank; pass x=graph.node_ids, the "
            f"original number of each own node"
        )
    check_weights(name, layer, names, given)


def refuse_node_tables(model: nn.Module, comm: Ranks, args: Any, kwargs: Any) -> None:
    """Raise if a parameter has a row per node of the graph that `model` is called with. Collective.

    Raises:
        RefusedError: naming the parameter; on every rank.
    """
    leaves = [
        leaf for leaf in torch_private.tree_leaves((args, kwargs)) if isinstance(leaf, (ShardedGraph, ShardedEdgeIndex))
    ]
    plans = [r.plan for leaf in leaves if isinstance(leaf, ShardedGraph) for r in leaf.relations.values()]
    plans += [leaf.plan for leaf in leaves if isinstance(leaf, ShardedEdgeIndex)]
    own = [count for plan in plans for count in (plan.num_own_src, plan.num_dst)]
    totals = [sum(column) for column in zip(*comm.all_gather_object(own, "nodes of the graph"))]
    refuse_matrices(model, totals)
    for name, parameter in _tables(model):
        if parameter.size(0) in totals:
            kind = _type_with(leaves, parameter.size(0))
            raise RefusedError(
                f"parameter or buffer {name!r} {list(parameter.shape)} has a row for each of the {parameter.size(0)} "
                f"{kind and f'{kind!r} '}nodes of the graph, but a rank only has its own nodes, in another order. Use "
                f"emb = shardpass.NodeEmbedding(graph, {parameter.size(1)}{kind and f', {kind!r}'}) in its place, "
                f"called without ids, emb(), or a node field; "
                f"if the two numbers are equal by chance, change the width"
            )


def _type_with(leaves: list[Any], count: int) -> str:
    """The node type of so many nodes, of a graph of several types; else empty."""
    graphs = (leaf for leaf in leaves if isinstance(leaf, ShardedGraph) and len(leaf.node_types) > 1)
    kinds = (kind for graph in graphs for kind, owned in graph.ownership.items() if owned.num_total == count)
    return next(kinds, "")


def refuse_whole_tensors(leaves: list[Any]) -> None:
    """Raise if a tensor of the whole graph is among the arguments of a model, instead of one of own rows.

    Raises:
        RefusedError: naming its shape.
    """
    for graph in (leaf.graph for leaf in leaves if isinstance(leaf, GraphArgument)):
        sets = list(graph.row_sets())
        for tensor in (leaf for leaf in leaves if type(leaf) is Tensor and leaf.dim()):
            for of in sets:
                if int(tensor.size(0)) == of.total and int(tensor.size(0)) not in [one.count for one in sets]:
                    raise whole_graph(tensor, of)


def refuse_norms_of_some_nodes(model: nn.Module, leaves: list[Any]) -> None:
    """Raise if `model` is called with `graph.layers`, but has a part that combines all nodes or remembers its edges.

    Raises:
        RefusedError: naming the part.
    """
    if not any(isinstance(leaf, ShardedEdgeIndex) and leaf.flow is not None for leaf in leaves):
        return
    if any(isinstance(leaf, BatchIndex) for leaf in leaves):
        raise RefusedError(
            "graph.batch together with graph.layers: a readout takes all nodes, but graph.layers leaves out those that "
            "are not needed. Call the model with the graph"
        )
    for name, module in model.named_modules():
        if getattr(module, "cached", False):
            raise RefusedError(
                f"{name}: {type(module).__name__} with cached=True would keep the edges of one of graph.layers for "
                f"other calls. Make it with cached=False, or call the model with the graph"
            )
        on_ranks = isinstance(module, (OnRanks, DistributedBatchNorm))
        if on_ranks and (module.training or getattr(module, "running_mean", None) is None):
            raise RefusedError(
                f"{name}: {type(module).__name__} takes the statistics of all nodes, but graph.layers leaves out nodes "
                f"that are not needed. Call the model with the graph, or use a norm of single rows (LayerNorm)"
            )


def _tables(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that may have a row per node: those of embeddings, of containers, and of a user's own classes."""
    for prefix, module in model.named_modules():
        known = type(module).__module__.startswith(("torch.", "torch_geometric."))
        if known and not isinstance(module, (nn.Embedding, nn.ParameterDict, nn.ParameterList)):
            continue
        tensors = [*module.named_parameters(prefix, recurse=False), *module.named_buffers(prefix, recurse=False)]
        for name, tensor in tensors:
            if tensor.dim() > 1 and not is_local(tensor):
                yield name, tensor


def _reason(module: nn.Module) -> str | None:
    if isinstance(module, OnRanks):
        return None  # of a model that was wrapped before
    reasons = [attention.reason_to_refuse(module), *(_reason_for_class(kind, module) for kind in type(module).__mro__)]
    if any(reasons):
        return next(filter(None, reasons))
    if has_unknown_statistics(module) or is_unknown_norm(module):
        return _STATISTICS
    if any(getattr(module, name, None) is not None for name in private.CACHES):
        return "with cached=True it keeps the graph of a call before wrap; make it anew, or set its cache to None"
    return None


def _reason_for_class(kind: type, module: Any) -> str | None:
    """Why `module` is refused for being of the class `kind` of PyG."""
    if not kind.__module__.startswith("torch_geometric."):
        return None
    if kind.__name__ in REFUSED:
        return REFUSED[kind.__name__]
    for package, reason in models.ELSEWHERE.items():
        if kind.__module__.startswith(package):
            return reason
    refused_if = models.REFUSED_IF.get(kind.__name__)
    if refused_if and refused_if[0](module):
        return refused_if[1]
    in_nn = kind.__module__.startswith("torch_geometric.nn.")
    known = kind.__module__.startswith("torch_geometric.nn.conv.") or kind.__name__ in _KNOWN
    return _UNKNOWN if in_nn and not known else None
