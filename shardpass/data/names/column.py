"""`IdColumn`: a column of names in a table, or a list of them in memory, read block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from shardpass.data.file_rows import RowWriter
from shardpass.data.names.names import Examples, Names
from shardpass.data.streaming import Budget
from shardpass.errors import require

_INTEGER = r"^(0|-?[1-9][0-9]{0,19})$"
"""An integer as everybody writes it, so that nothing is lost when it is kept as one."""


@dataclass(frozen=True)
class IdColumn:
    """A column of `count` names. `what` says where it is, for error messages.

    type: of pyarrow: large_string, int64 or uint64.
    is_text: whether it comes from a text file, in which integers and strings look alike.
    blocks: a function that reads it from the start, block by block, as arrays of pyarrow.
    """

    what: str
    count: int
    type: Any
    is_text: bool
    blocks: Callable[[], Iterable[Any]]

    @property
    def kind(self) -> str:
        """What the names are, in a word."""
        return "strings" if "string" in str(self.type) else "integers"

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """The blocks, each with the number of its first row.

        Raises:
            ValueError: at the end, when rows have no name.
        """
        row, missing = 0, Examples()
        for block in self.blocks():
            if block.null_count:
                missing.add(row + np.flatnonzero(block.is_null().to_numpy(zero_copy_only=False)))
            if not missing.count:
                yield row, (block.dictionary_decode() if hasattr(block, "dictionary_decode") else block).cast(self.type)
            row += len(block)
        if missing.count:
            raise ValueError(
                f"{self.what}: {missing.count} of {row} rows have no id ({missing}); fill them in, or leave the rows "
                "out"
            )


def name_type(found: Any, what: str) -> Any:
    """The type of pyarrow in which names of the type `found` are kept."""
    arrow = require("pyarrow", "names", "names of nodes")
    kinds = arrow.types
    plain = found.value_type if kinds.is_dictionary(found) else found
    if kinds.is_integer(plain):
        return arrow.uint64() if kinds.is_uint64(plain) else arrow.int64()
    if kinds.is_string(plain) or kinds.is_large_string(plain) or kinds.is_string_view(plain):
        return arrow.large_string()
    hint = ": a column of integers with gaps becomes one of floats in pandas" if kinds.is_floating(plain) else ""
    raise TypeError(f"{what} holds {found}; expected strings or integers as ids{hint}")


def column_of_names(names: Names, what: str, as_text: bool) -> IdColumn:
    """The column of all names, integers as text if you say so."""
    arrow = require("pyarrow", "names", "names of nodes")
    return IdColumn(what, len(names), arrow.large_string() if as_text else names.block(0, 0).type, False, names.blocks)


def column_of(values: Any, what: str) -> IdColumn:
    """The column of names in memory: a list, an array or a tensor of strings or integers."""
    arrow = require("pyarrow", "names", "names of nodes")
    plain = values.cpu().numpy() if isinstance(values, Tensor) else values
    try:
        try:
            array = arrow.array(plain)
        except OverflowError:  # integers above those of int64
            array = arrow.array(plain, arrow.uint64())
    except (arrow.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise TypeError(f"{what}: {_mixed(values) or error}; expected all strings, or all integers") from None
    return IdColumn(what, len(array), name_type(array.type, what), False, lambda: [array])


def _mixed(values: Any) -> str:
    """Words about the types of the values, if there are several, each with an example."""
    counts = Counter(type(value).__name__ for value in values)
    first = {type(value).__name__: value for value in reversed(list(values))}
    found = [f"{count} are {name}, as {first[name]!r}" for name, count in counts.items()]
    return "; ".join(found) if len(found) > 1 else ""


def write_names(column: IdColumn, budget: Budget) -> Names:
    """The names of a column, copied to temporary files. Text becomes integers if all of it is."""
    compute = require("pyarrow.compute", "names", "names of nodes")
    if column.kind == "integers":
        integers = RowWriter(budget.file(), column.type.to_pandas_dtype())
        for _, block in column:
            integers.append(block.to_numpy(zero_copy_only=False))
        return Names(integers.rows())
    text, ends = RowWriter(budget.file(), np.uint8), RowWriter(budget.file(), np.int64)
    whole = column.is_text
    for _, block in column:
        _, offsets, content = block.buffers()
        places = np.frombuffer(offsets, np.int64)[block.offset : block.offset + len(block) + 1]
        ends.append(places[1:] - places[0] + text.count)
        if content is not None:
            text.append(np.frombuffer(content, np.uint8)[places[0] : places[-1]])
        whole = whole and compute.all(compute.match_substring_regex(block, _INTEGER), min_count=0).as_py()
    names = Names(text.rows(), ends.rows())
    return (_integers(names, budget) if whole and len(names) else None) or names


def _integers(names: Names, budget: Budget) -> Names | None:
    """The same names as int64, or else as uint64, or `None` if neither holds them."""
    arrow = require("pyarrow", "names", "names of nodes")
    for kind in (np.dtype(np.int64), np.dtype(np.uint64)):
        integers = RowWriter(budget.file(), kind)
        try:
            for block in names.blocks():
                integers.append(block.cast(kind.name).to_numpy(zero_copy_only=False))
            return Names(integers.rows())
        except arrow.ArrowInvalid:
            continue
    return None
