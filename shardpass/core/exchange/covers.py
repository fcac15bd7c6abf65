"""The fewest rows that two ranks must exchange for sums over the edges between them.

An edge is served if the row of its source travels, or if the sum for its destination does. So what travels is a vertex
cover of the edges, seen as a bipartite graph. The smallest one has as many vertices as the largest matching has edges
(Kőnig 1931; its construction from a matching is in Schrijver, Combinatorial Optimization, Theorem 16.2).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor


def can_cover() -> bool:
    """Whether SciPy is installed, which finds the matching."""
    return find_spec("scipy") is not None


def minimum_cover(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
    """A smallest set of sources and destinations of which each edge has one, ``(is_source, is_destination)``.

    Args:
        src, dst: the ends of the edges, ``[num_edges]`` each. An edge may be there several times.

    Returns:
        ``[num_src]`` and ``[num_dst]`` bool, on the CPU.
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_bipartite_matching

    rows, columns = src.cpu().numpy(), dst.cpu().numpy()
    graph = csr_matrix((np.ones(len(rows), np.int8), (rows, columns)), shape=(num_src, num_dst))
    of_source = maximum_bipartite_matching(graph, perm_type="column")  # -1 for none
    of_destination = np.full(num_dst, -1, of_source.dtype)
    of_destination[of_source[of_source >= 0]] = np.flatnonzero(of_source >= 0)
    reached, ends = of_source < 0, np.zeros(num_dst, bool)  # by paths that alternate, from sources without a partner
    last = np.flatnonzero(reached)
    while len(last):
        found = np.unique(_neighbours(graph, last))
        found = found[~ends[found]]
        ends[found] = True
        last = of_destination[found]
        last = last[~reached[last]]
        reached[last] = True
    return torch.from_numpy(~reached & (np.diff(graph.indptr) > 0)), torch.from_numpy(ends)


def _neighbours(graph: Any, rows: Any) -> Any:
    """The columns of the entries of some rows of a sparse matrix."""
    starts, counts = graph.indptr[rows], np.diff(graph.indptr)[rows]
    before = np.cumsum(counts) - counts
    return graph.indices[np.arange(counts.sum()) + np.repeat(starts - before, counts)]
