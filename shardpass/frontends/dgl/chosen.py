"""Own rows that code chooses: by a mask, or by the places where a mask is true. Ids of the whole graph are refused."""

from __future__ import annotations

from typing import Any

import torch
from dgl import DGLError
from torch import Tensor

from shardpass.core.ranks import Ranks, RowSet
from shardpass.frontends.dgl.closed import refused


def chosen_rows(comm: Ranks, given: Any, of: RowSet, call: str, ids: str, are_own: bool = False) -> Tensor:
    """Some of the rows `of`, ``[n]`` int64, in their order as it was given. Not collective.

    Within a wrapped model, numbers are refused unless they come from rows, as those of ``mask.nonzero()`` do. Nobody
    can see that elsewhere, so only a mask is taken there.

    Args:
        given: bool ``[num_rows]``, or places.
        call: how it was given, for messages: ``"graph.in_degrees(v)"``.
        ids: where the original ids are: ``"graph.ndata[dgl.NID]"``.
        are_own: numbers are own rows wherever they come from, as SAR has it.

    Raises:
        ClosedMemberError, RefusedError: they are numbers of the whole graph, or may be.
        DGLError: a mask of another size, or numbers that no row has.
    """
    is_tensor = isinstance(given, Tensor)
    is_mask = is_tensor and given.dtype == torch.bool
    if not is_mask and not are_own and (not is_tensor or comm.forward is None or given.dim() == 0):
        raise refused(
            f"{call} by number",
            f"every rank numbers its own rows anew. Pass a mask of own rows, which may be made of original ids: "
            f"torch.isin({ids}, ids)",
        )
    numbers = torch.as_tensor(given, device=comm.device)
    if is_mask and numbers.shape != (of.count,):
        raise DGLError(f"{call} on rank {comm.rank}: a mask is bool [{of.count}], found {[*numbers.shape]}")
    with comm.unfollowed():
        rows = torch.zeros(of.count, device=comm.device)
        comm.mark_rows(rows, of)
        if not is_mask and numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < of.count:
            raise DGLError(
                f"{call} on rank {comm.rank}: found numbers from {int(numbers.min())} to {int(numbers.max())}, "
                f"expected numbers of own rows in [0, {of.count}). Ids of the whole graph are in {ids}"
            )
    with comm.followed():
        chosen = numbers.nonzero().view(-1) if is_mask else numbers.to(torch.int64).view(-1)
        rows.index_select(0, chosen)  # which is followed
    return chosen
