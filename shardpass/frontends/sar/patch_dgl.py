"""What SAR puts in the place of parts of DGL. Nothing needs to be patched here; the names exist."""

from __future__ import annotations

from typing import Any

import dgl.nn.pytorch as dnn
from dgl.nn.functional import edge_softmax as dgl_edge_softmax
from torch import Tensor

from shardpass.frontends.dgl.graph import ShardedDGLGraph
from shardpass.frontends.sar.edge_softmax import edge_softmax


class RelGraphConv(dnn.RelGraphConv):
    """`dgl.nn.RelGraphConv` on a graph of one node and one edge type (``construct_full_graph(homogeneous=True)``)."""

    def forward(
        self, g: Any, feat: Tensor, etypes: Tensor, norm: Tensor | None = None, *, presorted: bool = False
    ) -> Any:
        """New own rows, [num_own, out_feat]. Collective. The arguments are DGL's, but `presorted` is ignored.

        The edges of a rank are grouped by the part of their source, so they are never sorted by type as a whole.
        """
        return super().forward(g, feat, etypes, norm, presorted=False)


def patched_edge_softmax(graph: Any, *args: Any, **kwargs: Any) -> Tensor:
    """`edge_softmax` of a sharded graph, DGL's own of any other."""
    chosen = edge_softmax if isinstance(graph, ShardedDGLGraph) else dgl_edge_softmax
    return chosen(graph, *args, **kwargs)


def patch_dgl() -> None:
    """Do nothing: unmodified layers of ``dgl.nn`` run on sharded graphs, and `RelGraphConv` is there anyway."""
