"""Memory that the ranks of one host share, whatever carries their messages: files without a name that all ranks map.

[Note: a file without a name] Each rank makes a memory file (memfd), tells the others its process and descriptor, and
closes the file as soon as they have mapped it. So a crash at any moment leaves nothing behind, and the size of
/dev/shm, which is small in many containers, does not matter. The space is reserved when the file is made, so that a
lack of memory is an error then, not a fault at the first write. A random number at the front proves that a rank has
mapped the file it was told of: in another container, or on another host of the same name, a process number means
something else.
"""

from __future__ import annotations

import os
import secrets

import torch
from torch import Tensor

from shardpass.backends.communicator import Communicator

_PROOF_BYTES = 32
_FRONT_BYTES = 64  # so that what follows is aligned for every dtype

Offer = tuple[str, str, int]  # path, proof, bytes


def share(comm: Communicator, num_bytes: int, label: str) -> dict[int, Tensor] | None:
    """See `Communicator.share`. It works for ranks that are processes or threads of Linux."""
    file, offer = _create(num_bytes)
    try:
        offers = comm.all_gather_object(offer, f"{label}: shared memory")
        found = {rank: _map(*offers[rank]) for rank in comm.local_ranks if offers[rank] is not None}
        mapped = {rank: memory for rank, memory in found.items() if memory is not None}
        verdicts = comm.all_gather_object(len(mapped) == len(comm.local_ranks), f"{label}: shared memory mapped")
    finally:
        if file is not None:
            os.close(file)
    return mapped if all(verdicts) else None


def _create(num_bytes: int) -> tuple[int | None, Offer | None]:
    """The descriptor of a new file for `num_bytes` and what the others need to map it, or `None`."""
    try:
        file = os.memfd_create("shardpass")
    except (AttributeError, OSError):
        return None, None
    proof, total = secrets.token_bytes(_PROOF_BYTES), _FRONT_BYTES + num_bytes
    try:
        os.posix_fallocate(file, 0, total)
        os.pwrite(file, proof, 0)
    except OSError:
        os.close(file)
        return None, None
    return file, (f"/proc/{os.getpid()}/fd/{file}", proof.hex(), total)


def _map(path: str, proof: str, total: int) -> Tensor | None:
    try:
        if os.stat(path).st_size != total:  # checked before opening, since it may be anybody's file
            return None
        memory = torch.from_file(path, shared=True, size=total, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None
    if bytes(memory[:_PROOF_BYTES].tolist()).hex() != proof:
        return None
    return memory[_FRONT_BYTES:]
