"""Original ids to global ids, with a directory of which every rank holds its share."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardpass.core.sampling.structure import SampledSource
from shardpass.core.sampling.wire import exchange_arrays
from shardpass.core.sharding import NodeType

Array = Any


def global_ids(source: SampledSource, kind: NodeType, original_ids: Array) -> Array:
    """The global id of each original id of a node type, int64; -1 where there is no such node. Collective.

    Args:
        original_ids: int64, any number on each rank.
    """
    comm, owned = source.comm, source.ownership[kind]
    total = owned.num_total
    share = -(-max(total, 1) // comm.size)  # rank r keeps the original ids [r * share, (r + 1) * share)
    own = source.node_ids[kind]
    homes = own // share
    parts = [[own[homes == rank], np.flatnonzero(homes == rank)] for rank in range(comm.size)]
    directory = np.full(share, -1, dtype=np.int64)
    for rank, (ids, rows) in enumerate(exchange_arrays(comm, parts, "directory of nodes")):
        directory[ids - comm.rank * share] = rows + owned.offsets[rank]
    known = (original_ids >= 0) & (original_ids < total)
    homes = np.where(known, original_ids // share, comm.rank)
    order = np.argsort(homes, kind="stable")
    asked = np.split(original_ids[order], np.cumsum(np.bincount(homes, minlength=comm.size))[:-1])
    answers = []
    for (ids,) in exchange_arrays(comm, [[part] for part in asked], "look-up of nodes"):
        place = ids - comm.rank * share
        inside = (place >= 0) & (place < share)
        answers.append([np.where(inside, directory[np.where(inside, place, 0)], -1)])
    found = np.empty(len(original_ids), dtype=np.int64)
    found[order] = np.concatenate([part for (part,) in exchange_arrays(comm, answers, "nodes looked up")])
    return np.where(known, found, -1)
