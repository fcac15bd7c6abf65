"""`spawn_limited`: run a function in processes that may not take more memory than you say. Linux only.

Two examples of the gallery use it to show what fits into which memory.
"""

import ctypes
import multiprocessing
import os
import resource
import socket
import threading
import time
from pathlib import Path

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc


def status(field):
    """Bytes that a line of /proc/self/status tells."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def held():
    """The memory of this process that is not a mapped file: its own, and what it shares with other ranks."""
    return status("RssAnon") + status("RssShmem")


def _child(pipe, fn, rank, ranks, port, megabytes, mapped):
    if ranks > 1:  # the variables of torchrun, which sp.connect() reads
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    threading.stack_size(1 << 20)
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)  # so that freed tensors leave the process at once
    start, began, memory = held(), time.perf_counter(), []

    def watch():
        while True:
            memory.append((time.perf_counter() - began, (held() - start) / 2**20))
            time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()
    if megabytes is not None:
        limit = status("VmData") + megabytes * 2**20 + mapped
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        result = fn()
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        result = MemoryError("out of memory")
    pipe.send((result, memory))


def spawn_limited(fn, ranks=1, megabytes=None, mapped=0):
    """What ``fn()`` returned on each rank, or a `MemoryError`, and the memory it held: ``[(seconds, MiB), ...]``.

    The kernel enforces the limit (RLIMIT_DATA), on top of what the libraries hold. It counts a file that is mapped as
    if it were in memory, so `mapped` bytes are added. The memory is that above the libraries.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context, started = multiprocessing.get_context("fork"), []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (theirs, fn, rank, ranks, port, megabytes, mapped)
        process = context.Process(target=_child, args=arguments)
        process.start()
        theirs.close()
        started.append((process, ours))
    found = []
    for process, pipe in started:
        found.append(pipe.recv())
        process.join()
    return found
