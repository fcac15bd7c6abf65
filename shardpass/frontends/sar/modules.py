"""Modules and functions that SAR offers beside its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import dgl.nn.pytorch as dnn
from dgl.nn.functional import edge_softmax as dgl_edge_softmax
from torch import Tensor, nn

from shardpass.core.training import DistributedBatchNorm
from shardpass.errors import RefusedError
from shardpass.frontends.dgl.graph import ShardedDGLGraph
from shardpass.frontends.dgl.private import ALL, is_all
from shardpass.frontends.sar._state import communicator

Function = TypeVar("Function", bound=Callable[..., Any])


class DistributedBN1D(DistributedBatchNorm):
    """`torch.nn.BatchNorm1d` over the nodes of all ranks; see `DistributedBatchNorm`.

    Parameters, buffers and ``state_dict`` keys are BatchNorm1d's: in evaluation it uses running statistics, and does
    not communicate.

    Args:
        n_feats: channels.
        eps: added to the variance.
        affine: with `weight` and `bias`.
        distributed: whether statistics are over the nodes of all ranks, rather than this rank's.
        options: momentum, track_running_stats, dtype and device, as in BatchNorm1d. Without running statistics,
            evaluation uses those of the batch and is collective.
    """

    def __init__(
        self, n_feats: int, eps: float = 1e-5, affine: bool = True, distributed: bool = True, **options: Any
    ) -> None:
        super().__init__(n_feats, None, eps=eps, affine=affine, **options)  # type: ignore[arg-type]
        self.distributed = distributed

    def forward(self, input: Tensor) -> Tensor:
        """The normalised rows, [num_own, channels]. Collective in training."""
        if not self.distributed:
            return nn.BatchNorm1d.forward(self, input)
        if self.comm is None:  # found on first use, since modules may be made before `initialize_comms`
            self.comm = communicator()
        return super().forward(input)


class RelGraphConv(dnn.RelGraphConv):
    """`dgl.nn.RelGraphConv` on a graph of one node and one edge type (``construct_full_graph(homogeneous=True)``)."""

    def forward(
        self, g: Any, feat: Tensor, etypes: Tensor, norm: Tensor | None = None, *, presorted: bool = False
    ) -> Any:
        """New own rows, [num_own, out_feat]. Collective. The arguments are DGL's, but `presorted` is ignored.

        The edges of a rank are grouped by the part of their source, so they are never sorted by type as a whole.
        """
        return super().forward(g, feat, etypes, norm, presorted=False)


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


def patched_edge_softmax(graph: Any, *args: Any, **kwargs: Any) -> Tensor:
    """`edge_softmax` of a sharded graph, DGL's own of any other."""
    chosen = edge_softmax if isinstance(graph, ShardedDGLGraph) else dgl_edge_softmax
    return chosen(graph, *args, **kwargs)


def message_has_parameters(param_foo: Callable[..., Any]) -> Callable[[Function], Function]:
    """A decorator that returns the message function as it is, since the parameters that it uses are found anyway.

    Args:
        param_foo: a function that told SAR the parameters. It is not called.
    """
    if not callable(param_foo):
        raise TypeError(
            f"message_has_parameters takes a function that returns the parameters, got {type(param_foo).__name__}: "
            f"write @sar.message_has_parameters(lambda self: (self.weight,)) above the message function"
        )

    def unchanged(message: Function) -> Function:
        return message

    return unchanged


def patch_dgl() -> None:
    """Do nothing: unmodified layers of ``dgl.nn`` run on sharded graphs, and `RelGraphConv` is there anyway."""
