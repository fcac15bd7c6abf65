"""`RawGraph`: what every reader yields and every partitioner takes. Typed; a homogeneous graph is the one-type case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardpass.data.file_rows import FileRows, blocks
from shardpass.data.rows import Field, as_field, as_tensor

NodeType = str
EdgeType = tuple[str, str, str]
Scalar = bool | int | float | str

NODE: NodeType = "node"
"""The node type of a homogeneous graph."""
EDGE: EdgeType = (NODE, "to", NODE)
"""The edge type of a homogeneous graph: (source type, relation, destination type)."""

FIELD_DTYPES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
        "float16", "bfloat16", "float32", "float64",
    )
}  # fmt: skip
"""The dtypes a stored field may have, and their names in a manifest."""
_BLOCK_ROWS = 1 << 20


@dataclass(frozen=True)
class EdgeArrays:
    """The edges of one type: edge i goes from node `src[i]` to node `dst[i]`. Any integer arrays, [num_edges] each.

    Arrays in files (`FileRows`) are never read whole.
    """

    src: Any
    dst: Any


class Division(NamedTuple):
    """A partition that a graph came with: how many parts, and the part of each node by type."""

    parts: int
    part_of: Mapping[NodeType, Tensor]


@dataclass(frozen=True)
class RawGraph:
    """A whole graph as it was read: original node ids, original edge order.

    Args:
        num_nodes: nodes of each node type.
        edges: the edges of each edge type (source type, relation, destination type).
        node_fields: per node type, arrays with one row per node.
        edge_fields: per edge type, arrays with one row per edge.
        graph_fields: numbers and strings that belong to the graph as a whole.
        source: where the graph came from, in words; kept in the store's manifest.
        division: the partition that the graph came with, if it did.
    """

    num_nodes: Mapping[NodeType, int]
    edges: Mapping[EdgeType, EdgeArrays]
    node_fields: Mapping[NodeType, Mapping[str, Any]] = field(default_factory=dict)
    edge_fields: Mapping[EdgeType, Mapping[str, Any]] = field(default_factory=dict)
    graph_fields: Mapping[str, Scalar] = field(default_factory=dict)
    source: str = ""
    division: Division | None = None

    @property
    def num_edges(self) -> dict[EdgeType, int]:
        """Edges of each edge type."""
        return {edge_type: len(arrays.src) for edge_type, arrays in self.edges.items()}

    def validate(self) -> RawGraph:
        """The same graph, checked, with torch tensors for all arrays (memory is shared where it can be).

        Edge ends come out as int32 or int64 tensors on the CPU, or stay in their files; every node type has an entry in
        `node_fields` and every edge type one in `edge_fields`.

        Raises:
            TypeError: edge indices that are not integers, fields of a type a tensor cannot hold.
            ValueError: unknown node types, ids out of range (the first one is named), wrong numbers of rows.
        """
        for node_type, count in self.num_nodes.items():
            _check_name(node_type)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ValueError(f"number of nodes of type {node_type!r} is {count!r}; expected an integer >= 0")
        edges = {kind: self._checked_edges(kind, arrays) for kind, arrays in self.edges.items()}
        for name in ("node_fields", "edge_fields"):
            known = self.num_nodes if name == "node_fields" else self.edges
            for owner in getattr(self, name):
                if owner not in known:
                    raise ValueError(
                        f"{name} has fields of {owner!r}, which is not a type of this graph: {list(known)}"
                    )
        node_fields = {
            kind: _checked_fields(self.node_fields.get(kind, {}), count, f"nodes of type {kind!r}")
            for kind, count in self.num_nodes.items()
        }
        edge_fields = {
            kind: _checked_fields(self.edge_fields.get(kind, {}), len(arrays.src), f"edges of type {kind!r}")
            for kind, arrays in edges.items()
        }
        for name, value in self.graph_fields.items():
            if not isinstance(value, bool | int | float | str):
                raise TypeError(f"graph field {name!r} is a {type(value).__name__}; expected a number or a string")
        graph_fields = dict(self.graph_fields)
        return RawGraph(dict(self.num_nodes), edges, node_fields, edge_fields, graph_fields, self.source, self.division)

    def _checked_edges(self, kind: EdgeType, arrays: EdgeArrays) -> EdgeArrays:
        if not (isinstance(kind, tuple) and len(kind) == 3):
            raise ValueError(f"edge type {kind!r}: expected (source type, relation, destination type)")
        for name in kind:
            _check_name(name)
        for end in (kind[0], kind[2]):
            if end not in self.num_nodes:
                raise ValueError(f"edge type {kind}: {end!r} is not a node type of this graph: {list(self.num_nodes)}")
        src = _checked_ends(arrays.src, self.num_nodes[kind[0]], f"source ids of edges {kind}")
        dst = _checked_ends(arrays.dst, self.num_nodes[kind[2]], f"destination ids of edges {kind}")
        if len(src) != len(dst):
            raise ValueError(f"edges {kind}: {len(src)} sources and {len(dst)} destinations; expected as many")
        return EdgeArrays(src, dst)


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"type name {name!r} is a {type(name).__name__}; expected a string")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"name {name!r} is not valid Unicode") from None


def _checked_ends(values: Any, num_nodes: int, what: str) -> Tensor | FileRows:
    if isinstance(values, FileRows):
        return _checked_file(values, num_nodes, f"{values.name}: {what}")
    ends = as_tensor(values, what).cpu()
    if ends.numel() == 0 and ends.dim() <= 1:
        return ends.reshape(-1).long()  # an empty list has no integer type of its own
    _check_kind(ends, what)
    if ends.dtype is not torch.int32:
        ends = ends.long()
    _check_interval(ends, num_nodes, what)
    return ends.contiguous()


def _checked_file(values: FileRows, num_nodes: int, what: str) -> FileRows:
    for start, ends in blocks(values, _BLOCK_ROWS):
        _check_kind(ends, what, start)
        _check_interval(ends.long(), num_nodes, what, start)
    return values


def _check_kind(ends: Tensor, what: str, first: int = 0) -> None:
    if ends.dim() != 1:
        raise ValueError(f"{what} have the shape {list(ends.shape)}; expected one number per edge")
    if ends.dtype is torch.bool or ends.is_floating_point() or ends.is_complex():
        found = _first_fraction(ends, first)
        raise TypeError(f"{what} are {ends.dtype}{found}; expected integers: convert them to int64")


def _check_interval(ends: Tensor, num_nodes: int, what: str, first: int = 0) -> None:
    if int(ends.min()) < 0 or int(ends.max()) >= num_nodes:
        position = int(torch.nonzero((ends < 0) | (ends >= num_nodes))[0])
        raise ValueError(
            f"{what}: {int(ends[position])} at position {first + position} is outside the valid interval "
            f"[0, {num_nodes}); correct the edge, or pass the true number of nodes"
        )


def _first_fraction(values: Tensor, first: int = 0) -> str:
    if not values.is_floating_point():
        return ""
    wrong = torch.nonzero(values != values.floor())  # NaN differs from itself
    if not wrong.numel():
        return ""
    return f" and not whole ({float(values[wrong[0, 0]])} at position {first + int(wrong[0, 0])})"


def _checked_fields(fields: Mapping[str, Any], count: int, what: str) -> dict[str, Field]:
    checked: dict[str, Field] = {}
    for name, values in fields.items():
        _check_name(name)
        rows = as_field(values, f"field {name!r} of {what}")
        where = f"{rows.name}: " if isinstance(rows, FileRows) else ""
        if rows.dtype not in FIELD_DTYPES:
            raise TypeError(
                f"{where}field {name!r} of {what} is {rows.dtype}; expected one of {', '.join(FIELD_DTYPES.values())}"
            )
        if len(rows.shape) == 0 or rows.shape[0] != count:
            raise ValueError(
                f"{where}field {name!r} of {what} has the shape {list(rows.shape)}; expected {count} rows, one for each"
            )
        checked[name] = rows
    return checked
