"""One epoch under torch's profiler, as a file for a trace viewer (Perfetto, chrome://tracing)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shardpass.core.ranks import Ranks


def trace_path(path: str, comm: Ranks) -> Path:
    """Where this rank writes: `path`, with the rank before the suffix where there are several."""
    file = Path(path)
    return file if comm.size == 1 else file.with_name(f"{file.stem}.rank{comm.rank}{file.suffix or '.json'}")


@contextmanager
def profiled(path: str | None, comm: Ranks, shared_process: bool) -> Iterator[None]:
    """Trace what runs inside; nothing without a `path`.

    The engine's rounds are in it as "send", "wait for" and "compute" with the name of the call and the block. Ranks
    that are threads share one profiler, so only rank 0 is traced there.
    """
    if path is None or (shared_process and comm.rank > 0):
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        yield
    target = trace_path(path, comm)
    target.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(target))
