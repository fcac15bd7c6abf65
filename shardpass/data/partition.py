"""`partition`: from any graph that can be read to a store on disk."""

from __future__ import annotations

import importlib.metadata
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardpass.core.ranks import parse_bytes
from shardpass.data import keys
from shardpass.data.atomic import check_target, new_directory, scratch_directory
from shardpass.data.file_rows import FileRows, blocks
from shardpass.data.layout import EdgesByPart, Layout, graph_fingerprint, lay_out, partition_fingerprint
from shardpass.data.manifest import MANIFEST_NAME, FieldInfo, Manifest, write_manifest
from shardpass.data.partitioners import GIVEN, assign
from shardpass.data.raw import EdgeType, RawGraph
from shardpass.data.readers import read, stream_files
from shardpass.data.rows import Field, row_blocks
from shardpass.data.streaming import MEMORY_BYTES, PASSES, STREAMING, Budget, SpilledEdges
from shardpass.data.tensor_file import Blocks, FileRecord, write_tensors

_INT32_LIMIT = 2**31 - 1
_BLOCK_ROWS = 1 << 20


def partition(
    data: Any,
    path: str | os.PathLike[str],
    parts: int | None = None,
    method: str = "metis",
    *,
    assignment: Any = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    passes: int = PASSES,
    memory_bytes: str | float = MEMORY_BYTES,
) -> Manifest:
    """The manifest of the store that was written to `path`: the graph, cut into parts. Run it in one process.

    Nothing appears at `path` before everything is written. Part files are written one by one, features in blocks of
    rows, so memory holds the edges and a few blocks besides what `data` holds itself.

    Of a graph in files (`GraphFiles`), edges and fields are never in memory as a whole: there are a few numbers per
    node and `memory_bytes`, the rest goes through temporary files beside `path`. Only "metis" needs all edges at once.
    The part files are the same, to the byte, as those of the same graph in memory.

    Args:
        data: a PyG `Data` or `HeteroData`, a `DGLGraph`, a path, a dict of arrays or a `RawGraph`; see
            `shardpass.data.read`. Or `GraphFiles`: see `shardpass.data.stream_edge_list`.
        path: the directory to write.
        parts: number of parts; the largest number of ranks that can use the store. May exceed the number of nodes.
            None: the parts that `data` is cut into already, as a DGL partition directory is.
        method: "metis"; "fennel" or "ldg", which stream and need no more than a few numbers per node; "random"; or
            "range" (contiguous original ids).
        assignment: instead of a method, the part of each node: integers in `[0, parts)`, or a dict of them
            with an array per node type.
        seed: of the partitioner; the same seed gives the same partition ("fennel" and "ldg" draw no random numbers).
        overwrite: replace a store that is already at `path`.
        progress: called as `progress(stage, done, total)`, with the stages "read", "count", "bucket", "assign", "sort"
            and "write"; not every source and method has all of them.
        passes: of "fennel" and "ldg" over all nodes; more cut fewer edges.
        memory_bytes: for the edges of a graph in files, a number or as ``"4GiB"``; the edges into one node are never
            divided.

    Raises:
        StoreError: when something is at `path` already.
        ValueError, TypeError: a graph or an argument that is not right, in words.
    """
    target = Path(os.path.abspath(path))
    if parts is not None:
        parts = operator.index(parts)
    try:
        num_bytes = parse_bytes(memory_bytes)
    except ValueError as error:
        raise ValueError(f"memory_bytes: {error}") from None
    report = progress or (lambda stage, done, total: None)
    check_target(target, overwrite)
    with scratch_directory(target) as scratch:
        budget = Budget(scratch, num_bytes, report)
        report("read", 0, 1)
        files = stream_files(data)
        graph = read(data if files is None else files.open(budget))
        report("read", 1, 1)
        if parts is None:
            parts, assignment = _division(graph, assignment)
        if assignment is not None or method not in STREAMING:  # which count and sort before they assign
            report("assign", 0, 1)
        layout = lay_out(assign(graph, parts, method, assignment, seed, passes, budget), parts)
        report("assign", 1, 1)
        with new_directory(target, overwrite) as directory:
            manifest = _write(graph, layout, directory, GIVEN if assignment is not None else method, seed, budget)
            write_manifest(manifest, directory / MANIFEST_NAME)
    return manifest


