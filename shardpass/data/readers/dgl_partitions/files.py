"""DGL's binary files, read with NumPy alone: dicts of tensors and the graph of one part.

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
_ONE_GRAPH = (2, 2, 1)  # the version, the kind of graphs, and how many there are
_SEVERAL_FORMATS = 1
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

    src: np.ndarray
    dst: np.ndarray
    node_data: dict[str, Stored]
    edge_data: dict[str, Stored]


def read_tensors(path: Path) -> dict[str, Stored]:
    """The arrays in a file of ``dgl.data.utils.save_tensors``, by name. None is read before it is used."""
    return _parsed(path, _tensors)


def read_part_graph(path: Path) -> PartGraph:
    """The only graph in a file of ``dgl.save_graphs``, which has one node and one edge type."""
    return _parsed(path, _graph)


def integers(data: dict[str, Stored], name: str, path: Path) -> np.ndarray:
    """The integers that the graph of a part has under a name."""
    values = data[name].values if name in data else np.empty((0, 0))
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(f"{path} holds no integers {name!r}, which the parts of a DGL partition have")
    return values


class _Cursor:
    """A place in the bytes of a file. Every read is within the file, or raises a ValueError."""

    def __init__(self, content: np.ndarray) -> None:
        self.content, self.position = content, 0

    def take(self, size: int) -> np.ndarray:
        if not 0 <= size <= self.content.size - self.position:
            raise ValueError(f"{size} bytes expected")
        self.position += size
        return self.content[self.position - size : self.position]

    def numbers(self, codes: str) -> tuple[int, ...]:
        return struct.unpack("<" + codes, self.take(struct.calcsize("<" + codes)).tobytes())

    def count(self) -> int:
        return self.numbers("Q")[0]

    def expect(self, magic: int, what: str) -> None:
        _require(self.count() == magic, f"{what} expected")

    def vector(self, read: Callable[[_Cursor], T]) -> list[T]:
        return [read(self) for _ in range(self.count())]

    def only(self, read: Callable[[_Cursor], T]) -> T:
        """The element of a vector that has one for each type, of a graph of one type."""
        _require(self.count() == 1, "one type expected")
        return read(self)

    def string(self) -> str:
        return self.take(self.count()).tobytes().decode()

    def named_arrays(self) -> dict[str, Stored]:
        return dict(self.vector(lambda cursor: (cursor.string(), cursor.array())))

    def array(self) -> Stored:
        self.expect(_ARRAY, "an array")
        self.take(8 + 8)  # reserved, and the device it was on
        dims, code, bits, lanes = self.numbers("iBBH")
        _require((code, bits) in _TYPES and lanes == 1, f"an array of {lanes} x {bits} bits of the type {code}")
        _require(0 <= dims <= 32, f"an array of {dims} dimensions")
        *shape, size = self.numbers("q" * (dims + 1))
        dtype, name = _TYPES[code, bits]
        _require(min(shape, default=0) >= 0 and math.prod(shape) * bits // 8 == size, f"the shape {shape}")
        return Stored(self.take(size).view("<" + name).reshape(shape), dtype)


def _parsed(path: Path, parse: Callable[[_Cursor], T]) -> T:
    try:
        content = np.memmap(path, np.uint8, "r").view(np.ndarray) if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    cursor = _Cursor(content)
    try:
        return parse(cursor)
    except (ValueError, LookupError, OverflowError) as error:
        raise ValueError(
            f"{path} is cut short or altered ({error}, at byte {cursor.position} of {content.size}); "
            "copy it again, or partition the graph again with DGL 1.0 or newer"
        ) from error


def _require(condition: bool, found: str) -> None:
    if not condition:
        raise ValueError(found)


def _tensors(cursor: _Cursor) -> dict[str, Stored]:
    cursor.expect(_TENSORS, "a file of DGL tensors")
    count = cursor.count()
    arrays = cursor.named_arrays()
    _require(len(arrays) == count and cursor.position == cursor.content.size, f"{len(arrays)} tensors of {count}")
    return arrays


def _graph(cursor: _Cursor) -> PartGraph:
    cursor.expect(_GRAPHS, "a file of DGL graphs")
    version, kind, count = cursor.numbers("QQQ")
    _require((version, kind, count) == _ONE_GRAPH, f"{count} graphs in the format {(version, kind)}")
    cursor.position = _HEADER_BYTES
    cursor.position = cursor.count()
    cursor.expect(_HETERO, "the types of a graph")
    _skip_meta_graph(cursor)
    formats = cursor.only(_formats)
    num_nodes = cursor.only(lambda c: c.numbers("q")[0])
    node_data, edge_data = cursor.only(_Cursor.named_arrays), cursor.only(_Cursor.named_arrays)
    cursor.only(_Cursor.string)  # the names of the types
    cursor.only(_Cursor.string)
    cursor.take(_INDEX_BYTES)  # not needed, but a file without it was cut short
    src, dst = _edges(formats, num_nodes)
    for data, count in ((node_data, num_nodes), (edge_data, src.size)):
        for name, stored in data.items():
            _require(stored.values.shape[:1] == (count,), f"{name!r} has not {count} rows")
    return PartGraph(src, dst, node_data, edge_data)


_Matrix = tuple[int, int, np.ndarray, np.ndarray, np.ndarray]
"""Numbers of rows and columns; rows and columns (COO) or row starts and columns (CSR) of the edges; their ids, if not
in order."""


def _skip_meta_graph(cursor: _Cursor) -> None:
    """The graph of types, which is always the same: one node type and one edge type."""
    cursor.expect(_META, "a graph of types")
    _matrix(cursor, "csr")


def _matrix(cursor: _Cursor, kind: str) -> _Matrix:
    magic, flags = (_COO, 2) if kind == "coo" else (_CSR, 1)
    cursor.expect(magic, "a sparse matrix")
    num_columns, num_rows = cursor.numbers("qq")
    first, second, ids = (cursor.array().values for _ in range(3))
    cursor.take(flags)  # what is sorted
    _require(all(a.ndim == 1 and a.dtype.kind == "i" for a in (first, second, ids)), "edges that are not integers")
    return num_rows, num_columns, first, second, ids


def _formats(cursor: _Cursor) -> dict[str, _Matrix]:
    """The edges of one type, in each format that they are stored in."""
    cursor.expect(_UNIT, "edges")
    code = cursor.count()
    cursor.take(8)  # formats that may be made of the stored ones
    stored, layout = code & 0xFFFFFFFF, code >> 32
    _require(layout == _SEVERAL_FORMATS and 1 <= stored <= 7, f"the formats {code:#x}")
    formats: dict[str, _Matrix] = {}
    for bit, name in ((1, "coo"), (2, "csr"), (4, "csc")):
        if stored & bit:
            _skip_meta_graph(cursor)
            formats[name] = _matrix(cursor, name)
    return formats


def _edges(formats: dict[str, _Matrix], num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of the edges, by edge id; of the formats, the one that needs the least work."""
    name, (num_rows, num_columns, rows, columns, ids) = next(iter(formats.items()))
    _require(num_rows == num_columns == num_nodes, f"edges between {num_rows} and {num_columns} of {num_nodes} nodes")
    if name != "coo":
        counts = np.diff(rows)
        fits = rows.size == num_rows + 1 and rows[0] == 0 and rows[-1] == columns.size and (counts >= 0).all()
        _require(bool(fits), "row starts that do not fit the edges")
        rows = np.repeat(np.arange(num_rows), counts)
    _require(rows.size == columns.size and ids.size in (0, rows.size), "edges without an end or an id")
    for ends in (rows, columns):
        _require(not ends.size or (ends.min() >= 0 and ends.max() < num_nodes), f"an edge beyond the {num_nodes} nodes")
    if ids.size:
        order = ids.argsort()
        _require(np.array_equal(ids[order], np.arange(ids.size)), "edge ids that are not a permutation")
        rows, columns = rows[order], columns[order]
    return (columns, rows) if name == "csc" else (rows, columns)  # a CSC has the destinations as its rows
