"""How much of a graph the largest rank has: read from a store, or expected from counts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from shardpass.core.dryrun import EdgeSizes, Field, NodeSizes, RankSizes
from shardpass.core.exchange import can_cover
from shardpass.core.sharding import EDGE, NODE, EdgeType, NodeType
from shardpass.data import FieldInfo, Manifest, inspect, inspect_pairs, open_store

_MOST_CUT_EDGES = 10_000_000


@dataclass(frozen=True)
class GraphCounts:
    """A graph of which only the size is known.

    Args:
        nodes, edges: of the whole graph. Edges are directed: an undirected edge counts twice.
        num_features: channels of ``x``, float32.
        num_classes: of the labels.
        cut_fraction: fraction of the edges that begin on another rank than they end on. By default that of a random
            partition, ``1 - 1 / ranks``; good partitions of real graphs cut much less.
        halo_fraction: distinct remote sources of a rank per own node. By default as many as random edges have, see
            `expected_halo`.
    """

    nodes: int
    edges: int
    num_features: int
    num_classes: int = 2
    cut_fraction: float | None = None
    halo_fraction: float | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "edges", "num_features", "num_classes"):
            if not isinstance(getattr(self, name), int):
                raise TypeError(f"GraphCounts: {name} is an integer, got {getattr(self, name)!r}")
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        for name in ("cut_fraction", "halo_fraction"):
            if not isinstance(getattr(self, name), int | float | None):
                raise TypeError(f"GraphCounts: {name} is a number, got {getattr(self, name)!r}")
        if self.cut_fraction is not None and not 0 <= self.cut_fraction <= 1:
            raise ValueError(f"cut_fraction is in [0, 1], got {self.cut_fraction}")
        if self.halo_fraction is not None and not 0 <= self.halo_fraction < math.inf:
            raise ValueError(f"halo_fraction is at least 0, got {self.halo_fraction}")


def expected_halo(remote_nodes: int, cut_edges: int) -> int:
    """The expected number of distinct sources of `cut_edges` edges that begin at random ones of `remote_nodes` nodes.

    It is ``R * (1 - (1 - 1 / R)**c)``. If some nodes have many more edges than others, there are fewer.
    """
    if remote_nodes < 1 or cut_edges < 1:
        return 0
    return round(-remote_nodes * math.expm1(cut_edges * math.log1p(-1 / remote_nodes))) if remote_nodes > 1 else 1


def sizes_of(graph: str | os.PathLike[str] | GraphCounts, ranks: int, beyond_parts: bool = False) -> RankSizes:
    """How much the largest rank has when `graph`, a store or counts, is run on `ranks` ranks.

    With `beyond_parts`, a random partition is assumed for more ranks than a store has parts.

    Raises:
        ValueError: more ranks than parts, or no features.
    """
    if isinstance(graph, GraphCounts):
        fields = {"x": Field((graph.num_features,)), **_labels()}
        nodes = {NODE: NodeSizes(graph.nodes, fields, graph.num_classes)}
        return _expected(ranks, nodes, {EDGE: EdgeSizes(graph.edges, 0, 0)}, graph.cut_fraction, graph.halo_fraction)
    manifest = open_store(graph).manifest
    nodes = {kind: _node_sizes(graph, manifest, kind) for kind in manifest.node_types}
    edges = {
        kind: EdgeSizes(manifest.num_edges[kind], 0, 0, _stored(manifest.edge_fields[kind]))
        for kind in manifest.edge_types
    }
    if beyond_parts and ranks > manifest.num_parts:
        return _expected(ranks, nodes, edges)
    groups = inspect(graph, ranks).groups
    return RankSizes(
        ranks,
        {kind: replace(own, count=max(group.nodes[kind] for group in groups)) for kind, own in nodes.items()},
        {
            kind: EdgeSizes(
                max(group.edges[kind] for group in groups),
                max(group.cut_edges[kind] for group in groups),
                max(group.halo_rows[kind] for group in groups),
                own.fields,
            )
            for kind, own in edges.items()
        },
    )


def rows_spared(graph: str | os.PathLike[str] | GraphCounts, ranks: int) -> float:
    """The share of the rows of a layer that ranks need not fetch with partial sums; 0 if it is unknown.

    It is unknown of counts, without SciPy, and of so many cut edges that to count would take minutes.
    """
    if ranks == 1 or isinstance(graph, GraphCounts) or not can_cover():
        return 0.0
    if ranks > open_store(graph).num_parts or inspect(graph, ranks).num_cut_edges > _MOST_CUT_EDGES:
        return 0.0
    halo, fewest = inspect_pairs(graph, ranks)
    return 1 - float(fewest.sum()) / max(1, int(halo.sum()))


def _expected(
    ranks: int,
    nodes: dict[NodeType, NodeSizes],
    edges: dict[EdgeType, EdgeSizes],
    cut_fraction: float | None = None,
    halo_fraction: float | None = None,
) -> RankSizes:
    """What a rank has of a whole graph of these sizes, partitioned at random unless the fractions say otherwise."""
    own = {kind: replace(sizes, count=-(-sizes.count // ranks)) for kind, sizes in nodes.items()}
    fraction = 1 - 1 / ranks if cut_fraction is None else cut_fraction
    shares = {}
    for kind, sizes in edges.items():
        count = -(-sizes.count // ranks)
        cut = round(count * fraction) if ranks > 1 else 0
        remote = nodes[kind[0]].count - own[kind[0]].count
        halo = expected_halo(remote, cut)
        if halo_fraction is not None:
            halo = min(remote, cut, round(own[kind[0]].count * halo_fraction))
        shares[kind] = EdgeSizes(count, cut, halo, sizes.fields)
    return RankSizes(ranks, own, shares)


def _node_sizes(where: object, manifest: Manifest, kind: NodeType) -> NodeSizes:
    """What a store has of one node type. Labels are made up where a loss needs some that are not stored."""
    fields, is_only = _stored(manifest.node_fields[kind]), len(manifest.node_types) == 1
    if is_only and "x" not in fields:
        raise ValueError(f"{where} has no node features 'x'; there are: {', '.join(sorted(fields)) or 'none'}")
    if is_only or "y" in fields:
        fields = {**_labels(), **fields}
    return NodeSizes(manifest.num_nodes[kind], fields, _num_classes(where, manifest, kind))


def _labels() -> dict[str, Field]:
    return {"y": Field((), torch.int64), "train_mask": Field((), torch.bool)}


def _stored(fields: Mapping[str, FieldInfo]) -> dict[str, Field]:
    return {name: Field(info.shape, info.dtype) for name, info in fields.items()}


def _num_classes(where: object, manifest: Manifest, kind: NodeType) -> int:
    if "y" not in manifest.node_fields[kind]:
        return 2
    info = manifest.node_fields[kind]["y"]
    if info.dtype.is_floating_point:
        return info.shape[-1] if info.shape else 1
    store = open_store(where)  # type: ignore[arg-type]
    parts = (store.node_fields(kind, range(part, part + 1))["y"] for part in range(manifest.num_parts))
    largest = max((int(labels.max()) for labels in parts if labels.numel()), default=0)  # one part in memory at a time
    return max(1, largest + 1)


def known_sizes(graph: str | os.PathLike[str] | GraphCounts) -> tuple[int, int]:
    """Feature channels and classes of a store or counts.

    Raises:
        ValueError: a store of several types, or without features.
    """
    if isinstance(graph, GraphCounts):
        return graph.num_features, graph.num_classes
    manifest = open_store(graph).manifest
    if manifest.node_types != [NODE] or manifest.edge_types != [EDGE]:
        raise ValueError(
            f"{graph} holds a graph of several types ({manifest.node_types}), which the models of the command line do "
            f"not take: call shardpass.plan or train your model in a script"
        )
    sizes = _node_sizes(graph, manifest, NODE)
    shape = sizes.fields["x"].shape
    return (shape[-1] if shape else 1), sizes.num_classes