def _division(graph: RawGraph, assignment: Any) -> tuple[int, Any]:
    """The parts that a graph came with."""
    if graph.division is None:
        raise ValueError(
            f"how many parts? Pass parts=...: the graph ({graph.source or 'given'}) is not cut into parts already"
        )
    if assignment is not None:
        raise ValueError("an assignment of your own needs its number of parts: pass parts=... as well")
    return graph.division.parts, graph.division.part_of


def _write(graph: RawGraph, layout: Layout, directory: Path, method: str, seed: int, budget: Budget) -> Manifest:
    report = budget.report
    edges = {kind: _by_part(graph, layout, kind, budget) for kind in graph.edges}
    cut = dict.fromkeys(graph.edges, 0)
    files: list[FileRecord] = []
    for part in range(layout.num_parts):
        report("write", part, layout.num_parts)
        tensors = _node_tensors(graph, layout, part)
        for kind, by_part in edges.items():
            arrays, own = _edge_tensors(graph, layout, by_part, part)
            tensors |= arrays
            cut[kind] += by_part.counts[part] - own
        files.append(write_tensors(directory / keys.part_file_name(part), tensors))
    report("write", layout.num_parts, layout.num_parts)
    fingerprint = graph_fingerprint(graph)
    return Manifest(
        num_parts=layout.num_parts,
        num_nodes=dict(graph.num_nodes),
        num_edges=graph.num_edges,
        offsets={kind: offsets.tolist() for kind, offsets in layout.offsets.items()},
        part_edges={kind: by_part.counts for kind, by_part in edges.items()},
        cut_edges=cut,
        node_fields={kind: _info(fields) for kind, fields in graph.node_fields.items()},
        edge_fields={kind: _info(fields) for kind, fields in graph.edge_fields.items()},
        graph_fields=dict(graph.graph_fields),
        files=files,
        source=graph.source,
        method=method,
        seed=seed,
        shardpass_version=_version(),
        graph_fingerprint=fingerprint,
        partition_fingerprint=partition_fingerprint(fingerprint, layout),
    )


def _by_part(graph: RawGraph, layout: Layout, kind: EdgeType, budget: Budget) -> EdgesByPart | SpilledEdges:
    if isinstance(graph.edges[kind].src, FileRows):
        return SpilledEdges(graph, layout, kind, budget)
    return EdgesByPart(graph, layout, kind)


def _node_tensors(graph: RawGraph, layout: Layout, part: int) -> dict[str, Blocks]:
    tensors = {}
    for kind in graph.num_nodes:
        ids = layout.own_ids(kind, part)
        tensors[keys.node_ids_key(kind)] = Blocks.of(ids)
        for name, field in graph.node_fields[kind].items():
            tensors[keys.node_field_key(kind, name)] = _rows(field, ids)
    return tensors


def _edge_tensors(
    graph: RawGraph, layout: Layout, by_part: EdgesByPart | SpilledEdges, part: int
) -> tuple[dict[str, Blocks], int]:
    """The tensors of a part's edges of one type, and how many of these edges come from the part itself."""
    kind: EdgeType = by_part.edge_type
    edges = by_part.of_part(part)
    src = edges.src
    if isinstance(src, torch.Tensor) and graph.num_nodes[kind[0]] <= _INT32_LIMIT:
        src = src.to(torch.int32)
    arrays = (src, edges.dst, edges.edge_ids, edges.shard_offsets)
    tensors = {keys.edge_array_key(kind, name): _blocks(array) for name, array in zip(keys.EDGE_ARRAYS, arrays)}
    for name, field in graph.edge_fields[kind].items():
        tensors[keys.edge_field_key(kind, name)] = _rows(field, edges.edge_ids)
    return tensors, int(edges.shard_offsets[part + 1] - edges.shard_offsets[part])


def _blocks(array: torch.Tensor | FileRows) -> Blocks:
    return Blocks(array.dtype, tuple(array.shape), (block for _, block in blocks(array, _BLOCK_ROWS)))


def _rows(field: Field, ids: torch.Tensor | FileRows) -> Blocks:
    return Blocks(field.dtype, (len(ids), *field.shape[1:]), row_blocks(field, ids))


def _info(fields: Any) -> dict[str, FieldInfo]:
    return {name: FieldInfo(field.dtype, tuple(field.shape[1:])) for name, field in fields.items()}


def _version() -> str:
    try:
        return importlib.metadata.version("shardpass")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
