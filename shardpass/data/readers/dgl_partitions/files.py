"""DGL's binary files, read with numpy alone: dicts of tensors and the graph of one part.

All numbers are little-endian. A vector is a 64-bit count and its elements; a string is a vector of bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")

_ARRAY, _TENSORS, _GRAPHS = 0xDD5E40F096B4A13F, 0xDD5A9FBE3FA2443F, 0xDD2E4FF046B4A13F
_HETERO, _META, _UNIT = 0xDD589FBE35224ABF, 0xDD3C5FFE20046ABF, 0xDD2E60F0F6B4A127
_COO, _CSR = 0xDD61FFD305DFF127, 0xDD6CD31205DFF127
_GRAPH_VERSION, _HETERO_GRAPH, _SEVERAL_FORMATS = 2, 2, 1
_HEADER_BYTES, _INDEX_BYTES = 4096, 32

# (DLPack type code, bits): the type of the elements, and one of numpy that is as wide
_TYPES: dict[tuple[int, int], tuple[torch.dtype, str]] = {
    (0, 8): (torch.int8, "i1"), (0, 16): (torch.int16, "i2"), (0, 32): (torch.int32, "i4"),
    (0, 64): (torch.int64, "i8"), (1, 8): (torch.uint8, "u1"), (1, 16): (torch.uint16, "u2"),
    (1, 32): (torch.uint32, "u4"), (1, 64): (torch.uint64, "u8"), (2, 16): (torch.float16, "f2"),
    (2, 32): (torch.float32, "f4"), (2, 64): (torch.float64, "f8"), (4, 16): (torch.bfloat16, "i2"),
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """An array in a file, memory-mapped. `values` has the bits of bfloat16, which NumPy lacks, as int16."""

    values: np.ndarray
    dtype: torch.dtype


@dataclass(frozen=True)
class PartGraph:
    """The graph of one part: edge i of the part goes from its node `src[i]` to its node `dst[i]`."""

    num_nodes: int
    src: np.ndarray
    dst: np.ndarray
    node_data: dict[str, Stored]
    edge_data: dict[str, Stored]


def read_tensors(path: Path) -> dict[str, Stored]:
    """The arrays in a file of ``dgl.data.utils.save_tensors``, by name. None is read before it is used.

    Raises:
        ValueError: when the file is missing, cut short, or not such a file. The error names it.
    """
    cursor = _Cursor(path)
    cursor.expect(_TENSORS, "a file of DGL tensors")
    count = cursor.count()
    arrays = cursor.named_arrays()
    if len(arrays) != count or cursor.position != cursor.bytes.size:
        raise cursor.error(f"{len(arrays)} tensors of {count}")
    return arrays


def read_part_graph(path: Path) -> PartGraph:
    """The only graph in a file of ``dgl.save_graphs``, which has one node and one edge type.

    Raises:
        ValueError: when the file is missing, cut short, not such a file, or its arrays contradict each other. The
            error names it.
    """
    cursor = _Cursor(path)
    cursor.expect(_GRAPHS, "a file of DGL graphs")
    version, kind, count = (cursor.count() for _ in range(3))
    if (version, kind, count) != (_GRAPH_VERSION, _HETERO_GRAPH, 1):
        raise ValueError(
            f"{path} holds {count} graphs in the format {(version, kind)} of DGL; expected one in the format "
            f"{(_GRAPH_VERSION, _HETERO_GRAPH)}: partition the graph again with DGL 1.0 or newer"
        )
    cursor.position = _HEADER_BYTES
    cursor.position = cursor.count()
    cursor.expect(_HETERO, "the types of a graph")
    _read_meta_graph(cursor)
    formats = _only(cursor, _read_unit_graph, "edge types")
    num_nodes = _only(cursor, lambda c: c.number("q"), "node types")
    node_data = _only(cursor, _Cursor.named_arrays, "node types")
    edge_data = _only(cursor, _Cursor.named_arrays, "edge types")
    _only(cursor, _Cursor.string, "node types")
    _only(cursor, _Cursor.string, "edge types")
    cursor.take(_INDEX_BYTES)  # not needed, but a file without it was cut short
    src, dst = _edges(cursor, formats, num_nodes)
    _check_rows(cursor, node_data, num_nodes)
    _check_rows(cursor, edge_data, src.size)
    return PartGraph(num_nodes, src, dst, node_data, edge_data)


class _Cursor:
    """A place in a memory-mapped file. Every read is within the file or a ValueError that names it."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0
        try:
            self.bytes = np.memmap(path, np.uint8, "r").view(np.ndarray)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
        except ValueError:  # numpy cannot map a file of no bytes
            self.bytes = np.empty(0, np.uint8)

    def error(self, found: str) -> ValueError:
        return ValueError(
            f"{self.path} is cut short or altered ({found}, at byte {self.position} of {self.bytes.size}); "
            "copy it again, or partition the graph again"
        )

    def take(self, size: int) -> np.ndarray:
        if not 0 <= size <= self.bytes.size - self.position:
            raise self.error(f"{size} bytes expected")
        self.position += size
        return self.bytes[self.position - size : self.position]

    def number(self, code: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize("<" + code)).tobytes())[0])

    def count(self) -> int:
        return self.number("Q")

    def expect(self, magic: int, what: str) -> None:
        if self.count() != magic:
            self.position -= 8
            raise self.error(f"{what} expected")

    def string(self) -> str:
        try:
            return self.take(self.count()).tobytes().decode()
        except UnicodeDecodeError:
            raise self.error("a name that is not UTF-8") from None

    def vector(self, read: Callable[[_Cursor], T]) -> list[T]:
        return [read(self) for _ in range(self.count())]

    def named_arrays(self) -> dict[str, Stored]:
        return dict(self.vector(lambda cursor: (cursor.string(), cursor.array())))

    def array(self) -> Stored:
        self.expect(_ARRAY, "an array")
        self.take(8 + 8)  # reserved, and the device it was on
        dims = self.number("i")
        code, bits, lanes = self.number("B"), self.number("B"), self.number("H")
        if (code, bits) not in _TYPES or lanes != 1:
            raise ValueError(
                f"{self.path} holds an array of {lanes} x {bits} bits of type {code}, which is unknown here"
            )
        dtype, name = _TYPES[code, bits]
        if not 0 <= dims <= self.bytes.size:
            raise self.error(f"an array of {dims} dimensions")
        shape = [self.number("q") for _ in range(dims)]
        size = self.number("q")
        if min(shape, default=0) < 0 or math.prod(shape) * bits // 8 != size:
            raise self.error(f"an array of the shape {shape} in {size} bytes")
        return Stored(self.take(size).view("<" + name).reshape(shape), dtype)


