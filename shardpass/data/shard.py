"""`shard`: a graph in memory, which every rank holds alike, as each rank's share. No file is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardpass.connection import this_process
from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import (
    Known,
    Options,
    Ranks,
    agree,
    checksum,
    digest,
    gather_or_fail,
    ordinary_tensors,
    require_options,
    require_ranks,
    require_same,
    tensor_digest,
)
from shardpass.core.sharding import HOST, NODE, NodeType
from shardpass.data.by_space import bisected, refined
from shardpass.data.file_rows import FileRows
from shardpass.data.in_memory import Owners, Structure, structure_of
from shardpass.data.raw import ADJACENCY, RawGraph
from shardpass.data.readers.dgl import is_dgl
from shardpass.data.readers.dispatch import read
from shardpass.data.rows import Field

By = Literal["range", "space"]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
            order; ``"space"`` nodes that lie close together, by the node field ``pos``: as many, or a few more where
            that cuts fewer edges.
        options: as of `load`.
        drop: names of fields to leave out.

    Raises:
        ValueError, TypeError: what is wrong with the data or the parts, on every rank.
        DivergenceError: ranks gave different data, parts or options.
        PeerFailure: another rank cannot read its data.
    """
    is_alone, comm = comm is None, this_process() if comm is None else comm
    require_ranks(comm, "shard(data, comm)")
    options = require_options(options, "shard(data, comm, options=)")
    with ordinary_tensors(), comm.out_of_turn():
        return _sharded(data, comm, parts, by, options, drop, is_alone)


class _Given(NamedTuple):
    """What a rank was given.

    Args:
        raw: the graph, checked; its edges are not looked at where `known` has them.
        owners: empty where `known` has them.
        known: what an earlier call made of the same tensors.
        problem: why there is none of this.
    """

    raw: RawGraph | None
    owners: Owners
    known: Structure | None
    problem: Exception | None


