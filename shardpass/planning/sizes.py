"""How much of a graph the largest rank has: read from a store, or expected from counts."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from shardpass.core.dryrun import Field, RankSizes
from shardpass.core.sharding import EDGE, NODE
from shardpass.data import Manifest, inspect, open_store


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
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        if self.cut_fraction is not None and not 0 <= self.cut_fraction <= 1:
            raise ValueError(f"cut_fraction is in [0, 1], got {self.cut_fraction}")
        if self.halo_fraction is not None and self.halo_fraction < 0:
            raise ValueError(f"halo_fraction is at least 0, got {self.halo_fraction}")


def expected_halo(remote_nodes: int, cut_edges: int) -> int:
    """The expected number of distinct sources of `cut_edges` edges that begin at random ones of `remote_nodes` nodes.

    It is ``R * (1 - (1 - 1 / R)**c)``. If some nodes have many more edges than others, there are fewer.
    """
    if remote_nodes < 1 or cut_edges < 1:
        return 0
    return round(-remote_nodes * math.expm1(cut_edges * math.log1p(-1 / remote_nodes))) if remote_nodes > 1 else 1


def sizes_of(graph: str | os.PathLike[str] | GraphCounts, ranks: int, beyond_parts: bool = False) -> RankSizes:
    """How much the largest rank has when `graph` is run on `ranks` ranks.

    Args:
        graph: a store or counts.
        beyond_parts: assume a random partition for more ranks than a store has parts.

    Raises:
        ValueError: more ranks than parts, several types, no features, or fewer than one rank.
    """
    if ranks < 1:
        raise ValueError(f"the number of ranks is at least 1, got {ranks}")
    if isinstance(graph, GraphCounts):
        fields = {"x": Field((graph.num_features,)), **_labels()}
        return _expected(graph, ranks, fields, {})
    manifest = open_store(graph).manifest
    fields, edge_fields = _fields(manifest, graph)
    classes = _num_classes(graph, manifest)
    if beyond_parts and ranks > manifest.num_parts:
        counts = GraphCounts(manifest.num_nodes[NODE], max(1, manifest.num_edges[EDGE]), 1, classes)
        return _expected(counts, ranks, fields, edge_fields)
    groups = inspect(graph, ranks).groups
    return RankSizes(
        ranks,
        max(group.num_nodes for group in groups),
        max(group.num_edges for group in groups),
        max(group.num_cut_edges for group in groups),
        max(group.num_halo_rows for group in groups),
        fields,
        edge_fields,
        classes,
    )


def _expected(counts: GraphCounts, ranks: int, fields: dict[str, Field], edge_fields: dict[str, Field]) -> RankSizes:
    nodes, edges = -(-counts.nodes // ranks), -(-counts.edges // ranks)
    fraction = 1 - 1 / ranks if counts.cut_fraction is None else counts.cut_fraction
    cut = round(edges * fraction) if ranks > 1 else 0
    remote = counts.nodes - nodes
    halo = expected_halo(remote, cut)
    if counts.halo_fraction is not None:
        halo = min(remote, cut, round(nodes * counts.halo_fraction))
    return RankSizes(ranks, nodes, edges, cut, halo, fields, edge_fields, counts.num_classes)


def _fields(manifest: Manifest, where: object) -> tuple[dict[str, Field], dict[str, Field]]:
    if manifest.node_types != [NODE] or manifest.edge_types != [EDGE]:
        raise ValueError(
            f"{where} holds a graph of several types ({manifest.node_types}); a plan is made of graphs with one node "
            f"type and one edge type"
        )
    node, edge = (
        {name: Field(info.shape, info.dtype) for name, info in fields.items()}
        for fields in (manifest.node_fields[NODE], manifest.edge_fields[EDGE])
    )
    if "x" not in node:
        raise ValueError(f"{where} has no node features 'x'; there are: {', '.join(sorted(node)) or 'none'}")
    return {**_labels(), **node}, edge


def _labels() -> dict[str, Field]:
    return {"y": Field((), torch.int64), "train_mask": Field((), torch.bool)}


def _num_classes(where: object, manifest: Manifest) -> int:
    if "y" not in manifest.node_fields[NODE]:
        return 2
    info = manifest.node_fields[NODE]["y"]
    if info.dtype.is_floating_point:
        return info.shape[-1] if info.shape else 1
    store = open_store(where)  # type: ignore[arg-type]
    parts = (store.node_fields(NODE, range(part, part + 1))["y"] for part in range(manifest.num_parts))
    return max(int(labels.max()) for labels in parts if labels.numel()) + 1  # one part in memory at a time


def known_sizes(graph: str | os.PathLike[str] | GraphCounts) -> tuple[int, int]:
    """Feature channels and classes of a store or counts.

    Raises:
        ValueError: a store of several types, or without features.
    """
    if isinstance(graph, GraphCounts):
        return graph.num_features, graph.num_classes
    manifest = open_store(graph).manifest
    node, _ = _fields(manifest, graph)
    shape = node["x"].shape
    return (shape[-1] if shape else 1), _num_classes(graph, manifest)
