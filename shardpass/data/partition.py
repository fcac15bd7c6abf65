"""`partition`: from any graph that can be read to a store on disk."""

from __future__ import annotations

import importlib.metadata
import operator
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardpass.core.ranks import parse_bytes
from shardpass.data import keys
from shardpass.data.atomic import check_target, publish
from shardpass.data.doubts import Doubts
from shardpass.data.file_rows import FileRows, blocks
from shardpass.data.layout import Layout, graph_fingerprint, lay_out, partition_fingerprint
from shardpass.data.manifest import MANIFEST_NAME, FieldInfo, Manifest, write_manifest
from shardpass.data.names import Names, column_of, open_dictionary, write_names
from shardpass.data.partitioners import GIVEN, assign
from shardpass.data.raw import RawGraph
from shardpass.data.readers import read, stream_files
from shardpass.data.rows import Field, row_blocks
from shardpass.data.streaming import MEMORY_BYTES, Budget, EdgesByPart
from shardpass.data.tensor_file import Blocks, FileRecord, write_tensors

_BLOCK_ROWS = 1 << 20


def partition(
    data: Any,
    path: str | os.PathLike[str],
    parts: int | None = None,
    method: str = "kaminpar",
    *,
    assignment: Any = None,
    node_weights: Any = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    threads: int = 1,
    memory_bytes: str | float = MEMORY_BYTES,
    node_id: str | None = None,
) -> Manifest:
    """The manifest of the store that was written to `path`: the graph, cut into parts. Run it in one process.

    The store appears at `path` when it is complete. Temporary files are beside `path`.

    Args:
        data: anything that `shardpass.data.read` takes, or files that are read piece by piece, as
            `shardpass.data.stream_edge_list` and `stream_ogb` return them.
        path: the directory to write.
        parts: the number of parts, which is the largest number of ranks that can use the store. `None` keeps the
            partition that `data` came with, as a DGL partition directory does.
        method: "kaminpar"; "metis", which needs all edges in memory; "random"; or "range" (contiguous original ids).
        assignment: the part of each node, in place of a method: integers in `[0, parts)`, or a dict with an array for
            each node type.
        node_weights: what "kaminpar" and "metis" balance: a number above 0 for each node, or a dict with an array for
            each node type. By default a node weighs the bytes of its fields, and of its in-edges with theirs, as a rank
            holds them.
        seed: of the method. "metis" and "random" give the same partition for the same seed; "kaminpar" mostly does.
        overwrite: replace a store that is already at `path`.
        progress: called as `progress(stage, done, total)`. The stages are "read", "count", "bucket", "assign", "sort"
            and "write"; not every source and method has all of them.
        threads: of "kaminpar". With more than one, every run gives another partition.
        memory_bytes: memory for edges, as a number or as ``"4GiB"``. The edges into one node are never divided.
        node_id: the node field that holds your own ids, as in `shardpass.data.read`. The store keeps them, and
            `shardpass.node_names` returns them.

    Raises:
        StoreError: when something is at `path` already.
        ValueError, TypeError: when the graph or an argument is wrong; the message says how.
    """
    target = Path(os.path.abspath(path))
    check_target(target, overwrite)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.partial-", dir=target.parent) as scratch:
        budget = _budget(Path(scratch), memory_bytes, progress)
        graph = _opened(data, budget, node_id)
        parts, assignment = _division(graph, parts, assignment)
        layout = lay_out(assign(graph, parts, method, assignment, seed, threads, budget, node_weights), parts)
        complete = Path(scratch, "store")
        doubts = Doubts()
        manifest = _write(graph, layout, complete, GIVEN if assignment is not None else method, seed, budget, doubts)
        publish(complete, target, overwrite)
    doubts.tell(stacklevel=2)
    return manifest


def _budget(scratch: Path, memory_bytes: str | float, progress: Callable[[str, int, int], None] | None) -> Budget:
    try:
        num_bytes = parse_bytes(memory_bytes)
    except ValueError as error:
        raise ValueError(f"memory_bytes: {error}") from None
    return Budget(scratch, num_bytes, progress or (lambda stage, done, total: None))


def _opened(data: Any, budget: Budget, node_id: str | None) -> RawGraph:
    budget.report("read", 0, 1)
    files = stream_files(data)
    if files is not None and node_id is not None:
        raise ValueError(
            f"node_id={node_id!r} is a field of a graph in memory: of tables in files, pass it to "
            "shardpass.data.stream_tables"
        )
    graph = read(data if files is None else files.open(budget), node_id=node_id)
    graph = replace(graph, names={kind: _names(kind, names, budget) for kind, names in graph.names.items()})
    budget.report("read", 1, 1)
    return graph


def _names(kind: str, names: Any, budget: Budget) -> Names:
    """The names of the nodes of a type in temporary files, each of them once."""
    if isinstance(names, Names):
        return names
    what = f"the names of nodes of type {kind!r}"
    found = write_names(column_of(names, what), budget)
    with open_dictionary(found, what, False, budget):
        return found


