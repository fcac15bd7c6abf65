"""What a store must hold if its manifest is true. Checksums say that a store is as written, not that it is a graph."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import torch
from torch import Tensor

from shardpass.core.ranks import TensorInfo, header_of
from shardpass.core.sharding import smallest_index_dtype
from shardpass.data import keys
from shardpass.data.manifest import Manifest
from shardpass.errors import StoreError

_MOST_NODES = 2**31  # of a part, since rows are int32


def contradiction(manifest: Manifest) -> str | None:
    """Words about the first way in which a manifest contradicts itself, if there is one."""
    parts = manifest.num_parts
    if not 1 <= parts == len(manifest.files):
        return f"it lists {len(manifest.files)} files for {parts} parts"
    for record, name in ((manifest.names, keys.NAMES_FILE), (manifest.graph_file, keys.GRAPH_FILE)):
        if record is not None and record.name != name:
            return f"it lists the file {record.name!r}; expected {name!r}"
    for node_type, offsets in manifest.offsets.items():
        ends = [0, manifest.num_nodes[node_type]]
        if len(offsets) != parts + 1 or [offsets[0], offsets[-1]] != ends or sorted(offsets) != offsets:
            return f"offsets of nodes {node_type!r} are not {parts + 1} ascending numbers from 0 to {ends[1]}"
        if max(after - before for before, after in pairwise(offsets)) >= _MOST_NODES:
            return f"a part has more nodes {node_type!r} than int32 can number"
    for kind, counts in manifest.part_edges.items():
        if len(kind) != 3 or not {kind[0], kind[2]} <= manifest.num_nodes.keys():
            return f"the ends of edges {kind} are not of its types {manifest.node_types}"
        if len(counts) != parts or sum(counts) != manifest.num_edges[kind]:
            return f"the parts' edges {kind} are not {manifest.num_edges[kind]} in {parts} parts"
        if len(manifest.halo_rows[kind]) != parts:
            return f"the halo rows of edges {kind} are not those of {parts} parts"
    for part, record in enumerate(manifest.files):
        if record.name != keys.part_file_name(part):
            return f"part {part} is in {record.name!r}; expected {keys.part_file_name(part)!r}"
        tensors = part_tensors(manifest, part)
        header, size = header_of(tensors)
        found = record.bytes, record.header_sha256, sorted(record.tensors)
        if found != (size, hashlib.sha256(header).hexdigest(), sorted(tensors)):
            return f"the size, the header and the tensors of {record.name} are not those of its counts and fields"
    return _of_columns(manifest)


def _of_columns(manifest: Manifest) -> str | None:
    for node_type, columns in manifest.columns.items():
        for name, listed in columns.items():
            info = manifest.node_fields.get(node_type, {}).get(name)
            if info is None or info.shape != (len(listed),):
                return f"it names {len(listed)} columns of {name!r} of {node_type!r}, which has not as many"
    return None


def part_tensors(manifest: Manifest, part: int) -> dict[str, TensorInfo]:
    """The tensors of a part by key, in the order in which `partition` writes them."""
    found: dict[str, TensorInfo] = {}
    for node_type, offsets in manifest.offsets.items():
        count = offsets[part + 1] - offsets[part]
        found[keys.node_ids_key(node_type)] = TensorInfo(torch.int64, (count,))
        for name, info in manifest.node_fields[node_type].items():
            found[keys.node_field_key(node_type, name)] = info.rows(count)
    for kind, counts in manifest.part_edges.items():
        targets, num_parts = manifest.offsets[kind[2]], manifest.num_parts
        num_starts = num_parts * (targets[part + 1] - targets[part] + 1)
        arrays = (
            TensorInfo(torch.int32, (counts[part],)),
            TensorInfo(smallest_index_dtype(counts[part]), (num_starts,)),
            TensorInfo(torch.int32, (manifest.halo_rows[kind][part],)),
            TensorInfo(torch.int64, (num_parts + 1,)),
            TensorInfo(smallest_index_dtype(manifest.num_edges[kind]), (counts[part],)),
        )
        found |= {keys.edge_array_key(kind, name): array for name, array in zip(keys.EDGE_ARRAYS, arrays)}
        for name, info in manifest.edge_fields[kind].items():
            found[keys.edge_field_key(kind, name)] = info.rows(counts[part])
    return found


def are_pairs(ids: Tensor, counts: list[int]) -> bool:
    """Whether these are pairs of nodes, integers ``[2, n]``, of which there are so many on either side."""
    if ids.dim() != 2 or len(ids) != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        return False
    return not ids.numel() or all(0 <= int(row.min()) <= int(row.max()) < n for row, n in zip(ids, counts))


def check_nodes(ids: Tensor, count: int, what: str) -> None:
    """Return when the ids are ascending numbers in `[0, count)`; else raise a StoreError about `what`."""
    if ids.numel() and (int(ids[0]) < 0 or int(ids[-1]) >= count or bool((ids[1:] <= ids[:-1]).any())):
        raise StoreError(f"{what} are not ascending numbers in [0, {count}); the store is not as partition writes it")
