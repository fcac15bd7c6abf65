"""`load`: a store on disk as each rank's share of the graph."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from shardpass.core.exchange import node_set
from shardpass.core.graphs import (
    OwnFields,
    Relation,
    ShardedGraph,
    ShardedHeteroGraph,
    node_ids,
    relation_of,
    row_of_last,
)
from shardpass.core.ranks import (
    Options,
    Ranks,
    RowSet,
    gather_or_fail,
    ordinary_tensors,
    require_options,
    require_ranks,
    require_same,
)
from shardpass.core.sharding import EDGE, NODE, EdgeType, NodeType, Ownership
from shardpass.data.in_memory import num_classes
from shardpass.data.lookup import StoreTables
from shardpass.data.merge import RankData, merge_parts, parts_of_rank
from shardpass.data.raw import ADJACENCY
from shardpass.data.store import Store, open_store
from shardpass.data.tally import Tally, check_tallies, tally


def load(path: str | Path, comm: Ranks, options: Options | None = None) -> ShardedGraph:
    """This rank's share of the partitioned graph at `path`. Collective.

    A graph with several node or edge types is returned as a `ShardedHeteroGraph`. There may be as many ranks as parts,
    or fewer; each rank owns a contiguous run of parts. Every rank must pass the same store and options. One rank that
    holds several parts is warned: its rows are as many as those of the original graph, and in another order.

    Raises:
        ValueError: when there are more ranks than parts, or for ``mode="auto"``, which a plan decides first.
        StoreError: when the store is missing, torn or altered. The rank that found it raises this; the others raise
            `PeerFailure`, which names that rank. Also, on every rank, when the parts are not one graph. A field is
            verified when it is first read; `shardpass.data.verify` checks all of them.
        DivergenceError: when ranks passed different stores or options.
    """
    require_ranks(comm, "load(path, comm)")
    options = require_options(options, "load(path, comm, options)")
    with ordinary_tensors(), comm.out_of_turn():
        return _loaded(path, comm, options)


def _loaded(path: str | Path, comm: Ranks, options: Options) -> ShardedGraph:
    store, problem, counted = None, None, {}
    try:
        if options.mode == "auto":
            raise ValueError(
                "mode='auto' must be decided before a graph is loaded: plan = shardpass.plan(model, path, comm=comm, "
                "options=options), then shardpass.load(path, comm, plan.options)"
            )
        store = open_store(path)
        data = merge_parts(store, comm.size, comm.rank)
        counted = tally(store, data)
        of_graph = store.graph_tensors()
        links = {kind: store.links(kind) for kind in store.manifest.edge_types}
    except (OSError, ValueError, TypeError) as error:
        problem = error
    _agree_on_store(comm, store, options, problem, counted)
    assert store is not None  # and all else is there: what failed has been raised
    ownership = {kind: _ownership(store, kind, comm.size) for kind in store.manifest.node_types}
    relations = {kind: _relation(comm, store, data, kind, ownership, options) for kind in store.manifest.edge_types}
    fields = {
        kind: OwnFields(data.node_fields[kind], comm, node_set(kind, owned.num_own(comm.rank)))
        for kind, owned in ownership.items()
    }
    classes = {kind: num_classes(some["y"], comm) for kind, some in fields.items() if "y" in some}
    is_homogeneous = list(ownership) == [NODE] and list(relations) == [EDGE]
    graph = (ShardedGraph if is_homogeneous else ShardedHeteroGraph)(
        comm, options, ownership, data.node_ids, fields, relations, num_classes=classes,
        total_edges=dict(store.manifest.num_edges), fingerprint=store.manifest.graph_fingerprint,
        partition_fingerprint=store.manifest.partition_fingerprint, contents=_contents(store),
        tables=StoreTables(store),
    )  # fmt: skip
    scalars = {name: value for name, value in store.manifest.graph_fields.items() if name != ADJACENCY}
    graph.graph_fields = {**scalars, **{name: value.to(comm.device) for name, value in of_graph.items()}}
    graph.column_names = store.manifest.columns
    graph.own_links = {kind: _own_links(graph, kind, fields) for kind, fields in links.items()}
    if comm.size == 1 < store.num_parts and any((ids[1:] < ids[:-1]).any() for ids in data.node_ids.values()):
        warnings.warn(
            f"{path}: this rank holds all nodes, not in the original order: partitioning has numbered them anew. "
            f"Take features, labels, masks and row numbers from this graph (graph.node_ids are the original numbers), "
            f"or partition it with parts=1, which keeps the order",
            stacklevel=3,
        )
    return graph


def _own_links(graph: ShardedGraph, kind: EdgeType, fields: dict[str, Tensor]) -> dict[str, Any]:
    """Every W-th link of a type, from that of this rank on, and its labels: positives often stand before negatives."""
    found: dict[str, Any] = {}
    comm, types = graph.comm, [end if len(graph.node_types) > 1 else None for end in kind[::2]]
    for name, values in fields.items():
        if name.endswith("_index"):
            share = values[:, comm.rank :: comm.size].to(comm.device)
            pairs = [node_ids(graph, ids, end) for ids, end in zip(share, types)]
            found[name] = node_ids(graph, share, types[0]) if types[0] == types[1] else tuple(pairs)
        else:
            found[name] = values[comm.rank :: comm.size].to(comm.device)
            comm.mark_rows(found[name], RowSet.fetched(len(found[name])))
    return found


def _agree_on_store(
    comm: Ranks, store: Store | None, options: Options, problem: Exception | None, counted: Tally
) -> None:
    """Go on only if every rank opened the same store with the same options, and the parts of all are one graph."""
    mine: dict[str, Any] = {
        "store": _contents(store) if store else "",
        "options": {name: str(value) for name, value in asdict(options).items()},
        "tally": counted,
    }
    every = gather_or_fail(comm, "load: store and options", mine, problem, "could not load its parts")
    require_same(every, ("store", "options"), "load")
    assert store is not None
    check_tallies(store.path, [other["tally"] for other in every])


def _contents(store: Store) -> str:
    """Words for a store. They are the same for copies of it, and differ if a field differs."""
    manifest = store.manifest
    return f"one with partition {manifest.partition_fingerprint[:12]} and contents {manifest.contents_fingerprint[:24]}"


def _ownership(store: Store, node_type: NodeType, ranks: int) -> Ownership:
    offsets = store.manifest.offsets[node_type]
    starts = [offsets[parts_of_rank(store.num_parts, ranks, rank)[0]] for rank in range(ranks)]
    return Ownership((*starts, offsets[-1]))


def _relation(
    comm: Ranks,
    store: Store,
    data: RankData,
    edge_type: tuple[str, str, str],
    ownership: dict[NodeType, Ownership],
    options: Options,
) -> Relation:
    edges, (source, _, target) = data.edges[edge_type], edge_type
    names = str(store.manifest.graph_fields.get(ADJACENCY, "")).split()
    last_node = row_of_last(data.node_ids[source], ownership[source].offsets[-1]) if source == target else None
    return relation_of(
        comm,
        edges.owners,
        ownership[source].num_own(comm.rank),
        ownership[target].num_own(comm.rank),
        edges.edge_ids,
        data.edge_fields[edge_type],
        options,
        (source, target),
        last_node=last_node,
        weights=next((name for name in names if name in data.edge_fields[edge_type]), None),
    )
