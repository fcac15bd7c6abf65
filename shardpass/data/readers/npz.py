"""`.npz` files: dense or CSR features, one type or several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardpass.core.ranks import refuse_irregular
from shardpass.data.raw import EDGE, NODE, EdgeType, RawGraph
from shardpass.data.readers.mapping import is_scalar, read_mapping
from shardpass.data.reading import reading
from shardpass.data.rows import csr_rows

_CSR_SUFFIXES = ("_data", "_indices", "_indptr", "_shape")

_Typed = dict[Any, dict[str, Any]]
"""The arrays of each node type and edge type, by name."""


def read_npz(path: Path) -> RawGraph:
    """The graph of an `.npz` file.

    A graph of one type has ``edge_index`` [2, num_edges] and an array for each field. A graph of several types has
    ``edge_index/<edge type>``, ``<field>/<node type>`` and ``<field>/<edge type>``, where an edge type is
    ``<source>__<relation>__<target>``. Keys that begin with ``edge_`` are per edge, 0-dimensional arrays belong to the
    graph, and all others are per node.

    A field is sparse if it is given as ``<field>_data``, ``_indices``, ``_indptr`` and ``_shape`` (CSR); it is stored
    dense. A node field of the shape [num_splits, num_nodes] is transposed. ``num_nodes`` (or ``num_nodes/<node type>``)
    may be left out if a field tells it. If a graph has several types, and neither tells the number of nodes of one of
    them, these are counted up to the largest id in its edges, and the graph's `source` says so.

    Raises:
        ValueError: when the file is not an `.npz`, lacks edges, or a field does not fit. The error names the field.
    """
    with reading(path, "an .npz of plain arrays"):
        refuse_irregular(path)
        with np.load(path, allow_pickle=False) as archive:
            arrays = dict(archive)
    typed, scalars = _by_type(_join_sparse(arrays), path)
    edges = {kind: fields["edge_index"] for kind, fields in typed.items() if "edge_index" in fields}
    if not edges:
        raise ValueError(f"{path} has no array edge_index or edge_index/<source>__<relation>__<target>")
    source = f"{path.name} (npz)"
    kinds = dict.fromkeys([*(end for s, _, d in edges for end in (s, d)), *(k for k in typed if isinstance(k, str))])
    for kind in kinds:
        fields = typed.setdefault(kind, {})
        count = fields.pop("num_nodes", None)
        if count is None:
            count = _told(fields)
        if count is None and len(kinds) == 1:
            raise ValueError(f"{path}: the number of nodes is unknown: there is no node field; add an array num_nodes")
        if count is None:
            count = 1 + max((int(ids.max()) for ids in _ends_at(kind, edges) if ids.size), default=-1)
            source += f"; nodes of type {kind!r} counted from its edges"
        typed[kind] = {"num_nodes": count, **{name: _rows_first(rows, count) for name, rows in fields.items()}}
    ordered = {kind: typed.pop(kind) for kind in (*kinds, *edges)}
    return read_mapping({**ordered, **typed, **scalars}, source)


def _by_type(fields: dict[str, Any], path: Path) -> tuple[_Typed, dict[str, Any]]:
    """The arrays of each type, and those that belong to the graph as a whole."""
    typed: _Typed = {}
    scalars = {}
    single = "edge_index" in fields
    for key, values in fields.items():
        name, _, kind = key.partition("/")
        owner = kind or (single and NODE)
        if name == "num_nodes" and owner:
            typed.setdefault(owner, {})[name] = int(values)
        elif is_scalar(values):
            scalars[key] = values
        elif name.startswith("edge_") and (kind or single):
            typed.setdefault(_edge_type(kind, path) if kind else EDGE, {})[name] = values
        elif owner:
            typed.setdefault(owner, {})[name] = values
        else:
            if not any(key.startswith("edge_index") for key in fields):
                raise ValueError(
                    f"{path} has no array 'edge_index', with the edges; it has {', '.join(sorted(fields))}"
                )
            raise ValueError(f"{path}: array {key!r} names no type; expected <field>/<node type>")
    return typed, scalars


def _told(fields: dict[str, Any]) -> int | None:
    """The number of nodes that the fields tell: the rows of x, else the length of a field of single numbers."""
    if "x" in fields:
        return int(fields["x"].shape[0])
    return next((int(values.shape[0]) for values in fields.values() if len(values.shape) == 1), None)


def _ends_at(kind: str, edges: dict[EdgeType, Any]) -> Iterator[np.ndarray]:
    """The ids of the nodes of a type in all edges."""
    for (source, _, target), edge_index in edges.items():
        yield from (ids for ids, end in zip(edge_index, (source, target)) if end == kind)


def _rows_first(values: Any, count: int) -> Any:
    if isinstance(values, np.ndarray) and values.ndim == 2 and values.shape[0] != count == values.shape[1]:
        return values.T
    return values


def _join_sparse(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The arrays, with a sparse matrix in the place of each group of four CSR arrays."""
    fields: dict[str, Any] = {}
    for key, values in arrays.items():
        name, slash, kind = key.partition("/")
        base = next((name.removesuffix(end) for end in _CSR_SUFFIXES if name.endswith(end)), None)
        group = [f"{base}{suffix}{slash}{kind}" for suffix in _CSR_SUFFIXES]
        if base is None or not all(member in arrays for member in group):
            fields[key] = values
        elif key == group[0]:
            entries, columns, starts, shape = (arrays[member] for member in group)
            fields[f"{base}{slash}{kind}"] = csr_rows(entries, columns, starts, (int(shape[0]), int(shape[1])))
    return fields


def _edge_type(text: str, path: Path) -> EdgeType:
    names = text.split("__")
    if len(names) != 3:
        raise ValueError(f"{path}: edge type {text!r}; expected <source>__<relation>__<target>")
    return names[0], names[1], names[2]
