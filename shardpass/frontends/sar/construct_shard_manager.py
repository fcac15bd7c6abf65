"""Graphs made of this rank's `PartitionData`."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from shardpass.core.graphs import build_relation
from shardpass.core.ranks import Ranks
from shardpass.core.sharding import Ownership
from shardpass.errors import DivergenceError, PeerFailure
from shardpass.frontends.dgl.structure import Edges, Nodes
from shardpass.frontends.sar._state import communicator
from shardpass.frontends.sar.common_tuples import CanonicalType, PartitionData
from shardpass.frontends.sar.config import ConfiguredEdges, follow, options, words
from shardpass.frontends.sar.core.graphshard import GraphShardManager, NodeRanges, Whole
from shardpass.frontends.sar.data_loading import load_dgl_partition_data_from_graph
from shardpass.frontends.sar.own_part import OwnPart, merge_types, own_part, schemas, take_over


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
    comm, part, problem = communicator(), None, None
    try:
        words()
        part = own_part(partition_data, comm.rank, comm.size)
    except (ValueError, TypeError) as error:
        problem = error
    part = _agreed(comm, partition_data, homogeneous, part, problem)
    comm.move_to(part.device)  # tensors of the graph are there, and everything else follows them
    follow(comm)
    made = _graph(comm, part)
    nodes = {kind: made.nodes_of(kind).total for kind in made.ntypes}
    edges = {kind: made.edges_of(kind).total for kind in made.canonical_etypes}
    ranges = NodeRanges((start, end) for start, end in partition_data.node_ranges)
    return made.known(Whole(ranges, part.ranges, partition_data.partition_book, nodes, edges))


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
    rank = graph.comm.rank
    seeds = torch.unique(torch.as_tensor(seed_nodes).to(torch.int64)).to(graph.device)
    starts = {kind: own[rank] for kind, own in graph.type_ranges.items()}
    rows = {kind: seeds[(seeds >= start) & (seeds < end)] - start for kind, (start, end) in starts.items()}
    num_foreign = seeds.numel() - sum(part.numel() for part in rows.values())
    everywhere = graph.comm.all_gather_object(num_foreign, "construct_mfgs: seeds")
    if num_foreign:
        start, end = graph.tgt_node_range
        raise ValueError(
            f"rank {rank}: {num_foreign} of the seed nodes are not its own; expected ids in [{start}, {end}), which "
            f"are rows of its part plus partition_data.node_ranges[{rank}][0]"
        )
    for other, count in enumerate(everywhere):
        if count:
            raise PeerFailure(f"rank {other} passed seed nodes to construct_mfgs that are not its own")
    return rows


def _agreed(
    comm: Ranks, data: PartitionData, homogeneous: bool, part: OwnPart | None, problem: Exception | None
) -> OwnPart:
    """This rank's part, once all ranks agree on the partition and on `Config`. Collective."""
    mine = {
        "problem": "" if problem is None else str(problem),
        "partition": json.dumps([data.node_type_names, data.edge_type_names, part.ranges if part else {}]),
        "Config": "" if problem else words(),
        "homogeneous": str(homogeneous),
        "stored": schemas(part) if part else {},
    }
    theirs = comm.all_gather_object(mine, "construct_full_graph")
    if problem is not None:
        raise problem
    for rank, other in enumerate(theirs):
        if other["problem"]:
            raise PeerFailure(f"rank {rank} could not construct the graph: {other['problem']}")
        for what in ("partition", "Config", "homogeneous"):
            if other[what] != theirs[0][what]:
                raise DivergenceError(
                    f"every rank must construct with the same {what}: rank 0 has {theirs[0][what][:400]}, rank {rank} "
                    f"has {other[what][:400]}"
                )
    assert part is not None
    stored = [other["stored"] for other in theirs]
    take_over(part, stored)
    return merge_types(part, data.node_ranges, stored) if homogeneous else part


def _graph(comm: Ranks, part: OwnPart) -> GraphShardManager:
    owned = {kind: Ownership.from_counts([end - start for start, end in ends]) for kind, ends in part.ranges.items()}
    nodes = {}
    for kind, ends in part.ranges.items():
        fields = {name: rows.to(comm.device) for name, rows in part.node_fields[kind].items()}
        ids = torch.arange(*ends[comm.rank], device=comm.device)
        nodes[kind] = Nodes(ids.numel(), owned[kind].num_total, ids, fields)
    edges = {kind: _edges(comm, kind, part, owned[kind[0]]) for kind in part.edges}
    return GraphShardManager(comm, nodes, nodes, edges)


def _edges(comm: Ranks, kind: CanonicalType, part: OwnPart, sources: Ownership) -> Edges:
    listed, ends = part.edges[kind], (kind[0], kind[2])
    shifts = torch.tensor([first - own[0] for first, own in zip(sources.offsets, part.ranges[kind[0]])])
    src_ids = listed.src + shifts.to(listed.src.device)[listed.parts]
    dst_rows, num_dst = listed.dst - part.ranges[kind[2]][comm.rank][0], part.counts[kind[2]]
    stored = listed.fields.get("orig_id")
    ids = listed.ids if stored is None or stored.dim() != 1 or stored.is_floating_point() else stored.to(torch.int64)
    relation = build_relation(comm, sources, src_ids, dst_rows, num_dst, ids, listed.fields, options(), ends)
    total = sum(comm.all_gather_object(listed.src.numel(), f"edges of {kind}"))
    return ConfiguredEdges.like(Edges.of(kind, relation, total))
