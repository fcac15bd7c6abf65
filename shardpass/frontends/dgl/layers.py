"""DGL modules that need more than message passing: classes in whose unmodified code a few names mean something else.

`adapt` gives a module the class here that is derived from its own. It stays the same object with the same parameters.
"""

from __future__ import annotations

import types
from contextlib import nullcontext
from typing import Any

import dgl.function as fn
import dgl.nn.pytorch as dnn
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardpass.core.exchange import scatter_to_owners
from shardpass.core.following import unfollowed_anywhere
from shardpass.core.ranks import agree
from shardpass.core.wrapping import EmptyRows, with_names
from shardpass.frontends.dgl import readouts
from shardpass.frontends.dgl.attention import Attends
from shardpass.frontends.dgl.closed import refused
from shardpass.frontends.dgl.graph import ShardedDGLGraph


class _Reversed:
    """The reversed graph in EdgeWeightNorm, which sums an edge field over the out-edges of own nodes."""

    def __init__(self, graph: ShardedDGLGraph) -> None:
        self._edges = graph.edges_of(None)
        self.edata: dict[str, Tensor] = {}
        self.dstdata: dict[str, Tensor] = {}

    def update_all(self, message: Any, reducer: Any) -> None:
        """``copy_e`` and ``sum`` only. Collective."""
        if message.name != "copy_e" or reducer.name != "sum":
            raise refused("a reversed graph", "reverse the graph before partitioning it")
        rows, edges = self.edata[message.in_field], self._edges
        sums = rows.new_zeros((edges.plan.num_src, *rows.shape[1:])).index_add(0, edges.src_rows, rows)
        self.dstdata[reducer.out_field] = scatter_to_owners(sums, edges.plan, "sums over out-edges")


class ShardedEdgeWeightNorm(dnn.EdgeWeightNorm):
    """`dgl.nn.EdgeWeightNorm`, with sums over the out-edges on all ranks."""

    def forward(self, graph: ShardedDGLGraph, edge_weight: Tensor) -> Tensor:
        """Normalised weights, ``[num_edges]``. Collective.

        Raises:
            DGLError: a weight is not positive (with ``norm="both"``).
        """
        return with_names(dnn.EdgeWeightNorm.forward, reverse=_Reversed)(self, graph, edge_weight)


class ShardedAGNNConv(Attends, dnn.AGNNConv): ...


class ShardedDotGatConv(Attends, dnn.DotGatConv): ...


class ShardedGATConv(Attends, dnn.GATConv): ...


class ShardedGATv2Conv(Attends, dnn.GATv2Conv): ...


class _OwnEdgeCounts(ShardedDGLGraph):
    """A graph whose ``num_edges()`` is a plain number."""

    def num_edges(self, etype: Any = None) -> int:
        """How many edges of a type this rank has; `None` means all types."""
        return int(super().num_edges(etype))


class _ChecksWeights:
    """Layers that compare the number of edge weights with ``graph.num_edges()``, also where a rank has no edges."""

    def forward(self, graph: Any, *args: Any, **kwargs: Any) -> Any:
        """What the layer computes on own rows. Collective."""
        counted = graph.copied_as(_OwnEdgeCounts) if isinstance(graph, ShardedDGLGraph) else graph
        return super().forward(counted, *args, **kwargs)  # type: ignore[misc]


class ShardedGINConv(_ChecksWeights, dnn.GINConv): ...


class ShardedGraphConv(_ChecksWeights, dnn.GraphConv): ...


class ShardedSAGEConv(_ChecksWeights, dnn.SAGEConv): ...


class _NormalisesWeights:
    """Layers that make an `EdgeWeightNorm` in forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        original = super().forward.__func__  # type: ignore[misc]
        return with_names(original, EdgeWeightNorm=ShardedEdgeWeightNorm)(self, *args, **kwargs)


class ShardedAPPNPConv(_NormalisesWeights, dnn.APPNPConv): ...


class ShardedGCN2Conv(_NormalisesWeights, dnn.GCN2Conv): ...


class ShardedSGConv(_NormalisesWeights, dnn.SGConv): ...


class ShardedTAGConv(_NormalisesWeights, dnn.TAGConv): ...


class _ReadsOut:
    """Modules that use DGL's readouts, which are over the nodes of all ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = ("sum_nodes", "mean_nodes", "max_nodes", "softmax_nodes", "broadcast_nodes")
        original = super().forward.__func__  # type: ignore[misc]
        return with_names(original, **{name: getattr(readouts, name) for name in names})(self, *args, **kwargs)


class ShardedSumPooling(_ReadsOut, dnn.SumPooling): ...


class ShardedAvgPooling(_ReadsOut, dnn.AvgPooling): ...


class ShardedMaxPooling(_ReadsOut, dnn.MaxPooling): ...