def _division(graph: RawGraph, parts: int | None, assignment: Any) -> tuple[int, Any]:
    """How many parts there will be, and the part of each node if that is known already."""
    if parts is not None:
        return operator.index(parts), assignment
    if graph.division is None:
        raise ValueError(
            f"how many parts? Pass parts=...: the graph ({graph.source or 'given'}) is not cut into parts already"
        )
    if assignment is not None:
        raise ValueError("an assignment of your own needs its number of parts: pass parts=... as well")
    return graph.division.parts, graph.division.part_of


def _write(
    graph: RawGraph, layout: Layout, directory: Path, method: str, seed: int, budget: Budget, doubts: Doubts
) -> Manifest:
    """The manifest of the complete store that was written to a new directory."""
    directory.mkdir()
    edges = {kind: EdgesByPart(graph, layout, kind, budget) for kind in graph.edges}
    files = _write_parts(graph, layout, edges.values(), directory, budget, doubts)
    tensors = {key: rows for kind, names in graph.names.items() for key, rows in _name_tensors(kind, names).items()}
    names = write_tensors(directory / keys.NAMES_FILE, tensors) if tensors else None
    fingerprint = graph_fingerprint(graph)
    manifest = Manifest(
        num_parts=layout.num_parts,
        num_nodes=dict(graph.num_nodes),
        num_edges=graph.num_edges,
        offsets={kind: offsets.tolist() for kind, offsets in layout.offsets.items()},
        part_edges={kind: by_part.counts for kind, by_part in edges.items()},
        halo_rows={kind: by_part.halo_rows for kind, by_part in edges.items()},
        cut_edges={kind: sum(by_part.counts) - sum(by_part.inner) for kind, by_part in edges.items()},
        node_fields={kind: _info(fields) for kind, fields in graph.node_fields.items()},
        edge_fields={kind: _info(fields) for kind, fields in graph.edge_fields.items()},
        graph_fields=dict(graph.graph_fields),
        files=files,
        source=graph.source,
        method=method,
        seed=seed,
        shardpass_version=_version(),
        graph_fingerprint=fingerprint,
        partition_fingerprint=partition_fingerprint(fingerprint, layout.num_parts, layout.part_of),
        names=names,
    )
    write_manifest(manifest, directory / MANIFEST_NAME)
    return manifest


def _write_parts(
    graph: RawGraph, layout: Layout, edges: Collection[EdgesByPart], directory: Path, budget: Budget, doubts: Doubts
) -> list[FileRecord]:
    """The records of the part files."""
    files = []
    offsets = torch.stack([torch.as_tensor(offsets) for offsets in layout.offsets.values()]).sum(0)
    doubts.note_empty_parts(offsets.diff().tolist())
    for part in range(layout.num_parts):
        budget.report("write", part, layout.num_parts)
        tensors = _node_tensors(graph, layout, part, doubts)
        for by_part in edges:
            tensors |= _edge_tensors(graph, by_part, part, doubts)
        files.append(write_tensors(directory / keys.part_file_name(part), tensors))
    budget.report("write", layout.num_parts, layout.num_parts)
    return files


def _node_tensors(graph: RawGraph, layout: Layout, part: int, doubts: Doubts) -> dict[str, Blocks]:
    tensors = {}
    for kind in graph.num_nodes:
        ids = layout.own_ids(kind, part)
        tensors[keys.node_ids_key(kind)] = _blocks(ids)
        for name, field in graph.node_fields[kind].items():
            tensors[keys.node_field_key(kind, name)] = _rows(field, ids, doubts, name, f"nodes of type {kind!r}")
    return tensors


def _edge_tensors(graph: RawGraph, by_part: EdgesByPart, part: int, doubts: Doubts) -> dict[str, Blocks]:
    """The tensors of a part's edges of one type."""
    kind, edges = by_part.edge_type, by_part.of_part(part)
    arrays: tuple[torch.Tensor | FileRows, ...] = edges
    tensors = {keys.edge_array_key(kind, name): _blocks(array) for name, array in zip(keys.EDGE_ARRAYS, arrays)}
    for name, field in graph.edge_fields[kind].items():
        tensors[keys.edge_field_key(kind, name)] = _rows(field, edges.edge_ids, doubts, name, f"edges of type {kind}")
    return tensors


def _name_tensors(kind: str, names: Names) -> dict[str, Blocks]:
    key = keys.names_key(kind)
    if names.ends is None:
        return {key: _blocks(names.values)}
    return {f"{key}/text": _blocks(names.values), f"{key}/ends": _blocks(names.ends)}


def _blocks(array: torch.Tensor | FileRows) -> Blocks:
    return Blocks(array.dtype, tuple(array.shape), (block for _, block in blocks(array, _BLOCK_ROWS)))


def _rows(field: Field, ids: torch.Tensor | FileRows, doubts: Doubts, name: str, of: str) -> Blocks:
    rows = doubts.watch(row_blocks(field, ids), ids, name, of)
    return Blocks(field.dtype, (len(ids), *field.shape[1:]), rows)


def _info(fields: Mapping[str, Field]) -> dict[str, FieldInfo]:
    return {name: FieldInfo(field.dtype, tuple(field.shape[1:])) for name, field in fields.items()}


def _version() -> str:
    try:
        return importlib.metadata.version("shardpass")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
