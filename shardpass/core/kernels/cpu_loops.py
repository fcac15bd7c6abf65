"""Decides which tensors numba's loops take, and shares rows among threads. numba is imported on first use."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from shardpass.core.kernels.optional import optional_module
from shardpass.core.kernels.runs import EdgeRun, RowRun
from shardpass.core.ranks import torch_private

COMPILED_LOOPS = "compiled loops"
"""The name under which a profiler, or the planner's dry run, sees loops that numba has compiled."""

DTYPES = (torch.float32, torch.float64)
_SMALL = 1 << 14  # with fewer edges than this, another thread costs more than it saves


def numba_loops_for(rows: Tensor) -> ModuleType | None:
    """`numba_loops` if it takes these rows and numba is installed, else `None`."""
    if rows.device.type != "cpu" or rows.dtype not in DTYPES:
        return None
    return _loops()


@cache
def _loops() -> ModuleType | None:
    loops = optional_module("shardpass.core.kernels.numba_loops")
    if loops is not None:
        # numba makes 57,000 objects, for which Python would go over all objects of the process, which takes 0.2 s
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            loops.get_ready()
        finally:
            if was_enabled:
                gc.enable()
    return loops


def attention_loops() -> ModuleType:
    """`numba_attention`. Call this only for tensors that `numba_loops_for` takes."""
    from shardpass.core.kernels import numba_attention

    return numba_attention


def cut_rows(run: EdgeRun | RowRun, most: int | None = None) -> list[tuple[int, int]]:
    """Ranges of the run's rows with about equally many edges: one for each thread of torch, but at most `most`."""
    start, stop, low, high = run.bounds
    count = _num_threads(stop - start)
    count = count if most is None else min(count, most)
    if count == 1:
        return [(low, high)]
    edges = torch.linspace(start, stop, count + 1).to(run.indptr.dtype)[1:-1]
    cuts = torch.searchsorted(run.indptr[low : high + 1], edges).add_(low).tolist()
    return list(pairwise([low, *cuts, high]))


def cut_edges(run: EdgeRun | RowRun) -> list[tuple[int, int]]:
    """The same ranges as of the run's edges, ``(first, last)`` of each."""
    start, stop = run.bounds[:2]
    bounds = [(int(run.indptr[low]), int(run.indptr[high])) for low, high in cut_rows(run)]
    return [(max(first, start) - start, min(last, stop) - start) for first, last in bounds]


def by_rows(run: EdgeRun | RowRun, work: Callable[[int, int], None]) -> None:
    """Call `work` with the first and last row of each range of `cut_rows`, each in a thread of its own."""
    in_threads(work, cut_rows(run))


def in_threads(work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Call `work` once for each tuple of arguments, each call in a thread of its own, and wait for all of them."""
    others = [threading.Thread(target=work, args=given) for given in arguments[1:]]
    with torch_private.span(COMPILED_LOOPS):
        for thread in others:
            thread.start()
        work(*arguments[0])
        for thread in others:
            thread.join()


def _num_threads(num_edges: int) -> int:
    return max(1, min(torch.get_num_threads(), num_edges // _SMALL))
