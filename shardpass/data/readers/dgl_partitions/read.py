"""The whole graph of a DGL partition, put together from its parts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shardpass.data.raw import Division, EdgeArrays, EdgeType, RawGraph
from shardpass.data.readers.dgl import type_names
from shardpass.data.readers.dgl_partitions.config import Config, read_config
from shardpass.data.readers.dgl_partitions.fields import ORIGINAL, OriginalIds, read_fields
from shardpass.data.readers.dgl_partitions.files import integers, read_part_graph


def read_dgl_partition(path: str | os.PathLike[str]) -> RawGraph:
    """The whole graph of a DGL partition, checked, with the partition itself as its `division`.

    Nodes and edges have their original ids and order if these are stored with the parts, in files of their own or as a
    field ``orig_id``. Otherwise they have the ids that DGL gave them when it partitioned the graph. `source` says
    which. DGL stores booleans as uint8. Fields with ``mask`` in their name that hold zeros and ones only are read as
    booleans, others stay uint8.

    Args:
        path: the JSON that ``dgl.distributed.partition_graph`` wrote.

    Raises:
        ValueError: when a file is missing, cut short or altered, or was written for GraphBolt or by a DGL before 1.0.
            The error names the file.
    """
    config = read_config(Path(path))
    whole = _read_graphs(config)
    edge_labels = [":".join(kind) for kind in config.edge_types]
    node_fields = read_fields(config.node_types, config.nodes, config.node_files)
    edge_fields = read_fields(edge_labels, config.edges, config.edge_files)
    nodes = OriginalIds(config.node_types, config.nodes, config.node_files, whole.node_originals, node_fields)
    edges = OriginalIds(edge_labels, config.edges, config.edge_files, whole.edge_originals, edge_fields)
    node_names, edge_names = type_names(config.node_types, config.edge_types)
    kinds = list(node_names.values())
    graph = RawGraph(
        dict(zip(kinds, config.nodes.totals)),
        dict(zip(edge_names.values(), _original_ends(config, whole, nodes, edges))),
        dict(zip(kinds, nodes.fields())),
        dict(zip(edge_names.values(), edges.fields())),
        {},
        f"{config.path.name} (DGL partition, {config.method}; {nodes.described()}, {edges.described()})",
        Division(config.nodes.num_parts, dict(zip(kinds, nodes.parts()))),
    )
    return graph.validate()


@dataclass
class _Whole:
    """The graphs of all parts as one, by DGL's ids.

    src, dst: node ids of both ends of the edges, int64 [num_edges].
    node_originals, edge_originals: original ids, -1 where no part has them.
    """

    src: np.ndarray
    dst: np.ndarray
    node_originals: np.ndarray
    edge_originals: np.ndarray


def _read_graphs(config: Config) -> _Whole:
    num_nodes, num_edges = sum(config.nodes.totals), sum(config.edges.totals)
    whole = _Whole(*(np.full(count, -1, np.int64) for count in (num_edges, num_edges, num_nodes, num_edges)))
    for part, files in enumerate(config.parts):
        _add_part(config, part, files.graph, whole)
    return whole


def _add_part(config: Config, part: int, path: Path, whole: _Whole) -> None:
    """Add what a part owns: its inner nodes, and its inner edges, which are those into them."""
    graph = read_part_graph(path)
    ids = integers(graph.node_data, "_ID", path)
    own_nodes = np.flatnonzero(integers(graph.node_data, "inner_node", path))
    own_edges = np.flatnonzero(integers(graph.edge_data, "inner_edge", path))
    edge_ids = integers(graph.edge_data, "_ID", path)[own_edges]
    config.nodes.check_owned(ids[own_nodes], part, path)
    config.edges.check_owned(edge_ids, part, path)
    src, dst = ids[graph.src[own_edges]], ids[graph.dst[own_edges]]
    _check_ends(config, part, path, edge_ids, (src, dst))
    whole.src[edge_ids], whole.dst[edge_ids] = src, dst
    if ORIGINAL in graph.node_data:
        whole.node_originals[ids[own_nodes]] = integers(graph.node_data, ORIGINAL, path)[own_nodes]
    if ORIGINAL in graph.edge_data:
        whole.edge_originals[edge_ids] = integers(graph.edge_data, ORIGINAL, path)[own_edges]


def _check_ends(
    config: Config, part: int, path: Path, edge_ids: np.ndarray, ends: tuple[np.ndarray, np.ndarray]
) -> None:
    edge_kinds, _, _ = config.edges.locate(edge_ids, path)
    for end, ids in zip((0, 2), ends):
        kinds, _, parts = config.nodes.locate(ids, path)
        if end == 2 and (parts != part).any():
            raise ValueError(f"{path} is altered: an inner edge leads to a node of another part")
        expected = np.array([config.node_types.index(kind[end]) for kind in config.edge_types], np.int64)
        wrong = np.flatnonzero(kinds != expected[edge_kinds])
        if wrong.size:
            kind: EdgeType = config.edge_types[edge_kinds[wrong[0]]]
            raise ValueError(f"{path} is altered: an edge of type {kind} is at a node of another type")


def _original_ends(config: Config, whole: _Whole, nodes: OriginalIds, edges: OriginalIds) -> list[EdgeArrays]:
    ends = [config.edges.by_type(config.nodes.locate(ids, config.path)[1]) for ids in (whole.src, whole.dst)]
    found = []
    for number, (source, _, target) in enumerate(config.edge_types):
        src, dst = (
            edges.in_order(number, nodes.of(config.node_types.index(kind), of_type[number]))
            for kind, of_type in zip((source, target), ends)
        )
        found.append(EdgeArrays(torch.from_numpy(src), torch.from_numpy(dst)))
    return found