class _Structures(Known[Structure]):
    """What was made of the last few edge tensors, and of graphs of DGL, which make their tensors anew each time."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.of_graphs = WeakKeyDictionary[Any, tuple[Any, Structure]]()

    def of_graph(self, graph: Any, key: Any) -> Structure | None:
        """What was made of a graph of DGL whose edges had an equal `key`."""
        known, structure = self.of_graphs.get(graph, (None, None))
        return structure if known == key else None


def _sharded(
    data: Any, comm: Ranks, parts: Any, by: By, options: Options, drop: Collection[str], is_alone: bool
) -> ShardedGraph:
    kept, tensors = comm.caches.of(_Structures), _tensors_of(data, parts)
    key = repr(options), by, (*parts,) if isinstance(parts, Mapping) else ()
    if contents := _contents_of(data, parts):
        known = kept.of_graph(data, (key, contents))
    else:
        known = kept.find(key, tensors) if tensors else None
    given = _given(data, comm, parts, by, drop, known)
    codes = _codes(comm, options, given)
    if any(number != codes[0][1] for _, number in codes):  # some ranks know the edges, and others do not
        given = _given(data, comm, parts, by, drop, None)
        codes = _codes(comm, options, given)
    _refuse_unlike(comm, options, given, codes)
    raw, structure = given.raw, given.known
    assert raw is not None  # what failed has been raised
    if is_alone:
        comm.move_to(next((ends.src.device for ends in raw.edges.values()), HOST))
    if structure is None:
        kept.made += 1
        structure = structure_of(raw, given.owners, comm, options, kept.made)
        if contents:
            kept.of_graphs[data] = (key, contents), structure
        elif tensors:
            kept.keep(key, tensors, structure)
    return structure.graph(raw, comm, options)


def _given(data: Any, comm: Ranks, parts: Any, by: By, drop: Collection[str], known: Structure | None) -> _Given:
    try:
        _check_arguments(data, drop)
        raw = read(data, drop=tuple(drop), device=None, edges_are_known=known is not None)
        if known is not None and not known.is_of(raw):
            raw, known = raw.validate(device=None), None
        _check_batch(raw)
        owners = {} if known else {kind: _owner(raw, kind, parts, by, comm.size) for kind in raw.num_nodes}
        return _Given(raw, owners, known, None)
    except (ValueError, TypeError) as error:
        return _Given(None, {}, None, error)


def _check_arguments(data: Any, drop: Collection[str]) -> None:
    """Refuse fields that gradients would not reach, and names of fields that are none."""
    if isinstance(drop, str):
        raise TypeError(f"shard(drop={drop!r}): expected names of fields, such as [{drop!r}]")
    fields = [field for store in _stores_of(data) for field in store.items()]
    names = {name for name, _ in fields if isinstance(name, str)}
    values = {"edge_weight", "edge_attr"} if ADJACENCY in names else set()  # what those of a matrix are called here
    if unknown := set(drop) - names - values:
        raise ValueError(f"shard(drop=): there is no field {sorted(unknown)}; there are {sorted(names)}")
    for name, value in fields:
        if isinstance(value, Tensor) and value.requires_grad and name not in drop:
            raise ValueError(
                f"shard: field {name!r} requires a gradient, which own rows of a graph would not lead to: leave it out "
                f"(drop=[{name!r}]) and give the model graph.own(...) of it"
            )


def _check_batch(raw: RawGraph) -> None:
    batch = raw.node_fields.get(NODE, {}).get("batch")
    if isinstance(batch, Tensor) and (batch.dtype not in _INTEGERS or (batch.numel() and int(batch.min()) < 0)):
        raise ValueError(f"shard: the field batch ({batch.dtype}) must hold the number of each node's graph, from 0")


def _stores_of(data: Any) -> list[Mapping[Any, Any]]:
    """Where a `Data`, a `HeteroData`, a `DGLGraph` or a dict has its fields by name."""
    if isinstance(data, Mapping):
        return [data, *(store for store in data.values() if isinstance(store, Mapping))]
    if (stores := getattr(data, "stores", None)) is not None:
        return [*stores]
    kinds = getattr(data, "ntypes", []), getattr(data, "canonical_etypes", [])
    return [*(data.nodes[kind].data for kind in kinds[0]), *(data.edges[kind].data for kind in kinds[1])]


def _tensors_of(data: Any, parts: Any) -> list[Tensor]:
    """The very tensors in which edges and parts are given; none where some are not tensors."""
    stores = [] if isinstance(getattr(data, "ntypes", None), list) else _stores_of(data)
    found = [store["edge_index"] for store in stores if "edge_index" in store]
    found += [] if parts is None else [*parts.values()] if isinstance(parts, Mapping) else [parts]
    has_matrices = any(ADJACENCY in store for store in stores)
    return found if not has_matrices and all(type(one) is Tensor for one in found) else []


def _contents_of(data: Any, parts: Any) -> tuple[Any, ...]:
    """What tells the edges of a `DGLGraph` and the parts apart; empty for other graphs, and where it is on a device."""
    if not is_dgl(data) or type(data).__module__.split(".")[0] != "dgl" or data.is_block or data.device.type != "cpu":
        return ()
    given = [] if parts is None else [*parts.values()] if isinstance(parts, Mapping) else [parts]
    edges = [ends for kind in data.canonical_etypes for ends in data.all_edges("all", None, kind)]
    if not all(isinstance(one, Tensor) and one.device.type == "cpu" for one in given):
        return ()
    return tuple((one.dtype, *one.shape, checksum(one)) for one in (*edges, *given))


def _owner(raw: RawGraph, kind: NodeType, parts: Any, by: By, size: int) -> Tensor | None:
    """The rank of each node of a type, checked."""
    if by not in get_args(By):
        raise ValueError(f"shard(by={by!r}): expected one of {get_args(By)}")
    if isinstance(parts, Mapping) and (unknown := parts.keys() - raw.num_nodes.keys()):
        raise ValueError(f"shard(parts=) has {sorted(unknown)}, which are no node types of this graph")
    if parts is not None and not isinstance(parts, Mapping) and len(raw.num_nodes) > 1:
        raise ValueError(f"shard(parts=): expected a dict, with the ranks of the nodes of {[*raw.num_nodes]}")
    given, count = parts.get(kind) if isinstance(parts, Mapping) else parts, raw.num_nodes[kind]
    if given is None:
        return None if by == "range" else _close_together(raw, kind, size)
    what = f"shard(parts=): the ranks of {kind!r} nodes"
    try:
        owner = torch.as_tensor(given).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{what} are a {type(given).__name__}; expected integers, [{count}]") from None
    if owner.dtype not in _INTEGERS:
        raise TypeError(f"{what} are {owner.dtype}; expected integers, [{count}]")
    if owner.shape != (count,):
        raise ValueError(f"{what} have the shape {list(owner.shape)}; expected [{count}], one for each node")
    low, high = (int(one) for one in owner.aminmax()) if count else (0, 0)
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        position = int((owner == wrong).nonzero()[0])
        raise ValueError(f"{what}: {wrong} at position {position} is no rank; there are {size}, from 0")
    return owner.long()


def _close_together(raw: RawGraph, kind: NodeType, size: int) -> Tensor:
    owner = bisected(_positions(raw, kind), size)
    edges = [(ends.src, ends.dst) for ends_in, ends in raw.edges.items() if ends_in[::2] == (kind, kind)]
    return refined(owner, edges, size) if edges and size > 1 else owner


def _positions(raw: RawGraph, kind: NodeType) -> Tensor:
    points = raw.node_fields.get(kind, {}).get("pos")
    is_real = isinstance(points, Tensor) and not points.is_complex() and points.dtype != torch.bool
    if not is_real or not isinstance(points, Tensor) or points.dim() != 2 or not points.size(1):
        raise ValueError(
            f"shard(by='space') needs positions of the {kind!r} nodes, the field pos, [num_nodes, dimensions]"
        )
    if not bool(points.isfinite().all()):
        row = int((~points.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"shard(by='space'): the position of {kind!r} node {row} is {points[row].tolist()}")
    return points


def _codes(comm: Ranks, options: Options, given: _Given) -> list[list[int]]:
    """``[digest, number of the known structure]`` of every rank. Collective."""
    if comm.size == 1:
        return [[0, 0]]
    if given.problem is not None:
        return agree(comm, "shard", [-1, 0])
    return agree(comm, "shard", [digest(repr(_digests(given, options))), given.known.number if given.known else 0])


def _refuse_unlike(comm: Ranks, options: Options, given: _Given, codes: list[list[int]]) -> None:
    """Raise unless every rank was given the same, and it is sound. Collective where it is not."""
    if any(code != codes[0] for code in codes):
        mine = {} if given.raw is None else _digests(given, options)
        every = gather_or_fail(comm, "shard: what differs", mine, given.problem, "could not read its data")
        names = dict.fromkeys(name for found in every for name in found)
        require_same(every, names, "shard", ". Load the data alike on every rank, and seed what is drawn")
    if given.problem is not None:
        raise given.problem


def _digests(given: _Given, options: Options) -> dict[str, str]:
    """What tells different graphs apart, by words for it. Edges that are known are alike."""
    raw = given.raw
    assert raw is not None
    found = {"options": repr(options), "numbers of nodes": repr(raw.num_nodes), "edge types": repr([*raw.edges])}
    found |= {f"parts of {kind!r}": "" if owner is None else _digest(owner) for kind, owner in given.owners.items()}
    for kind, ends in raw.edges.items() if given.known is None else ():
        found[f"edges of {kind}"] = f"{_digest(ends.src)} {_digest(ends.dst)}"
    for kinds in (raw.node_fields, raw.edge_fields):
        for owner_kind, fields in kinds.items():
            for name, rows in fields.items():
                found[f"field {name!r} of {owner_kind!r}"] = f"{rows.dtype} {[*rows.shape]} {_content(rows)}"
    found["fields of the graph"] = repr(raw.graph_fields)
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
