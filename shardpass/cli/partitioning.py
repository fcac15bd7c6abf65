"""`shardpass partition`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardpass.cli.console import Steps, output
from shardpass.cli.graphs import demo_graph
from shardpass.core.ranks import Ranks, bytes_text
from shardpass.data import GraphFiles, RawGraph, partition, read, stream_edge_list, stream_files, stream_tables

_EDGE_LISTS = (".npy", ".csv", ".csv.gz", ".txt", ".txt.gz", ".parquet")
_PARTS = 4
_STAGES = {
    "read": "reading",
    "count": "counting neighbours",
    "bucket": "sorting edges by node",
    "assign": "assigning nodes to parts",
    "sort": "sorting edges by part",
    "write": "writing parts",
}


def read_source(
    name: str,
    drop: Sequence[str],
    masks: Mapping[str, Path | None],
    names: bool,
    tables: Mapping[str, Any],
    **beside: Any,
) -> GraphFiles | RawGraph:
    """The graph, as `shardpass.partition` takes it.

    Args:
        masks, beside: what an edge list does not hold itself; `None` if it is not given.
        names: whether the ids of an edge list are names. A table of nodes implies it.
        tables: what `shardpass.data.stream_tables` takes beside the edges; `None` if it is not given.
    """
    given = {mask: path for mask, path in masks.items() if path is not None}
    if names or tables["nodes"] is not None:
        others = [option for option, value in {**given, **beside}.items() if value is not None]
        if others:
            raise ValueError(f"--{others[0].replace('_', '-')} is by number, and these nodes have names: use --nodes")
        return stream_tables(name, drop=tuple(drop), **tables)
    node_id, is_edge_list = tables["node_id"], not name.startswith("demo:") and name.endswith(_EDGE_LISTS)
    if any(tables[option] for option in ("label", "src", "dst")) or (node_id is not None and is_edge_list):
        raise ValueError("--node-id, --label, --src and --dst name columns of tables: pass --nodes, or --names as well")
    if is_edge_list:
        return replace(stream_edge_list(name, masks=given, **beside), drop=tuple(drop))
    if given or any(value is not None for value in beside.values()):
        raise ValueError(
            f"--features, --labels, --weights, --num-nodes and masks belong to edge lists ({', '.join(_EDGE_LISTS)}); "
            f"{name} holds its own"
        )
    if name.startswith("demo:"):
        return replace(read(demo_graph(name), drop=tuple(drop), node_id=node_id), source=name)
    files = stream_files(name, drop=tuple(drop)) if node_id is None else None
    return files or read(name, drop=tuple(drop), node_id=node_id)


@dataclass(frozen=True)
class PartitionConfig:
    """What the command line says. `options` are those of `shardpass.partition`."""

    read_graph: Callable[[], GraphFiles | RawGraph]
    target: Path
    parts: int | None
    assignment: Path | None
    node_weights: Path | None
    options: Mapping[str, Any]


def partition_rank(comm: Ranks, config: PartitionConfig) -> None:
    """Partition on these ranks, with progress shown on the first, which then says what was written."""
    console, parts = output(), config.parts
    console.quiet = comm.rank > 0
    with Steps(console) as steps:

        def progress(stage: str, done: int, total: int) -> None:
            steps.tell(_STAGES.get(stage, stage), done, total)

        progress("read", 0, 1)
        graph = _read_in_turn(comm, config.read_graph)
        if parts is None and (isinstance(graph, GraphFiles) or graph.division is None):
            parts = _PARTS
        part_of, weights = (
            None if path is None else np.load(path, mmap_mode="r", allow_pickle=False)
            for path in (config.assignment, config.node_weights)
        )
        given: dict[str, Any] = {"assignment": part_of, "node_weights": weights, "comm": comm}
        manifest = partition(graph, config.target, parts, progress=progress, **given, **config.options)
    size = bytes_text(sum(file.bytes for file in manifest.files))
    console.print(f"wrote {config.target}, {size}: {manifest}", markup=False)


def _read_in_turn(comm: Ranks, read_graph: Callable[[], GraphFiles | RawGraph]) -> GraphFiles | RawGraph:
    """What `read_graph` returned on this rank. Rank 0 is the first, since it may have to download the files."""
    graph = read_graph() if comm.rank == 0 else None
    is_in_files = comm.all_gather_object(isinstance(graph, GraphFiles), "rank 0 has found the graph")[0]
    if comm.size > 1 and not is_in_files:
        raise ValueError(
            f"a graph in memory is partitioned by one process, and here are {comm.size}, of which each would have to "
            "hold it: start one process, or pass files (an edge list, a folder)"
        )
    return read_graph() if graph is None else graph
