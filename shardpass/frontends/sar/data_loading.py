"""A rank's part of a graph that DGL partitioned, from its directory or from a DistGraph, and its features by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dgl
import numpy as np
import torch
from dgl.distributed import load_partition_book
from torch import Tensor

from shardpass.data.readers.dgl_partitions import (
    as_mask,
    own_edges,
    read_description,
    read_fields,
    read_part_graph,
    read_tensors,
)
from shardpass.frontends.sar.common_tuples import CanonicalType, PartitionData, Ranges, ShardEdgesAndFeatures


class _OwnEdges(NamedTuple):
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
    description, part = read_description(Path(partition_json_file)), own_partition_idx
    if not 0 <= part < len(description.parts):
        raise ValueError(
            f"{description.path} has the parts 0 to {len(description.parts) - 1}, no part {part}; pass the rank"
        )
    files, labels = description.parts[part], [":".join(kind) for kind in description.edge_types]
    features = _features(files.edge_fields, "orig_eids.dgl", labels, description.edges.sizes[:, [part]])
    edge_ids, src, dst = own_edges(description, part, read_part_graph(files.graph))
    kinds, numbers, _ = description.edges.locate(edge_ids, files.graph)
    edges = _OwnEdges(*(torch.from_numpy(array.astype(np.int64)) for array in (src, dst, kinds, numbers)))
    starts = [description.edges.rows(kind, part).start for kind in range(len(description.edge_types))]
    nodes, sizes = description.node_types, description.nodes.sizes[:, [part]]
    node_features = _features(files.node_fields, "orig_nids.dgl", nodes, sizes)
    node_features[dgl.NTYPE] = _numbered(sizes.ravel())
    book, *_ = load_partition_book(str(partition_json_file), part)
    return _part_of(book, node_features, nodes, edges, description.edge_types, features, starts, device)


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
    edges = _OwnEdges(ids[src[inner]], ids[dst[inner]], kinds.to(torch.int64), numbers)
    nodes = {kind: book.partid2nids(part, kind) for kind in node_types}
    own = {kind: book.partid2eids(part, kind) for kind in edge_types}
    node_features = _pulled(graph.nodes, nodes, str)
    node_features[dgl.NTYPE] = _numbered([rows.numel() for rows in nodes.values()])
    features = _pulled(graph.edges, own, ":".join)
    starts = [int(own[kind][0]) if own[kind].numel() else 0 for kind in edge_types]
    return _part_of(book, node_features, node_types, edges, edge_types, features, starts, device)


def _part_of(
    book: Any, node_features: dict[str, Tensor], node_types: Sequence[str], edges: _OwnEdges,
    edge_types: Sequence[CanonicalType], features: Mapping[str, Tensor], starts: Sequence[int], device: Any,
) -> PartitionData:  # fmt: skip
    """The edges by the part of their source, sorted by type and then by number, and everything else as it is.

    The features of edges are by full name. The row of an edge is its number less the entry of `starts` of its type.
    """
    order = torch.from_numpy(np.lexsort((edges.numbers.numpy(), edges.kinds.numpy())))
    src, dst, kinds, numbers = (tensor[order] for tensor in edges)
    ranges: Ranges = []
    shards = []
    for part in range(book.num_partitions()):
        start = ranges[-1][1] if ranges else 0
        ranges.append((start, start + book.partid2nids(part).numel()))
        mine = ((src >= start) & (src < ranges[-1][1])).nonzero().view(-1)
        found = {dgl.EID: numbers[mine].to(device), dgl.ETYPE: kinds[mine].to(device)}
        for kind, names in enumerate(edge_types):
            rows = numbers[mine[kinds[mine] == kind]] - starts[kind]
            label = f"{':'.join(names)}/"
            found |= {name: stored[rows].to(device) for name, stored in features.items() if name.startswith(label)}
        shards.append(ShardEdgesAndFeatures((src[mine].to(device), dst[mine].to(device)), found))
    return PartitionData(shards, ranges, node_features, list(node_types), list(edge_types), book)


def _features(path: Path, original: str, labels: Sequence[str], sizes: np.ndarray) -> dict[str, Tensor]:
    """What is stored of a part's own nodes or edges, by ``<label>/<name>``, with original ids of a file beside it."""
    stored = read_fields(labels, sizes, [path])
    if path.with_name(original).exists():
        for label, ids in read_tensors(path.with_name(original)).items():
            stored[labels.index(label)].setdefault("orig_id", torch.from_numpy(np.array(ids.values)))
    return {f"{label}/{name}": rows for label, fields in zip(labels, stored) for name, rows in fields.items()}


