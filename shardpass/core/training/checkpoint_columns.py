"""The columns that a model was trained on, compared with those of the graph that it is to be used on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from shardpass.errors import CheckpointError

_MOST_NAMES = 12

Columns = Mapping[str, Mapping[str, Sequence[str]]]
"""The names of columns, by node type and field."""


def refuse_other_columns(what: str, saved: Columns, found: Columns) -> None:
    """Raise a CheckpointError if a field that both have has other columns in the checkpoint than in the graph."""
    for kind, fields in saved.items():
        for name, trained in fields.items():
            given = found.get(kind, {}).get(name)
            if given is None or [*given] == [*trained]:
                continue
            first = next((i for i, (a, b) in enumerate(zip(trained, given)) if a != b), min(len(trained), len(given)))
            raise CheckpointError(
                f"{what} was trained on other columns of {name!r} (nodes of type {kind!r}): {_listed(trained)}; those "
                f"of this graph are {_listed(given)}. They differ from column {first} on. Write the store again from a "
                f"table with the columns of training, in their order"
            )


def warn_of_unknown(path: str, saved: Columns, found: Columns, is_given: bool) -> None:
    """Warn where a model was trained on columns with names, and the graph is not given or does not name its own."""
    lack = "this graph does not name its own: make" if is_given else "they were not compared with those of the graph: "
    lack += "" if is_given else "pass graph= (and perhaps other_graph=True), or make"
    for kind, fields in saved.items():
        for name, trained in fields.items():
            if name not in found.get(kind, {}):
                warnings.warn(
                    f"the checkpoint {path!r} was trained on the columns {_listed(trained)} of {name!r}, and "
                    f"{lack} sure that they are the same, in this order",
                    stacklevel=3,
                )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return f"{', '.join(names[:_MOST_NAMES])}{f' and {more} more' if more > 0 else ''} ({len(names)})"
