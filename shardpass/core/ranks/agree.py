"""How ranks find out whether they are about to do the same thing, and the error when they are not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from shardpass.core.ranks.ranks import Ranks
from shardpass.errors import DivergenceError, PeerFailure

_T = TypeVar("_T")


def digest(text: str) -> int:
    """A 62-bit fingerprint of `text`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def agree(comm: Ranks, label: str, values: list[int]) -> list[list[int]]:
    """Every rank's `values`, in rank order. Collective; all ranks pass equally many."""
    if comm.size == 1:
        return [values]
    gathered = comm.all_gather(torch.tensor(values, dtype=torch.int64), label=label)
    return [row.tolist() for row in gathered]


def fail_together(comm: Ranks, label: str, work: Callable[[], _T], *kinds: type[Exception]) -> _T:
    """What `work` returned on this rank. An error of `kinds` on one rank is raised on all. Collective."""
    result, problem = None, None
    try:
        result = work()
    except kinds as error:
        problem = next(index for index, kind in enumerate(kinds) if isinstance(error, kind)), str(error)
    for rank, found in enumerate(comm.all_gather_object(problem, label)):
        if found is not None:
            raise kinds[found[0]](f"{found[1]} (found on rank {rank})")
    return cast(_T, result)


def gather_or_fail(comm: Ranks, label: str, mine: _T, problem: Exception | None, failed: str) -> list[_T]:
    """What every rank passes as `mine`, in rank order, if no rank has a `problem`. Collective.

    A rank raises its own problem. The others raise a `PeerFailure`, which says who `failed`, and why.
    """
    every = comm.all_gather_object((mine, "" if problem is None else str(problem)), label)
    if problem is not None:
        raise problem
    for rank, (_, told) in enumerate(every):
        if told:
            raise PeerFailure(f"rank {rank} {failed}: {told}")
    return [found for found, _ in every]


def require_same(every: Sequence[Mapping[str, Any]], names: Iterable[str], verb: str, advice: str = "") -> None:
    """Raise a `DivergenceError` if ranks differ in a value; `verb` is what they do with it. `every` is by rank."""
    for name in names:
        first, *others = (one.get(name) for one in every)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise DivergenceError(
                    f"every rank must {verb} the same {name}: rank 0 has {first}, rank {rank} has {other}{advice}"
                )


def diverged(comm: Ranks, label: str, mine: str) -> DivergenceError:
    """The error for ranks that describe one call differently, for every rank to raise. Collective."""
    descriptions = comm.all_gather_object(mine, label=f"{label}: descriptions")
    other = next(r for r in range(comm.size) if descriptions[r] != descriptions[0])
    return DivergenceError(
        f"{label}: ranks disagree about this call, so it cannot be exact. Rank 0: {descriptions[0]}. "
        f"Rank {other}: {descriptions[other]}. Every rank must call the same model as often, with the same widths and "
        f"dtypes; a call under `if comm.rank == 0` ends like this"
    )