def _numbered(counts: Sequence[int] | np.ndarray) -> Tensor:
    """The number of the type of each node."""
    return torch.arange(len(counts)).repeat_interleave(torch.as_tensor(counts))


def _pulled(views: Any, rows: Mapping[Any, Tensor], label: Callable[[Any], str]) -> dict[str, Tensor]:
    """Some rows of the distributed tensors of each type."""
    return {
        f"{label(kind)}/{name}": as_mask(name, tensor[ids])
        for kind, ids in rows.items()
        for name, tensor in views[kind].data.items()
    }


def suffix_key_lookup(
    feature_dict: Mapping[str, Tensor],
    key: str,
    expand_to_all: bool = False,
    type_list: Sequence[str | CanonicalType] | None = None,
) -> Tensor:
    """The feature `key` of `feature_dict`, whose names begin with a type: ``feat`` finds ``paper/feat``, not ``xfeat``.

    If there is no such feature, the result is an empty tensor, int64 [0], and a warning names the features.

    Args:
        feature_dict: `PartitionData.node_features` or the like.
        key: a name without its type, or a full name.
        expand_to_all: whether nodes of the types in `type_list` that lack the feature get zeros. Otherwise such types
            are left out.
        type_list: the types whose rows follow one another in the result, such as `PartitionData.node_type_names`.
            `None` means the one type that has the feature.

    Raises:
        ValueError: several types have it, or `expand_to_all` is asked for, and there is no `type_list`. Or the rows of
            the types differ in shape or dtype, or it is not known how many nodes a type has that lacks it.
    """
    if expand_to_all and type_list is None:
        raise ValueError("expand_to_all=True needs the type_list, for example partition_data.node_type_names")
    if key in feature_dict:
        return feature_dict[key]
    matches = [name for name in feature_dict if name.endswith(f"/{key}")]
    labels = [kind if isinstance(kind, str) else ":".join(kind) for kind in type_list or ()]
    if type_list is not None:
        matches = [name for name in matches if name[: -len(key) - 1] in labels]
    if not matches:
        among = "" if type_list is None else f" of the types {labels}"
        warnings.warn(
            f"no feature{among} is called {key!r}, so the result is an empty tensor; there are: "
            f"{', '.join(sorted(feature_dict)) or 'none'}",
            stacklevel=2,
        )
        return torch.empty(0, dtype=torch.int64)
    if type_list is not None:
        return _joined(feature_dict, key, labels, expand_to_all)
    if len(matches) > 1:
        raise ValueError(f"{key!r} means {', '.join(matches)}: pass one of them, or the type_list to join them")
    return feature_dict[matches[0]]


def _joined(features: Mapping[str, Tensor], key: str, labels: Sequence[str], expand: bool) -> Tensor:
    """The rows of the types one after the other, with zeros for those that lack the feature or without them."""
    first = next(features[f"{label}/{key}"] for label in labels if f"{label}/{key}" in features)
    parts = []
    for number, label in enumerate(labels):
        if f"{label}/{key}" in features:
            parts.append(features[f"{label}/{key}"])
        elif expand:
            parts.append(first.new_zeros((_count(features, label, number), *first.shape[1:])))
    kinds = {f"{str(part.dtype).removeprefix('torch.')} rows of shape {list(part.shape[1:])}" for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"{key!r} differs between the types {list(labels)}: {' and '.join(sorted(kinds))}")
    return torch.cat(parts)


def _count(features: Mapping[str, Tensor], label: str, number: int) -> int:
    """How many nodes of a type there are, from `dgl.NTYPE` or another feature."""
    if dgl.NTYPE in features:
        return int((features[dgl.NTYPE] == number).sum())
    for name, tensor in features.items():
        if name.startswith(f"{label}/"):
            return tensor.size(0)
    raise ValueError(
        f"the number of nodes of type {label!r} is not known: there is neither {dgl.NTYPE!r} nor a feature"
    )
