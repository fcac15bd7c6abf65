"""`RawGraph`: the whole graph that every reader returns and every partitioner takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardpass.core.sharding import EDGE, HOST, NODE, EdgeType, NodeType
from shardpass.data.column_names import refuse_doubtful
from shardpass.data.file_rows import FileRows, blocks
from shardpass.data.rows import Field, as_field, as_tensor

__all__ = [
    "ADJACENCY",
    "EDGE",
    "FIELD_DTYPES",
    "NODE",
    "Division",
    "EdgeArrays",
    "EdgeType",
    "NodeType",
    "RawGraph",
    "Scalar",
]

Scalar = bool | int | float | str

ADJACENCY = "adj_t"
"""PyG's name of an adjacency matrix. As a field of the graph it names the edge fields that were values of one."""

FIELD_DTYPES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
        "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    )
}  # fmt: skip
"""The dtypes that a stored field may have, and their names in a manifest."""
_BLOCK_ROWS = 1 << 20


@dataclass(frozen=True)
class EdgeArrays:
    """The edges of one type: edge i goes from node `src[i]` to node `dst[i]`.

    Both are integer arrays of any kind, [num_edges]. Arrays in files (`FileRows`) are never read as a whole.
    """

    src: Any
    dst: Any


class Division(NamedTuple):
    """A partition that came with a graph: the number of parts, and for each node type the part of each node."""

    parts: int
    part_of: Mapping[NodeType, Tensor]


@dataclass(frozen=True)
class RawGraph:
    """A whole graph as it was read, with its original node ids and the original order of its edges.

    Args:
        num_nodes: the number of nodes of each node type.
        edges: the edges of each edge type (source type, relation, destination type).
        node_fields: for each node type, arrays with one row per node.
        edge_fields: for each edge type, arrays with one row per edge.
        graph_fields: numbers, strings and small arrays that belong to the graph as a whole, such as the labels of the
            graphs that were joined to this one.
        source: where the graph came from, in words. A store keeps this text in its manifest.
        division: the partition that came with the graph, if there is one.
        names: for some node types, the ids that the nodes have in your own data: all strings or all integers. A list
            or an array with an entry for each node.
        links: for some edge types, pairs of nodes to score, which are no edges. ``name_index``, ``[2, n]``, has the ids
            of their ends, and ``name``, if it is there, a label for each, ``[n, ...]``.
        columns: for some node types, the names of the columns of fields such as ``x``.
    """

    num_nodes: Mapping[NodeType, int]
    edges: Mapping[EdgeType, EdgeArrays]
    node_fields: Mapping[NodeType, Mapping[str, Any]] = field(default_factory=dict)
    edge_fields: Mapping[EdgeType, Mapping[str, Any]] = field(default_factory=dict)
    graph_fields: Mapping[str, Scalar | Tensor] = field(default_factory=dict)
    source: str = ""
    division: Division | None = None
    names: Mapping[NodeType, Any] = field(default_factory=dict)
    links: Mapping[EdgeType, Mapping[str, Any]] = field(default_factory=dict)
    columns: Mapping[NodeType, Mapping[str, Sequence[str]]] = field(default_factory=dict)

    @property
    def num_edges(self) -> dict[EdgeType, int]:
        """The number of edges of each edge type."""
        return {edge_type: len(arrays.src) for edge_type, arrays in self.edges.items()}

    def validate(
        self, share: Callable[[int], range] = range, device: torch.device | None = HOST, edges_are_known: bool = False
    ) -> RawGraph:
        """The same graph, checked, with torch tensors for all arrays. Memory is shared where that is possible.

        The ends of the edges become int32 or int64 tensors on `device` (`None`: where they are), or stay in their
        files. Every node type has an entry in `node_fields`, and every edge type one in `edge_fields`. Given the number
        of rows of an array in a file, `share` says of which of them the ids are checked; edges that are known are left
        as they are.
        """
        for node_type, count in self.num_nodes.items():
            _check_name(node_type)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ValueError(f"number of nodes of type {node_type!r} is {count!r}; expected an integer >= 0")
        nodes, edges = list(self.num_nodes), list(self.edges)
        named: dict[str, list[Any]] = {"node_fields": nodes, "edge_fields": edges, "names": nodes, "links": edges}
        for name, known in named.items():
            for owner in getattr(self, name):
                if owner not in known:
                    raise ValueError(f"{name} has fields of {owner!r}, which is not a type of this graph: {known}")
        for kind, names in self.names.items():
            if len(names) != self.num_nodes[kind]:
                raise ValueError(
                    f"nodes of type {kind!r} have {len(names)} names; expected {self.num_nodes[kind]}, one for each"
                )
        graph_fields = {name: _checked_graph_field(name, value) for name, value in self.graph_fields.items()}
        checked = dict(self.edges)
        if not edges_are_known:
            checked = {kind: self._checked_edges(kind, arrays, share, device) for kind, arrays in checked.items()}
        node_fields = {
            kind: _checked_fields(self.node_fields.get(kind, {}), count, f"nodes of type {kind!r}")
            for kind, count in self.num_nodes.items()
        }
        edge_fields = {
            kind: _checked_fields(self.edge_fields.get(kind, {}), len(arrays.src), f"edges of type {kind!r}")
            for kind, arrays in checked.items()
        }
        links = {kind: self._checked_links(kind, fields) for kind, fields in self.links.items()}
        return replace(
            self,
            edges=checked,
            node_fields=node_fields,
            edge_fields=edge_fields,
            graph_fields=graph_fields,
            links=links,
            columns={kind: self._checked_columns(kind, fields) for kind, fields in node_fields.items()},
        )

    def _checked_columns(self, kind: NodeType, checked: Mapping[str, Field]) -> dict[str, list[str]]:
        """The names of the columns of each field that has some: those given, or those of a DataFrame."""
        found: dict[str, list[str]] = {}
        for name, rows in checked.items():
            given = self.columns.get(kind, {}).get(name)
            if given is None:
                given = [one for one in getattr(self.node_fields[kind][name], "columns", ()) if isinstance(one, str)]
                refuse_doubtful(
                    f"field {name!r}", given, (), (), "leave the column out, or pass .to_numpy() if it is one"
                )
            if len(given) and list(rows.shape[1:]) != [len(given)]:
                raise ValueError(
                    f"field {name!r} of nodes of type {kind!r} has rows of the shape {list(rows.shape[1:])} and "
                    f"{len(given)} names of columns; expected one for each"
                )
            if len(given):
                found[name] = list(given)
        return found

    def _checked_links(self, kind: EdgeType, fields: Mapping[str, Any]) -> dict[str, Tensor]:
        checked = {}
        for name, values in fields.items():
            _check_name(name)
            checked[name] = as_tensor(values, f"{name!r} of {kind}").cpu().contiguous()
            if not name.endswith("_index"):
                checked[name] = _checked_graph_field(name, checked[name])
                continue
            for end, ids in zip(kind[::2], checked[name]):
                check_ids(ids, self.num_nodes[end], f"ids of {end!r} in {name!r} of {kind}")
        return checked

    def _checked_edges(
        self, kind: EdgeType, arrays: EdgeArrays, share: Callable[[int], range], device: torch.device | None
    ) -> EdgeArrays:
        if not (isinstance(kind, tuple) and len(kind) == 3):
            raise ValueError(f"edge type {kind!r}: expected (source type, relation, destination type)")
        for name in kind:
            _check_name(name)
        for end in (kind[0], kind[2]):
            if end not in self.num_nodes:
                raise ValueError(f"edge type {kind}: {end!r} is not a node type of this graph: {list(self.num_nodes)}")
        src = check_ids(arrays.src, self.num_nodes[kind[0]], f"source ids of edges {kind}", share=share, device=device)
        dst = check_ids(
            arrays.dst, self.num_nodes[kind[2]], f"destination ids of edges {kind}", share=share, device=device
        )
        if len(src) != len(dst):
            raise ValueError(f"edges {kind}: {len(src)} sources and {len(dst)} destinations; expected as many of both")
        return EdgeArrays(src, dst)


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name {name!r} is a {type(name).__name__}; expected a string")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"name {name!r} is not valid Unicode") from None


