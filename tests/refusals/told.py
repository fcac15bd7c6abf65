"""How a mistake is told: a row is a class of error, words, and a mistake, which is a function of a rank and its graph.

The words are a regular expression, in which ``{line}`` stands for a line of the mistake itself. Every rank must raise
the error, and in one line.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from shardpass.errors import RefusedError
from shardpass.testing import (
    WholeGraph,
    WholeHeteroGraph,
    assignments,
    awkward_graph,
    awkward_hetero_graph,
    hetero_assignments,
)
from tests.frontends.staying_ranks import Team

Row = tuple[Any, str, Callable[..., Any]]
Table = Mapping[str, Row]


def _labelled() -> WholeGraph:
    graph = awkward_graph()
    graph.node["y"], graph.node["train_mask"] = torch.arange(41) % 3, torch.arange(41) % 5 < 3
    return graph


GRAPH, HETERO = awkward_graph(), awkward_hetero_graph()
N = GRAPH.num_nodes


@functools.cache
def _team(ranks: int, kind: str) -> Team:
    graph: WholeGraph | WholeHeteroGraph = {"plain": GRAPH, "typed": HETERO}.get(kind) or _labelled()
    owned = hetero_assignments if isinstance(graph, WholeHeteroGraph) else _assignments
    return Team(graph, owned(graph, ranks)["random"], ranks)


def _assignments(graph: WholeGraph, ranks: int) -> dict[str, Any]:
    return assignments(graph.num_nodes, ranks, graph.edge_index)


def of(mistake: Callable[..., Any], cases: Mapping[str, Any], error: Any = RefusedError, line: str = "") -> Table:
    """The rows of cases of one kind of mistake: what is given to it, and the words."""
    return {name: (error, line + words, functools.partial(mistake, case)) for name, (case, words) in cases.items()}


class Does(nn.Module):
    """A model that calls a function of its modules and arguments."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *given: Any) -> Any:
        return self.function(*self.parts, *given)


def rows_of(one: Table, three: Table, kind: str = "plain") -> Any:
    """Parametrizes a test by `row`, `ranks` and `kind` of graph.

    Args:
        one: told on one rank.
        three: told on each of three.
        kind: ``plain``, ``labelled`` (with ``y`` and ``train_mask``) or ``typed``.
    """
    tables = ((1, one), (3, three))
    params = [pytest.param(row, n, kind, id=f"{name}-{n}") for n, rows in tables for name, row in rows.items()]
    return pytest.mark.parametrize(("row", "ranks", "kind"), params)


def assert_told(row: Row, ranks: int, kind: str) -> None:
    error, words, mistake = row
    if "{line}" in words:
        lines, first = inspect.getsourcelines(mistake.args[0] if isinstance(mistake, functools.partial) else mistake)
        numbers = "|".join(str(number) for number in range(first, first + len(lines)))
        words = words.replace("{line}", rf"\.py:({numbers}): .*")
    for rank, found in enumerate(_team(ranks, kind).run(mistake)):
        assert isinstance(found, error), f"rank {rank} ended with {found!r}"
        assert re.search(words, str(found)), f"rank {rank}, without {words!r}: {found}"
