"""Programs that are refused at a line of the user's on every rank, or exact, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardpass.errors import RefusedError
from shardpass.testing.run import run

RANKS = (1, 3, 4)
Work = Callable[[Any], Any]
"""``work(comm)``, a program of one rank."""


def told(work: Work, ranks: int) -> list[Any]:
    """What `work` returned on each rank, or the refusal that ended it there."""

    def caught(comm: Any) -> Any:
        try:
            return work(comm)
        except RefusedError as refusal:
            return refusal

    return run(caught, ranks, timeout=30.0)


def assert_refused(work: Work, line: str, *words: str, ranks: tuple[int, ...] = RANKS) -> None:
    """On every rank of each number of ranks, `work` is refused at a line of code with `line`, in words with `words`."""
    for count in ranks:
        for rank, found in enumerate(told(work, count)):
            where = f"rank {rank} of {count}"
            assert isinstance(found, RefusedError), f"{where} ended with {found!r}"
            for part in (line, *words):
                assert part in str(found), f"{where}, without {part!r}: {found}"


def assert_rows(work: Work, expected: Tensor, bound: float = 1e-10, ranks: tuple[int, ...] = RANKS) -> None:
    """For each number of ranks, `work` returns ``(original ids, rows)`` of own nodes, which are rows of `expected`."""
    for count in ranks:
        for rank, found in enumerate(told(work, count)):
            if isinstance(found, RefusedError):
                raise AssertionError(f"rank {rank} of {count} is refused") from found
            ids, rows = found
            assert float((rows - expected[ids]).abs().max()) <= bound, f"rank {rank} of {count}"
