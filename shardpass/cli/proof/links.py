"""What travels between two ranks: bandwidth and latency, measured in rings in which all ranks send at once."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

import torch

from shardpass.core.ranks import Ranks

_LARGE, _TIMES = 4 << 20, 3  # bytes of a message whose bandwidth is measured, and how often it is sent
_SMALL_TIMES = 20  # one number, for the latency
_RINGS = 8
_SLOW = 5.0  # times slower than the median


@dataclass(frozen=True)
class Link:
    """What rank `target` has received from rank `source`, in seconds for a short message and bytes per second."""

    source: int
    target: int
    latency: float
    bandwidth: float
    is_right: bool


def measure(comm: Ranks) -> list[Link]:
    """What every rank receives from some of the others, and whether it is what they sent. Collective.

    Each ring has every rank send to the one `step` places on. With at most 9 ranks these are all pairs. With more, the
    steps are 1, 2, 4 ... so that the time does not grow with the number of ranks.
    """
    mine = [_ring(comm, step) for step in steps(comm.size)]
    every = comm.all_gather_object(mine, "test: links")
    return [Link(*link) for links in every for link in links]


def steps(size: int) -> list[int]:
    """The distances between sender and receiver in the rings of `size` ranks."""
    every = range(1, size)
    return list(every) if len(every) <= _RINGS else [1 << power for power in range(_RINGS) if 1 << power < size]


def _ring(comm: Ranks, step: int) -> tuple[int, int, float, float, bool]:
    to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
    short, _ = _exchanged(comm, to, source, 1, _SMALL_TIMES)
    long, is_right = _exchanged(comm, to, source, _LARGE // 8, _TIMES)
    return source, comm.rank, statistics.median(short), _LARGE / min(long), is_right


def _exchanged(comm: Ranks, to: int, source: int, count: int, times: int) -> tuple[list[float], bool]:
    """The seconds of each exchange of `count` numbers, and whether what came is what the source sent."""
    numbers = torch.arange(count, dtype=torch.int64, device=comm.device)
    sent, received = numbers + comm.rank, torch.empty_like(numbers)
    seconds = []
    comm.barrier("test: ring")
    for tag in range(times + 1):
        received.zero_()
        start = perf_counter()
        comm.exchange(sent, to, received, source, tag, "test: ring").wait()
        seconds.append(perf_counter() - start)
    return seconds[1:], bool((received == numbers + source).all())  # the first one makes connections


def slowest(links: Iterable[Link], count: int = 5) -> list[Link]:
    """The links of the least bandwidth, worst first."""
    return sorted(links, key=lambda link: link.bandwidth)[:count]


def stragglers(links: Iterable[Link], hosts: list[str]) -> list[str]:
    """A sentence for each link that is much slower than the median of those within a host, or else between hosts."""
    told = []
    kinds: dict[bool, list[Link]] = {}
    for link in links:
        kinds.setdefault(hosts[link.source] == hosts[link.target], []).append(link)
    for alike in kinds.values():
        usual = statistics.median(link.bandwidth for link in alike)
        for link in slowest(alike, 3):
            if link.bandwidth * _SLOW < usual:
                told.append(
                    f"rank {link.target} ({hosts[link.target]}) receives from rank {link.source} "
                    f"({hosts[link.source]}) {usual / link.bandwidth:.0f} times slower than the median"
                )
    return told
