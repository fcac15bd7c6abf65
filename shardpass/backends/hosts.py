"""Where a process runs. A host's name does not say it: two hosts may share one, and containers of one host may not."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHEAP_TENSORS = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "67108864",
}
"""What makes fresh tensors cheap: torch asks the kernel for huge pages, and glibc uses the same memory again.

These are variables of the environment, read as a process starts. Where huge pages are asked for without the last two,
tensors of a few MiB get fresh pages from the kernel each time, which clears them.
"""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # parameters of mallopt
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def machine() -> str:
    """The running kernel: processes with the same one share cores, also from different containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode():x}"


def usable_cores() -> set[int]:
    """The cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def memory_space() -> str:
    """The processes that this one can tell by their numbers, and so read the shared memory of."""
    return f"{machine()} {socket.gethostname()} {_namespace('pid')}"


def network_space() -> str:
    """The processes that this one reaches over the loopback interface.

    Copies of one running virtual machine have the same kernel, but addresses of their own.
    """
    return f"{machine()} {_namespace('net')} {' '.join(sorted(own_addresses()))}"


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return socket.gethostname()


def reuse_memory() -> None:
    """Do in this process what glibc does with the variables of `CHEAP_TENSORS`."""
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, int(CHEAP_TENSORS["MALLOC_MMAP_THRESHOLD_"]))
        libc.mallopt(_TRIM_THRESHOLD, int(CHEAP_TENSORS["MALLOC_TRIM_THRESHOLD_"]))


def lacks_cheap_tensors(environment: Mapping[str, str]) -> str:
    """The words to set what of `CHEAP_TENSORS` an environment lacks, if this kernel gives huge pages to who asks."""
    missing = [f"{name}={value}" for name, value in CHEAP_TENSORS.items() if not environment.get(name)]
    return f"export {' '.join(missing)}" if missing and huge_pages() == "madvise" else ""


def huge_pages() -> str:
    """To whom this kernel gives huge pages: ``"always"``, ``"madvise"`` (who asks) or ``"never"``; empty if unknown."""
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def chosen_interface() -> str:
    """The network interface that GLOO_SOCKET_IFNAME names; empty if it names none."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


def own_addresses() -> list[str]:
    """The addresses at which another host may reach this one: those of the chosen interface, or else of all."""
    only = chosen_interface()
    names = [only] if only else [name for _, name in socket.if_nameindex()]
    found = [address for name in names for address in addresses_of(name)]
    if not only:
        with contextlib.suppress(OSError):
            infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            found += [str(info[4][0]) for info in infos]
    return [address for address in dict.fromkeys(found) if only or not address.startswith(("127.", "::1", "fe80"))]


def address_towards(host: str) -> str:
    """The address of this host on the way to `host`; empty if there is no way. Nothing is sent."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """The network interface with an IPv4 address; empty if there is none."""
    return next((name for _, name in socket.if_nameindex() if address in addresses_of(name)), "")


def is_loopback(address: str) -> bool:
    """Whether an address is one at which a host reaches itself alone."""
    return address.startswith(("127.", "::1"))


def addresses_of(interface: str) -> list[str]:
    """The IPv4 address of a network interface of this host; empty if it has none."""
    if sys.platform != "linux":
        return []
    import fcntl  # not every system has it

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket, _GET_ADDRESS, interface.encode()[:15].ljust(256, b"\0"))
        except OSError:  # it has none, or there is no such interface
            return []
    return [socket.inet_ntoa(found[20:24])]
