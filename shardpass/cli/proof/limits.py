"""How much memory this process may use: what the kernel, a container or a batch system allows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroups of version 1 write a number above this one for "no limit"
_ROOT = Path("/")


def memory_limit(root: Path = _ROOT) -> tuple[int, str]:
    """The fewest bytes that bound this process, and what sets the bound; 0 and an empty text if nothing is known.

    `root` is where ``proc`` and ``sys`` are found.
    """
    found = [*_cgroup_limits(root), *_resource_limits(), *_memory_of_host(root)]
    return min(found, default=(0, ""))


def _cgroup_limits(root: Path) -> Iterator[tuple[int, str]]:
    """The limits of the control groups of this process and of all groups around them, versions 1 and 2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        group = Path(path.strip("/"))
        for folder in (group, *group.parents):
            text = _text(base / folder / name).strip()
            if text.isdigit() and int(text) < _UNLIMITED:
                yield int(text), "cgroup"


def _resource_limits() -> Iterator[tuple[int, str]]:
    if sys.platform == "win32":
        return
    import resource  # not every system has it

    for name in ("RLIMIT_AS", "RLIMIT_DATA"):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            yield soft, name


def _memory_of_host(root: Path) -> Iterator[tuple[int, str]]:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            yield int(line.split()[1]) * 1024, "the host"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
