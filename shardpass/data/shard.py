"""`shard`: a graph in memory, which every rank holds alike, as each rank's share. No file is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardpass.connection import this_process
from shardpass.core.exchange import node_set
from shardpass.core.graphs import OwnFields, Relation, ShardedGraph, ShardedHeteroGraph, relation_of, row_of_last
from shardpass.core.ranks import Options, Ranks, agree, checksum, digest, ordinary_tensors, require_ranks, tensor_digest
from shardpass.core.sharding import EDGE, HOST, NODE, EdgeType, NodeType, Ownership, edges_by_owner, stable_order
from shardpass.data.file_rows import FileRows
from shardpass.data.raw import EdgeArrays, RawGraph
from shardpass.data.readers.dispatch import read
from shardpass.data.rows import SIGNED_TWIN, Field, take_rows
from shardpass.errors import DivergenceError

By = Literal["range", "space"]


def shard(
    data: Any,
    comm: Ranks | None = None,
    parts: Any = None,
    by: By = "range",
    options: Options | None = None,
    *,
    drop: Collection[str] = (),
) -> ShardedGraph:
    """This rank's share of a graph that every rank holds alike, in memory. Collective; the arguments are the same.

    The rows of a rank are those of its nodes, in the order that they have in `data`; ``graph.own`` takes them of
    tensors of the whole graph, and ``graph.whole`` puts the rows of all ranks into that order again. A graph with
    several node or edge types is returned as a `ShardedHeteroGraph`.

    Args:
        data: a PyG `Data` or `HeteroData`, a `DGLGraph`, or a dict of arrays such as ``{"edge_index": ..., "x": ...}``.
            Its fields become those of the graph, as `partition` would store them.
        comm: the ranks that share it. `None` is this process alone.
        parts: the rank of each node, ``[num_nodes]`` integers, or a dict of these by node type.
        by: how nodes are given to ranks where `parts` does not say: ``"range"`` gives each rank as many nodes, in their
            order.
        options: as of `load`.
        drop: names of fields to leave out.

    Raises:
        ValueError, TypeError: what is wrong with the data or the parts, on every rank.
        DivergenceError: ranks gave different data, parts or options.
    """
    comm = this_process() if comm is None else comm
    require_ranks(comm, "shard(data, comm)")
    options = Options() if options is None else options
    with ordinary_tensors(), comm.out_of_turn():
        return _sharded(data, comm, parts, by, options, drop)


def _sharded(data: Any, comm: Ranks, parts: Any, by: By, options: Options, drop: Collection[str]) -> ShardedGraph:
    raw, owners, problem = None, None, None
    try:
        raw = read(data, drop=tuple(drop), device=None)
        owners = {kind: _owner(parts, kind, count, comm.size) for kind, count in raw.num_nodes.items()}
    except (ValueError, TypeError) as error:
        problem = error
    _agree(comm, options, raw, owners, problem)
    assert raw is not None and owners is not None  # what failed has been raised
    if comm is this_process():
        comm.move_to(next((ends.src.device for ends in raw.edges.values()), HOST))
    return shard_raw(raw, owners, comm, options)


class _Placed(NamedTuple):
    """The nodes of a type, as they are given to ranks.

    Args:
        ownership: of their new numbers.
        ids: the original numbers of own nodes, ascending.
        new: the new number of each node, or `None` where it is the original one.
    """

    ownership: Ownership
    ids: Tensor
    new: Tensor | None

    def new_of(self, ids: Tensor) -> Tensor:
        """The new numbers of nodes, int64."""
        return ids.long() if self.new is None else self.new[ids.long()]


def _placed(owner: Tensor | None, count: int, comm: Ranks) -> _Placed:
    if owner is None or comm.size == 1:
        ownership = Ownership(tuple(count * rank // comm.size for rank in range(comm.size + 1)))
        return _Placed(ownership, torch.arange(*ownership.offsets[comm.rank : comm.rank + 2]), None)
    owner = owner.to(comm.device)
    order = stable_order(owner, comm.size)
    ownership = Ownership.from_counts(torch.bincount(owner, minlength=comm.size).tolist())
    new = torch.empty_like(order)
    new[order] = torch.arange(order.numel(), device=order.device)
    return _Placed(ownership, order[slice(*ownership.offsets[comm.rank : comm.rank + 2])], new)


def _taken(rows: Field, ids: Tensor | None, device: torch.device) -> Tensor:
    """The rows `ids` of a field, dense; `None` takes all, which are not copied if they are dense and on `device`."""
    is_plain = isinstance(rows, Tensor) and rows.layout is torch.strided and rows.dtype not in SIGNED_TWIN
    if is_plain and isinstance(rows, Tensor):
        return rows.to(device) if ids is None else rows.index_select(0, ids.to(rows.device)).to(device)
    return take_rows(rows, torch.arange(rows.shape[0]) if ids is None else ids.cpu()).to(device)


def shard_raw(raw: RawGraph, owners: Mapping[NodeType, Tensor | None], comm: Ranks, options: Options) -> ShardedGraph:
    """The share of a graph that has been checked. Collective.

    Args:
        owners: the rank of each node by type, ``[num_nodes]`` int64; `None` gives each rank a range.
    """
    nodes = {kind: _placed(owners[kind], count, comm) for kind, count in raw.num_nodes.items()}
    fields = {}
    for kind, placed in nodes.items():
        ids = None if comm.size == 1 else placed.ids
        own = {name: _taken(rows, ids, comm.device) for name, rows in raw.node_fields.get(kind, {}).items()}
        fields[kind] = OwnFields(own, comm, node_set(kind, placed.ids.numel()))
    relations = {kind: _relation(raw, kind, ends, nodes, comm, options) for kind, ends in raw.edges.items()}
    is_homogeneous = list(nodes) == [NODE] and list(relations) == [EDGE]
    classes = {kind: classes_of(some["y"]) for kind, some in raw.node_fields.items() if "y" in some}
    graph = (ShardedGraph if is_homogeneous else ShardedHeteroGraph)(
        comm, options, {kind: placed.ownership for kind, placed in nodes.items()},
        {kind: placed.ids for kind, placed in nodes.items()}, fields, relations,
        total_edges=raw.num_edges, num_classes=classes,
    )  # fmt: skip
    graph.graph_fields = dict(raw.graph_fields)
    return graph


def _relation(
    raw: RawGraph, kind: EdgeType, ends: EdgeArrays, nodes: Mapping[NodeType, _Placed], comm: Ranks, options: Options
) -> Relation:
    """The edges that end in own nodes."""
    source, target = nodes[kind[0]], nodes[kind[2]]
    first, last = target.ownership.offsets[comm.rank : comm.rank + 2]
    src, rows = ends.src.to(comm.device), target.new_of(ends.dst.to(comm.device)) - first
    own = None if comm.size == 1 else ((rows >= 0) & (rows < last - first)).nonzero().view(-1)
    src, rows = (src, rows) if own is None else (src[own], rows[own])
    fields = {name: _taken(some, own, comm.device) for name, some in raw.edge_fields.get(kind, {}).items()}
    last_node = row_of_last(source.ids, source.ownership.num_total) if kind[0] == kind[2] else None
    device = HOST if options.stream_structure else comm.device
    owners, order = edges_by_owner(
        source.ownership, comm.rank, source.new_of(src).to(device), rows.to(device), last - first
    )

    def edge_ids() -> Tensor:
        return torch.arange(len(rows), device=comm.device) if own is None else own

    return relation_of(
        comm, owners, source.ownership.num_own(comm.rank), last - first, edge_ids, fields, options,
        (kind[0], kind[2]), order, last_node,
    )  # fmt: skip


def classes_of(y: Tensor) -> int:
    """The number of classes in labels of the whole graph."""
    if y.is_floating_point():
        return y.size(-1) if y.dim() > 1 else 1
    return int(y.max()) + 1 if y.numel() else 0


def _owner(parts: Any, kind: NodeType, count: int, size: int) -> Tensor | None:
    """The rank of each node of a type, checked."""
    given = parts.get(kind) if isinstance(parts, Mapping) else parts
    if given is None:
        return None
    owner = torch.as_tensor(given).cpu()
    what = f"shard(parts=): the ranks of {kind!r} nodes"
    if owner.dtype is torch.bool or owner.is_floating_point() or owner.is_complex():
        raise TypeError(f"{what} are {owner.dtype}; expected integers, [{count}]")
    if owner.shape != (count,):
        raise ValueError(f"{what} have the shape {list(owner.shape)}; expected [{count}], one for each node")
    low, high = (int(one) for one in owner.aminmax()) if count else (0, 0)
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        position = int((owner == wrong).nonzero()[0])
        raise ValueError(f"{what}: {wrong} at position {position} is no rank; there are {size}, from 0")
    return owner.long()


def _agree(
    comm: Ranks,
    options: Options,
    raw: RawGraph | None,
    owners: Mapping[NodeType, Tensor | None] | None,
    problem: Exception | None,
) -> None:
    """Go on only if every rank gave the same. Collective."""
    if comm.size == 1 and problem is None:
        return
    mine = {} if raw is None or owners is None else _digests(raw, owners, options)
    codes = agree(comm, "shard", [digest(repr(mine)) if problem is None else -1])
    are_alike = all(code == codes[0] for code in codes)
    if problem is None and are_alike:
        return
    found = comm.all_gather_object((problem and str(problem), mine), "shard: what differs") if not are_alike else []
    if problem is not None:
        raise problem
    for rank, (told, other) in enumerate(found):
        if told is not None:
            raise DivergenceError(f"shard: rank {rank} cannot read its data, which every rank must give alike: {told}")
        differ = [name for name in {**other, **found[0][1]} if other.get(name) != found[0][1].get(name)]
        if differ:
            raise DivergenceError(
                f"shard: every rank must give the same data, parts and options, but rank {rank} and rank 0 differ in "
                f"{', '.join(differ)}. Load the data alike on every rank, and seed what is drawn"
            )


def _digests(raw: RawGraph, owners: Mapping[NodeType, Tensor | None], options: Options) -> dict[str, str]:
    """What tells different graphs apart, by words for it."""
    found = {"options": repr(options), "the numbers of nodes": repr(raw.num_nodes)}
    found |= {f"the parts of {kind!r}": "" if owner is None else _digest(owner) for kind, owner in owners.items()}
    for kind, ends in raw.edges.items():
        found[f"the edges of {kind}"] = f"{_digest(ends.src)} {_digest(ends.dst)}"
    for kinds in (raw.node_fields, raw.edge_fields):
        for owner_kind, fields in kinds.items():
            for name, rows in fields.items():
                found[f"field {name!r} of {owner_kind!r}"] = f"{rows.dtype} {[*rows.shape]} {_content(rows)}"
    found["the fields of the graph"] = repr(raw.graph_fields)
    return found


def _content(rows: Field) -> str:
    """What tells the content of fields apart, as far as it is in memory."""
    if isinstance(rows, FileRows):
        return str(rows.name)
    if rows.layout is torch.sparse_csr:
        return "".join(map(_digest, (rows.crow_indices(), rows.col_indices(), rows.values())))
    return _digest(rows)


def _digest(rows: Tensor) -> str:
    return str(checksum(rows)) if rows.device.type == "cpu" else tensor_digest(rows)
