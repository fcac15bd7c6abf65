"""Random permutations of which every rank computes the entries that it needs, so that nobody holds a whole one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.core.exchange import node_set
from shardpass.core.graphs import ShardedGraph, graph_of
from shardpass.core.ranks import Ranks, agree, derive_seed, digest, diverged, draw_seed
from shardpass.core.sampling.drawing import keys_of
from shardpass.core.sharding import NodeType

Array = np.ndarray[Any, Any]

_FEISTEL_ROUNDS = 6


def permuted_ids(graph: ShardedGraph, seed: int | None = None, node_type: NodeType | None = None) -> Tensor:
    """For each own node the id that one permutation of all nodes of the graph gives it, ``[num_own]``. Collective.

    ``shardpass.rows(graph, x, permuted_ids(graph))`` shuffles rows over the whole graph, as ``x[torch.randperm(n)]``
    does in one process. A seed gives the same permutation on any number of ranks.

    Args:
        graph: this rank's share, or what stands for it inside a wrapped model.
        seed: the same on every rank. `None` draws one from rank 0's random numbers.
        node_type: of the nodes; needed where the graph has several types.

    Raises:
        ValueError: a node type that is missing or unknown.
        DivergenceError: on every rank, if ranks pass different seeds or types.
    """
    graph = graph_of(graph)
    comm, (ids, total) = graph.comm, graph.ids_of(node_type)
    with comm.unfollowed():
        seed = agreed_seed(comm, "permuted ids", f"of {node_type or 'all'} nodes", seed)
        found = torch.from_numpy(shuffled(ids.cpu().numpy(), total, seed)).to(comm.device)
    comm.mark_rows(found, node_set(node_type or graph.node_types[0], ids.numel()))
    return found


def agreed_seed(comm: Ranks, label: str, words: str, seed: int | None) -> int:
    """`seed`, or if it is `None` one that rank 0 draws. Collective.

    Raises:
        DivergenceError: on every rank, if ranks pass different seeds, or `words`, which describe the call.
    """
    words = f"{words}, seed {seed}"
    answers = agree(comm, label, [digest(words), draw_seed(comm) if seed is None else 0])
    if any(answer[0] != answers[0][0] for answer in answers):
        raise diverged(comm, label, words)
    return answers[0][1] if seed is None else seed


def shuffled(positions: Array, count: int, seed: int) -> Array:
    """What a random permutation of ``[0, count)`` puts at each position, int64; the seed decides which permutation.

    A Feistel network permutes the numbers of an even number of bits. One that lies outside is permuted again until it
    is inside (cycle walking; Black, Rogaway 2002).
    """
    half = max(1, -(-(count - 1).bit_length() // 2))
    mask = np.uint64((1 << half) - 1)
    values, todo = positions.astype(np.uint64), np.arange(len(positions))
    seeds = [derive_seed(seed, "shuffled", i) for i in range(_FEISTEL_ROUNDS)]
    while len(todo):
        left, right = values[todo] >> np.uint64(half), values[todo] & mask
        for key in seeds:
            left, right = right, left ^ (keys_of(key, right) & mask)
        values[todo] = left << np.uint64(half) | right
        todo = todo[values[todo] >= np.uint64(count)]
    return values.astype(np.int64)
