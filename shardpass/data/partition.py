"""`partition`: from any graph that can be read to a store on disk."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardpass.core.ranks import Blocks, Ranks, parse_bytes, require_count
from shardpass.data import keys
from shardpass.data.atomic import check_target, publish
from shardpass.data.doubts import Doubts
from shardpass.data.file_rows import FileRows, blocks
from shardpass.data.layout import Layout, graph_fingerprint, lay_out, partition_fingerprint
from shardpass.data.manifest import MANIFEST_NAME, FieldInfo, Manifest, write_manifest
from shardpass.data.names import Names, column_of, open_dictionary, write_names
from shardpass.data.partitioners import GIVEN, assign
from shardpass.data.raw import EdgeType, RawGraph
from shardpass.data.readers import GraphFiles, read, stream_files
from shardpass.data.rows import Field, row_blocks
from shardpass.data.streaming import MEMORY_BYTES, Budget, EdgesByPart, parts_of
from shardpass.data.team import Team
from shardpass.data.tensor_file import FileRecord, write_tensors
from shardpass.errors import shorten_tracebacks

_BLOCK_ROWS = 1 << 20
_MOST_PARTS = 99_999  # each is a file, whose name has five digits


def partition(
    data: Any, path: str | os.PathLike[str], parts: int | None = None, method: str = "kaminpar", *,
    assignment: Any = None, node_weights: Any = None, seed: int = 0, overwrite: bool = False,
    progress: Callable[[str, int, int], None] | None = None, threads: int = 1,
    memory_bytes: str | float = MEMORY_BYTES, node_id: str | None = None, comm: Ranks | None = None,
) -> Manifest:  # fmt: skip
    """The manifest of the store that was written to `path`: the graph, cut into parts.

    Run it in one process, or, for a graph in files, in several with `comm`: the store has the same bytes. It appears
    at `path` when it is complete. Temporary files are beside it.

    Args:
        data: anything that `shardpass.data.read` takes, or files that are read piece by piece, as
            `shardpass.data.stream_edge_list` and `stream_ogb` return them.
        parts: how many, which is the most ranks that can use the store. `None` keeps the partition of `data`, if any.
        method: "kaminpar"; "metis", which needs all edges in memory; "random"; or "range" (contiguous original ids).
        assignment: the part of each node, in place of a method: integers in `[0, parts)`, or a dict with an array for
            each node type.
        node_weights: what "kaminpar" and "metis" balance: a number above 0 for each node, or a dict with an array for
            each node type. By default a node weighs the bytes of its fields, and of its in-edges with theirs.
        seed: of the method. "metis" and "random" give the same partition for the same seed; "kaminpar" mostly does.
        progress: called as `progress(stage, done, total)`. Stages are some of read, count, bucket, assign, sort, write.
        threads: of "kaminpar". With more than one, every run gives another partition.
        memory_bytes: for edges, of each process, as a number or as ``"4GiB"``. Those into one node are never divided.
        node_id: the node field with your own ids, as in `shardpass.data.read`. `shardpass.node_names` returns them.
        comm: the ranks that share the work. The call is collective then: all pass the same arguments, and see the same
            files and the same folder of `path`. Rank 0 alone runs KaMinPar or METIS: pass `connect` a longer `timeout`.

    Raises:
        StoreError: when something is at `path` already. With `overwrite`, a store that is there is replaced.
        DivergenceError: when ranks passed different arguments.
        OSError: when a file cannot be written. If the disk is full, the message names the file and its size.
        ValueError, TypeError: when the graph or an argument is wrong; the message says how.
    """
    shorten_tracebacks()
    team, doubts = Team(comm), Doubts()
    target, num_bytes = _agreed(team, data, path, parts, method, seed, memory_bytes)
    team.only_first("partition", lambda: check_target(target, overwrite), None)
    with nullcontext() if comm is None else comm.out_of_turn(), _scratch(target, team) as scratch:
        report = progress if progress is not None and team.rank == 0 else lambda stage, done, total: None
        budget = Budget(scratch, num_bytes, report, team)
        graph = _opened(data, budget, node_id)
        parts, assignment = _division(graph, parts, assignment)
        layout = lay_out(assign(graph, parts, method, assignment, seed, threads, budget, node_weights), parts)
        method = GIVEN if assignment is not None else method
        manifest = _write(graph, layout, scratch / "store", method, seed, budget, doubts)
        team.only_first("the store", lambda: publish(scratch / "store", target, overwrite), None)
    if team.rank == 0:
        doubts.tell(stacklevel=2)
    return manifest


def _agreed(
    team: Team, data: Any, path: Any, parts: int | None, method: str, seed: int, memory_bytes: str | float
) -> tuple[Path, int]:
    """The directory to write, and the bytes of memory, after all ranks have passed the same arguments. Collective."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"partition(data, path, parts): `path` must name the directory to write, but got {type(path).__name__}"
        )
    target = Path(os.path.abspath(path))
    try:
        num_bytes = parse_bytes(memory_bytes)
    except ValueError as error:
        raise ValueError(f"memory_bytes: {error}") from None
    is_named = is_dataclass(data) if isinstance(data, GraphFiles) else isinstance(data, str | os.PathLike)
    facts: dict[str, Any] = {"data": str(data) if is_named else type(data).__name__, "path": str(target)}
    facts |= {"parts": parts, "method": method, "seed": seed, "memory_bytes": num_bytes}
    team.agree("partition", facts)
    return target, num_bytes


