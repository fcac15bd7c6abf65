"""DGL's `DGLGraph`. dgl is not imported: whoever has such an object has imported it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from shardpass.data.raw import EDGE, NODE, EdgeArrays, EdgeType, RawGraph

_DGL_NODE = "_N"
_DGL_EDGE = (_DGL_NODE, "_E", _DGL_NODE)


def is_dgl(data: Any) -> bool:
    """Whether `data` is a `dgl.DGLGraph`."""
    kind = getattr(sys.modules.get("dgl"), "DGLGraph", None)
    return kind is not None and isinstance(data, kind)


def read_dgl(data: Any) -> RawGraph:
    """The graph of a `DGLGraph`: all of its ndata and edata, edges by DGL's edge id.

    Types that DGL named itself (``_N`` and ``_E``) become `NODE` and `EDGE`; names that the user gave stay. Data on a
    GPU stays there, and rows come to the CPU when they are written to their part.

    Raises:
        ValueError: a block, a batch of several graphs, or a graph that is partitioned already.
    """
    _refuse(data)
    node_name, edge_name = type_names(data.ntypes, data.canonical_etypes)
    num_nodes = {node_name[kind]: int(data.num_nodes(kind)) for kind in data.ntypes}
    node_fields = {node_name[kind]: dict(data.nodes[kind].data) for kind in data.ntypes}
    edges = {edge_name[kind]: _edges(data, kind) for kind in data.canonical_etypes}
    edge_fields = {edge_name[kind]: dict(data.edges[kind].data) for kind in data.canonical_etypes}
    return RawGraph(num_nodes, edges, node_fields, edge_fields, {}, "dgl DGLGraph")


def type_names(
    node_types: Sequence[str], edge_types: Sequence[EdgeType]
) -> tuple[dict[str, str], dict[EdgeType, EdgeType]]:
    """What DGL's node and edge types are called here: the same, but for those of DGL's homogeneous graphs."""
    if list(node_types) == [_DGL_NODE] and list(edge_types) == [_DGL_EDGE]:
        return {_DGL_NODE: NODE}, {_DGL_EDGE: EDGE}
    return {kind: kind for kind in node_types}, {kind: kind for kind in edge_types}


def _is_batch(data: Any) -> bool:
    try:
        return bool(data.batch_size != 1)
    except KeyError:  # DGL is about to count the nodes of what is no batch, for another rank, which is a thread
        return False


def _refuse(data: Any) -> None:
    if type(data).__module__.split(".")[0] == "shardpass":
        raise ValueError("this is one rank's share of a graph that is partitioned already; pass the whole graph")
    if data.is_block:
        raise ValueError(
            "this DGLGraph is a block (message flow graph) of a sampler, with different nodes on its two sides; "
            "pass the graph that it was sampled from"
        )
    if _is_batch(data):
        raise ValueError(
            f"this DGLGraph is a batch of {data.batch_size} graphs; pass one of dgl.unbatch(g), or make it one graph: "
            "g.set_batch_num_nodes(torch.tensor([g.num_nodes()])) and "
            "g.set_batch_num_edges(torch.tensor([g.num_edges()])), with dicts of these if it has several types"
        )


def _edges(data: Any, kind: EdgeType) -> EdgeArrays:
    # without an order, since DGL refuses one by edge id where a graph is restricted to CSR or CSC
    src, dst, ids = (ends.cpu() for ends in data.all_edges(form="all", order=None, etype=kind))
    if torch.equal(ids, torch.arange(ids.numel(), dtype=ids.dtype)):
        return EdgeArrays(src, dst)
    order = ids.argsort()
    return EdgeArrays(src[order], dst[order])
