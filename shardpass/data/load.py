"""`load`: a store on disk as each rank's share of the graph."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from shardpass.backends.communicator import Communicator
from shardpass.core.graphs import OwnFields, Relation, ShardedGraph, ShardedHeteroGraph, build_relation
from shardpass.core.ranks import Options
from shardpass.core.sharding import EDGE, NODE, NodeType, Ownership
from shardpass.data.merge import RankData, merge_parts, parts_of_rank
from shardpass.data.store import Store, open_store
from shardpass.errors import DivergenceError, PeerFailure


def load(path: str | Path, comm: Communicator, options: Options | None = None) -> ShardedGraph:
    """This rank's share of the partitioned graph at `path`. Collective.

    A graph with several node or edge types comes as a `ShardedHeteroGraph`. Any number of ranks up to the number of
    parts will do; each owns a contiguous run of parts. Every rank must pass the same store and options.

    Raises:
        ValueError: more ranks than parts.
        StoreError: the store is missing, torn or altered (on the rank that found it; the others say which). Fields are
            verified when they are first read, or all of them by ``shardpass inspect --verify``.
        DivergenceError: ranks passed different stores or options.
    """
    options = replace(options or Options())  # what mode="auto" comes to is this graph's own
    store, data, problem = None, None, None
    try:
        store = open_store(path)
        data = merge_parts(store, parts_of_rank(store.num_parts, comm.size, comm.rank))
    except (OSError, ValueError) as error:
        problem = error
    _agree_on_store(comm, store, options, problem)
    assert store is not None and data is not None
    ownership = {kind: _ownership(store, kind, comm.size) for kind in store.manifest.node_types}
    relations = {kind: _relation(comm, store, data, kind, ownership, options) for kind in store.manifest.edge_types}
    fields = {kind: OwnFields(data.node_fields[kind], lambda t: t.to(comm.device)) for kind in data.node_fields}
    classes = {kind: _num_classes(comm, kind, fields[kind]) for kind in ownership if "y" in fields[kind]}
    shared: dict[str, Any] = {
        "total_edges": dict(store.manifest.num_edges),
        "fingerprint": store.manifest.graph_fingerprint,
        "partition_fingerprint": store.manifest.partition_fingerprint,
        "contents": _contents(store),
    }
    share = (comm, options, ownership, data.node_ids, fields, relations)
    is_homogeneous = list(ownership) == [NODE] and list(relations) == [EDGE]
    return (ShardedGraph if is_homogeneous else ShardedHeteroGraph)(*share, num_classes=classes, **shared)


def _agree_on_store(comm: Communicator, store: Store | None, options: Options, problem: Exception | None) -> None:
    """Go on only if every rank opened the same store with the same options."""
    mine = {
        "problem": "" if problem is None else str(problem),
        "store": _contents(store) if store else "",
        "options": {name: str(value) for name, value in asdict(options).items()},
    }
    theirs = comm.all_gather_object(mine, label="load: store and options")
    if problem is not None:
        raise problem
    for rank, other in enumerate(theirs):
        if other["problem"]:
            raise PeerFailure(f"rank {rank} could not load its parts: {other['problem']}")
        for what in ("store", "options"):
            if other[what] != theirs[0][what]:
                raise DivergenceError(
                    f"every rank must load the same {what}: rank 0 has {theirs[0][what]}, rank {rank} has {other[what]}"
                )


def _contents(store: Store) -> str:
    """What is in a store, in words that are the same for copies of it only: fields included."""
    files = [(record.header_sha256, sorted(record.tensors.items())) for record in store.manifest.files]
    contents = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return f"one with partition {store.manifest.partition_fingerprint[:12]} and contents {contents[:24]}"


def _ownership(store: Store, node_type: NodeType, ranks: int) -> Ownership:
    offsets = store.manifest.offsets[node_type]
    starts = [offsets[parts_of_rank(store.num_parts, ranks, rank)[0]] for rank in range(ranks)]
    return Ownership((*starts, offsets[-1]))


def _relation(
    comm: Communicator,
    store: Store,
    data: RankData,
    edge_type: tuple[str, str, str],
    ownership: dict[NodeType, Ownership],
    options: Options,
) -> Relation:
    edges = data.edges[edge_type]
    return build_relation(
        comm,
        ownership[edge_type[0]],
        edges.src,
        edges.dst,
        ownership[edge_type[2]].num_own(comm.rank),
        edges.edge_ids,
        data.edge_fields[edge_type],
        options,
        (edge_type[0], edge_type[2]),
    )


def _num_classes(comm: Communicator, node_type: NodeType, fields: OwnFields) -> int:
    """Found when the graph is built, since a getter must not communicate."""
    y = fields["y"]
    if y.is_floating_point():
        return y.size(-1) if y.dim() > 1 else 1
    largest = torch.tensor([int(y.max()) if y.numel() else -1])
    label = f"load: number of classes of {node_type!r}"
    return int(comm.all_reduce(largest.to(comm.device), "max", label=label)) + 1
