"""Which parts a rank owns, and the contents of these parts merged into one range of nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardpass.core.sharding import OwnerEdges
from shardpass.data.fields import Fields, join_rows
from shardpass.data.merged_edges import MergedEdges
from shardpass.data.part_edges import PartEdges
from shardpass.data.raw import EdgeType, NodeType
from shardpass.data.store import Store


@dataclass(frozen=True)
class RankEdges:
    """The edges of one type into a rank's own nodes, by the owner of their sources, then by destination.

    parts: the edges of each of the rank's parts. owners: those from the nodes of each rank; as long as every rank has a
    single part, these are views of the mapped file. edge_ids: reads the original positions, int32 or int64 [num_edges].
    The edge fields have the same order.
    """

    parts: list[PartEdges]
    owners: list[OwnerEdges]
    edge_ids: Callable[[], Tensor]


@dataclass(frozen=True)
class RankData:
    """What the rank that owns a run of `parts` needs. Structure is verified, fields when you first ask for them.

    node_ids: for each node type, the original id of each own row, int64 [num_own].
    node_fields, edge_fields: for each type, tensors by name, with one row per own node or edge.
    """

    parts: range
    node_ids: dict[NodeType, Tensor]
    node_fields: dict[NodeType, Fields]
    edges: dict[EdgeType, RankEdges]
    edge_fields: dict[EdgeType, Fields]


def parts_of_rank(num_parts: int, ranks: int, rank: int) -> range:
    """The run of parts that a rank owns. The numbers of parts of two ranks differ by at most one.

    Raises:
        ValueError: when there are more ranks than parts, or the rank is out of range.
    """
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}: expected a rank in [0, {ranks}) of at least one")
    if ranks > num_parts:
        raise ValueError(
            f"{ranks} ranks, but the store has {num_parts} parts and every rank needs one: "
            f"run at most {num_parts} ranks, or partition the graph again into {ranks} parts or more"
        )
    size, larger = divmod(num_parts, ranks)
    first = rank * size + min(rank, larger)
    return range(first, first + size + (rank < larger))


def merge_parts(store: Store, ranks: int, rank: int) -> RankData:
    """What a rank of `ranks` needs, with its parts merged into one range of nodes.

    Raises:
        StoreError: when the structure of a part is altered, or is not what the manifest says of it.
        ValueError: when there are more ranks than parts, or the rank is out of range.
    """
    groups = [parts_of_rank(store.num_parts, ranks, one) for one in range(ranks)]
    parts, manifest = parts_of_rank(store.num_parts, ranks, rank), store.manifest
    edges, edge_fields = {}, {}
    for kind in manifest.edge_types:
        edges[kind], join = _merged_edges(store, kind, groups, rank)
        edge_fields[kind] = store.edge_fields(kind, parts, join)
    return RankData(
        parts=parts,
        node_ids={kind: join_rows([store.node_ids(kind, part) for part in parts]) for kind in manifest.node_types},
        node_fields={kind: store.node_fields(kind, parts) for kind in manifest.node_types},
        edges=edges,
        edge_fields=edge_fields,
    )


def _merged_edges(
    store: Store, edge_type: EdgeType, groups: list[range], rank: int
) -> tuple[RankEdges, Callable[[Sequence[Tensor]], Tensor]]:
    """The edges, and what puts tensors of the parts into their order."""
    is_stored = len(groups) == store.num_parts
    parts = [store.part_edges(edge_type, part, mapped=is_stored) for part in groups[rank]]
    merged = MergedEdges(parts, groups, rank, store.manifest.offsets[edge_type[0]])
    join = join_rows if is_stored else merged.join
    from_owner = parts[0].from_part if is_stored else merged.from_owner
    owners = [from_owner(owner) for owner in range(len(groups))]
    return RankEdges(parts, owners, lambda: join([store.edge_ids(edge_type, part) for part in groups[rank]])), join