def _only(cursor: _Cursor, read: Callable[[_Cursor], T], what: str) -> T:
    count = cursor.count()
    if count != 1:
        raise cursor.error(f"{count} {what} instead of 1")
    return read(cursor)


def _read_meta_graph(cursor: _Cursor) -> None:
    """Skip the graph of types, which is always the same: one node type and one edge type."""
    cursor.expect(_META, "a graph of types")
    _read_matrix(cursor, "csr")


_Matrix = tuple[int, int, np.ndarray, np.ndarray, np.ndarray]
"""Numbers of rows and columns; rows and columns (COO) or row starts and columns (CSR) of the edges; their ids, if not
in order."""


def _read_matrix(cursor: _Cursor, kind: str) -> _Matrix:
    magic, flags = (_COO, 2) if kind == "coo" else (_CSR, 1)
    cursor.expect(magic, "a sparse matrix")
    num_columns, num_rows = cursor.number("q"), cursor.number("q")
    first, second, ids = (cursor.array().values for _ in range(3))
    cursor.take(flags)  # what is sorted
    if any(array.ndim != 1 or array.dtype.kind != "i" for array in (first, second, ids)):
        raise cursor.error("edges that are not lists of integers")
    return num_rows, num_columns, first, second, ids


def _read_unit_graph(cursor: _Cursor) -> dict[str, _Matrix]:
    """The edges of one type, in each format that they are stored in."""
    cursor.expect(_UNIT, "edges")
    code = cursor.count()
    cursor.take(8)  # formats that may be made of the stored ones
    stored, layout = code & 0xFFFFFFFF, code >> 32
    if layout != _SEVERAL_FORMATS or not 1 <= stored <= 7:
        raise cursor.error(f"formats {code:#x}")
    formats: dict[str, _Matrix] = {}
    for bit, name in ((1, "coo"), (2, "csr"), (4, "csc")):
        if stored & bit:
            _read_meta_graph(cursor)
            formats[name] = _read_matrix(cursor, name)
    return formats


def _edges(cursor: _Cursor, formats: dict[str, _Matrix], num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of the edges, by edge id; of the formats, the one that needs the least work."""
    name, (num_rows, num_columns, first, second, ids) = next(iter(formats.items()))
    if not num_rows == num_columns == num_nodes:
        raise cursor.error(f"edges between {num_rows} and {num_columns} of {num_nodes} nodes")
    rows = first if name == "coo" else _expand(cursor, first, num_rows, second.size)
    if not rows.size == second.size or ids.size not in (0, rows.size):
        raise cursor.error(f"{rows.size} sources, {second.size} destinations and {ids.size} ids of edges")
    for ends in (rows, second):
        if ends.size and not (ends.min() >= 0 and ends.max() < num_nodes):
            raise cursor.error(f"an edge beyond the {num_nodes} nodes")
    if ids.size:
        if not is_permutation(ids):
            raise cursor.error("edge ids that are not a permutation")
        rows, second = reordered(rows, ids), reordered(second, ids)
    return (second, rows) if name == "csc" else (rows, second)  # a CSC has the destinations as its rows


def _expand(cursor: _Cursor, starts: np.ndarray, num_rows: int, num_edges: int) -> np.ndarray:
    counts = np.diff(starts)
    if starts.size != num_rows + 1 or starts[0] != 0 or starts[-1] != num_edges or (counts < 0).any():
        raise cursor.error("row starts that do not fit the edges")
    return np.repeat(np.arange(num_rows), counts)


def _check_rows(cursor: _Cursor, data: dict[str, Stored], count: int) -> None:
    for name, stored in data.items():
        if stored.values.shape[:1] != (count,):
            raise cursor.error(f"{name!r} of the shape {list(stored.values.shape)} for {count} rows")


def integers(data: dict[str, Stored], name: str, path: Path) -> np.ndarray:
    """The integers that the graph of a part has under a name.

    Raises:
        ValueError: when there are none. The error names `path`.
    """
    values = data[name].values if name in data else np.empty((0, 0))
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(f"{path} holds no integers {name!r}, which the parts of a DGL partition have")
    return values


def is_permutation(ids: np.ndarray) -> bool:
    """Whether a list of integers holds each of 0 .. len - 1 once."""
    return np.array_equal(np.sort(ids), np.arange(ids.size))


def reordered(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The array whose row ``ids[i]`` is ``values[i]``; `ids` is a permutation."""
    rows = np.empty(values.shape, values.dtype.newbyteorder("="))
    rows[ids] = values
    return rows
