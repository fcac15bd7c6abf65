"""Rows of the whole graph in its own order, and a rank's rows of them."""

from __future__ import annotations

import torch
from torch import Tensor

from shardpass.core.graphs.readout import all_rows
from shardpass.core.ranks import Ranks, is_differentiable


class WholeOrder:
    """Some rows of a graph: of its nodes or edges of one type.

    Args:
        comm: the ranks.
        ids: the original number of each own row, ``[num_own]`` int64.
        total: rows of the whole graph.
        what: words for the rows.
    """

    def __init__(self, comm: Ranks, ids: Tensor, total: int, what: str) -> None:
        self._comm, self._ids, self._total, self._what = comm, ids.to(comm.device), total, what
        self._places: Tensor | None = None

    def own(self, rows: Tensor) -> Tensor:
        """See `ShardedGraph.own`."""
        if not rows.dim() or rows.size(0) != self._total:
            raise ValueError(
                f"graph.own takes a tensor of the whole graph, with a row for each of its {self._total} {self._what}, "
                f"but got the shape {[*rows.shape]}"
            )
        return rows.index_select(0, self._ids.to(rows.device))

    def whole(self, rows: Tensor) -> Tensor:
        """See `ShardedGraph.whole`."""
        if not rows.dim() or rows.size(0) != len(self._ids):
            raise ValueError(
                f"rank {self._comm.rank}: graph.whole takes a tensor with a row for each of this rank's "
                f"{len(self._ids)} {self._what}, but got the shape {[*rows.shape]}"
            )
        gathered = all_rows(rows, self._comm) if is_differentiable(rows) else self._gathered(rows)
        if self._places is None:
            with self._comm.unfollowed():
                self._places = torch.argsort(self._gathered(self._ids))
        return gathered.index_select(0, self._places)

    def _gathered(self, rows: Tensor) -> Tensor:
        return torch.cat(self._comm.all_gather(rows.contiguous(), f"graph.whole of {self._what}"))
