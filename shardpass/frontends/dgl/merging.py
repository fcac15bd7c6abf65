"""Results of several edge types for one node type, merged as DGL's ``multi_update_all`` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dgl import DGLError
from torch import Tensor

from shardpass.core.ranks import Ranks, RowSet
from shardpass.frontends.dgl.followed import RowFunctions

_MERGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "mean": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.max(0)[0],
    "min": lambda stacked: stacked.min(0)[0],
}


def merged(
    parts: list[tuple[int, dict[str, Tensor]]], cross_reducer: Any, comm: Ranks, functions: RowFunctions, of: RowSet
) -> dict[str, Tensor]:
    """One result of `parts`, the results and the number of the edge type that gave each.

    Raises:
        DGLError: there is no such `cross_reducer`.
    """
    if len(parts) == 1 and cross_reducer != "stack":
        return parts[0][1]
    if not callable(cross_reducer) and cross_reducer not in (*_MERGERS, "stack"):
        raise DGLError(
            f"the cross type reducer is {cross_reducer!r}; expected {', '.join(_MERGERS)}, stack or a function"
        )
    if cross_reducer == "stack":
        parts = sorted(parts, key=lambda part: part[0])
    whole = {}
    for name in dict.fromkeys(name for _, fields in parts for name in fields):
        found = [fields[name] for _, fields in parts if name in fields]
        if callable(cross_reducer):
            whole[name] = functions.run(comm, cross_reducer, found, of)
        elif cross_reducer == "stack":
            whole[name] = torch.stack(found, 1)
        else:
            whole[name] = _MERGERS[cross_reducer](torch.stack(found)) if len(found) > 1 else found[0]
    return whole
