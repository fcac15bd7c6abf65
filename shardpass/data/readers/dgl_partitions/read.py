"""The whole graph of a DGL partition, put together from its parts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardpass.data.raw import Division, EdgeArrays, RawGraph
from shardpass.data.readers.dgl import type_names
from shardpass.data.readers.dgl_partitions.description import Description, read_description
from shardpass.data.readers.dgl_partitions.files import PartGraph, Stored, integers, read_part_graph, read_tensors


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
    description = read_description(Path(path))
    edge_labels = [":".join(kind) for kind in description.edge_types]
    node_files, edge_files = zip(*[(part.node_fields, part.edge_fields) for part in description.parts])
    node_fields = read_fields(description.node_types, description.nodes.sizes, node_files)
    edge_fields = read_fields(edge_labels, description.edges.sizes, edge_files)
    node_names, edge_names = type_names(description.node_types, description.edge_types)
    kinds, parts = list(node_names.values()), torch.arange(description.nodes.num_parts, dtype=torch.int32)
    part_of = [parts.repeat_interleave(torch.from_numpy(sizes)) for sizes in description.nodes.sizes]
    graph = RawGraph(
        dict(zip(kinds, description.nodes.totals)),
        dict(zip(edge_names.values(), _read_edges(description))),
        dict(zip(kinds, node_fields)),
        dict(zip(edge_names.values(), edge_fields)),
        {},
        f"{description.path.name} (DGL partition, {description.method}; DGL's new node ids, DGL's new edge ids)",
        Division(description.nodes.num_parts, dict(zip(kinds, part_of))),
    )
    return graph.validate()


def _read_edges(description: Description) -> list[EdgeArrays]:
    """The edges of each type, by the numbers of nodes and edges within their types."""
    for part, files in enumerate(description.parts):  # before memory is taken for what the JSON claims
        size = files.graph.stat().st_size if files.graph.is_file() else None
        claimed = description.nodes.count(part) + description.edges.count(part)
        if size is not None and size < claimed:
            raise ValueError(
                f"{files.graph} is cut short or altered ({size} bytes for {claimed} nodes and edges); copy it again, "
                f"or correct {description.path}"
            )
    src, dst = np.empty((2, sum(description.edges.totals)), np.int64)
    for part, files in enumerate(description.parts):
        edge_ids, src_ids, dst_ids = own_edges(description, part, read_part_graph(files.graph))
        src[edge_ids], dst[edge_ids] = src_ids, dst_ids
    ends = (description.edges.by_type(description.nodes.locate(ids, description.path)[1]) for ids in (src, dst))
    return [EdgeArrays(torch.from_numpy(sources), torch.from_numpy(targets)) for sources, targets in zip(*ends)]


def own_edges(description: Description, part: int, graph: PartGraph) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The inner edges of a part, which are those into its inner nodes: DGL's ids of the edges and of both ends."""
    path = description.parts[part].graph
    ids = integers(graph.node_data, "_ID", path)
    own_nodes = np.flatnonzero(integers(graph.node_data, "inner_node", path))
    own_edges = np.flatnonzero(integers(graph.edge_data, "inner_edge", path))
    edge_ids = integers(graph.edge_data, "_ID", path)[own_edges]
    description.nodes.check_owned(ids[own_nodes], part, path)
    description.edges.check_owned(edge_ids, part, path)
    edge_kinds, _, _ = description.edges.locate(edge_ids, path)
    src, dst = ids[graph.src[own_edges]], ids[graph.dst[own_edges]]
    for end, end_ids in ((0, src), (2, dst)):
        kinds, _, parts = description.nodes.locate(end_ids, path)
        if end == 2 and (parts != part).any():
            raise ValueError(f"{path} is altered: an inner edge leads to a node of another part")
        expected = np.array([description.node_types.index(kind[end]) for kind in description.edge_types], np.int64)
        if (kinds != expected[edge_kinds]).any():
            raise ValueError(f"{path} is altered: an inner edge is at a node of another type")
    return edge_ids, src, dst


def read_fields(labels: Sequence[str], sizes: np.ndarray, paths: Sequence[Path]) -> list[dict[str, Tensor]]:
    """The fields of each type in some parts by name, with rows in the order of DGL's ids.

    Args:
        labels: the types, as in DGL's files.
        sizes: the number of nodes or edges of each type in each of the parts.
        paths: the file of fields of each of the parts.
    """
    pieces = [{_owner_of(key, labels, path): piece for key, piece in read_tensors(path).items()} for path in paths]
    found: list[dict[str, Tensor]] = [{} for _ in labels]
    for number, name in sorted({key for keys in pieces for key in keys}):
        label, stored = labels[number], list[Stored]()  # all are checked before memory is taken for any
        for part, path in enumerate(paths):
            if not sizes[number, part] and len(paths) > 1:
                continue
            if (number, name) not in pieces[part]:
                raise ValueError(f"{path} has no {name!r} of {label!r}, which other parts have")
            stored.append(pieces[part][number, name])
            dtype, expected = stored[0].dtype, (int(sizes[number, part]), *stored[0].values.shape[1:])
            if (stored[-1].dtype, stored[-1].values.shape) != (dtype, expected):
                raise ValueError(
                    f"{path} is altered: {name!r} of {label!r} is {stored[-1].dtype} {list(stored[-1].values.shape)}; "
                    f"expected {expected[0]} rows of {dtype} {list(expected[1:])}, as in other parts"
                )
        if stored:
            rows = torch.from_numpy(np.concatenate([piece.values for piece in stored]))
            found[number][name] = as_mask(name, rows.view(stored[0].dtype))
    return found


def _owner_of(key: str, labels: Sequence[str], path: Path) -> tuple[int, str]:
    """The number of the type and the name of a field that is stored as ``<type>/<name>``."""
    owners = [label for label in labels if key.startswith(f"{label}/")]
    if not owners:
        raise ValueError(f"{path}: {key!r} belongs to no type; expected <type>/<name> with one of {list(labels)}")
    label = max(owners, key=len)  # a type's name may itself contain a slash
    return labels.index(label), key[len(label) + 1 :]


def as_mask(name: str, rows: Tensor) -> Tensor:
    """`rows`, as booleans if they are a mask. DGL stored it as uint8, which torch takes for row numbers."""
    is_mask = "mask" in name and rows.dtype is torch.uint8 and (not rows.numel() or int(rows.max()) <= 1)
    return rows.view(torch.bool) if is_mask else rows
