"""PyG's attention over all nodes, with the nodes of all ranks.

Linear attention (Performer, SGFormer, Polynormer) needs sums over all nodes of small matrices. `wrap` exchanges its
classes, and it is exact at the cost of one all-reduce. ``GPSConv(attn_type="multihead")`` attends over all pairs of
nodes. That is exact too, but every rank then holds the rows of all nodes, so you ask for it with `gather_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.nn import attention, models
from torch_geometric.nn.attention import performer
from torch_geometric.nn.models import sgformer

from shardpass.core.graphs import BatchIndex, all_rows
from shardpass.core.ranks import OnRanks, Ranks, all_reduce_sum, refuse_inside_message
from shardpass.core.training import total_rows
from shardpass.core.wrapping import with_names
from shardpass.errors import RefusedError
from shardpass.frontends.pyg.norms import distribute

_ALL_PAIRS = (
    "its attention runs over all pairs of nodes; use attn_type='performer', which is exact, or call "
    "shardpass.pyg.gather_attention(model) before wrap, which lets every rank hold the rows of all nodes"
)
_DERIVED = "its attention runs over all nodes; PyG's own classes are exact, but not classes derived from them"


def gather_attention(model: nn.Module) -> nn.Module:
    """`model`, changed in place so that `wrap` accepts its ``GPSConv(attn_type="multihead")`` layers. Not collective.

    Every rank gathers the input rows of all ranks in forward, and their gradients in backward. This takes memory for
    ``[total_nodes, channels]`` and work for ``[num_own, total_nodes]`` scores per head. Where that is too much, use
    ``attn_type="performer"``, which needs no such call.

    Args:
        model: not wrapped yet.
    """
    for module in model.modules():
        if isinstance(module, gnn.GPSConv):
            module.gathers_all_nodes = True
    return model


class _OneGraph(OnRanks):
    """A module that pads the nodes of each graph to a dense batch. Here there is one graph, with the own rows."""

    def run(self, original: Any, batch: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """``original(self, *args, batch, **kwargs)`` with own rows for its dense batch."""
        refuse_inside_message(self.ranks(), type(self).__name__)
        if self.ranks().size == 1 and not isinstance(batch, BatchIndex):
            return original(self, *args, batch, **kwargs)  # type: ignore[no-any-return]
        several = batch.num_graphs > 1 if isinstance(batch, BatchIndex) else batch is not None and bool(batch.any())
        if isinstance(batch, BatchIndex):
            batch = batch.plain
        if several:
            raise RefusedError(f"{type(self).__name__}: `batch` means several graphs, which it attends over as one")
        return with_names(original, to_dense_batch=_own_rows)(self, *args, batch, **kwargs)  # type: ignore[no-any-return]


def _own_rows(x: Tensor, batch: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`x` as a batch of one graph, ``[1, num_own, channels]``, and that all of its rows are nodes."""
    return x.unsqueeze(0), x.new_ones((1, x.size(0)), dtype=torch.bool)


class DistributedGPSConv(_OneGraph, gnn.GPSConv):
    """`torch_geometric.nn.GPSConv` on own rows, with the attention of all ranks (Rampasek et al., NeurIPS 2022)."""

    def forward(self, x: Tensor, edge_index: Any, batch: Tensor | None = None, **kwargs: Any) -> Tensor:
        """See `torch_geometric.nn.GPSConv`; ``[num_own, channels]``. Collective."""
        return self.run(gnn.GPSConv.forward, batch, x, edge_index, **kwargs)


class DistributedSGModule(_OneGraph, sgformer.SGModule):
    """The attention half of `torch_geometric.nn.models.SGFormer` on own rows."""

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        """See `torch_geometric.nn.models.SGFormer`; ``[num_own, channels]``. Collective."""
        return self.run(sgformer.SGModule.forward, batch, x)


class DistributedPolynormer(_OneGraph, models.Polynormer):
    """`torch_geometric.nn.models.Polynormer` on own rows."""

    def forward(self, x: Tensor, edge_index: Any, batch: Tensor | None) -> Tensor:
        """See `torch_geometric.nn.models.Polynormer`; ``[num_own, out_channels]``. Collective."""
        return self.run(models.Polynormer.forward, batch, x, edge_index)


