"""Fields of a graph as a script is given them: what is made of them is followed, as of what a model returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from shardpass.core.following import Around, FollowFunctions, FollowRows
from shardpass.core.ranks import FollowedTensor, Ranks, torch_private


class LoadedGraphs:
    """The graphs of a run that are in use."""

    def __init__(self) -> None:
        self.graphs: WeakSet[Any] = WeakSet()


class _Fields:
    """Holds what follows the fields of the graphs of a run, once one is asked for."""

    def __init__(self) -> None:
        self.around: Around | None = None


def _around_of_fields(comm: Ranks) -> Around:
    """What follows the fields of graphs outside of models."""
    kept = comm.caches.of(_Fields)
    if kept.around is None:
        kept.around = Around(FollowFunctions(FollowRows(nn.Module())), comm)
    return kept.around


def mark_fields(follower: FollowRows, comm: Ranks) -> None:
    """Tell `follower` the sets of rows of the graphs that are in use, and the fields of them that were read."""
    follower.marks.selections = _around_of_fields(comm).marks.selections
    marks, graphs = follower.marks, list(comm.caches.of(LoadedGraphs).graphs)
    marks.known = [rows for graph in graphs for rows in graph.row_sets()]
    follower.made.clear()  # rows of graphs that are gone are no longer recognised
    marks.by_name = {
        name: rows for graph in graphs for name, rows in zip((*graph.ownership, *graph.relations), graph.row_sets())
    }
    for graph in graphs:
        for rows, fields in graph.row_sets().items():
            for field in fields.read():
                follower.mark(field, rows)


def as_given(field: Tensor, comm: Ranks, is_kept: bool = False) -> Tensor:
    """`field` as code outside of models gets it, which nobody else follows.

    Args:
        field: as the engine has read it.
        comm: the ranks.
        is_kept: it is kept, and what reads it in a model or a function of ours takes it as it is.
    """
    if comm.size == 1 or (not is_kept and (comm.forward is not None or comm.met is not None)):
        return field
    if isinstance(field, FollowedTensor) or torch_private.is_in_backward():  # which runs code of a model again
        return field
    around = _around_of_fields(comm)
    if field not in around.marks.rows:
        mark_fields(around.follower, comm)
    return around.followed(field)  # type: ignore[no-any-return]


class GivenFields(Mapping[str, Tensor]):
    """Fields by name, each `as_given`.

    Args:
        fields: as the engine reads them.
        comm: the ranks.
    """

    def __init__(self, fields: Mapping[str, Tensor], comm: Ranks) -> None:
        self._fields, self._comm = fields, comm

    def __getitem__(self, name: str) -> Tensor:
        return as_given(self._fields[name], self._comm)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def listed(self) -> str:
        """The names, for an error message."""
        return ", ".join(sorted(self)) or "none"