@contextmanager
def _scratch(target: Path, team: Team) -> Iterator[Path]:
    """A folder of all ranks for temporary files, beside `target`, which rank 0 makes and deletes."""
    with ExitStack() as stack:
        stack.callback(team.after_failure)  # when the folder is gone

        def make() -> str:
            folder = tempfile.TemporaryDirectory(
                prefix=f".{target.name}.partial-", dir=target.parent, ignore_cleanup_errors=team.size > 1
            )
            return stack.enter_context(folder)

        scratch = Path(team.first("the folder for temporary files", make))
        team.together("the folder for temporary files", lambda: _require_shared(scratch))
        yield scratch


def _require_shared(scratch: Path) -> None:
    if not scratch.is_dir():
        raise ValueError(
            f"{scratch}, which rank 0 has made, is not there: write the store to a file system that all hosts share, "
            "or partition on one host"
        )


def _opened(data: Any, budget: Budget, node_id: str | None) -> RawGraph:
    budget.report("read", 0, 1)
    files = data if isinstance(data, GraphFiles) else budget.team.first("the graph", lambda: stream_files(data))
    if files is not None and node_id is not None:
        raise ValueError(
            f"node_id={node_id!r} is a field of a graph in memory: of tables in files, pass it to "
            "shardpass.data.stream_tables"
        )
    if files is None and budget.team.size > 1:
        raise ValueError(
            f"a graph in memory is partitioned by one process, and here are {budget.team.size}, of which each would "
            "have to hold it: start one process, or pass files (shardpass.data.stream_edge_list)"
        )
    if files is None:
        graph = read(data, node_id=node_id)
    else:
        graph = files.open_together(budget)
        graph = budget.team.together("the graph", lambda: graph.validate(budget.team.share))
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
        return require_count(parts, "parts", "partition(data, path, parts)", 1, _MOST_PARTS), assignment
    if graph.division is None:
        raise ValueError(
            f"how many parts? Pass parts=...: the graph ({graph.source or 'given'}) is not cut into parts already"
        )
    if assignment is not None:
        raise ValueError("an assignment of your own needs its number of parts: pass parts=... as well")
    return graph.division.parts, graph.division.part_of


class _Written(NamedTuple):
    """What a manifest says of a part: its file, and for each edge type its halo rows and the edges within it."""

    part: int
    file: dict[str, Any]
    halo_rows: list[int]
    inner: list[int]


def _write(
    graph: RawGraph, layout: Layout, directory: Path, method: str, seed: int, budget: Budget, doubts: Doubts
) -> Manifest:
    """The manifest of the complete store that was written to a new directory."""
    team = budget.team
    team.only_first("the store", directory.mkdir, None)
    edges = [EdgesByPart(graph, layout, kind, budget) for kind in graph.edges]
    own = team.together("parts", lambda: _write_parts(graph, layout, edges, directory, budget, doubts))
    parts = sorted(_Written(*written) for of_rank in team.gather("parts", own) for written in of_rank)
    doubts.gather(team)
    counts = {by_part.edge_type: by_part.counts for by_part in edges}
    return team.first("the store", lambda: _write_rest(graph, layout, directory, method, seed, counts, parts))


def _write_rest(
    graph: RawGraph,
    layout: Layout,
    directory: Path,
    method: str,
    seed: int,
    counts: Mapping[EdgeType, list[int]],
    parts: list[_Written],
) -> Manifest:
    """The manifest of the store, whose part files are written already."""
    tensors = {key: rows for kind, names in graph.names.items() for key, rows in _name_tensors(kind, names).items()}
    names = write_tensors(directory / keys.NAMES_FILE, tensors) if tensors else None
    of_graph = _graph_tensors(graph)
    fingerprint = graph_fingerprint(graph)
    inner = [sum(column) for column in zip(*(written.inner for written in parts))]
    manifest = Manifest(
        num_parts=layout.num_parts,
        num_nodes=dict(graph.num_nodes),
        num_edges=graph.num_edges,
        offsets={kind: offsets.tolist() for kind, offsets in layout.offsets.items()},
        part_edges=dict(counts),
        halo_rows={kind: [written.halo_rows[i] for written in parts] for i, kind in enumerate(counts)},
        cut_edges={kind: sum(of_parts) - within for (kind, of_parts), within in zip(counts.items(), inner)},
        node_fields={kind: _info(fields) for kind, fields in graph.node_fields.items()},
        edge_fields={kind: _info(fields) for kind, fields in graph.edge_fields.items()},
        graph_fields={name: value for name, value in graph.graph_fields.items() if not isinstance(value, torch.Tensor)},
        files=[FileRecord(**written.file) for written in parts],
        source=graph.source,
        method=method,
        seed=seed,
        shardpass_version=_version(),
        graph_fingerprint=fingerprint,
        partition_fingerprint=partition_fingerprint(fingerprint, layout.num_parts, layout.part_of),
        names=names,
        graph_file=write_tensors(directory / keys.GRAPH_FILE, of_graph) if of_graph else None,
        columns={
            kind: {name: [*of] for name, of in fields.items()} for kind, fields in graph.columns.items() if fields
        },
    )
    write_manifest(manifest, directory / MANIFEST_NAME)
    return manifest


