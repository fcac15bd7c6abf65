"""Edge lists in files or arrays, with features, labels and masks beside them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardpass.data.raw import EDGE, NODE, EdgeArrays, RawGraph
from shardpass.data.readers.mapping import count_nodes
from shardpass.data.readers.text import delimiter_of, edge_columns
from shardpass.data.rows import as_tensor


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
        edges: integers [2, num_edges] or [num_edges, 2], source first: an array, or a path to `.npy` (memory-mapped),
            `.csv` (commas; a header line is skipped) or `.txt` (blanks; `#` begins a comment). A third column of
            such a text file is the edge weight.
        features: becomes `x`, [num_nodes, ...]: an array or a path to `.npy`, which stays memory-mapped.
        labels: becomes `y`, [num_nodes]; -1 for unlabelled nodes. An array or a path to `.npy`.
        masks: by name (`"train_mask"`), booleans [num_nodes]; arrays or paths to `.npy`.
        weights: becomes `edge_weight`, [num_edges]. An array or a path to `.npy`.
        num_nodes: needed when there is neither features nor labels nor masks.

    Raises:
        ValueError, TypeError: a file or array that is not as described.
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


def _load(values: Any, what: str) -> Any:
    if not isinstance(values, str | os.PathLike):
        return as_tensor(values, what)
    path = Path(values)
    if path.suffix != ".npy":
        raise ValueError(f"{what}: {path} is not an .npy file; save the array with numpy.save")
    # copy-on-write: the file is never changed, and rows are read when they are written to their part
    return np.load(path, mmap_mode="c", allow_pickle=False)


def _load_edges(edges: Any) -> tuple[EdgeArrays, Any]:
    """Both ends of the edges, and the third column of a text file if there is one."""
    column = None
    text = isinstance(edges, str | os.PathLike) and Path(edges).suffix in (".csv", ".txt")
    if text:
        table, column = _load_text(Path(edges))
    else:
        table = as_tensor(_load(edges, "edges"), "edges")
    shape = list(table.shape)
    if text:
        return EdgeArrays(table[:, 0], table[:, 1]), column
    if len(shape) != 2 or 2 not in shape:
        raise ValueError(f"edges have the shape {shape}; expected [2, num_edges] or [num_edges, 2]")
    if shape == [2, 2]:
        raise ValueError(
            "edges of the shape [2, 2] can be read both ways; pass a PyG Data or {'edge_index': edges, 'num_nodes': n}"
        )
    by_row = shape[0] == 2
    return (EdgeArrays(table[0], table[1]) if by_row else EdgeArrays(table[:, 0], table[:, 1])), column


def _load_text(path: Path) -> tuple[Any, Any]:
    """The first two columns [num_edges, 2] and the third of a text file (None if there is none)."""
    delimiter = delimiter_of(path)
    skip, columns = edge_columns(path)
    if columns == 0:
        return as_tensor(np.empty((0, 2), dtype=np.int64), "edges"), None
    try:
        # ids as integers: through floats those above 2**53 would change
        table = np.loadtxt(path, np.int64, delimiter=delimiter, skiprows=skip, usecols=(0, 1), ndmin=2)
        column = None
        if columns == 3:
            column = np.loadtxt(path, np.float32, delimiter=delimiter, skiprows=skip, usecols=2, ndmin=1)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as an edge list of integers: {error}") from error
    return as_tensor(table, "edges"), column
