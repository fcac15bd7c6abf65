"""Tables of edges and of nodes, whose ids are the user's own: strings or any integers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardpass.data.column_names import place_of, refuse_doubtful, refuse_index
from shardpass.data.file_rows import FileRows, RowWriter
from shardpass.data.names import Examples, IdColumn, Names, distinct_names, open_dictionary, write_names
from shardpass.data.raw import EDGE, NODE, EdgeArrays, RawGraph
from shardpass.data.readers.graph_files import GraphFiles, PathLike
from shardpass.data.readers.inverse import inverse_added
from shardpass.data.readers.parquet import ID_NAMES, numbers_of
from shardpass.data.readers.table import TABLE_FILES, Table, open_table
from shardpass.data.streaming import Budget
from shardpass.errors import require

_LABELS = ("y", "label", "labels")
_MASKS = ("train_mask", "val_mask", "test_mask")
_SPLITS = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}
"""What a column named split may say, and the mask that it means."""


@dataclass(frozen=True)
class TableFiles(GraphFiles):
    """A table of edges, and perhaps one of nodes. Made by `stream_tables`."""

    edges: Path
    nodes: Path | None = None
    node_id: str | None = None
    src: str | None = None
    dst: str | None = None
    label: str | None = None
    drop: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    add_inverse_edge: bool = False

    def open(self, budget: Budget) -> RawGraph:
        edges = open_table(self.edges)
        src, dst, weight = _edge_columns(edges, self.src, self.dst, self.drop)
        ends = [edges.ids(name, budget) for name in (src, dst)]
        names, fields, what, columns = self._nodes(ends, budget)
        with open_dictionary(names, what, edges.is_text, budget) as found:
            arrays = EdgeArrays(*(found.numbers(column) for column in ends))
        weights = {} if weight is None else {"edge_weight": _weights(edges, weight, budget)}
        source = " and ".join(path.name for path in (self.edges, self.nodes) if path is not None)
        graph = RawGraph(
            {NODE: len(names)}, {EDGE: arrays}, {NODE: fields}, {EDGE: weights}, {}, source, names={NODE: names},
            columns={NODE: {"x": columns}} if columns else {},
        )  # fmt: skip
        return inverse_added(graph, budget) if self.add_inverse_edge else graph

    def _nodes(self, ends: list[IdColumn], budget: Budget) -> tuple[Names, dict[str, FileRows], str, list[str]]:
        """The names of the nodes, their fields, where they are from, and the names of the features."""
        if self.nodes is None:
            return distinct_names(ends, budget), {}, str(self.edges), []
        table = open_table(self.nodes)
        columns = _node_columns(table, self.node_id, self.label, self.drop, self.keep)
        ids = table.ids(columns.id, budget)
        if table.is_text and not ends[0].is_text and ends[0].kind == "strings":  # then nothing here is an integer
            ids = replace(ids, is_text=False)
        features = [] if any(map(_is_list, (table.types[name] for name in columns.features))) else columns.features
        return write_names(ids, budget), _fields(table, columns, budget), ids.what, features


def stream_tables(
    edges: PathLike,
    nodes: PathLike | None = None,
    *,
    node_id: str | None = None,
    src: str | None = None,
    dst: str | None = None,
    label: str | None = None,
    drop: tuple[str, ...] = (),
    keep: tuple[str, ...] = (),
    add_inverse_edge: bool = False,
) -> TableFiles:
    """Tables whose node ids are your own, strings or any integers, for `shardpass.partition`.

    A table is a Parquet file, a folder of them, or a CSV file (perhaps compressed as `.gz`) whose first line names the
    columns. The files are read when the graph is partitioned, in bounded memory, and must not change until then. The
    nodes are numbered as their rows in `nodes`; the store keeps the name of each, which `shardpass.node_names` returns
    and which `shardpass.infer` writes beside its results.

    Ids are compared exactly: strings by their bytes, so ``"7"`` is not ``"07"``. The ids of a CSV file are integers if
    all of them are written as integers are, else strings.

    Args:
        edges: a row for each edge. The columns `src` and `dst` (or source and target) hold ids, and `weight`, if it is
            there, becomes `edge_weight`.
        nodes: a row for each node. A column of ids; perhaps one named y, label or labels, which becomes `y` (a missing
            integer is -1); perhaps train_mask, val_mask and test_mask, or a column `split` that says train, val
            (valid, validation), test or nothing. The columns of numbers that are left, or a single column of lists,
            become `x`, float32. Without this table the nodes are those that edges name, in the order of their names.
        node_id: the name of the column of ids in `nodes`, if it is not id, node_id or nid.
        src, dst: the names of the columns of ids in `edges`, if they do not tell it themselves.
        label: the name of the column of labels.
        drop: columns to leave out.
        keep: columns that are features, though their names are those of an index or a label.
        add_inverse_edge: add the reverse of each edge right behind it, as in `stream_edge_list`.

    Raises:
        ValueError: when a file does not exist or is of another kind.
    """
    of_edges, of_nodes = Path(edges), None if nodes is None else Path(nodes)
    for file in (of_edges, *([of_nodes] if of_nodes else [])):
        if not file.exists():
            raise ValueError(f"there is no file {file}")
        if not file.name.endswith(TABLE_FILES) and not file.is_dir():
            raise ValueError(f"{file}: expected a table, one of {', '.join(TABLE_FILES)}, or a folder of .parquet")
    if nodes is None and (node_id or label or keep):
        raise ValueError("node_id=, label= and keep= name columns of a table of nodes: pass nodes= (--nodes) as well")
    return TableFiles(of_edges, of_nodes, node_id, src, dst, label, tuple(drop), tuple(keep), add_inverse_edge)


def _edge_columns(table: Table, src: str | None, dst: str | None, drop: tuple[str, ...]) -> tuple[str, str, str | None]:
    """The columns of sources, of destinations, and of weights, if there is one."""
    names = [name for name in table.types if name not in drop]
    ends = []
    for place, given in enumerate((src, dst)):
        ends += [name for name in names if place_of(name) == place] if given is None else [_known(table, given)]
    two = [name for name in names if place_of(name) != 2]
    if not ends and not table.is_text and len(two) == 2:  # in a CSV file the first line may be an edge
        ends = two
        refuse_index(table.path, two)
    weights = [name for name in names if place_of(name) == 2 and name not in ends]
    if len(ends) != 2 or len(weights) > 1:
        raise ValueError(
            f"{table.path} has the columns {names}; expected src, dst and perhaps weight: name them so in the first "
            "line, or pass src= and dst= (--src, --dst)"
        )
    others = [name for name in names if name not in (*ends, *weights)]
    if others:
        raise ValueError(_unplaced(table, others, "of edges only ids and a weight are kept"))
    return ends[0], ends[1], weights[0] if weights else None


class _NodeColumns(NamedTuple):
    """The columns of a table of nodes by what they are for."""

    id: str
    label: list[str]
    masks: list[str]
    split: list[str]
    features: list[str]


def _node_columns(
    table: Table, node_id: str | None, label: str | None, drop: tuple[str, ...], keep: tuple[str, ...]
) -> _NodeColumns:
    names = [name for name in table.types if name not in drop]
    ids = [_known(table, node_id)] if node_id is not None else [name for name in names if name in ID_NAMES]
    if len(ids) != 1:
        raise ValueError(f"{table.path} has the columns {names}; which one holds the ids? Pass node_id= (--node-id)")
    names = [name for name in names if name not in ids]
    keep = tuple(_known(table, name) for name in keep)
    labels = [name for name in names if name in _LABELS and name not in keep]
    labels = labels if label is None else [_known(table, label)]
    masks, split = [n for n in names if n in _MASKS], [n for n in names if n == "split"]
    if len(labels) > 1 or (masks and split):
        both = labels if len(labels) > 1 else [*masks, *split]
        raise ValueError(f"{table.path} has the columns {both}, of which one is enough: leave one out with drop=")
    features = [name for name in names if name not in (*labels, *masks, *split)]
    found = _NodeColumns(ids[0], labels, masks, split, features)
    _check_types(table, found)
    do = "leave it out by drop= (--drop), "
    do += "name the label by label= (--label), " if not labels else ""
    refuse_doubtful(table.path, features, table.index, keep, f"{do}or say by keep= (--keep) that it is one")
    return found


def _check_types(table: Table, columns: _NodeColumns) -> None:
    kinds = require("pyarrow", "names", "reading tables").types

    def is_number(found: Any) -> bool:
        return any(kind(found) for kind in (kinds.is_integer, kinds.is_floating, kinds.is_boolean, kinds.is_null))

    def holds_numbers(name: str) -> bool:
        found = table.types[name]
        return is_number(found.value_type if _is_list(found) else found)

    others = [name for name in columns.features if not holds_numbers(name)]
    if others:
        raise ValueError(_unplaced(table, others, "features are numbers, or lists of numbers"))
    if len(columns.features) > 1 and any(_is_list(table.types[name]) for name in columns.features):
        raise ValueError(_unplaced(table, columns.features, "features are one column of lists, or columns of numbers"))
    for name in columns.label:
        if not holds_numbers(name):
            raise TypeError(
                f"{table.path}, column {name!r} holds {table.types[name]}; expected class ids, integers from 0: with "
                f"pandas, table[{name!r}], names = pandas.factorize(table[{name!r}], sort=True) gives them, and -1 for "
                f"none; or pass the column of ids by label= (--label)"
            )


def _is_list(found: Any) -> bool:
    kinds = require("pyarrow", "names", "reading tables").types
    return any(kind(found) for kind in (kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list))


def _known(table: Table, name: str) -> str:
    if name not in table.types:
        raise ValueError(f"{table.path} has no column {name!r}; there are {list(table.types)}")
    return name


def _unplaced(table: Table, names: list[str], rule: str) -> str:
    found = ", ".join(f"{name!r} ({table.types[name]})" for name in names)
    return f"{table.path}: {found} cannot be kept, since {rule}; leave columns out with drop={names!r} (--drop)"


def _weights(table: Table, name: str, budget: Budget) -> FileRows:
    arrow = require("pyarrow", "names", "reading tables")
    writer = RowWriter(budget.file(), np.float32, name=table.path)
    for first, batch in table.batches({name: arrow.float32()}, budget):
        writer.append(numbers_of(batch.column(0), f"{table.path}, column {name!r}", first))
    return writer.rows()


def _fields(table: Table, columns: _NodeColumns, budget: Budget) -> dict[str, FileRows]:
    """The fields of the nodes, one row for each, in temporary files."""
    arrow = require("pyarrow", "names", "reading tables")
    types = dict.fromkeys(columns.features, arrow.float32())
    for name in columns.label:
        is_whole = arrow.types.is_integer(table.types[name]) or arrow.types.is_null(table.types[name])
        types[name] = arrow.int64() if is_whole else arrow.float32()
    types |= {**dict.fromkeys(columns.masks, arrow.bool_()), **dict.fromkeys(columns.split, arrow.string())}
    writers: dict[str, RowWriter] = {}
    for first, batch in table.batches(types, budget) if types else ():
        for name, rows in _rows(batch, columns, f"{table.path}, column ", first):
            if name not in writers:
                writers[name] = RowWriter(budget.file(), rows.dtype, rows.shape[1:], table.path)
            if rows.shape[1:] != writers[name].row_shape:
                raise ValueError(
                    f"{table.path}, rows from {first} on: {name} of the shape {rows.shape[1:]}; expected "
                    f"{writers[name].row_shape} as before"
                )
            writers[name].append(rows)
    return {name: writer.rows() for name, writer in writers.items()}


def _rows(batch: Any, columns: _NodeColumns, what: str, first: int) -> Iterator[tuple[str, np.ndarray]]:
    """The rows of each field in a block of a table whose first row is `first`."""

    def numbers(name: str) -> np.ndarray:
        return numbers_of(batch[name], f"{what}{name!r}", first)

    if columns.features:
        found = [numbers(name) for name in columns.features]
        x = found[0] if found[0].ndim == 2 else np.stack(found, axis=1)
        yield "x", x.astype(np.float32)
    for name in columns.label:
        is_whole = str(batch[name].type).startswith(("int", "uint"))
        if not is_whole and batch[name].null_count:
            raise ValueError(
                f"{what}{name!r} holds {batch[name].type} with gaps, as pandas makes of integers with gaps: write "
                f"class ids as integers (astype('Int64')), of which a missing one becomes -1, or give each row a number"
            )
        y = numbers_of(batch[name].cast("int64").fill_null(-1) if is_whole else batch[name], f"{what}{name!r}", first)
        yield "y", y.astype(np.float32 if y.dtype.kind == "f" else np.int64)
    for name in columns.masks:
        mask = numbers(name)
        if not np.isin(mask, (0, 1)).all():
            raise ValueError(f"{what}{name!r}, rows from {first} on: {mask.dtype}; expected booleans")
        yield name, mask.astype(np.bool_)
    for name in columns.split:
        said = _splits(batch[name], f"{what}{name!r}", first)
        yield from ((mask, said == place) for place, mask in enumerate(_MASKS))


def _splits(column: Any, what: str, first: int) -> np.ndarray:
    """0, 1 or 2 for each row that is for training, validation or test, else -1."""
    compute = require("pyarrow.compute", "names", "reading tables")
    words = compute.fill_null(compute.utf8_lower(column.cast("string")), "")
    said = np.full(len(words), -2)
    for word, place in {**_SPLITS, "": -1}.items():
        said[compute.equal(words, word).to_numpy(zero_copy_only=False)] = place
    wrong = np.flatnonzero(said == -2)
    if wrong.size:
        examples = Examples()
        examples.add(first + wrong, column.take(wrong))
        raise ValueError(f"{what}: {examples}; expected train, val (valid, validation), test or nothing")
    return said
