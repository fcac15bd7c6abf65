"""`PeakMeter`: how much memory a process needed at most, above what it held when the work began.

[Note: what is measured]
The peak is the resident set of the process (on Linux VmHWM, which writing 5 to /proc/self/clear_refs resets), so it
counts everything: tensors, gradients, optimizer state, transport buffers, what the allocator keeps. Memory that ranks
share is resident in each process that has read it, but counts at its owner alone (`windows_of_others`). If the
environment variable MALLOC_MMAP_THRESHOLD_ is set (see `exact_allocator`), glibc maps every larger block by itself and
gives it back when it is freed. The peak is then that of live bytes.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from shardpass.core.exchange import WindowPool
from shardpass.core.ranks import Ranks

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MAPS, _WINDOW = Path("/proc/self/smaps"), "memfd:shardpass"


def exact_allocator() -> dict[str, str]:
    """Environment variables for a child process in which freed tensors leave the resident set at once (glibc)."""
    return {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}


class PeakMeter:
    """The peak above the memory held when the meter was made. Where it cannot be reset, a peak while loading counts."""

    def __init__(self) -> None:
        with suppress(OSError):
            _CLEAR.write_text("5")
        self.baseline = _resident("VmRSS")

    def peak(self, comm: Ranks | None = None) -> int:
        """Bytes at the highest point so far, above the baseline; at least 0. `comm` is the one of this process."""
        shared = 0 if comm is None else windows_of_others(comm)
        return max(0, _resident("VmHWM") - self.baseline - shared)


def windows_of_others(comm: Ranks) -> int:
    """Bytes by which shared memory makes this process's resident set differ from what this rank has reserved.

    That is what is resident of the windows of all ranks, less the size of the rank's own.
    """
    if not comm.shares_memory:
        return 0
    resident, inside = 0, False
    for line in _MAPS.read_text().splitlines():
        if line[0].isdigit() or line[0] in "abcdef":
            inside = _WINDOW in line
        elif inside and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident - sum(window.sizes[comm.rank] for window in comm.caches.of(WindowPool).windows)


def _resident(field: str) -> int:
    """Bytes of VmRSS or VmHWM of this process; the high-water mark for both on systems without /proc."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
