"""Graphs made of this rank's `PartitionData`."""

from __future__ import annotations

import json
from typing import Any

import dgl
import torch
from torch import Tensor

from shardpass.core.graphs import build_relation
from shardpass.core.ranks import Ranks, gather_or_fail, require_same
from shardpass.core.sharding import Ownership
from shardpass.frontends.dgl.structure import Edges, Nodes
from shardpass.frontends.sar._state import communicator
from shardpass.frontends.sar.common_tuples import CanonicalType, PartitionData
from shardpass.frontends.sar.config import ConfiguredEdges, follow, options, words
from shardpass.frontends.sar.core.graphshard import GraphShardManager, NodeRanges
from shardpass.frontends.sar.data_loading import load_dgl_partition_data_from_graph
from shardpass.frontends.sar.own_part import OwnPart, merge_types, numbers_within, own_part, schema_of, take_over


def construct_full_graph(partition_data: PartitionData, homogeneous: bool = False) -> GraphShardManager:
    """The whole graph, of which this rank holds its part. Collective.

    Node and edge types are kept, and stored features are in its data by name. ``ndata[dgl.NID]`` are node ids in the
    numbering of `PartitionData.node_ranges`; original ids, if they are stored, are ``ndata["orig_id"]``.

    Args:
        partition_data: of this rank, from `load_dgl_partition_data`; rank r has part r.
        homogeneous: put all nodes into one type and all edges into one, as ``dgl.to_homogeneous`` does, with their
            types in ``ndata[dgl.NTYPE]`` and ``edata[dgl.ETYPE]``, as `RelGraphConv` needs it. Nodes are in the order
            of `suffix_key_lookup` with ``type_list``. The features that all types have in one shape are kept.

    Raises:
        ValueError: the partition does not fit the ranks, or the data contradict each other. The rank that found it
            raises it; the others name that rank.
        DivergenceError: ranks hold parts of different partitions, or differ in `Config`.
    """
    comm, part, mine, problem = communicator(), None, dict[str, Any](), None
    try:
        part = own_part(partition_data, comm.rank, comm.size)
        types = [partition_data.node_type_names, partition_data.edge_type_names, part.ranges]
        mine = {"partition": json.dumps(types), "Config": words(), "homogeneous": homogeneous}
        mine["stored"] = schema_of(part)
    except (ValueError, TypeError) as error:
        problem = error
    every = gather_or_fail(comm, "construct_full_graph", mine, problem, "could not construct the graph")
    require_same(every, ("partition", "Config", "homogeneous"), "construct with")
    assert part is not None
    device, stored = partition_data.all_shard_edges[0].edges[0].device, [other["stored"] for other in every]
    take_over(part, stored, device)
    comm.move_to(device)  # tensors of the graph are there, and everything else follows them
    follow(comm)
    part = merge_types(part, partition_data.node_ranges, stored) if homogeneous else part
    made = _graph(comm, part)
    edges = {kind: made.edges_of(kind).total for kind in made.canonical_etypes}
    ranges = NodeRanges((start, end) for start, end in partition_data.node_ranges)
    return made.share_of(ranges, part.ranges, partition_data.partition_book, edges)


def construct_mfgs(
    partition_data: PartitionData, seed_nodes: Tensor, n_layers: int, keep_seed_nodes: bool = True,
    homogeneous: bool = False,
) -> list[GraphShardManager]:  # fmt: skip
    """A block (message flow graph) for each layer of a model that is asked for some nodes only. Collective.

    The first layer's block comes first. It takes the rows ``blocks[0].input_nodes`` of this rank's part. The last block
    gives the rows ``blocks[-1].seeds``, the seeds in ascending order.

    Args:
        partition_data, homogeneous: as in `construct_full_graph`.
        seed_nodes: ids of own nodes in the numbering of `PartitionData.node_ranges`: rows of the part plus
            ``node_ranges[rank][0]``. May be empty on a rank.
        n_layers: the same on every rank.
        keep_seed_nodes: whether destinations of a layer are among its sources also where no edge begins in them.

    Raises:
        ValueError: some seeds are not this rank's, or as in `construct_full_graph`.
    """
    graph = construct_full_graph(partition_data, homogeneous)
    return graph.mfgs(_own_rows(graph, seed_nodes), n_layers, keep_seed_nodes)


def convert_dist_graph(dist_graph: Any) -> GraphShardManager:
    """The graph of a ``dgl.distributed.DistGraph``, with its features. Collective.

    The part that belongs to this process must be numbered as its rank.
    """
    return construct_full_graph(load_dgl_partition_data_from_graph(dist_graph, communicator().device))


def _own_rows(graph: GraphShardManager, seed_nodes: Any) -> dict[str, Tensor]:
    """The seeds as rows of this rank's part, in ascending order, by node type of the graph. Collective."""
    rank, problem = graph.comm.rank, None
    seeds = torch.unique(torch.as_tensor(seed_nodes).to(torch.int64)).to(graph.device)
    rows = {kind: numbers_within([own[rank]], seeds) for kind, own in graph.type_ranges.items()}
    num_foreign = seeds.numel() - sum(part.numel() for part in rows.values())
    if num_foreign:
        start, end = graph.tgt_node_range
        problem = ValueError(
            f"rank {rank}: {num_foreign} of the seed nodes are not its own; expected ids in [{start}, {end}), which "
            f"are rows of its part plus partition_data.node_ranges[{rank}][0]"
        )
    gather_or_fail(graph.comm, "construct_mfgs: seeds", None, problem, "passed seed nodes to construct_mfgs")
    return rows


def _graph(comm: Ranks, part: OwnPart) -> GraphShardManager:
    owned = {kind: Ownership.from_counts([end - start for start, end in ends]) for kind, ends in part.ranges.items()}
    nodes = {}
    for kind, ends in part.ranges.items():
        fields = {name: rows.to(comm.device) for name, rows in part.nodes[kind].items()}
        ids = torch.arange(*ends[comm.rank], device=comm.device)
        nodes[kind] = Nodes(ids.numel(), owned[kind].num_total, ids, fields)
    edges = {kind: _edges(comm, kind, part, owned[kind[0]]) for kind in part.edges}
    return GraphShardManager(comm, nodes, nodes, edges)


def _edges(comm: Ranks, kind: CanonicalType, part: OwnPart, sources: Ownership) -> Edges:
    (src, dst), fields = part.edges[kind]
    ends, (first, end) = (kind[0], kind[2]), part.ranges[kind[2]][comm.rank]
    src_ids, ids = numbers_within(part.ranges[kind[0]], src), fields.pop(dgl.EID)
    stored = fields.get("orig_id", ids)
    if stored.dim() == 1 and not stored.is_floating_point():
        ids = stored.to(torch.int64)
    relation = build_relation(comm, sources, src_ids, dst - first, end - first, ids, fields, options(), ends)
    return ConfiguredEdges.like(Edges.of(kind, relation, sum(comm.all_gather_object(len(src), f"edges of {kind}"))))
