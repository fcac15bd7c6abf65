"""`shardpass partition`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shardpass.cli.console import bytes_text, output
from shardpass.cli.graphs import demo_graph
from shardpass.data import GraphFiles, partition, read, stream_edge_list, stream_files

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


@dataclass(frozen=True)
class Source:
    """What is to be partitioned. All but `name` and `drop` belong to edge lists."""

    name: str
    features: Path | None = None
    labels: Path | None = None
    masks: Mapping[str, Path | None] | None = None
    weights: Path | None = None
    num_nodes: int | None = None
    drop: tuple[str, ...] = ()

    def read(self) -> Any:
        """The graph, as `shardpass.partition` takes it.

        Raises:
            ValueError: options of edge lists with another kind of input, or what the readers find wrong.
        """
        masks = {name: path for name, path in (self.masks or {}).items() if path is not None}
        beside = any(value is not None for value in (self.features, self.labels, self.weights, self.num_nodes)) or masks
        if not self.name.startswith("demo:") and self.name.endswith(_EDGE_LISTS):
            graph = stream_edge_list(
                self.name, features=self.features, labels=self.labels, masks=masks, weights=self.weights,
                num_nodes=self.num_nodes,
            )  # fmt: skip
            return replace(graph, drop=self.drop)
        if beside:
            raise ValueError(
                f"--features, --labels, --weights, --num-nodes and masks belong to edge lists "
                f"({', '.join(_EDGE_LISTS)}); {self.name} holds its own"
            )
        if self.name.startswith("demo:"):
            return replace(read(demo_graph(self.name), drop=self.drop), source=self.name)
        return stream_files(self.name, drop=self.drop) or read(self.name, drop=self.drop)


def run_partition(
    source: Source, target: Path, parts: int | None, assignment: Path | None, options: Mapping[str, Any]
) -> None:
    """Partition with progress shown, then say what was written. `options` are those of `shardpass.partition`."""
    console = output()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(_STAGES.get(stage, stage), total=total)
            bar.update(tasks[stage], completed=done, total=total)

        progress("read", 0, 1)
        graph = source.read()
        if parts is None and (isinstance(graph, GraphFiles) or graph.division is None):
            parts = _PARTS
        part_of = None if assignment is None else np.load(assignment, allow_pickle=False)
        manifest = partition(graph, target, parts, assignment=part_of, progress=progress, **options)
    edges, cut = (sum(counts.values()) for counts in (manifest.num_edges, manifest.cut_edges))
    size, share = sum(file.bytes for file in manifest.files), cut / edges if edges else 0.0
    console.print(
        f"wrote {target}: {sum(manifest.num_nodes.values()):,} nodes and {edges:,} edges in "
        f"{manifest.num_parts} parts, {share:.1%} of the edges cut, {bytes_text(size)}"
    )
