"""Tests that are the program of a rank: its share of a graph, and what all ranks must say of a program."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import WholeGraph, WholeHeteroGraph, run, shard_hetero_in_memory, shard_in_memory

from .how_much import owners_of

Program = Callable[..., Any]
RANKS = (1, 4)
"""Of `assert_refused` and `assert_rows`."""


def share(whole: WholeGraph | WholeHeteroGraph, comm: Any, owners: Any = "random", **options: Any) -> Any:
    """The rank's share of a graph: of one of its assignments, by name, or of the owners of its nodes.

    Args:
        options: those of `shardpass.Options`.
    """
    where = owners if isinstance(owners, (Tensor, dict)) else owners_of(whole, comm.size)[owners]
    shard: Any = shard_hetero_in_memory if isinstance(whole, WholeHeteroGraph) else shard_in_memory
    return shard(whole, where, comm, sp.Options(**options))


def on_ranks(*counts: Any) -> Callable[[Program], Program]:
    """Makes a test of a program: each rank of each number of ranks runs it, with its communicator and the fixtures.

    The test has a parameter `ranks`, which the program may take as well.
    """

    def decorate(program: Program) -> Program:
        parameters = [*inspect.signature(program).parameters.values()][1:]
        takes_ranks = any(parameter.name == "ranks" for parameter in parameters)

        @functools.wraps(program)
        def test(ranks: int, **given: Any) -> None:
            given = given | {"ranks": ranks} if takes_ranks else given
            run(lambda comm: program(comm, **given), ranks)

        ranks = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
        others = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters if p.name != "ranks"]
        test.__signature__ = inspect.Signature([ranks, *others])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("ranks", counts)(test)

    return decorate


def on_shares(
    whole: WholeGraph | WholeHeteroGraph, work: Program, ranks: int = 2, owners: Any = "random", **options: Any
) -> list[Any]:
    """What ``work(comm, graph)`` returns on each rank, of its share of a graph. Arguments are those of `share`."""
    return run(lambda comm: work(comm, share(whole, comm, owners, **options)), ranks)


def told(work: Program, ranks: int) -> list[Any]:
    """What `work` returned on each rank, or the refusal that ended it there."""

    def caught(comm: Any) -> Any:
        try:
            return work(comm)
        except RefusedError as refusal:
            return refusal

    return run(caught, ranks, timeout=30.0)


def assert_refused(work: Program, line: str, *words: str, ranks: tuple[int, ...] = RANKS) -> None:
    """On every rank of each number of ranks, `work` is refused at a line of code with `line`, in words with `words`."""
    for count in ranks:
        for rank, found in enumerate(told(work, count)):
            where = f"rank {rank} of {count}"
            assert isinstance(found, RefusedError), f"{where} ended with {found!r}"
            for part in (line, *words):
                assert part in str(found), f"{where}, without {part!r}: {found}"


def assert_rows(work: Program, expected: Tensor, bound: float = 1e-10, ranks: tuple[int, ...] = RANKS) -> None:
    """For each number of ranks, `work` returns ``(original ids, rows)`` of own nodes, which are rows of `expected`."""
    for count in ranks:
        for rank, found in enumerate(told(work, count)):
            if isinstance(found, RefusedError):
                raise AssertionError(f"rank {rank} of {count} is refused") from found
            ids, rows = found
            assert float((rows - expected[ids]).abs().max()) <= bound, f"rank {rank} of {count}"
