"""A rank's part of a graph that DGL partitioned, from its directory or from a DistGraph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dgl
import numpy as np
import torch
from dgl.distributed import load_partition_book
from torch import Tensor

from shardpass.data.readers.dgl_partitions import (
    Config,
    PartGraph,
    Stored,
    as_mask,
    integers,
    own_edges,
    owner_of,
    read_config,
    read_part_graph,
    read_tensors,
)
from shardpass.frontends.sar.common_tuples import CanonicalType, PartitionData, ShardEdgesAndFeatures, part_ranges
from shardpass.frontends.sar.suffix_lookup import suffix_key_lookup

__all__ = ["load_dgl_partition_data", "load_dgl_partition_data_from_graph", "suffix_key_lookup"]

ORIGINAL = "orig_id"


class InEdges(NamedTuple):
    """The edges into this rank's nodes: ids of both ends, the type of each edge and its number in the type."""

    src: Tensor
    dst: Tensor
    kinds: Tensor
    numbers: Tensor


def load_dgl_partition_data(
    partition_json_file: str, own_partition_idx: int, device: torch.device | str = "cpu"
) -> PartitionData:
    """One part of a graph that ``dgl.distributed.partition_graph`` wrote. Not collective.

    Only the files of that part are read. All node and edge features are kept, and original ids (``orig_id``) if they
    are stored. DGL stores booleans as uint8. So a feature with ``mask`` in its name that holds only zeros and ones
    becomes boolean again.

    Args:
        partition_json_file: the JSON that partition_graph wrote.
        own_partition_idx: the part to load, which is the rank of the caller.
        device: where the edges and their features are, and so the graph made of them. Node features are on the CPU.

    Raises:
        ValueError: there is no such part, or a file is missing, cut short or altered. It names the file.
    """
    config = read_config(Path(partition_json_file))
    num_parts, part = config.nodes.num_parts, own_partition_idx
    if not 0 <= part < num_parts:
        raise ValueError(f"{config.path} has the parts 0 to {num_parts - 1}, no part {part}; pass the rank")
    _check_numbering(config)
    graph = read_part_graph(config.parts[part].graph)
    labels = [":".join(kind) for kind in config.edge_types]
    counts = [_size(config.edges.rows(number, part)) for number in range(len(labels))]
    features = _features(config.parts[part].edge_fields, labels, counts)
    starts = [config.edges.rows(number, part).start for number in range(len(labels))]
    edges = _in_edges(config, part, graph)
    book, *_ = load_partition_book(str(partition_json_file), part)
    parts = part_ranges(book)
    return PartitionData(
        split(edges, parts, _by_kind(features, labels), starts, torch.device(device)),
        parts,
        _node_features(config, part, graph),
        list(config.node_types),
        list(config.edge_types),
        book,
    )


def split(
    edges: InEdges,
    node_ranges: Sequence[tuple[int, int]],
    features: Sequence[dict[str, Tensor]],
    starts: Sequence[int],
    device: torch.device,
) -> list[ShardEdgesAndFeatures]:
    """The edges by the part of their source, sorted by type and then by number.

    Args:
        edges: the edges into this rank's nodes.
        node_ranges: the ranges of all parts.
        features: of each type, by full name. The row of an edge is its number less the entry of `starts`.
        starts: the lowest number of each type.
        device: where the result is.
    """
    order = np.lexsort((edges.numbers.numpy(), edges.kinds.numpy()))
    src, dst, kinds, numbers = (tensor[torch.from_numpy(order)] for tensor in edges)
    shards = []
    for start, end in node_ranges:
        mine = ((src >= start) & (src < end)).nonzero().view(-1)
        found = {dgl.EID: numbers[mine].to(device), dgl.ETYPE: kinds[mine].to(device)}
        for kind, rows_of in enumerate(features):
            rows = numbers[mine[kinds[mine] == kind]] - starts[kind]
            found |= {name: tensor[rows].to(device) for name, tensor in rows_of.items()}
        shards.append(ShardEdgesAndFeatures((src[mine].to(device), dst[mine].to(device)), found))
    return shards


def _check_numbering(config: Config) -> None:
    """Raise unless the nodes are numbered part by part, and in a part type by type, as DGL does it."""
    position = 0
    for part in range(config.nodes.num_parts):
        for number in range(len(config.node_types)):
            size = _size(config.nodes.rows(number, part))
            ends = np.array([position, position + size - 1][: 2 * (size > 0)])
            found_kinds, _, found_parts = config.nodes.locate(ends, config.path)
            if (found_kinds != number).any() or (found_parts != part).any():
                raise ValueError(
                    f"{config.path} is altered: its node ids do not go part by part, and within a part type by type"
                )
            position += size