class ShardedGlobalAttentionPooling(_ReadsOut, dnn.GlobalAttentionPooling): ...


class ShardedSet2Set(_ReadsOut, dnn.Set2Set): ...


class ShardedWeightAndSum(_ReadsOut, dnn.WeightAndSum): ...


class ShardedChebConv(_ReadsOut, dnn.ChebConv): ...  # it broadcasts `lambda_max` to own nodes


class ShardedLabelPropagation(dnn.LabelPropagation):
    """`dgl.nn.LabelPropagation`, with the number of classes that the labels of all ranks have."""

    def forward(self, g: ShardedDGLGraph, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Propagated labels of own nodes, ``[num_own, classes]``. Collective."""
        largest = int(labels.max()) if labels.numel() else -1
        classes = 1 + max(answer[0] for answer in agree(g.comm, "classes of LabelPropagation", [largest]))
        names = types.SimpleNamespace(
            one_hot=lambda ids: functional.one_hot(ids, classes), normalize=functional.normalize
        )
        return with_names(dnn.LabelPropagation.forward, F=names)(self, g, labels, mask)


class ShardedGroupRevRes(dnn.GroupRevRes):
    """`dgl.nn.GroupRevRes`, which keeps its input and computes the layer again from it in backward.

    DGL's own class frees its input and recovers it from the output inside backward, where ranks would communicate out
    of step.
    """

    def forward(self, g: ShardedDGLGraph, x: Tensor, *args: Any) -> Tensor:
        """Updated own rows, in the shape of `x`. Collective."""

        def layer(x: Tensor, *args: Any) -> Any:
            with EmptyRows() if getattr(g, "lacks_rows", False) else nullcontext():
                return self._forward(g, x, *args)

        return checkpoint(layer, x, *args, use_reentrant=False)


class ShardedTypedLinear(dnn.TypedLinear):
    """`dgl.nn.TypedLinear`, which ignores `sorted_by_type`: a part of a sorted list of edges is not sorted."""

    def forward(self, x: Tensor, x_type: Tensor, sorted_by_type: bool = False) -> Tensor:
        """Rows of `x` times the matrix of their type."""
        with unfollowed_anywhere():  # it sorts the rows by type and puts them back
            return super().forward(x, x_type, False)


class ShardedGatedGraphConv(dnn.GatedGraphConv):
    """`dgl.nn.GatedGraphConv`, which skips no edge type: which types have no edges differs from rank to rank."""

    def forward(self, graph: ShardedDGLGraph, feat: Tensor, etypes: Tensor | None = None) -> Tensor:
        """Updated own rows, ``[num_own, out_feats]``. Collective."""
        if etypes is None:
            return super().forward(graph, feat)
        if etypes.numel() and not bool(((etypes >= 0) & (etypes < self._n_etypes)).all()):
            raise ValueError(f"edge type indices out of range [0, {self._n_etypes})")
        chosen = [(etypes == kind).nonzero().view(-1) for kind in range(self._n_etypes)]
        feat = torch.cat([feat, feat.new_zeros(feat.size(0), self._out_feats - feat.size(1))], -1)
        with graph.local_scope():
            for _ in range(self._n_steps):
                graph.ndata["h"] = feat
                for linear, edges in zip(self.linears, chosen):
                    graph.apply_edges(lambda batch, linear=linear: {"m": linear(batch.src["h"])}, edges)
                graph.update_all(fn.copy_e("m", "m"), fn.sum("m", "a"))
                feat = self.gru(graph.ndata["a"], feat)
        return feat


_SHARDED: tuple[Any, ...] = (
    ShardedAGNNConv, ShardedAPPNPConv, ShardedAvgPooling, ShardedChebConv, ShardedDotGatConv, ShardedEdgeWeightNorm,
    ShardedGATConv, ShardedGATv2Conv, ShardedGCN2Conv, ShardedGINConv, ShardedGatedGraphConv,
    ShardedGlobalAttentionPooling, ShardedGraphConv, ShardedGroupRevRes, ShardedLabelPropagation, ShardedMaxPooling,
    ShardedSAGEConv, ShardedSGConv, ShardedSet2Set, ShardedSumPooling, ShardedTAGConv, ShardedTypedLinear,
    ShardedWeightAndSum,
)  # fmt: skip
ADAPTED: dict[type[nn.Module], type[nn.Module]] = {kind.__bases__[-1]: kind for kind in _SHARDED}
"""The sharded class of each class of ``dgl.nn`` that has one."""


def adapt(model: nn.Module) -> None:
    """Give the modules of `model` whose class is a key of `ADAPTED` their sharded class, in place."""
    for module in model.modules():
        kind = ADAPTED.get(type(module))
        if kind is not None:
            module.__class__ = kind
