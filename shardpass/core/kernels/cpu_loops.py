"""Which tensors numba's loops take, and rows dealt out to threads. numba is imported when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from shardpass.core.kernels.runs import EdgeRun, RowRun

DTYPES = (torch.float32, torch.float64)
_SMALL = 1 << 14  # edges below which a thread is not worth starting


def numba_loops_for(rows: Tensor) -> ModuleType | None:
    """`numba_loops`, if they take these rows and numba is installed."""
    if rows.device.type != "cpu" or rows.dtype not in DTYPES:
        return None
    try:
        from shardpass.core.kernels import numba_loops
    except ImportError:
        return None
    return numba_loops


def attention_loops() -> Any:
    """`numba_attention`, for tensors that `numba_loops_for` takes. Compiled functions have no types for a checker."""
    from shardpass.core.kernels import numba_attention

    return numba_attention


def cut_rows(run: EdgeRun | RowRun, most: int | None = None) -> list[tuple[int, int]]:
    """Ranges of the run's rows with about as many edges each, one for each thread of torch, `most` at most."""
    start, stop, low, high = run.bounds
    count = _num_threads(stop - start)
    count = count if most is None else min(count, most)
    if count == 1:
        return [(low, high)]
    edges = torch.linspace(start, stop, count + 1).to(run.indptr.dtype)[1:-1]
    cuts = torch.searchsorted(run.indptr[low : high + 1], edges).add_(low).tolist()
    return list(pairwise([low, *cuts, high]))


def by_rows(run: EdgeRun | RowRun, work: Callable[[int, int], None]) -> None:
    """Call `work` for ranges of the run's rows with about as many edges each, one for each thread of torch."""
    in_threads(work, cut_rows(run))


def _num_threads(num_edges: int) -> int:
    return max(1, min(torch.get_num_threads(), num_edges // _SMALL))


def in_threads(work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Call `work` with each of the arguments, all at the same time."""
    others = [threading.Thread(target=work, args=given) for given in arguments[1:]]
    for thread in others:
        thread.start()
    work(*arguments[0])
    for thread in others:
        thread.join()
