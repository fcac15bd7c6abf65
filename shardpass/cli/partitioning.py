"""`shardpass partition`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

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


_Mask = Annotated[Path | None, typer.Option(help="Edge lists: .npy of booleans.")]


@dataclass(frozen=True)
class PartitionConfig:
    """What the command line says."""

    input: Annotated[
        str,
        typer.Argument(
            help=".npz, .json of a DGL partition, edge list (.npy, .parquet, .csv, .txt; the latter also .gz), folder "
            "with edges and features, dataset of OGB (folder or name), demo:digits or demo:powerlaw."
        ),
    ]
    output: Annotated[Path, typer.Argument(help="The directory to write.")]
    parts: Annotated[int | None, typer.Option(help="Ranks at most (default: 4; of a .json its own).")] = None
    method: Annotated[str, typer.Option(help="kaminpar (for any size), metis, random or range.")] = "kaminpar"
    seed: Annotated[int, typer.Option(help="Of the partitioner.")] = 0
    assignment: Annotated[Path | None, typer.Option(help="An .npy with the part of each node, instead.")] = None
    node_weights: Annotated[Path | None, typer.Option(help="An .npy of what parts balance (default: bytes).")] = None
    overwrite: Annotated[bool, typer.Option(help="Replace a store that is there already.")] = False
    features: Annotated[Path | None, typer.Option(help="Edge lists: .npy, .parquet or .csv, a row per node.")] = None
    labels: Annotated[Path | None, typer.Option(help="Edge lists: .npy of class ids, -1 for unlabelled.")] = None
    train_mask: _Mask = None
    val_mask: _Mask = None
    test_mask: _Mask = None
    weights: Annotated[Path | None, typer.Option(help="Edge lists: .npy of edge weights.")] = None
    num_nodes: Annotated[int | None, typer.Option(help="Edge lists without features, labels and masks.")] = None
    names: Annotated[bool, typer.Option("--names", help="Edge lists: ids are names, as --nodes implies.")] = False
    nodes: Annotated[Path | None, typer.Option(help="Edge lists: a table of ids, features, label, split.")] = None
    node_id: Annotated[str | None, typer.Option(help="The column of ids in --nodes, or a field of names.")] = None
    label: Annotated[str | None, typer.Option(help="The column of labels in --nodes (default: y or label).")] = None
    src: Annotated[str | None, typer.Option(help="With names: the column of sources (default: src).")] = None
    dst: Annotated[str | None, typer.Option(help="With names: the column of destinations (default: dst).")] = None
    drop: Annotated[list[str] | None, typer.Option(help="Leave out this field (may be repeated).")] = None
    add_inverse_edge: Annotated[
        bool, typer.Option("--add-inverse-edge", help="Edge lists: add the reverse of each edge; nothing is merged.")
    ] = False
    keep: Annotated[
        list[str] | None, typer.Option(help="A column of features that looks like a label or index (may be repeated).")
    ] = None
    threads: Annotated[int, typer.Option(help="kaminpar: with more than 1, the parts differ from run to run.")] = 1
    memory: Annotated[float, typer.Option(help="Files: GiB for edges on each rank, before temporary files.")] = 1.0

    def given(self, *names: str) -> dict[str, Any]:
        """Those of these options that were given, by name."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def read_source(config: PartitionConfig) -> GraphFiles | RawGraph:
    """The graph, as `shardpass.partition` takes it."""
    name, drop, node_id = config.input, tuple(config.drop or ()), config.node_id
    keep, inverse = tuple(config.keep or ()), config.add_inverse_edge
    masks = config.given("train_mask", "val_mask", "test_mask")
    beside = config.given("features", "labels", "weights", "num_nodes")
    if config.names or config.nodes is not None:
        if others := [*masks, *beside]:
            raise ValueError(f"--{others[0].replace('_', '-')} is by number, and these nodes have names: use --nodes")
        return stream_tables(
            name,
            drop=drop,
            keep=keep,
            add_inverse_edge=inverse,
            **config.given("nodes", "node_id", "label", "src", "dst"),
        )
    is_edge_list = not name.startswith("demo:") and name.endswith(_EDGE_LISTS)
    if config.given("label", "src", "dst") or (node_id is not None and is_edge_list):
        raise ValueError("--node-id, --label, --src and --dst name columns of tables: pass --nodes, or --names as well")
    if is_edge_list:
        return replace(stream_edge_list(name, masks=masks, keep=keep, add_inverse_edge=inverse, **beside), drop=drop)
    if inverse:
        raise ValueError(
            f"--add-inverse-edge is for edge lists ({', '.join(_EDGE_LISTS)}) and --names; {name} is none: with PyG, "
            f"ToUndirected() adds reverse edges"
        )
    if masks or beside:
        raise ValueError(
            f"--features, --labels, --weights, --num-nodes and masks belong to edge lists ({', '.join(_EDGE_LISTS)}); "
            f"{name} holds its own"
        )
    files = stream_files(name, drop=drop, keep=keep) if node_id is None and not name.startswith("demo:") else None
    if keep and files is None:
        raise ValueError(f"--keep names columns of a file of features or of --nodes, and {name} is neither")
    if name.startswith("demo:"):
        return replace(read(demo_graph(name), drop=drop, node_id=node_id), source=name)
    return files or read(name, drop=drop, node_id=node_id)


def partition_rank(comm: Ranks, config: PartitionConfig) -> None:
    """Partition on these ranks, with progress shown on the first, which then says what was written."""
    console, parts = output(), config.parts
    console.quiet = comm.rank > 0
    with Steps(console) as steps:

        def progress(stage: str, done: int, total: int) -> None:
            steps.tell(_STAGES.get(stage, stage), done, total)

        progress("read", 0, 1)
        graph = _read_in_turn(comm, config)
        if parts is None and (isinstance(graph, GraphFiles) or graph.division is None):
            parts = _PARTS
        part_of, weights = (
            None if path is None else np.load(path, mmap_mode="r", allow_pickle=False)
            for path in (config.assignment, config.node_weights)
        )
        manifest = partition(
            graph, config.output, parts, config.method, seed=config.seed, assignment=part_of, node_weights=weights,
            overwrite=config.overwrite, threads=config.threads, memory_bytes=int(config.memory * 2**30), comm=comm,
            progress=progress,
        )  # fmt: skip
    size = bytes_text(sum(file.bytes for file in manifest.files))
    console.print(f"wrote {config.output}, {size}: {manifest}", markup=False)


def _read_in_turn(comm: Ranks, config: PartitionConfig) -> GraphFiles | RawGraph:
    """The graph that this rank has read. Rank 0 is the first, since it may have to download the files."""
    graph = read_source(config) if comm.rank == 0 else None
    is_in_files = comm.all_gather_object(isinstance(graph, GraphFiles), "rank 0 has found the graph")[0]
    if comm.size > 1 and not is_in_files:
        raise ValueError(
            f"a graph in memory is partitioned by one process, and here are {comm.size}, of which each would have to "
            "hold it: start one process, or pass files (an edge list, a folder)"
        )
    return read_source(config) if graph is None else graph
