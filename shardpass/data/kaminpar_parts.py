"""KaMinPar partitions: few cut edges, balanced work, for graphs that may be larger than memory.

[Note: the file] KaMinPar (Gottesbüren et al. 2021) compresses a graph while it reads it from a file in the binary
format of ParHIP. So the neighbours are written to that file, one run of nodes after the other: 24 bytes that say what
follows (what is left out, number of nodes, number of neighbours), where in the file the neighbours of each node begin
and where the last ones end, the neighbours, the weights of nodes, and the weights of edges.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardpass.core.ranks import bytes_text, tells_of_full_disk
from shardpass.data.raw import RawGraph
from shardpass.data.streaming import INT32_LIMIT, Adjacency, Budget
from shardpass.errors import ShardpassError, require

_NO_EDGE_WEIGHTS, _SMALL_NODE_IDS, _SMALL_EDGE_WEIGHTS = 1, 8, 32
_HEADER_BYTES = 24
_SHARE, _NEIGHBOUR_BYTES = 3, 28
"""KaMinPar's own memory: how often `Budget.memory_bytes`, and what it was measured to need for each neighbour."""
_IMBALANCE = 0.03
_RUN = """
import sys
import kaminpar, numpy
path, result, (parts, imbalance, seed, threads) = *sys.argv[1:3], map(float, sys.argv[3:])
partitioner = kaminpar.KaMinPar(num_threads=int(threads), ctx=kaminpar.terapart_context())  # limits reading too
graph = kaminpar.load_graph(path, kaminpar.GraphFileFormat.PARHIP, compress=True)
kaminpar.reseed(int(seed))
numpy.asarray(partitioner.compute_partition(graph, int(parts), imbalance), numpy.int32).tofile(result)
"""
"""It runs in a process of its own, since what KaMinPar finds depends on what it did before in the same process."""
_ENVIRONMENT = ("HOME", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")
"""What it sees of the environment: the parts have changed with the number of variables, of which launchers set many."""


def kaminpar_parts(
    graph: RawGraph, parts: int, budget: Budget, seed: int, threads: int = 1, node_weights: Tensor | None = None
) -> Tensor:
    """The part of each node, int32 [num_nodes]; the nodes of all types, one type after the other.

    Collective. KaMinPar itself runs on rank 0. What the other ranks return holds no parts.

    KaMinPar sees one graph without directions and self-loops, in which parallel edges weigh as many.

    Args:
        budget: memory for edges while the file is written, and where temporary files go. KaMinPar's own memory comes on
            top, without the pages of its file: at most about three times as much. If all edges would need more, it is
            given a sample of them (see `Adjacency`).
        node_weights: what each node weighs, [num_nodes]; by default the bytes of `Adjacency.weights`.
        threads: with one, the same seed mostly gives the same parts; KaMinPar does not promise it.
    """
    instead = "use method='metis', which needs pymetis, or method='random'"
    require("kaminpar", "kaminpar", "partitioning with method 'kaminpar', the default,", instead)
    adjacency = Adjacency(graph, budget, _SHARE * budget.memory_bytes // _NEIGHBOUR_BYTES)
    if adjacency.kept < adjacency.neighbours and budget.team.rank == 0:
        warnings.warn(_few_edges(adjacency), stacklevel=5)  # which calls `partition`
    path, result = write_parhip(adjacency, parts, budget, node_weights), budget.file()

    def cut() -> Tensor:
        budget.report("assign", 0, 1)
        numbers = map(str, (parts, _IMBALANCE, seed, threads))
        command = [sys.executable, "-c", _RUN, path.name, result.name, *numbers]
        env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        ended = subprocess.run(
            command, cwd=path.parent, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if code := ended.returncode:
            how = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
            why = ended.stderr.strip().splitlines()[-1:] or [
                "it printed nothing; signal 9 often means a lack of memory"
            ]
            raise ShardpassError(
                f"KaMinPar {how} ({why[0]}): give it more memory, or use method='random' or an assignment of your own"
            )
        return torch.from_numpy(np.fromfile(result, np.int32))

    try:
        unknown = torch.empty(sum(graph.num_nodes.values()), dtype=torch.int32)
        return budget.team.only_first("KaMinPar", cut, unknown)
    finally:
        path.unlink()
        result.unlink()


def _few_edges(adjacency: Adjacency) -> str:
    share = adjacency.kept / adjacency.neighbours
    enough = bytes_text(adjacency.neighbours * _NEIGHBOUR_BYTES / _SHARE)
    return (
        f"KaMinPar sees {share:.0%} of the edges, since all of them would need more than {_SHARE} times memory_bytes "
        f"(--memory): it may cut more edges than it has to. It sees all of them with about {enough}, and takes up to "
        f"{_SHARE} times as much memory then"
    )


def write_parhip(adjacency: Adjacency, parts: int, budget: Budget, node_weights: Tensor | None = None) -> Path:
    """The file that KaMinPar reads, in the format of the note, which the caller deletes. It closes `adjacency`.

    Collective. Rank 0 writes it, and the other ranks return an empty file.
    """
    num_nodes = adjacency.num_nodes
    node_type = np.dtype(np.uint32 if num_nodes <= INT32_LIMIT else np.uint64)
    num_bytes = 2 * adjacency.total * (node_type.itemsize + 4) + 16 * num_nodes
    budget.require_disk(num_bytes, "the graph for KaMinPar")
    runs = adjacency.runs()
    if budget.team.rank:
        list(runs)  # of which this rank merges some, for rank 0
        adjacency.close()
        return budget.file()
    path, weights_path = budget.file(), budget.file()
    first = _HEADER_BYTES + 8 * (num_nodes + 1)  # byte at which the neighbours begin
    at, multiplicities = first, set[int]()
    with tells_of_full_disk(path, num_bytes), open(path, "r+b") as file, open(weights_path, "r+b") as weights:
        for first_node, starts, neighbours, multiplicity in runs:
            file.seek(_HEADER_BYTES + 8 * first_node)
            file.write((at + starts * node_type.itemsize).astype(np.uint64).data)
            file.seek(at)
            file.write(neighbours.astype(node_type).data)
            weights.write(multiplicity.astype(np.int32).data)
            if len(multiplicity):
                multiplicities |= {int(multiplicity.min()), int(multiplicity.max())}
            at += len(neighbours) * node_type.itemsize
        adjacency.close()
        file.seek(at)
        file.write(adjacency.weights(parts, node_weights).numpy().data)
        left_out = _SMALL_EDGE_WEIGHTS | (_SMALL_NODE_IDS if node_type.itemsize == 4 else 0)
        if len(multiplicities) > 1:
            weights.seek(0)
            shutil.copyfileobj(weights, file, 1 << 24)
        else:
            left_out |= _NO_EDGE_WEIGHTS  # all alike, as in a graph that has each edge in both directions
        file.seek(0)
        np.array([left_out, num_nodes, (at - first) // node_type.itemsize], np.uint64).tofile(file)
    weights_path.unlink()
    return path
