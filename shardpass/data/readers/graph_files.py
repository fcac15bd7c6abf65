"""Graphs in files that are too large for memory: opened by `partition`, which has a folder for temporary files."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardpass.data.file_rows import FileRows
from shardpass.data.raw import EDGE, NODE, EdgeArrays, RawGraph
from shardpass.data.readers.mapping import count_nodes
from shardpass.data.streaming.budget import Budget

PathLike = str | os.PathLike[str]


class GraphFiles(ABC):
    """A graph in files, not read yet. `shardpass.partition` takes it."""

    @abstractmethod
    def open(self, budget: Budget) -> RawGraph:
        """The graph, not yet checked, of arrays that stay in files: the given ones, or temporary ones in
        `budget.scratch` where the given ones cannot be read row by row."""


@dataclass(frozen=True)
class EdgeListFiles(GraphFiles):
    """An edge list and arrays beside it; made by `stream_edge_list`."""

    edges: Path
    fields: Mapping[str, Path]
    weights: Path | None = None
    num_nodes: int | None = None
    drop: tuple[str, ...] = field(default=())

    def open(self, budget: Budget) -> RawGraph:
        node_fields = {name: FileRows.of_npy(path) for name, path in self.fields.items() if name not in self.drop}
        edge_fields = {"edge_weight": FileRows.of_npy(self.weights)} if self.weights else {}
        ends = columns_of(FileRows.of_npy(self.edges))
        count = count_nodes(self.num_nodes, node_fields, NODE)
        source = f"{self.edges.name} (edge list)"
        return RawGraph({NODE: count}, {EDGE: ends}, {NODE: node_fields}, {EDGE: edge_fields}, {}, source)


def columns_of(edges: FileRows) -> EdgeArrays:
    """Both ends of edges of the shape [2, num_edges] or [num_edges, 2].

    Raises:
        ValueError: for another shape, or one that can be read both ways.
    """
    shape = list(edges.shape)
    if len(shape) != 2 or 2 not in shape:
        raise ValueError(f"{edges.path}: edges have the shape {shape}; expected [2, num_edges] or [num_edges, 2]")
    if shape == [2, 2]:
        raise ValueError(f"{edges.path}: edges of the shape [2, 2] can be read both ways; save them in another format")
    if shape[0] == 2:
        return EdgeArrays(edges.select(0), edges.select(1))
    return EdgeArrays(edges.select(slice(None), 0), edges.select(slice(None), 1))


def stream_edge_list(
    edges: PathLike,
    *,
    features: PathLike | None = None,
    labels: PathLike | None = None,
    masks: Mapping[str, PathLike] | None = None,
    weights: PathLike | None = None,
    num_nodes: int | None = None,
) -> EdgeListFiles:
    """An edge list in files, for `shardpass.partition`, which never holds it in memory as a whole."""
    given = {"x": features, "y": labels, **(masks or {})}
    fields = {name: Path(path) for name, path in given.items() if path is not None}
    return EdgeListFiles(Path(edges), fields, Path(weights) if weights is not None else None, num_nodes)
