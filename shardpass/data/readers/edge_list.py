"""Edge lists in files or arrays, with features, labels and masks beside them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardpass.core.ranks import refuse_irregular
from shardpass.data.file_rows import in_memory
from shardpass.data.raw import EDGE, NODE, EdgeArrays, RawGraph
from shardpass.data.readers.graph_files import columns_of, open_edges
from shardpass.data.readers.mapping import count_nodes
from shardpass.data.reading import reading
from shardpass.data.rows import as_tensor
from shardpass.data.streaming import Budget


def read_edge_list(
    edges: Any,
    *,
    features: Any = None,
    labels: Any = None,
    masks: Mapping[str, Any] | None = None,
    weights: Any = None,
    num_nodes: int | None = None,
) -> RawGraph:
    """The graph of an edge list, checked.

    Args:
        edges: integers [2, num_edges] or [num_edges, 2], source first: an array, or a path of one of the files that
            `stream_edge_list` reads. A third column of a text file is the edge weight.
        features: becomes `x`, [num_nodes, ...]: an array, or the path of an `.npy` file, which stays memory-mapped.
        labels: becomes `y`, [num_nodes]; -1 for unlabelled nodes. An array or the path of an `.npy` file.
        masks: booleans [num_nodes] by name, such as `"train_mask"`. Arrays or paths of `.npy` files.
        weights: becomes `edge_weight`, [num_edges]. An array or the path of an `.npy` file.
        num_nodes: needed when there are neither features nor labels nor masks.

    Raises:
        ValueError, TypeError: when a file or array is not as described.
    """
    ends, column = _load_edges(edges)
    if weights is not None and column is not None:
        raise ValueError("edge weights are given twice: as the third column of the edges and as weights=")
    given = {"x": features, "y": labels, **(masks or {})}
    node_fields = {name: _load(values, name) for name, values in given.items() if values is not None}
    edge_weight = column if weights is None else _load(weights, "weights")
    edge_fields = {} if edge_weight is None else {"edge_weight": edge_weight}
    count = count_nodes(num_nodes, node_fields, NODE)
    source = f"{Path(edges).name} (edge list)" if isinstance(edges, str | os.PathLike) else "an edge list"
    return RawGraph({NODE: count}, {EDGE: ends}, {NODE: node_fields}, {EDGE: edge_fields}, {}, source).validate()


def _load_edges(edges: Any) -> tuple[EdgeArrays, Any]:
    """Both ends of the edges, and the weights if they are in the same file."""
    if not isinstance(edges, str | os.PathLike) or Path(edges).suffix == ".npy":
        return columns_of(as_tensor(_load(edges, "edges"), "edges")), None
    with tempfile.TemporaryDirectory() as scratch:
        ends, weights = open_edges(Path(edges), Budget(Path(scratch)))
        return EdgeArrays(in_memory(ends.src), in_memory(ends.dst)), None if weights is None else in_memory(weights)


def _load(values: Any, what: str) -> Any:
    if not isinstance(values, str | os.PathLike):
        return as_tensor(values, what)
    path = Path(values)
    if path.suffix != ".npy":
        raise ValueError(f"{what}: {path} is not an .npy file; save the array with numpy.save")
    # copy-on-write: the file is never changed, and rows are read when they are written to their part
    with reading(path, "an .npy file of numbers"):
        refuse_irregular(path)
        return np.load(path, mmap_mode="c", allow_pickle=False)
