"""How ranks learn the address of rank 0: network interfaces, and a file on a shared file system."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

from shardpass.backends import TIMEOUT_VARIABLE
from shardpass.errors import CommunicationError
from shardpass.frontends.sar._state import STATE
from shardpass.frontends.sar.common_tuples import SocketInfo

SOCKET_VARIABLE = "SAR_SOCKET_NAME"
_SIOCGIFADDR = 0x8915
_POLL_SECONDS = 0.1


def nfs_ip_init(_rank: int, ip_file: str) -> str:
    """The IP address of rank 0, which rank 0 writes to `ip_file` and the others read there. Returns once it is known.

    The file may be on any file system that all ranks see. A rank takes an address only if rank 0 of a run that is just
    starting answers there, so a file that an earlier run has left is not used. Rank 0 removes the file when all ranks
    have joined (`initialize_comms`).

    Args:
        _rank: the rank of this process.
        ip_file: the path of the file, the same on all ranks.

    Raises:
        CommunicationError: no rank 0 of a starting run was found within ``SHARDPASS_CONNECT_TIMEOUT`` (60) seconds.
    """
    path = Path(ip_file)
    if _rank == 0:
        return _publish(path)
    return _find(path, _rank, float(os.environ.get(TIMEOUT_VARIABLE, "60")))


def own_ip() -> str:
    """The IPv4 address of the interface in ``SAR_SOCKET_NAME``, or else of the one that reaches other hosts.

    Raises:
        ValueError: there is no such interface, or it has no IPv4 address.
    """
    name = os.environ.get(SOCKET_VARIABLE)
    if name:
        return address_of(name)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing: only asks which interface would be used
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def get_socket() -> SocketInfo:
    """The network interface that ranks use here, and its address; the name is empty if the system chooses it."""
    return SocketInfo(os.environ.get(SOCKET_VARIABLE, ""), own_ip())


def get_ip_address(ip_file: str) -> str:
    """The address in a file that `nfs_ip_init` or `dump_ip_address` wrote."""
    return Path(ip_file).read_text(encoding="utf-8").split()[0]


def dump_ip_address(ip_file: str) -> str:
    """Write this host's address to a file, and return it. `nfs_ip_init` also sees to it that all ranks find it."""
    Path(ip_file).write_text(f"{own_ip()}\n", encoding="utf-8")
    return own_ip()


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface of this host.

    Raises:
        ValueError: there is no such interface, or it has no IPv4 address.
    """
    known = [name for _, name in socket.if_nameindex()]
    if interface not in known:
        raise ValueError(
            f"{SOCKET_VARIABLE}={interface!r} is no network interface of {socket.gethostname()}, which has: "
            f"{', '.join(known)}"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise ValueError(f"{SOCKET_VARIABLE}={interface!r} has no IPv4 address: {error.strerror}") from error
    return socket.inet_ntoa(found[20:24])


def _publish(path: Path) -> str:
    """Write this host's address, and have a process answer on a port of it until all ranks have come."""
    ip, token = own_ip(), secrets.token_hex(16)
    with socket.create_server((ip, 0), backlog=128) as listener:
        port = listener.getsockname()[1]
        program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("answering.py")), str(listener.fileno())]
        answering = subprocess.Popen(program, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], text=True)
    pipe = answering.stdin
    assert pipe is not None
    pipe.write(f"{token}\n")
    pipe.flush()
    temporary = path.with_name(f"{path.name}.{token}")
    temporary.write_text(f"{ip}\n{port} {token}\n", encoding="utf-8")
    os.replace(temporary, path)

    def end() -> None:
        pipe.close()
        answering.wait()
        if any(found == token for _, _, found in _read(path)):
            path.unlink(missing_ok=True)

    STATE.on_connected.append(end)
    return ip


def _find(path: Path, rank: int, limit: float) -> str:
    deadline, stale = monotonic() + limit, ""
    while monotonic() < deadline:
        for ip, port, token in _read(path):
            if _answers(ip, port, token):
                return ip
            stale = ip
        sleep(_POLL_SECONDS)
    if stale:
        found = f"names {stale}, where no starting rank 0 answers: it was left by an earlier run"
    else:
        found = "was written by something else" if path.exists() else "does not exist"
    raise CommunicationError(
        f"rank {rank} waited {limit:.0f} s for rank 0 to write its address, but {path} {found}. Was rank 0 started "
        f"with this file, and do all ranks see it? {TIMEOUT_VARIABLE} gives slow starters more seconds"
    )


def _read(path: Path) -> Iterator[tuple[str, int, str]]:
    """The address, port and token in the file, if `nfs_ip_init` wrote it."""
    with contextlib.suppress(OSError, ValueError):
        ip, port, token = path.read_text(encoding="utf-8").split()
        yield ip, int(port), token


def _answers(ip: str, port: int, token: str) -> bool:
    try:
        with socket.create_connection((ip, port), timeout=2.0) as peer:
            return peer.recv(len(token)) == token.encode()
    except OSError:
        return False
