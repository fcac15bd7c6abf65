"""The structure of all ranks of a host in memory that they share: neighbours are then drawn without messages.

Every rank still draws what it owns from its own memory, and what others own from theirs; nothing is held twice. Draws
depend on seed and original ids alone, so they are the same as those that owners make and send.
"""

from __future__ import annotations

from dataclasses import replace as replaced
from typing import Any

import numpy as np
from torch import Tensor

from shardpass.core.exchange import WindowPool
from shardpass.core.sampling.structure import InEdges, SampledSource, Structure

Array = Any

_ALIGNMENT = 64  # bytes
_EDGE_ARRAYS = ("indptr", "src_ids", "edge_ids", "rows", "weights")

Layout = list[tuple[str, int]]  # dtype and length of each array


def share_structure(source: SampledSource, allowed: bool = True) -> SampledSource:
    """`source` with the structure of every rank, where all are on one host and can share memory. Collective.

    The arrays of its own are in shared memory then, and those given are not needed any more.

    Args:
        allowed: as `Options.share_memory`; the same on every rank.

    Returns:
        `source` itself where ranks are on several hosts, are threads, or cannot have such memory.
    """
    comm = source.comm
    pool = comm.caches.of(WindowPool)
    if not allowed or not comm.shares_memory or pool.refused or comm.size == 1 or len(comm.local_ranks) < comm.size:
        return source
    found = placed(source)
    pool.refused = found is None
    return source if found is None else found


def placed(source: SampledSource) -> SampledSource | None:
    """`source` with its arrays in memory of `Communicator.share`, and those of the others; None without. Collective."""
    comm, arrays = source.comm, _arrays(source)
    layout = [(array.dtype.str, len(array)) for array in arrays]
    memory = comm.share(sum(_aligned(array.nbytes) for array in arrays), "sampling: structure")
    if memory is None:
        return None
    for view, array in zip(_views(memory[comm.rank], layout), arrays):
        view[:] = array
    layouts = comm.all_gather_object(layout, "sampling: layout of the structure")  # from here on all may read
    parts = [_structure(source, _views(memory[rank], layouts[rank])) for rank in range(comm.size)]
    own = parts[comm.rank]
    edges = {kind: replaced(held, fields=source.edges[kind].fields) for kind, held in own.edges.items()}
    return replaced(source, node_ids=own.node_ids, edges=edges, parts=parts)


def _arrays(source: SampledSource) -> list[Array]:
    edges = [getattr(held, name) for held in source.edges.values() for name in _EDGE_ARRAYS]
    return edges + list(source.node_ids.values())


def _structure(source: SampledSource, arrays: list[Array]) -> Structure:
    """The `arrays` of one rank, in the order of `_arrays`."""
    left = iter(arrays)
    edges = {kind: InEdges(fields={}, **{name: next(left) for name in _EDGE_ARRAYS}) for kind in source.edges}
    return Structure({kind: next(left) for kind in source.node_ids}, edges)


def _views(memory: Tensor, layout: Layout) -> list[Array]:
    found, at = [], 0
    for dtype, length in layout:
        size = length * np.dtype(dtype).itemsize
        found.append(memory.numpy()[at : at + size].view(dtype))
        at += _aligned(size)
    return found


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
