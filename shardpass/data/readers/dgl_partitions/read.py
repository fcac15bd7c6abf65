"""The whole graph of a DGL partition, put together from its parts."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from shardpass.data.raw import Division, EdgeArrays, RawGraph
from shardpass.data.readers.dgl import type_names
from shardpass.data.readers.dgl_partitions.config import Config, IdRanges, read_config
from shardpass.data.readers.dgl_partitions.fields import read_fields
from shardpass.data.readers.dgl_partitions.files import PartGraph, integers, read_part_graph


def read_dgl_partition(path: str | os.PathLike[str]) -> RawGraph:
    """The whole graph of a DGL partition, checked, with the partition itself as its `division`.

    Nodes and edges have the ids that DGL gave them when it partitioned the graph. DGL stores booleans as uint8. Fields
    with ``mask`` in their name that hold zeros and ones only are read as booleans, others stay uint8.

    Args:
        path: the JSON that ``dgl.distributed.partition_graph`` wrote.

    Raises:
        ValueError: when a file is missing, cut short or altered, or was written for GraphBolt or by a DGL before 1.0.
            The error names the file.
    """
    config = read_config(Path(path))
    edge_labels = [":".join(kind) for kind in config.edge_types]
    node_fields = read_fields(config.node_types, config.nodes, [part.node_fields for part in config.parts])
    edge_fields = read_fields(edge_labels, config.edges, [part.edge_fields for part in config.parts])
    node_names, edge_names = type_names(config.node_types, config.edge_types)
    kinds = list(node_names.values())
    graph = RawGraph(
        dict(zip(kinds, config.nodes.totals)),
        dict(zip(edge_names.values(), _read_edges(config))),
        dict(zip(kinds, node_fields)),
        dict(zip(edge_names.values(), edge_fields)),
        {},
        f"{config.path.name} (DGL partition, {config.method}; DGL's new node ids, DGL's new edge ids)",
        Division(config.nodes.num_parts, dict(zip(kinds, _parts(config.nodes)))),
    )
    return graph.validate()


def _parts(nodes: IdRanges) -> list[torch.Tensor]:
    """The part of each node of each type, int32."""
    parts = torch.arange(nodes.num_parts, dtype=torch.int32)
    return [parts.repeat_interleave(torch.from_numpy(sizes)) for sizes in nodes.sizes]


def _read_edges(config: Config) -> list[EdgeArrays]:
    """The edges of each type, by the numbers of nodes and edges within their types."""
    for part, files in enumerate(config.parts):  # before memory is taken for what the JSON claims
        size = files.graph.stat().st_size if files.graph.is_file() else None
        claimed = config.nodes.count(part) + config.edges.count(part)
        if size is not None and size < claimed:
            raise ValueError(
                f"{files.graph} is cut short or altered ({size} bytes for {claimed} nodes and edges); copy it again, "
                f"or correct {config.path}"
            )
    src, dst = np.empty((2, sum(config.edges.totals)), np.int64)
    for part, files in enumerate(config.parts):
        edge_ids, src_ids, dst_ids = own_edges(config, part, read_part_graph(files.graph))
        src[edge_ids], dst[edge_ids] = src_ids, dst_ids
    ends = (config.edges.by_type(config.nodes.locate(ids, config.path)[1]) for ids in (src, dst))
    return [EdgeArrays(torch.from_numpy(sources), torch.from_numpy(targets)) for sources, targets in zip(*ends)]


def own_edges(config: Config, part: int, graph: PartGraph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The inner edges of a part, which are those into its inner nodes: DGL's ids of the edges and of both ends."""
    path = config.parts[part].graph
    ids = integers(graph.node_data, "_ID", path)
    own_nodes = np.flatnonzero(integers(graph.node_data, "inner_node", path))
    own_edges = np.flatnonzero(integers(graph.edge_data, "inner_edge", path))
    edge_ids = integers(graph.edge_data, "_ID", path)[own_edges]
    config.nodes.check_owned(ids[own_nodes], part, path)
    config.edges.check_owned(edge_ids, part, path)
    edge_kinds, _, _ = config.edges.locate(edge_ids, path)
    src, dst = ids[graph.src[own_edges]], ids[graph.dst[own_edges]]
    for end, end_ids in ((0, src), (2, dst)):
        kinds, _, parts = config.nodes.locate(end_ids, path)
        if end == 2 and (parts != part).any():
            raise ValueError(f"{path} is altered: an inner edge leads to a node of another part")
        expected = np.array([config.node_types.index(kind[end]) for kind in config.edge_types], np.int64)
        if (kinds != expected[edge_kinds]).any():
            raise ValueError(f"{path} is altered: an inner edge is at a node of another type")
    return edge_ids, src, dst
