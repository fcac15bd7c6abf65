"""Directories written by ``dgl.distributed.partition_graph``, read without dgl."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardpass.data.raw import EdgeArrays, NodeType, RawGraph
from shardpass.data.readers.dgl import type_names
from shardpass.data.readers.dgl_config import Config, IdRanges, read_config
from shardpass.data.readers.dgl_files import Stored, read_part_graph, reordered
from shardpass.data.readers.dgl_rows import ORIGINAL, TypedRows


class DglPartition(NamedTuple):
    """A graph that DGL partitioned: the whole graph, the part of each node by its id in `graph`, how many parts."""

    graph: RawGraph
    assignment: dict[NodeType, Tensor]
    num_parts: int


def read_dgl_partition(path: str | os.PathLike[str], *, node_ids: Any = None, edge_ids: Any = None) -> DglPartition:
    """The whole graph of a DGL partition, checked, and the partition itself.

    Nodes and edges have their original ids and order where these are known: passed here, stored with the parts, or as
    a field ``orig_id``. Otherwise they have the ids that DGL gave them when it partitioned the graph; `graph.source`
    says which. DGL stores booleans as uint8: fields with ``mask`` in their name that hold zeros and ones only come back
    as booleans, others stay uint8.

    Args:
        path: the JSON that ``dgl.distributed.partition_graph`` wrote.
        node_ids: the first of what ``partition_graph(..., return_mapping=True)`` returned: the original id of each
            node, or a dict of these by node type.
        edge_ids: the second; a dict of these is by edge type (source type, relation, destination type).

    Raises:
        ValueError: a file that is missing, cut short or altered (it is named); files of GraphBolt or of DGL before 1.0.
        TypeError: original ids that are not integers.
    """
    config = read_config(Path(path))
    graphs = _read_graphs(config)
    nodes, edges = _rows(config)
    nodes.find_orders(node_ids, graphs.node_orders)
    edges.find_orders(edge_ids, graphs.edge_orders)
    named_nodes, named_edges = type_names(config.node_types, config.edge_types)
    node_names, edge_names = list(named_nodes.values()), list(named_edges.values())
    graph = RawGraph(
        dict(zip(node_names, config.nodes.totals)),
        dict(zip(edge_names, _original_ends(config, graphs, nodes, edges))),
        dict(zip(node_names, nodes.fields())),
        dict(zip(edge_names, edges.fields())),
        {},
        f"{config.path.name} (DGL partition, {config.method}; {nodes.described()}, {edges.described()})",
    )
    assignment = {name: nodes.parts(number) for number, name in enumerate(node_names)}
    return DglPartition(graph.validate(), assignment, config.nodes.num_parts)


def _rows(config: Config) -> tuple[TypedRows, TypedRows]:
    node_files = [part.node_fields for part in config.parts]
    edge_files = [part.edge_fields for part in config.parts]
    labels = [":".join(kind) for kind in config.edge_types]
    return (
        TypedRows("node", config.node_types, config.node_types, config.nodes, node_files),
        TypedRows("edge", config.edge_types, labels, config.edges, edge_files),
    )


class _Graphs:
    """The graphs of all parts as one, by DGL's ids within each type; types go by number.

    `ends` holds both ends of the edges of each type; `node_orders` and `edge_orders` original ids, where there are any.
    """

    def __init__(self, config: Config) -> None:
        self.ends = [(np.empty(count, np.int64), np.empty(count, np.int64)) for count in config.edges.totals]
        self.node_orders: dict[int, np.ndarray] = {}
        self.edge_orders: dict[int, np.ndarray] = {}


def _read_graphs(config: Config) -> _Graphs:
    graphs = _Graphs(config)
    for part, files in enumerate(config.parts):
        _read_graph(config, part, files.graph, graphs)
    return graphs


def _read_graph(config: Config, part: int, path: Path, graphs: _Graphs) -> None:
    """Add what a part owns: its inner nodes, and its inner edges, which are those into them."""
    graph = read_part_graph(path)
    ids = _numbers(graph.node_data, "_ID", path)
    inner_nodes = _numbers(graph.node_data, "inner_node", path) != 0
    inner_edges = _numbers(graph.edge_data, "inner_edge", path) != 0
    own_nodes = _Own(config.nodes, ids[inner_nodes], part, path)
    own_edges = _Own(config.edges, _numbers(graph.edge_data, "_ID", path)[inner_edges], part, path)
    kinds, numbers, owners = config.nodes.locate(ids, path)
    for end, ends in enumerate((graph.src[inner_edges], graph.dst[inner_edges])):
        if end == 1 and (owners[ends] != part).any():
            raise ValueError(f"{path} is altered: an inner edge leads to a node of another part")
        for number, kind in enumerate(config.edge_types):
            chosen, rows = own_edges.of(number)
            if (kinds[ends[chosen]] != config.node_types.index(kind[2 * end])).any():
                raise ValueError(f"{path} is altered: an edge of type {kind} is at a node of another type")
            graphs.ends[number][end][rows] = numbers[ends[chosen]]
    if ORIGINAL in graph.node_data:
        own_nodes.spread(_numbers(graph.node_data, ORIGINAL, path)[inner_nodes], graphs.node_orders)
    if ORIGINAL in graph.edge_data:
        own_edges.spread(_numbers(graph.edge_data, ORIGINAL, path)[inner_edges], graphs.edge_orders)


class _Own:
    """The ids of the nodes or edges that a part owns, in the order of its graph; exactly those that are its by JSON."""

    def __init__(self, ranges: IdRanges, ids: np.ndarray, part: int, path: Path) -> None:
        self._ranges = ranges
        self._kinds, self._numbers, parts = ranges.locate(ids, path)
        if (parts != part).any() or ids.size != ranges.count(part) or np.unique(ids).size != ids.size:
            raise ValueError(
                f"{path} is altered or belongs to another partition: its inner {ranges.what}s are not those that the "
                f"JSON gives to part {part}"
            )

    def of(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of them are of a type, and their numbers within it."""
        chosen = np.flatnonzero(self._kinds == number)
        return chosen, self._numbers[chosen]

    def spread(self, values: np.ndarray, into: dict[int, np.ndarray]) -> None:
        """Put a value for each of them into the arrays of their types; what no part has stays -1."""
        for number, total in enumerate(self._ranges.totals):
            chosen, rows = self.of(number)
            into.setdefault(number, np.full(total, -1, np.int64))[rows] = values[chosen]


def _original_ends(config: Config, graphs: _Graphs, nodes: TypedRows, edges: TypedRows) -> list[EdgeArrays]:
    found = []
    for number, (source, _, target) in enumerate(config.edge_types):
        ends = []
        for ids, kind in zip(graphs.ends[number], (source, target)):
            node_order, edge_order = nodes.order(config.node_types.index(kind)), edges.order(number)
            ids = ids if node_order is None else node_order[ids]
            ends.append(torch.from_numpy(ids if edge_order is None else reordered(ids, edge_order)))
        found.append(EdgeArrays(*ends))
    return found


def _numbers(data: dict[str, Stored], name: str, path: Path) -> np.ndarray:
    values = data[name].values if name in data else np.empty((0, 0))
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(f"{path} holds no integers {name!r}, which the parts of a DGL partition have")
    return values
