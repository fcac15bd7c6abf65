"""Run a function on several ranks with a short time-out, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from shardpass.connection import spawn

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    ranks: int,
    backend: Literal["threads", "processes"] = "threads",
    timeout: float = 120.0,
    args: tuple[Any, ...] = (),
) -> list[T]:
    """What ``fn(comm, *args)`` returned on each rank; see `spawn`. A wait longer than ``timeout`` seconds fails."""
    return spawn(fn, ranks, backend, args=args, timeout=timeout)
