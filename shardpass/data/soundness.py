"""What a store must hold if its manifest is true. Checksums say that a store is as written, not that it is a graph."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardpass.data import keys
from shardpass.data.manifest import Manifest
from shardpass.data.raw import EdgeType
from shardpass.data.tensor_file import TensorInfo, header_of
from shardpass.errors import StoreError

_INT32_NODES = 2**31 - 1
_BLOCK = 1 << 20


@dataclass(frozen=True)
class PartEdges:
    """A part's edges of one type, sorted by (source part, destination, original id). Views of the mapped file.

    src: new global ids, int32 or int64. dst: rows of the part, int32. edge_ids: original positions, int64.
    shard_offsets: int64 [num_parts + 1]; the edges from part q are `[shard_offsets[q], shard_offsets[q + 1])`.
    """

    src: Tensor
    dst: Tensor
    edge_ids: Tensor
    shard_offsets: Tensor


def contradictions(manifest: Manifest) -> Iterator[str]:
    """Words about each way in which a manifest contradicts itself."""
    parts = manifest.num_parts
    if not 1 <= parts == len(manifest.files):
        yield f"it lists {len(manifest.files)} files for {parts} parts"
        return
    if manifest.names is not None and manifest.names.name != keys.NAMES_FILE:
        yield f"names are in {manifest.names.name!r}; expected {keys.NAMES_FILE!r}"
        return
    for node_type, offsets in manifest.offsets.items():
        ends = [0, manifest.num_nodes[node_type]]
        if len(offsets) != parts + 1 or [offsets[0], offsets[-1]] != ends or sorted(offsets) != offsets:
            yield f"offsets of nodes {node_type!r} are not {parts + 1} ascending numbers from 0 to {ends[1]}"
            return
    for kind, counts in manifest.part_edges.items():
        if len(kind) != 3 or not {kind[0], kind[2]} <= manifest.num_nodes.keys():
            yield f"the ends of edges {kind} are not of its types {manifest.node_types}"
            return
        if len(counts) != parts or sum(counts) != manifest.num_edges[kind]:
            yield f"the parts' edges {kind} are not {manifest.num_edges[kind]} in {parts} parts"
    for part, record in enumerate(manifest.files):
        if record.name != keys.part_file_name(part):
            yield f"part {part} is in {record.name!r}; expected {keys.part_file_name(part)!r}"
        tensors = part_tensors(manifest, part)
        header, size = header_of(tensors)
        found = record.bytes, record.header_sha256, sorted(record.tensors)
        if found != (size, hashlib.sha256(header).hexdigest(), sorted(tensors)):
            yield f"the size, the header and the tensors of {record.name} are not those of its counts and fields"


def part_tensors(manifest: Manifest, part: int) -> dict[str, TensorInfo]:
    """The tensors of a part by key, in the order in which `partition` writes them."""
    found: dict[str, TensorInfo] = {}
    for node_type, offsets in manifest.offsets.items():
        count = offsets[part + 1] - offsets[part]
        found[keys.node_ids_key(node_type)] = TensorInfo(torch.int64, (count,))
        for name, info in manifest.node_fields[node_type].items():
            found[keys.node_field_key(node_type, name)] = TensorInfo(info.dtype, (count, *info.shape))
    for kind, counts in manifest.part_edges.items():
        source = torch.int32 if manifest.num_nodes[kind[0]] <= _INT32_NODES else torch.int64
        shapes = (counts[part],), (counts[part],), (counts[part],), (manifest.num_parts + 1,)
        for name, dtype, shape in zip(keys.EDGE_ARRAYS, (source, torch.int32, torch.int64, torch.int64), shapes):
            found[keys.edge_array_key(kind, name)] = TensorInfo(dtype, shape)
        for name, info in manifest.edge_fields[kind].items():
            found[keys.edge_field_key(kind, name)] = TensorInfo(info.dtype, (counts[part], *info.shape))
    return found


def check_nodes(ids: Tensor, count: int, what: str) -> None:
    """Return when the ids are ascending numbers in `[0, count)`; else raise a StoreError about `what`."""
    if ids.numel() and (int(ids[0]) < 0 or int(ids[-1]) >= count or bool((ids[1:] <= ids[:-1]).any())):
        raise StoreError(f"{what} are not ascending numbers in [0, {count}); the store is not as partition writes it")


def check_edges(manifest: Manifest, kind: EdgeType, part: int, edges: PartEdges, path: Path) -> None:
    """Return when the edges of a part have both ends, and shards that fit; else raise a StoreError."""
    sources, targets = manifest.offsets[kind[0]], manifest.offsets[kind[2]]
    limits = sources[-1], targets[part + 1] - targets[part], manifest.num_edges[kind]
    for name, values, limit in zip(keys.EDGE_ARRAYS, (edges.src, edges.dst, edges.edge_ids), limits):
        if values.numel() and not 0 <= int(values.amin()) <= int(values.amax()) < limit:
            raise StoreError(f"{path}: {keys.edge_array_key(kind, name)} is not in [0, {limit})")
    starts = torch.tensor(sources[1:-1], dtype=edges.src.dtype)  # of the shards but the first
    counts = torch.zeros(manifest.num_parts, dtype=torch.int64)
    for block in edges.src.split(_BLOCK):
        counts += torch.bincount(torch.bucketize(block, starts, right=True), minlength=manifest.num_parts)
    if edges.shard_offsets[0] != 0 or not torch.equal(edges.shard_offsets.diff(), counts):
        raise StoreError(f"{path}: {keys.edge_array_key(kind, 'shard_offsets')} does not fit the sources of the edges")
