"""`Meter`: CPU seconds and memory of a training loop in this process, epoch by epoch.

[Note: how memory is measured]
Everything is above the *loaded baseline*: graph structure, features, labels and model are in memory, no optimizer step
has been made. Code is loaded by then: torch's, and numba with its compiled loops, where it is installed (some 130 MiB
of code and Python objects in every process that uses it). Two figures are taken from the resident set (VmRSS, and VmHWM
reset through /proc/self/clear_refs):

* peak: the highest point above the baseline, from the first epoch on. Gradients, Adam's state, transport buffers and
  whatever structure is built at first use count.
* kept: what is resident between epochs above the baseline (gradients, Adam's state, structure and buffers kept for the
  next epoch). transient = peak of the later epochs - kept: what an epoch itself needs.

A window (memory that ranks on one host share) counts once, at its owner, in full: what is resident of any rank's window
is taken off, and the size of the rank's own is added.

The resident set equals live memory only if freed blocks leave it. So processes that measure memory run with glibc's
mmap threshold at 64 KiB (MALLOC_MMAP_THRESHOLD_): every larger block, hence every large tensor, is a mapping of its own
that free() returns at once. That costs page faults, so CPU seconds are taken in another run, without it. As a check,
the live heap between epochs is read from glibc itself (mallinfo2), and stands beside `kept`.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from pathlib import Path
from typing import Any

from shardpass import Communicator
from shardpass.cli.memory import windows_of_others

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def live_heap() -> int:
    """Bytes in live malloc blocks, by glibc's own count; -1 where there is no mallinfo2 (glibc before 2.33)."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return -1
    function.restype = _MallInfo
    found = function()
    return int(found.uordblks + found.hblkhd)


def resident(field: str) -> int:
    """Bytes: VmRSS, VmHWM or RssAnon of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


class Meter:
    """Call `start` once all is loaded, then `epoch` after every epoch.

    Args:
        comm: whose windows count; None where there is one process.
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        self._comm = comm

    def start(self) -> None:
        """The baseline is now."""
        Path("/proc/self/clear_refs").write_text("5")
        self.rss, self.heap = resident("VmRSS"), live_heap()
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.peaks: list[int] = []
        self.kept: list[int] = []
        self.kept_heap: list[int] = []
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def epoch(self) -> None:
        """An epoch has ended."""
        self.cpu.append(time.process_time() - self._cpu)
        self.wall.append(time.perf_counter() - self._wall)
        others = windows_of_others(self._comm) if self._comm is not None else 0
        self.peaks.append(resident("VmHWM") - self.rss - others)
        self.kept.append(resident("VmRSS") - self.rss - others)
        self.kept_heap.append(live_heap() - self.heap)
        Path("/proc/self/clear_refs").write_text("5")
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def result(self) -> dict[str, Any]:
        """Medians over all epochs but the first, and memory in bytes."""
        later = slice(1, None) if len(self.cpu) > 1 else slice(None)
        return {
            "cpu_seconds": statistics.median(self.cpu[later]),
            "wall_seconds": statistics.median(self.wall[later]),
            "peak_bytes": max(self.peaks),
            "kept_bytes": self.kept[-1],
            "kept_heap_bytes": self.kept_heap[-1],
            "transient_bytes": max(self.peaks[later]) - min(self.kept[later]),
        }
