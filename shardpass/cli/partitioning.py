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
from shardpass.data import inspect, partition, read, read_edge_list

_EDGE_LISTS = (".npy", ".csv", ".txt")
_PARTS = 4
_STAGES = {"read": "reading", "assign": "assigning nodes to parts", "write": "writing parts"}


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
        if not self.name.startswith("demo:") and Path(self.name).suffix in _EDGE_LISTS:
            if not Path(self.name).is_file():
                raise ValueError(f"there is no file {self.name}")
            graph = read_edge_list(
                self.name, features=self.features, labels=self.labels, masks=masks, weights=self.weights,
                num_nodes=self.num_nodes,
            )  # fmt: skip
            return read(graph, drop=self.drop)
        if beside:
            raise ValueError(
                f"--features, --labels, --weights, --num-nodes and masks belong to edge lists "
                f"({', '.join(_EDGE_LISTS)}); {self.name} holds its own"
            )
        if self.name.startswith("demo:"):
            return replace(read(demo_graph(self.name), drop=self.drop), source=self.name)
        return read(self.name, drop=self.drop)


def run_partition(
    source: Source, target: Path, parts: int | None, method: str, seed: int, assignment: Path | None, overwrite: bool
) -> None:
    """Partition with progress shown, then say what was written."""
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
        if parts is None and graph.division is None:
            parts = _PARTS
        part_of = None if assignment is None else np.load(assignment, allow_pickle=False)
        partition(graph, target, parts, method, assignment=part_of, seed=seed, overwrite=overwrite, progress=progress)
    report = inspect(target)
    edges = sum(report.manifest.num_edges.values())
    cut = report.num_cut_edges / edges if edges else 0.0
    size = sum(group.num_bytes for group in report.groups)
    console.print(
        f"wrote {target}: {sum(report.manifest.num_nodes.values()):,} nodes and {edges:,} edges in "
        f"{report.manifest.num_parts} parts, "
        f"{cut:.1%} of the edges cut, {bytes_text(size)}"
    )
