"""Readouts over the nodes of all ranks, with the names and arguments of DGL's."""

from __future__ import annotations

from typing import Any

import dgl
import torch
from torch import Tensor

from shardpass.core.graphs import ShardedGraph, reduce_rows
from shardpass.core.ranks import all_reduce_sum, unfollowed
from shardpass.errors import RefusedError
from shardpass.frontends.dgl.graph import ShardedDGLGraph


@unfollowed(0, gives="alike")
def sum_nodes(graph: ShardedDGLGraph, feat: str, weight: str | None = None, *, ntype: str | None = None) -> Tensor:
    """The sum of a node field over all nodes, ``[1, ...]``, the same on every rank. Collective, also in backward.

    Args:
        graph: a sharded graph.
        feat: the name of the field.
        weight: the name of a field that multiplies it.
        ntype: the type of the nodes. It may be left out if there is one.
    """
    if _is_plain(graph):
        return dgl.sum_nodes(graph, feat, weight, ntype=ntype)
    return reduce_rows(_weighted(graph, feat, weight, ntype), "sum", graph.comm).unsqueeze(0)


@unfollowed(0, gives="alike")
def mean_nodes(graph: ShardedDGLGraph, feat: str, weight: str | None = None, *, ntype: str | None = None) -> Tensor:
    """The mean over all nodes, ``[1, ...]``; see `sum_nodes`."""
    if _is_plain(graph):
        return dgl.mean_nodes(graph, feat, weight, ntype=ntype)
    total = graph.nodes_of(ntype).total
    return sum_nodes(graph, feat, weight, ntype=ntype) / max(1, total)


@unfollowed(0, gives="alike")
def max_nodes(graph: ShardedDGLGraph, feat: str, weight: str | None = None, *, ntype: str | None = None) -> Tensor:
    """The maximum over all nodes, ``[1, ...]``; see `sum_nodes`. The gradient goes to the first node that has it."""
    if _is_plain(graph):
        return dgl.max_nodes(graph, feat, weight, ntype=ntype)
    rows = _weighted(graph, feat, weight, ntype)
    comm, ids = graph.comm, graph.nodes_of(ntype).ids
    with torch.no_grad():
        best = reduce_rows(rows.detach(), "max", comm)
        shaped = ids.view(-1, *[1] * (rows.dim() - 1)).to(torch.float64)
        places = torch.where(rows == best, shaped, float("inf"))
        first = reduce_rows(places, "min", comm)
        won = places == first
    return all_reduce_sum(torch.where(won, rows, 0).sum(0), comm, "max over all nodes").unsqueeze(0)


@unfollowed(0)
def softmax_nodes(graph: ShardedDGLGraph, feat: str, *, ntype: str | None = None) -> Tensor:
    """Softmax of a node field over all nodes, ``[num_own, ...]``; see `sum_nodes`."""
    if _is_plain(graph):
        return dgl.softmax_nodes(graph, feat, ntype=ntype)
    rows = _weighted(graph, feat, None, ntype)
    with torch.no_grad():
        peak = reduce_rows(rows.detach(), "max", graph.comm)
    exponentials = (rows - peak).exp()
    return exponentials / reduce_rows(exponentials, "sum", graph.comm)


@unfollowed(0)
def broadcast_nodes(graph: ShardedDGLGraph, graph_feat: Tensor, *, ntype: str | None = None) -> Tensor:
    """`graph_feat` ``[1, ...]`` for each own node, ``[num_own, ...]``. Not collective."""
    if _is_plain(graph):
        return dgl.broadcast_nodes(graph, graph_feat, ntype=ntype)
    if graph_feat.size(0) != 1:
        graph_feat = graph_feat.unsqueeze(0)
    return graph_feat.expand(graph.nodes_of(ntype).num, *graph_feat.shape[1:])


def _is_plain(graph: Any) -> bool:
    """Whether `graph` is an ordinary DGLGraph. Models that use these readouts run on such graphs too.

    Raises:
        RefusedError: it is neither an ordinary nor a sharded DGLGraph.
    """
    if isinstance(graph, ShardedGraph):
        raise RefusedError("readouts take what shardpass.dgl.graph(graph) returns, which has the fields set in forward")
    if not isinstance(graph, dgl.DGLGraph):
        raise RefusedError(f"readouts take a graph, not {type(graph).__name__}")
    return not isinstance(graph, ShardedDGLGraph)


def _weighted(graph: ShardedDGLGraph, feat: str, weight: str | None, ntype: str | None) -> Tensor:
    if graph.core is not None and not graph.is_block and "batch" in graph.nodes_of(ntype).fields:
        raise RefusedError(
            "this graph stores a node field 'batch', as one made of several graphs does, but DGL's readouts take all "
            "nodes of a sharded graph as one. Pool with torch_geometric.nn.global_mean_pool(h, graph.batch) and the "
            "like, or store the field under another name if it means something else"
        )
    data = (graph.dstnodes if graph.is_block else graph.nodes)[ntype].data
    return data[feat] if weight is None else data[feat] * data[weight]
