"""A rank's part of a graph that DGL partitioned, from its directory or from a DistGraph, and its features by name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from shardpass.frontends.sar.common_tuples import CanonicalType, PartitionData, ShardEdgesAndFeatures

Fields = dict[str, Tensor]


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
    files, (nodes, edges) = description.parts[part], (description.nodes.sizes, description.edges.sizes)
    labels = [":".join(kind) for kind in description.edge_types]
    edge_features = _features(files.edge_fields, "orig_eids.dgl", labels, edges[:, [part]])
    numbers = own_edges(description, part, read_part_graph(files.graph))
    ids, src, dst = (torch.from_numpy(array.astype(np.int64)) for array in numbers)
    node_features = _features(files.node_fields, "orig_nids.dgl", description.node_types, nodes[:, [part]])
    book, *_ = load_partition_book(str(partition_json_file), part)
    types = description.node_types, description.edge_types
    return _part_of(book, *types, node_features, edge_features, ids, src, dst, device)


def load_dgl_partition_data_from_graph(graph: Any, device: torch.device | str = "cpu") -> PartitionData:
    """The part of a ``dgl.distributed.DistGraph`` that belongs to this process. Not collective.

    All node and edge features of the DistGraph come along. Args and result otherwise as `load_dgl_partition_data`.
    """
    book, local = graph.get_partition_book(), graph.local_partition
    node_types, edge_types = list(graph.ntypes), [tuple(kind) for kind in graph.canonical_etypes]
    nodes = {kind: book.partid2nids(int(book.partid), kind) for kind in node_types}
    edges = {kind: book.partid2eids(int(book.partid), kind) for kind in edge_types}
    inner, ids = local.edata["inner_edge"].bool(), local.ndata[dgl.NID]
    src, dst = (ids[end[inner]] for end in local.edges(order="eid"))
    features = _pulled(graph.nodes, nodes), _pulled(graph.edges, edges)
    return _part_of(book, node_types, edge_types, *features, local.edata[dgl.EID][inner], src, dst, device)


def _part_of(
    book: Any, node_types: Sequence[str], edge_types: Sequence[CanonicalType], node_features: Sequence[Fields],
    edge_features: Sequence[Fields], edge_ids: Tensor, src: Tensor, dst: Tensor, device: Any,
) -> PartitionData:  # fmt: skip
    """The edges by the part of their source, each part's in the order of DGL's ids, and so by type and number.

    The features of each type are by name. Those of edges have a row for each own edge of the type, in the same order.
    """
    order = edge_ids.argsort()
    src, dst, (kinds, numbers) = src[order], dst[order], book.map_to_per_etype(edge_ids[order])
    kinds, ranges, shards = kinds.to(torch.int64), [(0, 0)], []
    firsts = torch.searchsorted(kinds, torch.arange(len(edge_types)))
    for part in range(book.num_partitions()):
        start = ranges[-1][1]
        ranges.append((start, start + book.partid2nids(part).numel()))
        mine = ((src >= start) & (src < ranges[-1][1])).nonzero().view(-1)
        found = {dgl.EID: numbers[mine].to(device), dgl.ETYPE: kinds[mine].to(device)}
        for kind, names in enumerate(edge_types):
            rows = mine[kinds[mine] == kind] - firsts[kind]
            fields = edge_features[kind].items()
            found |= {f"{':'.join(names)}/{name}": stored[rows].to(device) for name, stored in fields}
        shards.append(ShardEdgesAndFeatures((src[mine].to(device), dst[mine].to(device)), found))
    kept = {f"{kind}/{name}": rows for kind, fields in zip(node_types, node_features) for name, rows in fields.items()}
    counts = [book.partid2nids(int(book.partid), kind).numel() for kind in node_types]
    kept[dgl.NTYPE] = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return PartitionData(shards, ranges[1:], kept, list(node_types), list(edge_types), book)


def _features(path: Path, original: str, labels: Sequence[str], sizes: np.ndarray) -> list[Fields]:
    """What is stored of a part's own nodes or edges by type and name, with original ids of a file beside it."""
    stored = read_fields(labels, sizes, [path])
    if path.with_name(original).exists():
        for label, ids in read_tensors(path.with_name(original)).items():
            stored[labels.index(label)].setdefault("orig_id", torch.from_numpy(np.array(ids.values)))
    return stored


def _pulled(views: Any, rows: Mapping[Any, Tensor]) -> list[Fields]:
    """Some rows of the distributed tensors of each type."""
    return [
        {name: as_mask(name, tensor[ids]) for name, tensor in views[kind].data.items()} for kind, ids in rows.items()
    ]


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
    found = {name.removesuffix(f"/{key}"): rows for name, rows in feature_dict.items() if name.endswith(f"/{key}")}
    labels = [kind if isinstance(kind, str) else ":".join(kind) for kind in type_list or found]
    found = {label: found[label] for label in labels if label in found}
    if not found:
        among = "" if type_list is None else f" of the types {labels}"
        warnings.warn(
            f"no feature{among} is called {key!r}, so the result is an empty tensor; there are: "
            f"{', '.join(sorted(feature_dict)) or 'none'}",
            stacklevel=2,
        )
        return torch.empty(0, dtype=torch.int64)
    first, *others = found.values()
    if type_list is None and others:
        names = ", ".join(f"{label}/{key}" for label in found)
        raise ValueError(f"{key!r} means {names}: pass one of them, or the type_list to join them")
    if type_list is None:
        return first
    _refuse_unlike_rows(key, labels, found)
    for number, label in enumerate(labels if expand_to_all else ()):
        if label not in found:
            found[label] = first.new_zeros((_count(feature_dict, label, number), *first.shape[1:]))
    return torch.cat([found[label] for label in labels if label in found])


def _refuse_unlike_rows(key: str, labels: Sequence[str], found: Mapping[str, Tensor]) -> None:
    kinds = {
        f"{str(rows.dtype).removeprefix('torch.')} rows of shape {list(rows.shape[1:])}" for rows in found.values()
    }
    if len(kinds) > 1:
        raise ValueError(f"{key!r} differs between the types {labels}: {' and '.join(sorted(kinds))}")


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