class DistributedMultiheadAttention(OnRanks, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` of own queries over the rows of all ranks, as `GPSConv` calls it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """``([1, num_own, channels], None)`` of ``[1, num_own, channels]``. Collective; `key` is also the value."""
        comm = self.ranks()
        if comm.size == 1:
            return super().forward(query, key, value, **options)
        every = all_rows(key.squeeze(0), comm).unsqueeze(0)
        if query.size(1) == 0:  # torch's attention wants a query
            zero = sum((p.sum() for p in self.parameters()), every.sum()) * 0
            return query + zero, None
        return super().forward(query, every, every, need_weights=False)


class DistributedPerformerProjection(OnRanks, performer.PerformerProjection):
    """The linear attention inside `PerformerAttention`, over all ranks (Choromanski et al., ICLR 2021, 2009.14794)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[1, heads, num_own, head_channels]`` of the same. Collective."""
        q, k = (performer.generalized_kernel(t, self.projection_matrix, self.kernel) for t in (q, k))
        product, total = _summed(k.transpose(-2, -1) @ v, k.sum(-2), self.ranks())
        return (q @ product) / (q @ total.unsqueeze(-1))  # type: ignore[no-any-return]


class DistributedPerformerAttention(OnRanks, attention.PerformerAttention):
    """`torch_geometric.nn.attention.PerformerAttention` over all ranks."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``[1, num_own, channels]`` of own rows. Collective."""
        comm = self.ranks()
        if comm.size == 1:
            return super().forward(x, mask)  # type: ignore[no-any-return]
        heads = (self.heads, self.head_channels)
        q, k, v = (lin(_single(x)).unflatten(-1, heads).transpose(1, 2) for lin in (self.q, self.k, self.v))
        out = self.fast_attn(q, k, v).transpose(1, 2).flatten(2)
        return self.dropout(self.attn_out(out))  # type: ignore[no-any-return]

    @torch.no_grad()
    def redraw_projection_matrix(self) -> None:
        """A new projection, that of rank 0. Collective."""
        super().redraw_projection_matrix()
        matrix = self.fast_attn.projection_matrix
        matrix.copy_(self.ranks().broadcast(matrix.contiguous(), 0, "projection matrix"))


class DistributedSGFormerAttention(OnRanks, attention.SGFormerAttention):
    """`torch_geometric.nn.attention.SGFormerAttention` over all ranks (Wu et al., NeurIPS 2023, arXiv 2306.10759)."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``[1, num_own, head_channels]`` of own rows. Collective."""
        comm = self.ranks()
        if comm.size == 1:
            return super().forward(x, mask)  # type: ignore[no-any-return]
        heads = (self.heads, self.head_channels)
        q, k, v = (lin(_single(x)).unflatten(-1, heads) for lin in (self.q, self.k, self.v))
        q, k = (torch.where(t == 0, 1e-6, t) for t in (q, k))
        q, k = (t / torch.linalg.norm(t, ord=2, dim=-1, keepdim=True) for t in (q, k))
        product, total = _summed(torch.einsum("blhm,blhd->bhmd", k, v), k.sum(1), comm)
        count = sum(total_rows(x[0], comm))
        above = torch.einsum("bnhm,bhmd->bnhd", q, product) + count * v
        below = torch.einsum("bnhm,bhm->bnh", q, total).unsqueeze(-1) + count
        return (above / below).mean(dim=2)


class DistributedPolynormerAttention(OnRanks, attention.PolynormerAttention):
    """`torch_geometric.nn.attention.PolynormerAttention` over all ranks (Deng et al., ICLR 2024, arXiv 2403.01232)."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``[1, num_own, heads * head_channels]`` of own rows. Collective."""
        comm = self.ranks()
        if comm.size == 1:
            return super().forward(x, mask)  # type: ignore[no-any-return]
        shape = (self.head_channels, self.heads)
        k = self.k(_single(x)).sigmoid().unflatten(-1, shape)
        q = k if self.qk_shared else self.q(x).sigmoid().unflatten(-1, shape)
        v = self.v(x).unflatten(-1, shape)
        product, total = _summed(torch.einsum("bndh,bnmh->bhdm", k, v), k.sum(1).transpose(1, 2), comm)
        above = torch.einsum("bndh,bhdm->bnmh", q, product)
        below = torch.einsum("bndh,bhd->bnh", q, total).unsqueeze(2)
        out = self.lns((above / (below + 1e-6)).flatten(2)) * (self.h_lins(x) + self.beta)
        return self.dropout(self.lin_out(out).relu())  # type: ignore[no-any-return]


def _single(x: Tensor) -> Tensor:
    if x.dim() != 3 or x.size(0) != 1:
        raise RefusedError(
            f"attention over a sharded graph takes own rows as [1, num_own, channels], found {list(x.shape)}"
        )
    return x


def _summed(product: Tensor, total: Tensor, comm: Ranks) -> tuple[Tensor, Tensor]:
    """Two sums over own nodes made sums over all, ``[1, heads, m, d]`` and ``[1, heads, m]``. One collective call."""
    both = all_reduce_sum(torch.cat([product, total.unsqueeze(-1)], -1), comm, "linear attention")
    return both[..., :-1], both[..., -1]


DISTRIBUTED: dict[type[nn.Module], Any] = {
    gnn.GPSConv: DistributedGPSConv,
    attention.PerformerAttention: DistributedPerformerAttention,
    attention.PolynormerAttention: DistributedPolynormerAttention,
    attention.SGFormerAttention: DistributedSGFormerAttention,
    models.Polynormer: DistributedPolynormer,
    performer.PerformerProjection: DistributedPerformerProjection,
    sgformer.SGModule: DistributedSGModule,
}


def distribute_attention(model: nn.Module, comm: Ranks) -> None:
    """Give every attention over all nodes in `model` its distributed class, in place. Not collective."""
    for module in list(model.modules()):
        if isinstance(module, gnn.GPSConv) and type(module.attn) is nn.MultiheadAttention:
            distribute(module.attn, DistributedMultiheadAttention, comm)
        if type(module) in DISTRIBUTED:
            distribute(module, DISTRIBUTED[type(module)], comm)


def reason_to_refuse(module: Any) -> str | None:
    """Why an attention over all nodes is refused; `None` for one that is exact, and for any other module."""
    if isinstance(module, tuple(DISTRIBUTED)) and type(module) not in DISTRIBUTED:
        return _DERIVED
    if not isinstance(module, gnn.GPSConv) or type(module.attn) is attention.PerformerAttention:
        return None
    if type(module.attn) is not nn.MultiheadAttention:
        return _DERIVED
    return None if getattr(module, "gathers_all_nodes", False) else _ALL_PAIRS
