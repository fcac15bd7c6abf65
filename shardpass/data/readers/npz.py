"""`.npz` files: dense or CSR features, one type or several."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardpass.data.raw import EDGE, NODE, EdgeArrays, EdgeType, RawGraph, Scalar
from shardpass.data.readers.mapping import as_scalar, edge_ends, is_scalar
from shardpass.data.rows import CsrRows

_CSR_SUFFIXES = ("_data", "_indices", "_indptr", "_shape")


def read_npz(path: Path) -> RawGraph:
    """The graph of an `.npz` file.

    One type: ``edge_index`` [2, num_edges] and one array per field. Several types: ``edge_index/<edge type>``,
    ``<field>/<node type>`` and ``<field>/<edge type>``, where an edge type is ``<source>__<relation>__<target>``.
    A field is sparse when it is given as ``<field>_data``, ``_indices``, ``_indptr`` and ``_shape`` (CSR); it is stored
    dense. Keys that begin with ``edge_`` are per edge, 0-dimensional arrays belong to the graph, all others are per
    node; one whose last dimension is the number of nodes ([num_splits, num_nodes]) is transposed. ``num_nodes`` (or
    ``num_nodes/<node type>``) is optional where a field tells it. The nodes of a type that has neither, beside other
    types, are counted up to the largest id in its edges; the graph's `source` says so.

    Raises:
        ValueError: when the file is not an `.npz`, or lacks edges, or a field does not fit; it is named.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (zipfile.BadZipFile, ValueError, EOFError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read as an .npz of plain arrays: {error}") from error
    fields: dict[str, Any] = _join_sparse(arrays)
    if "edge_index" in fields:
        fields = {_typed_name(name): values for name, values in fields.items()}
    return _assemble(fields, path)


def _typed_name(name: str) -> str:
    return f"{name}/{'__'.join(EDGE) if name.startswith('edge_') else NODE}"


def _assemble(fields: dict[str, Any], path: Path) -> RawGraph:
    edges: dict[EdgeType, EdgeArrays] = {}
    node_fields: dict[str, dict[str, Any]] = {}
    edge_fields: dict[EdgeType, dict[str, Any]] = {}
    counts: dict[str, int] = {}
    graph_fields: dict[str, Scalar] = {}
    for key, values in fields.items():
        name, _, kind = key.partition("/")
        if name == "edge_index":
            edges[_edge_type(kind, path)] = edge_ends(values, f"{key} in {path}")
        elif name == "num_nodes" and kind:
            counts[kind] = int(values)
        elif is_scalar(values):
            graph_fields[name if kind in ("", NODE) else key] = as_scalar(values)
        elif not kind:
            raise ValueError(f"{path}: array {key!r} names no type; expected <field>/<node type>")
        elif name.startswith("edge_"):
            edge_fields.setdefault(_edge_type(kind, path), {})[name] = values
        else:
            node_fields.setdefault(kind, {})[name] = values
    if not edges:
        raise ValueError(f"{path} has no array edge_index or edge_index/<source>__<relation>__<target>")
    node_types = dict.fromkeys([*(end for s, _, d in edges for end in (s, d)), *counts, *node_fields])
    num_nodes, source = {}, f"{path.name} (npz)"
    for kind in node_types:
        own = node_fields.get(kind, {})
        told = counts.get(kind, _told(own))
        if told is None and len(node_types) == 1:
            raise ValueError(f"{path}: the number of nodes is unknown: there is no node field; add an array num_nodes")
        if told is None:
            told = _largest_id(kind, edges) + 1
            source += f"; nodes of type {kind!r} counted from its edges"
        num_nodes[kind] = told
        node_fields[kind] = {name: _rows_first(values, told) for name, values in own.items()}
    return RawGraph(num_nodes, edges, node_fields, edge_fields, graph_fields, source)


def _told(fields: dict[str, Any]) -> int | None:
    """The number of nodes, as the fields have it: x, else one with a number per node."""
    if "x" in fields:
        return int(fields["x"].shape[0])
    return next((int(values.shape[0]) for values in fields.values() if len(values.shape) == 1), None)


def _largest_id(kind: str, edges: dict[EdgeType, EdgeArrays]) -> int:
    ends = [arrays.src for (source, _, _), arrays in edges.items() if source == kind]
    ends += [arrays.dst for (_, _, target), arrays in edges.items() if target == kind]
    return max((int(ids.max()) for ids in ends if ids.numel()), default=-1)


def _rows_first(values: Any, count: int) -> Any:
    if isinstance(values, np.ndarray) and values.ndim == 2 and values.shape[0] != count == values.shape[1]:
        return values.T
    return values


def _join_sparse(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The arrays, with each group of four CSR arrays in the place of its first."""
    fields: dict[str, Any] = {}
    for key, values in arrays.items():
        name, slash, kind = key.partition("/")
        base = next((name.removesuffix(end) for end in _CSR_SUFFIXES if name.endswith(end)), None)
        group = [f"{base}{suffix}{slash}{kind}" for suffix in _CSR_SUFFIXES]
        if base is None or not all(member in arrays for member in group):
            fields[key] = values
        elif key == group[0]:
            data, indices, indptr, shape = (arrays[member] for member in group)
            entries, columns, starts = (torch.from_numpy(array) for array in (data, indices, indptr))
            fields[f"{base}{slash}{kind}"] = CsrRows(entries, columns, starts, (int(shape[0]), int(shape[1])))
    return fields


def _edge_type(text: str, path: Path) -> EdgeType:
    names = text.split("__")
    if len(names) != 3:
        raise ValueError(f"{path}: edge type {text!r}; expected <source>__<relation>__<target>")
    return names[0], names[1], names[2]
