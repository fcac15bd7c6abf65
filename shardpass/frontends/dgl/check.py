"""How DGL models take part in the self-check, see `shardpass.core.selfcheck`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import dgl
import torch
from torch import Tensor, nn

from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import Ranks
from shardpass.core.selfcheck import Fields, Frontend
from shardpass.frontends.dgl.convert import edge_type, graph, node_type
from shardpass.frontends.dgl.graph import ShardedDGLGraph
from shardpass.testing.hetero import shard_by_type
from shardpass.testing.run import run


def checked_by(wrap: Callable[[nn.Module, Ranks], nn.Module]) -> Frontend:
    """The self-check's view of this frontend. `wrap` wraps its models."""
    return Frontend(
        wrap=wrap,
        run=run,
        shard=shard_by_type,
        core_of=core_of,
        fields_of=_fields_of,
        whole=_whole,
        sharded=_sharded,
        every_node=True,  # many layers of DGL refuse nodes without in-edges
    )


def core_of(value: Any) -> ShardedGraph | None:
    """The engine's graph that `value` stands for, or `None` if it is no graph or only a part of one."""
    if isinstance(value, ShardedDGLGraph):
        return value.core
    return value if isinstance(value, ShardedGraph) else None


def _fields_of(value: Any) -> Mapping[Any, Mapping[str, Tensor]]:
    core = core_of(value)
    assert core is not None
    if isinstance(value, ShardedDGLGraph):
        frames = value.frames
        found: dict[Any, Mapping[str, Tensor]] = {kind: frames.nodes[node_type(kind)] for kind in core.node_types}
        found |= {kind: frames.edges[edge_type(kind)] for kind in core.edge_types}
    else:
        found = {kind: core.fields_of(kind) for kind in core.node_types}
        found |= {kind: core.relations[kind].fields for kind in core.edge_types}
    ids = (dgl.NID, dgl.EID)
    return {kind: {n: fields[n] for n in fields if n not in ids} for kind, fields in found.items()}


def _whole(num_nodes: dict[Any, int], edges: dict[Any, Tensor], fields: Fields) -> Any:
    ends = {edge_type(kind): tuple(index) for kind, index in edges.items()}
    made = dgl.heterograph(ends, {node_type(kind): count for kind, count in num_nodes.items()})
    for kind, named in fields.items():
        data = made.edges[edge_type(kind)].data if kind in edges else made.nodes[node_type(kind)].data
        data.update({name: rows.clone() for name, rows in named.items()})
    for ntype in made.ntypes:
        made.nodes[ntype].data[dgl.NID] = torch.arange(made.num_nodes(ntype))
    for etype in made.canonical_etypes:
        made.edges[etype].data[dgl.EID] = torch.arange(made.num_edges(etype))
    return made


def _sharded(share: ShardedGraph, fields: Fields) -> ShardedDGLGraph:
    made = graph(share)
    frames = made.frames
    for kind, named in fields.items():
        is_edge = kind in share.edge_types
        (frames.edges[edge_type(kind)] if is_edge else frames.nodes[node_type(kind)]).update(named)
    return made