def _write_parts(
    graph: RawGraph, layout: Layout, edges: Collection[EdgesByPart], directory: Path, budget: Budget, doubts: Doubts
) -> list[_Written]:
    """What was written of each part that this rank writes."""
    written = []
    offsets = torch.stack([torch.as_tensor(offsets) for offsets in layout.offsets.values()]).sum(0)
    doubts.note_empty_parts(offsets.diff().tolist())
    for part in parts_of(layout.num_parts, budget.team):
        budget.report("write", part, layout.num_parts)
        tensors = _node_tensors(graph, layout, part, doubts)
        for by_part in edges:
            tensors |= _edge_tensors(graph, by_part, part, doubts)
        file = write_tensors(directory / keys.part_file_name(part), tensors)
        halo_rows, inner = [e.halo_rows[part] for e in edges], [e.inner[part] for e in edges]
        written.append(_Written(part, vars(file), halo_rows, inner))
    budget.report("write", layout.num_parts, layout.num_parts)
    return written


def _node_tensors(graph: RawGraph, layout: Layout, part: int, doubts: Doubts) -> dict[str, Blocks]:
    tensors = {}
    for kind in graph.num_nodes:
        ids = layout.own_ids(kind, part)
        tensors[keys.node_ids_key(kind)] = _blocks(ids)
        for name, field in graph.node_fields[kind].items():
            columns = graph.columns.get(kind, {}).get(name, ())
            rows = doubts.watch(row_blocks(field, ids), ids, name, f"nodes of type {kind!r}", columns)
            tensors[keys.node_field_key(kind, name)] = _rows(field, len(ids), rows)
    return tensors


def _edge_tensors(graph: RawGraph, by_part: EdgesByPart, part: int, doubts: Doubts) -> dict[str, Blocks]:
    """The tensors of a part's edges of one type."""
    kind, edges = by_part.edge_type, by_part.of_part(part)
    tensors = {keys.edge_array_key(kind, name): _blocks(getattr(edges, name)) for name in keys.EDGE_ARRAYS}
    for name, field in graph.edge_fields[kind].items():
        rows = doubts.watch(row_blocks(field, edges.edge_ids), edges.edge_ids, name, f"edges of type {kind}")
        tensors[keys.edge_field_key(kind, name)] = _rows(field, len(edges.edge_ids), rows)
    return tensors


def _graph_tensors(graph: RawGraph) -> dict[str, Blocks]:
    """The arrays that belong to the graph as a whole, and the links to score."""
    tensors = {keys.graph_field_key(name): value for name, value in graph.graph_fields.items()}
    for kind, fields in graph.links.items():
        tensors |= {keys.link_key(kind, name): values for name, values in fields.items()}
    return {key: _blocks(values) for key, values in tensors.items() if isinstance(values, torch.Tensor)}


def _name_tensors(kind: str, names: Names) -> dict[str, Blocks]:
    key = keys.names_key(kind)
    if names.ends is None:
        return {key: _blocks(names.values)}
    return {f"{key}/text": _blocks(names.values), f"{key}/ends": _blocks(names.ends)}


def _blocks(array: torch.Tensor | FileRows) -> Blocks:
    return Blocks(array.dtype, tuple(array.shape), (block for _, block in blocks(array, _BLOCK_ROWS)))


def _rows(field: Field, count: int, rows: Iterator[torch.Tensor]) -> Blocks:
    if field.dtype.is_complex:
        rows = (torch.view_as_real(block.resolve_conj()) for block in rows)
    stored = FieldInfo(field.dtype, tuple(field.shape[1:])).rows(count)
    return Blocks(stored.dtype, stored.shape, rows)


def _info(fields: Mapping[str, Field]) -> dict[str, FieldInfo]:
    return {name: FieldInfo(field.dtype, tuple(field.shape[1:])) for name, field in fields.items()}


def _version() -> str:
    try:
        return importlib.metadata.version("shardpass")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
