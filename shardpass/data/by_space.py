"""Parts of points that lie close together, by recursive coordinate bisection (Berger and Bokhari 1987)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


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
