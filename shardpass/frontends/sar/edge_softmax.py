"""Softmax over in-edges."""

from __future__ import annotations

from typing import Any

from dgl.nn.functional import edge_softmax as dgl_edge_softmax
from torch import Tensor

from shardpass.errors import RefusedError
from shardpass.frontends.dgl.private import ALL, is_all


def edge_softmax(graph: Any, logits: Tensor, eids: Any = ALL, norm_by: str = "dst") -> Tensor:
    """Softmax of `logits` ``[num_edges, ...]`` over the in-edges of each node. Not collective.

    Raises:
        RefusedError: you ask for some edges only, or for out-edges, some of which are on other ranks.
    """
    if not is_all(eids) or norm_by != "dst":
        raise RefusedError(
            f"edge_softmax with norm_by={norm_by!r}{'' if is_all(eids) else ' over some edges'}: a rank holds the "
            f"in-edges of its own nodes, so the softmax is over all in-edges of a node (norm_by='dst')"
        )
    return dgl_edge_softmax(graph, logits)