def check_ids(
    values: Any, count: int, what: str, counted: str = "nodes", share: Callable[[int], range] = range,
    device: torch.device | None = HOST,
) -> Tensor | FileRows:  # fmt: skip
    """The values as int32 or int64, [n], or in their file, after each has been found to be in `[0, count)`."""
    ends: Tensor | FileRows
    if isinstance(values, FileRows):
        ends, what = values, f"{values.name}: {what}"
    else:
        ends = as_tensor(values, what)
        ends = ends if device is None else ends.to(device)
        if ends.numel() == 0 and ends.dim() <= 1:
            return ends.reshape(-1).long()  # an empty list has no integer type of its own
    if len(ends.shape) != 1:
        raise ValueError(f"{what} have the shape {list(ends.shape)}; expected a list of integers")
    checked = share(len(ends)) if isinstance(ends, FileRows) else range(len(ends))
    for start, block in blocks(ends[checked.start : checked.stop], _BLOCK_ROWS):
        start += checked.start
        if block.dtype is torch.bool or block.is_floating_point() or block.is_complex():
            found = _first_fraction(block, start)
            raise TypeError(f"{what} are {block.dtype}{found}; expected integers: convert them to int64")
        ids = block.long()
        if int(ids.min()) < 0 or int(ids.max()) >= count:
            position = int(torch.nonzero((ids < 0) | (ids >= count))[0])
            raise ValueError(
                f"{what}: {int(ids[position])} at position {start + position} is outside the valid interval "
                f"[0, {count}); correct it, or pass the true number of {counted}"
            )
    if isinstance(ends, FileRows):
        return ends
    return (ends if ends.dtype is torch.int32 else ends.long()).contiguous()


def _first_fraction(values: Tensor, first: int) -> str:
    """Words about the first number that is not whole, if there is one in this block."""
    wrong = torch.nonzero(values != values.floor()) if values.is_floating_point() else values[:0]  # NaN differs too
    if not wrong.numel():
        return ""
    return f" and not whole ({float(values[wrong[0, 0]])} at position {first + int(wrong[0, 0])})"


def _checked_graph_field(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in FIELD_DTYPES and not value.is_complex():
        return value.detach().cpu().contiguous()
    if not isinstance(value, bool | int | float | str):
        found = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TypeError(f"graph field {name!r} is {found}; expected a number, a string or a tensor of real numbers")
    return value


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
