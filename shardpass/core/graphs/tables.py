"""What writes tables of results with the user's own node ids. A store has it; a graph only passes it on."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from shardpass.core.sharding import NodeType


class TableWriter(Protocol):
    """Writes Parquet files of a row for each node of a type, in the original order, with the user's own ids."""

    def check(self) -> None:
        """Return when files can be written. What it raises says why not, before any work is done."""

    def write(self, path: Path, rows: np.ndarray, node_type: NodeType | None = None, classes: bool = False) -> None:
        """Write, or replace, the file of all rows ``[total_nodes, ...]``: the columns `id` and `output`.

        With `classes`, rows are logits, and there are the columns `class` and `probability` too.
        """
