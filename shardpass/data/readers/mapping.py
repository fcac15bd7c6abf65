"""Graphs given as a dict of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardpass.data.raw import ADJACENCY, EDGE, NODE, EdgeArrays, EdgeType, RawGraph, Scalar
from shardpass.data.readers.sparse_matrix import refuse_matrix, weight_names, with_edges
from shardpass.data.rows import as_tensor


def read_mapping(arrays: Mapping[Any, Any], source: str = "a dict of arrays") -> RawGraph:
    """The graph of a dict.

    A graph of one type is ``{"edge_index": [2, num_edges], "x": ..., "num_nodes": optional, ...}``. In place of
    ``edge_index`` there may be a sparse matrix ``adj_t``, whose entry (i, j) is the edge from j to i. Keys that begin
    with ``edge_`` are per edge, numbers and strings belong to the graph, and all others are per node. A graph of
    several types is a dict of dicts, whose keys are strings for node types and tuples (source type, relation,
    destination type) for edge types.

    Raises:
        ValueError: when edges are missing, or fields do not fit. The error names the field.
    """
    if not any(isinstance(key, tuple) for key in arrays):
        arrays = _by_type(with_edges(arrays, "the dict", is_square=True))
    num_nodes: dict[str, int] = {}
    edges: dict[EdgeType, EdgeArrays] = {}
    node_fields, edge_fields = {}, {}
    graph_fields: dict[str, Scalar] = {}
    weights: list[str] = []
    for kind, values in arrays.items():
        if isinstance(kind, tuple):
            values = with_edges(values, f"edge type {kind}")
            weights += [values.pop(ADJACENCY)] if isinstance(values.get(ADJACENCY), str) else []
            edges[kind] = edge_ends(values.get("edge_index"), "edge_index" + f" of {kind}" * (kind != EDGE))
            edge_fields[kind] = {name: field for name, field in values.items() if name != "edge_index"}
        elif isinstance(values, Mapping):
            node_fields[kind] = {name: field for name, field in values.items() if name != "num_nodes"}
            num_nodes[kind] = count_nodes(values.get("num_nodes"), node_fields[kind], kind)
        elif is_scalar(values):
            graph_fields[kind] = as_scalar(values)
        else:
            raise ValueError(f"key {kind!r}: expected a dict of arrays of a node type, or a number or a string")
    if names := weight_names(weights):
        graph_fields[ADJACENCY] = names
    return RawGraph(num_nodes, edges, node_fields, edge_fields, graph_fields, source)


def _by_type(arrays: Mapping[Any, Any]) -> dict[Any, Any]:
    """The arrays of a graph of one type, by type."""
    typed: dict[Any, Any] = {NODE: {}, EDGE: {}}
    for name, values in arrays.items():
        if is_scalar(values) and name != "num_nodes":
            typed[name] = values
        else:
            typed[EDGE if str(name).startswith("edge_") else NODE][name] = values
    return typed


def edge_ends(edge_index: Any, what: str) -> EdgeArrays:
    """The two rows of an edge index [2, num_edges]."""
    if edge_index is None:
        raise ValueError(
            f"{what} is missing; expected integers of the shape [2, num_edges] (row 0 source, row 1 target)"
        )
    refuse_matrix(edge_index, what)
    if isinstance(edge_index, set | frozenset):
        raise TypeError(f"{what} is a set of pairs; expected [2, num_edges]: pass numpy.array([*pairs]).T")
    if isinstance(edge_index, list | tuple) and edge_index and all(getattr(one, "ndim", 0) for one in edge_index):
        if len(edge_index) != 2:
            raise ValueError(
                f"{what} is {len(edge_index)} arrays; expected two, the sources and the targets of edges: the others "
                f"are fields of edges, such as edge_shift"
            )
        return EdgeArrays(*(as_tensor(one, f"{end} of {what}") for one, end in zip(edge_index, ("sources", "targets"))))
    ends = as_tensor(edge_index, what)
    if ends.dim() != 2 or ends.shape[0] != 2:
        turned = ": transpose it" if ends.dim() == 2 and ends.shape[1] == 2 else ""
        raise ValueError(f"{what} has the shape {list(ends.shape)}; expected [2, num_edges]{turned}")
    return EdgeArrays(ends[0], ends[1])


def count_nodes(given: Any, fields: Mapping[str, Any], node_type: str) -> int:
    """The number of nodes: as given, else the rows of a node field. It is never guessed from the largest id."""
    if given is not None:
        return int(given)
    counts = {
        name: values.shape[0] if hasattr(values, "shape") else len(values)
        for name, values in fields.items()
        if hasattr(values, "__len__")
    }
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise ValueError(
            f"the fields of the nodes of type {node_type!r} have different numbers of rows: {listed}. Give each one "
            f"row per node, let names of edge fields begin with edge_, and leave out what is neither"
        )
    if counts:
        return next(iter(counts.values()))
    raise ValueError(
        f"the number of nodes of type {node_type!r} is unknown: there is no node field to count; pass num_nodes "
        f"(--num-nodes)"
    )


def is_scalar(value: Any) -> bool:
    """Whether a value is a single number or string. A 0-dimensional array is one."""
    return isinstance(value, bool | int | float | str) or getattr(value, "shape", None) == ()


def as_scalar(value: Any) -> Scalar:
    """The plain number or string of such a value."""
    return value.item() if hasattr(value, "item") else value
