"""`RGCNConv` with one call for all relations, where PyG makes one for each.

PyG goes over all edges and all nodes once per relation. Here edges are added up by relation and destination at once:
each pair of the two that has an edge is a row of its own, in the order of relations. The weights of a relation map its
rows, and those of a node are added up in the same order. So time and memory grow with edges plus relations.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import typing
from torch_geometric.nn import aggr
from torch_geometric.nn.conv import MessagePassing, RGCNConv

from shardpass.core.exchange import HaloPlan
from shardpass.core.graphs import ShardedEdgeIndex
from shardpass.core.kernels import gather_sum
from shardpass.core.ranks import Known
from shardpass.core.sharding import Block, Derivation, EdgeShards, Shard, build_shards

_AGGREGATIONS = (aggr.SumAggregation, aggr.MeanAggregation, aggr.MaxAggregation, aggr.MinAggregation)


class _Pairs(NamedTuple):
    """The pairs of a relation and a destination that have an edge, by relation and then by destination.

    Args:
        edges: the edges, with pairs as their destinations.
        counts: how many pairs each relation has.
        destinations: of each pair, ``[pairs]``.
        of_nodes: from pairs to destinations.
    """

    edges: EdgeShards
    counts: list[int]
    destinations: Tensor
    of_nodes: Shard


class _KnownPairs(Known[_Pairs]):
    """The pairs of one edge list."""


def join_relations(conv: MessagePassing) -> None:
    """Let `conv`, if it is an `RGCNConv`, make one call for all relations."""
    if type(conv) is RGCNConv and "forward" not in vars(conv):
        conv.forward = partial(_forward, conv)  # type: ignore[method-assign]


def _forward(conv: RGCNConv, x: Any, edge_index: Any, edge_type: Any = None) -> Tensor:
    source, own = x if isinstance(x, tuple) else (x, x)
    if not _is_joined(conv, source, own, edge_index, edge_type):
        return RGCNConv.forward(conv, x, edge_index, edge_type)
    comm, plan = edge_index.plan.comm, edge_index.plan
    if comm.is_followed:
        edge_index[:, edge_type == 0]  # which refuses types that are made of several edges
    with comm.unfollowed():
        pairs = _pairs_of(edge_index.derivation, edge_type, conv.num_relations, plan)
        edges = ShardedEdgeIndex.of_shards(pairs.edges, plan)
    with comm.unfollowed(keeps=False):
        rows = conv.propagate(edges, x=source, edge_type_ptr=None, size=None)
        mapped = _mapped(conv, rows, pairs.counts)
        mapped = mapped.to(torch.promote_types(mapped.dtype, torch.get_default_dtype()))
        out: Tensor = _OfNodes.apply(mapped, pairs)
    comm.mark_rows(out, plan.dst_set)
    out = out if conv.root is None else out + own @ conv.root
    return out if conv.bias is None else out + conv.bias


def _is_joined(conv: RGCNConv, source: Any, own: Any, edge_index: Any, edge_type: Any) -> bool:
    """Whether a call can be one for all relations, and PyG would make one for each."""
    if not isinstance(edge_index, ShardedEdgeIndex) or edge_index.derivation is None or edge_index.flow is not None:
        return False
    if not all(isinstance(rows, Tensor) and rows.is_floating_point() for rows in (source, own)):
        return False
    if not isinstance(edge_type, Tensor) or edge_type.shape != (edge_index.derivation.num_edges,):
        return False
    plan = edge_index.plan
    is_plain = (
        isinstance(conv.aggr_module, _AGGREGATIONS) and not typing.WITH_SEGMM and not edge_type.is_floating_point()
    )
    follows = (conv.flow == "source_to_target") != edge_index.is_reversed
    hooks = conv._propagate_forward_pre_hooks, conv._propagate_forward_hooks
    is_watched = any(hooks) or plan.comm.kept_calls is not None or plan.options.stream_structure
    return is_plain and follows and not is_watched


def _pairs_of(edges: Derivation, edge_type: Tensor, num_relations: int, plan: HaloPlan) -> _Pairs:
    known = plan.comm.caches.of(_KnownPairs, edges)
    found = known.find(num_relations, [edge_type])
    if found is None:
        found = _make_pairs(edges, edge_type, num_relations, plan)
        known.keep(num_relations, [edge_type], found)
    return found


def _make_pairs(edges: Derivation, edge_type: Tensor, num_relations: int, plan: HaloPlan) -> _Pairs:
    sources, destinations = edges.row(0), edges.row(1)
    types = edge_type.to(sources.device, torch.int64)
    counted = (types >= 0) & (types < num_relations)  # PyG leaves out edges of other types
    keys = types[counted] * plan.num_dst + destinations[counted]
    pairs, rows = keys.unique(return_inverse=True)
    ends = pairs % max(1, plan.num_dst)
    counts = torch.bincount(pairs // max(1, plan.num_dst), minlength=num_relations).tolist()
    numbers, block = torch.arange(len(pairs), device=pairs.device), Block(plan.comm.rank, 0, len(pairs))
    (of_nodes,) = build_shards(numbers, ends, [block], plan.num_dst).shards
    return _Pairs(build_shards(sources[counted], rows, plan.blocks, len(pairs)), counts, ends, of_nodes)


def _mapped(conv: RGCNConv, rows: Tensor, counts: list[int]) -> Tensor:
    """The rows of pairs, ``[pairs, in_channels]``, mapped by the weights of their relations."""
    weight = conv.weight
    if conv.num_bases is not None:
        weight = (conv.comp @ weight.view(conv.num_bases, -1)).view(conv.num_relations, -1, conv.out_channels)
    parts = zip(rows.split(counts), weight.unbind())
    if conv.num_blocks is None:
        return torch.cat([part @ own for part, own in parts])
    blocks = (torch.einsum("abc,bcd->abd", part.view(len(part), *own.shape[:2]), own) for part, own in parts)
    return torch.cat([part.reshape(-1, conv.out_channels) for part in blocks])


class _OfNodes(torch.autograd.Function):
    """The sums of the rows of pairs over the pairs of each destination."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pairs: _Pairs) -> Tensor:
        ctx.pairs = pairs
        out = rows.new_empty((pairs.of_nodes.num_dst, *rows.shape[1:]))
        gather_sum(out, pairs.of_nodes, rows, None, fresh=True)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.pairs.destinations), None
