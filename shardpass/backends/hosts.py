"""Where a process runs. A host's name does not say it: two hosts may share one, and containers of one host may not."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import uuid
from pathlib import Path

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""With 1 in this variable of the environment, torch asks the kernel for huge pages."""
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def machine() -> str:
    """The running kernel: processes with the same one share cores, also from different containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode():x}"


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
    found = [address for name in names for address in _addresses_of(name)]
    if not only:
        with contextlib.suppress(OSError):
            infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            found += [str(info[4][0]) for info in infos]
    return [address for address in dict.fromkeys(found) if only or not address.startswith(("127.", "::1", "fe80"))]


def _addresses_of(interface: str) -> list[str]:
    if sys.platform != "linux":
        return []
    import fcntl  # not every system has it

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket, _GET_ADDRESS, interface.encode()[:15].ljust(256, b"\0"))
        except OSError:  # it has none, or there is no such interface
            return []
    return [socket.inet_ntoa(found[20:24])]