def _size(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _in_edges(config: Config, part: int, graph: PartGraph) -> InEdges:
    edge_ids, src, dst = own_edges(config, part, graph)
    kinds, numbers, _ = config.edges.locate(edge_ids, config.parts[part].graph)
    return InEdges(*(torch.from_numpy(array.astype(np.int64)) for array in (src, dst, kinds, numbers)))


def _node_features(config: Config, part: int, graph: PartGraph) -> dict[str, Tensor]:
    files, types = config.parts[part], config.node_types
    counts = [_size(config.nodes.rows(number, part)) for number in range(len(types))]
    found = _features(files.node_fields, types, counts)
    ids = integers(graph.node_data, "_ID", files.graph)
    inner = np.flatnonzero(integers(graph.node_data, "inner_node", files.graph))
    inner = inner[ids[inner].argsort()]
    found[dgl.NTYPE] = torch.repeat_interleave(torch.arange(len(types)), torch.tensor(counts))
    if len(types) == 1 and ORIGINAL in graph.node_data:
        found.setdefault(f"{types[0]}/{ORIGINAL}", _tensor(graph.node_data[ORIGINAL])[torch.from_numpy(inner)])
    return found


def _features(path: Path, labels: Sequence[str], counts: Sequence[int]) -> dict[str, Tensor]:
    """What is stored of a part's own nodes or edges, by ``<label>/<name>``."""
    found = dict(read_tensors(path))
    originals = path.with_name("orig_nids.dgl" if path.name.startswith("node") else "orig_eids.dgl")
    if originals.exists():
        for label, stored in read_tensors(originals).items():
            found.setdefault(f"{label}/{ORIGINAL}", stored)
    features = {}
    for key, stored in found.items():
        owner, name = owner_of(key, labels, path)
        if stored.values.shape[:1] != (counts[owner],):
            raise ValueError(
                f"{path} is altered: {key!r} is {list(stored.values.shape)}; expected {counts[owner]} rows"
            )
        features[key] = as_mask(name, _tensor(stored))
    return features


def _by_kind(features: Mapping[str, Tensor], labels: Sequence[str]) -> list[dict[str, Tensor]]:
    return [{name: t for name, t in features.items() if name.startswith(f"{label}/")} for label in labels]


def _tensor(stored: Stored) -> Tensor:
    return torch.from_numpy(np.array(stored.values)).view(stored.dtype)


def load_dgl_partition_data_from_graph(graph: Any, device: torch.device | str = "cpu") -> PartitionData:
    """The part of a ``dgl.distributed.DistGraph`` that belongs to this process. Not collective.

    All node and edge features of the DistGraph come along. Args and result otherwise as `load_dgl_partition_data`.
    """
    book, local = graph.get_partition_book(), graph.local_partition
    part, node_types = int(book.partid), list(graph.ntypes)
    edge_types: list[CanonicalType] = [tuple(kind) for kind in graph.canonical_etypes]
    inner = local.edata["inner_edge"].bool()
    ids = local.ndata[dgl.NID]
    src, dst = local.edges(order="eid")
    kinds, numbers = book.map_to_per_etype(local.edata[dgl.EID][inner])
    edges = InEdges(ids[src[inner]], ids[dst[inner]], kinds.to(torch.int64), numbers)
    node_features = _pulled(graph.nodes, node_types, node_types, lambda kind: book.partid2nids(part, kind))
    counts = torch.tensor([book.partid2nids(part, kind).numel() for kind in node_types])
    node_features[dgl.NTYPE] = torch.repeat_interleave(torch.arange(len(node_types)), counts)
    labels = [":".join(kind) for kind in edge_types]
    own = {kind: book.partid2eids(part, kind) for kind in edge_types}
    features = _pulled(graph.edges, edge_types, labels, own.__getitem__)
    starts = [int(own[kind][0]) if own[kind].numel() else 0 for kind in edge_types]
    parts = part_ranges(book)
    shards = split(edges, parts, _by_kind(features, labels), starts, torch.device(device))
    return PartitionData(shards, parts, node_features, node_types, edge_types, book)


def _pulled(views: Any, kinds: Sequence[Any], labels: Sequence[str], rows_of: Any) -> dict[str, Tensor]:
    """This rank's rows of the distributed tensors of each type."""
    found = {}
    for kind, label in zip(kinds, labels):
        for name, tensor in views[kind].data.items():
            found[f"{label}/{name}"] = as_mask(name, tensor[rows_of(kind)])
    return found
