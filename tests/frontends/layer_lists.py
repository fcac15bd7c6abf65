"""How a layer is computed, found by running it, and the rows of the table that says so."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple
from unittest import mock

from shardpass.core.aggregation import sharded_call

from .how_much import largest_error

WAYS = ("kernel", "softmax", "traced")
AT_ONCE = "at once"


class Layer(NamedTuple):
    """A layer with some options, and what has been found of it.

    Args:
        name: the class, and after a space the options.
        ways: how it is computed.
        error: the largest, beside the same layer on the whole graph.
    """

    name: str
    ways: str
    error: float


def measured(name: str, *arguments: Any, **options: Any) -> Layer:
    """`largest_error` of a case, and the ways that its sums over edges went; *at once* if none was seen."""
    found: set[str] = set()
    settle = sharded_call.settle

    def recorded(*args: Any, **kwargs: Any) -> Any:
        agreed = settle(*args, **kwargs)
        reductions = agreed.structure.reductions
        if any(reduction.leader is not None for reduction in reductions):
            found.add("softmax")
        else:
            found.update("traced" if reduction.form == "general" else "kernel" for reduction in reductions)
        return agreed

    with mock.patch.object(sharded_call, "settle", recorded):
        error = largest_error(*arguments, **options)
    return Layer(name, ", ".join(way for way in WAYS if way in found) or AT_ONCE, error)


def rows_of_layers(layers: Iterable[Layer]) -> list[str]:
    """A row for each class: its way, and the options that go another way; the default's or the commonest is first."""
    classes: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for layer in layers:
        kind, _, options = layer.name.partition(" ")
        classes[kind][layer.ways].append(options or "default")
    rows = []
    for kind in sorted(classes, key=str.lower):
        first, *others = sorted(classes[kind].items(), key=lambda item: ("default" not in item[1], -len(item[1])))
        rows.append(row(kind, "; ".join([first[0], *(f"{ways} ({', '.join(names)})" for ways, names in others)])))
    return rows


def rows_by_reason(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Rows of ``(class, reason)``: one for each reason."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for name, reason in reasons:
        grouped[reason].append(name)
    return [row(", ".join(names), reason) for reason, names in grouped.items()]


def row(name: str, told: str) -> str:
    """A row of the table."""
    return f"|{name}|{told}|"
