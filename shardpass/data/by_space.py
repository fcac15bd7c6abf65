"""Parts of points that lie close together.

Points are cut by recursive coordinate bisection (Berger and Bokhari 1987). Then nodes at the borders move to the part
that has more of their neighbours, as in the refinement of Fiduccia and Mattheyses (1982).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ROUNDS = 6
_MOST = 1.03
"""What a part may have of the mean, which is what KaMinPar is given, too."""


def bisected(points: Tensor, parts: int) -> Tensor:
    """The part of each point, ``[num_points]`` int64. Sizes differ by one at most.

    The points are cut across their widest side, so that each half gets its share of the parts; then each half again.

    Args:
        points: ``[num_points, dimensions]``, finite.
        parts: how many.
    """
    places = points.detach().cpu().double().numpy()
    found = np.empty(len(places), np.int64)
    bounds = [len(places) * part // parts for part in range(parts + 1)]
    todo = [(np.arange(len(places)), 0, parts)]
    while todo:
        ids, first, last = todo.pop()
        if last - first == 1:
            found[ids] = first
            continue
        middle, some = (first + last) // 2, places[ids]
        cut = bounds[middle] - bounds[first]
        if 0 < cut < len(ids):
            axis = int(np.argmax(np.ptp(some, axis=0)))
            ids = ids[np.argpartition(some[:, axis], cut)]
        todo += [(ids[:cut], first, middle), (ids[cut:], middle, last)]
    return torch.from_numpy(found)


def refined(owner: Tensor, edges: Sequence[tuple[Tensor, Tensor]], parts: int) -> Tensor:
    """The part of each node, ``[num_nodes]`` int64, after those at the borders have moved so that fewer edges are cut.

    No part grows beyond 1.03 of the mean. Nodes move to higher parts and to lower ones in turn, so that neighbours do
    not change places.

    Args:
        owner: the part of each node, ``[num_nodes]``.
        edges: for each edge type, sources and targets among these nodes. Directions do not matter.
    """
    part = owner.numpy().astype(np.int16 if parts < 1 << 15 else np.int64)  # small numbers stay in a cache
    ends = [(src.cpu().numpy(), dst.cpu().numpy()) for src, dst in edges]
    is_near = np.zeros(len(part), bool)
    for src, dst in ends:
        cut = part[src] != part[dst]
        is_near[src[cut]] = is_near[dst[cut]] = True
    near = [is_near[src] | is_near[dst] for src, dst in ends]
    src, dst = (np.concatenate([each[side][some] for each, some in zip(ends, near)]) for side in (0, 1))
    src, dst = src[src != dst], dst[src != dst]
    degree = np.bincount(src, minlength=len(part)) + np.bincount(dst, minlength=len(part))
    degree[~is_near] = len(src)  # of which some edges are left out: these nodes stay
    for turn in range(_ROUNDS):
        cut = part[src] != part[dst]
        _move(part, np.concatenate([src[cut], dst[cut]]), np.concatenate([dst[cut], src[cut]]), degree, parts, turn % 2)
    return torch.from_numpy(part.astype(np.int64))


def _move(
    part: np.ndarray, nodes: np.ndarray, others: np.ndarray, degree: np.ndarray, parts: int, is_down: int
) -> None:
    """Move nodes into the parts of neighbours, those first that gain most.

    Args:
        nodes, others: the ends of the edges that are cut, each edge from both its ends.
    """
    at_home = degree - np.bincount(nodes, minlength=len(part))
    pairs, counts = np.unique(nodes.astype(np.int64) * parts + part[others], return_counts=True)
    nodes, towards = np.divmod(pairs, parts)
    gain = counts - at_home[nodes]
    chosen = np.flatnonzero((gain > 0) & ((towards < part[nodes]) == is_down))
    chosen = chosen[np.argsort(-gain[chosen], kind="stable")]
    chosen = chosen[np.sort(np.unique(nodes[chosen], return_index=True)[1])]  # the best part for each
    nodes, towards, sizes = nodes[chosen], towards[chosen], np.bincount(part, minlength=parts)
    for each in np.unique(towards):
        room = int(len(part) * _MOST / parts) - sizes[each]
        part[nodes[towards == each][: max(0, room)]] = each
