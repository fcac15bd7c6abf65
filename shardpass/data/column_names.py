"""What the names of columns say: of an edge list, and of a table of features."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

_SOURCES = ("src", "source", "from")
_DESTINATIONS = ("dst", "dest", "destination", "target", "to")
_WEIGHTS = ("weight", "edge_weight")
_INDEX = re.compile(r"|unnamed(: ?\d+.*)?|__index_level_\d+__|level_\d+|index|idx|row_?names?|row_?id|id|node_?id|nid")
_LABEL = re.compile(r"y|y_true|(class_?)?labels?|targets?|class(es)?|class_?id|ground_?truth")
"""Names in lower case: of an index as pandas, R and databases write it, and of what a model is to predict."""
_DO = "leave it out of the file, or say by keep= (--keep) that it is one"


def place_of(name: str) -> int | None:
    """0 for a column of sources, 1 for destinations, 2 for weights, `None` if the name does not tell."""
    plain = name.strip(" \t\r\n\"'\ufeff").lower().removesuffix("_id").removesuffix("_ids")
    return next((place for place, names in enumerate((_SOURCES, _DESTINATIONS, _WEIGHTS)) if plain in names), None)


def in_order(names: list[str]) -> bool:
    """Whether the columns may be source, destination and weight: no name says that its column stands elsewhere."""
    return all(place_of(name) in (None, place) for place, name in enumerate(names))


def pandas_index(schema: Any) -> list[str]:
    """The columns of a schema of pyarrow in which pandas has written the index of a table."""
    found = (schema.pandas_metadata or {}).get("index_columns", ())
    return [name for name in found if isinstance(name, str)]


def refuse_separator(path: object, line: str) -> None:
    """Refuse a CSV file whose first line has another separator than commas."""
    marks = {";": "semicolons", "\t": "tabs", "|": "bars"}
    if "," not in line and (found := [words for mark, words in marks.items() if mark in line]):
        raise ValueError(
            f"{path} has {found[0]} between its columns, and expected are commas: write it with commas, and points for "
            f"decimals (with pandas, read_csv(path, sep=..., decimal=...).to_csv(path, index=False))"
        )


def looks_like_index(name: str) -> bool:
    """Whether a column of this name counts rows, most of the time."""
    return _INDEX.fullmatch(name.strip(" \t\r\n\"'\ufeff").lower()) is not None


def refuse_index(what: object, names: Sequence[str]) -> None:
    """Refuse a column that numbers the rows of a list of edges, where it would be taken for an end of the edges."""
    if found := [name for name in names if looks_like_index(name) and place_of(name) is None]:
        raise ValueError(
            f"{what} has the columns {list(names)}, of which {found[0]!r} seems to number the rows: leave it out of "
            f"the file (with pandas, write index=False), or name the ends of edges src and dst and nothing else"
        )


def refuse_doubtful(
    what: object, names: Sequence[str], index: Collection[str], keep: Collection[str], do: str = _DO
) -> None:
    """Refuse features by whose names they are an index or a label.

    Args:
        what: of which they are columns.
        index: the columns that are an index of pandas.
        keep: those that are said to be features.
        do: what to do about them.
    """
    doubts = {}
    for name in names:
        if name in index or looks_like_index(name):
            doubts[name] = "an index"
        elif _LABEL.fullmatch(name.strip().lower()):
            doubts[name] = "a label"
    if unknown := [name for name in keep if name not in names]:
        raise ValueError(f"{what} has no column {unknown[0]!r} of features; there are {list(names)}")
    found = [f"{name!r} looks like {kind}" for name, kind in doubts.items() if name not in keep]
    if found:
        raise ValueError(f"{what}: {', '.join(found)}, and would become a feature: {do}")
