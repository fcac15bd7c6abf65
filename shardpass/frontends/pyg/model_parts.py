"""What models of PyG compute over all nodes besides message passing, with the nodes of all ranks.

Each class takes the place of one method of one module; which one, `frontends/pyg/methods.py` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import global_add_pool
from torch_geometric.nn.models import CorrectAndSmooth
from torch_geometric.nn.models.autoencoder import EPS, MAX_LOGSTD
from torch_geometric.utils import one_hot, softmax

from shardpass.core.graphs import BatchIndex
from shardpass.core.ranks import all_reduce_sum
from shardpass.core.training import objective
from shardpass.frontends.pyg.adapt import Replacement


class LabelPropagationForward(Replacement):
    """`LabelPropagation.forward`: with class ids for `y`, every rank has a column for each class of the graph."""

    @torch.no_grad()
    def __call__(self, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if y.dtype == torch.long and y.size(0) == y.numel():
            own = y.max().view(1) if y.numel() else y.new_full((1,), -1)
            y = one_hot(y.view(-1), num_classes=int(self.comm.all_reduce(own, "max", "number of classes")) + 1)
        out: Tensor = type(self.module).forward(self.module, y, *args, **kwargs)
        return out


class Correct(Replacement):
    """`CorrectAndSmooth.correct`, whose autoscale divides by the mean error of all masked nodes of the graph."""

    def __call__(
        self, y_soft: Tensor, y_true: Tensor, mask: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        module: Any = self.module
        if not module.autoscale:
            return CorrectAndSmooth.correct(module, y_soft, y_true, mask, edge_index, edge_weight)  # type: ignore[no-any-return]
        if y_true.dtype == torch.long and y_true.size(0) == y_true.numel():
            y_true = one_hot(y_true.view(-1), num_classes=y_soft.size(-1), dtype=y_soft.dtype)
        error = torch.zeros_like(y_soft)
        error[mask] = y_true - y_soft[mask]
        smoothed = module.prop1(error, edge_index, edge_weight=edge_weight, post_step=lambda x: x.clamp_(-1.0, 1.0))
        own = torch.stack([error[mask].abs().sum(), error.new_tensor(y_true.size(0))])
        total, count = all_reduce_sum(own, self.comm, "CorrectAndSmooth: mean error").unbind()
        scale = total / count / smoothed.abs().sum(dim=1, keepdim=True)
        scale[scale.isinf() | (scale > 1000)] = 1.0
        return y_soft + scale * smoothed


class KlLoss(Replacement):
    """`VGAE.kl_loss`: the mean over the nodes of all ranks."""

    def __call__(self, mu: Tensor | None = None, logstd: Tensor | None = None) -> Tensor:
        module: Any = self.module
        mu = module.__mu__ if mu is None else mu
        logstd = module.__logstd__ if logstd is None else logstd.clamp(max=MAX_LOGSTD)
        return objective.mean(-0.5 * (1 + 2 * logstd - mu**2 - logstd.exp() ** 2).sum(1), None, self.comm)


class RegLoss(Replacement):
    """`ARGA.reg_loss`: the mean over the nodes of all ranks."""

    def __call__(self, z: Tensor) -> Tensor:
        return self.mean_log(self.module.discriminator(z).sigmoid())  # type: ignore[operator]

    def mean_log(self, rows: Tensor) -> Tensor:
        """Minus the mean logarithm of the rows of all ranks, 0-dim. Collective."""
        return objective.mean(-torch.log(rows + EPS), None, self.comm)


class DiscriminatorLoss(RegLoss):
    """`ARGA.discriminator_loss`: the means over the nodes of all ranks, each rank with noise of its own."""

    def __call__(self, z: Tensor) -> Tensor:
        discriminator: Any = self.module.discriminator
        real, fake = discriminator(torch.randn_like(z)).sigmoid(), discriminator(z.detach()).sigmoid()
        return self.mean_log(real) + self.mean_log(1 - fake)


class MoleculeAttention(Replacement):
    """The `GATConv` of `AttentiveFP` from all nodes to the one graph: a softmax over the nodes of all ranks."""

    def __call__(self, x: tuple[Tensor, Tensor], batch: BatchIndex) -> Tensor:
        conv: Any = self.module
        own, whole = (conv.lin(rows).view(-1, conv.heads, conv.out_channels) for rows in x)
        scores = (own * conv.att_src).sum(-1) + (whole * conv.att_dst).sum(-1)[batch]
        alpha = softmax(nn.functional.leaky_relu(scores, conv.negative_slope), batch, num_nodes=1)
        alpha = nn.functional.dropout(alpha, p=conv.dropout, training=conv.training)
        out = global_add_pool((alpha.unsqueeze(-1) * own).flatten(1), batch, 1)
        return out + conv.bias  # type: ignore[no-any-return]


class AttentiveFPForward(Replacement):
    """`AttentiveFP.forward` with ``graph.batch``: one molecule, or whatever the graph is, over all ranks."""

    def __call__(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: BatchIndex) -> Tensor:
        module: Any = self.module
        dropout: Callable[[Tensor], Tensor] = lambda h: nn.functional.dropout(h, module.dropout, module.training)  # noqa: E731
        x = nn.functional.leaky_relu(module.lin1(x))
        x = module.gru(dropout(nn.functional.elu(module.gate_conv(x, edge_index, edge_attr))), x).relu()
        for conv, gru in zip(module.atom_convs, module.atom_grus):
            x = gru(dropout(nn.functional.elu(conv(x, edge_index))), x).relu()
        out = global_add_pool(x, batch, 1).relu()
        attend = MoleculeAttention(module.mol_conv, self.comm)
        for _ in range(module.num_timesteps):
            out = module.mol_gru(dropout(nn.functional.elu(attend((x, out), batch))), out).relu()
        return module.lin2(dropout(out))  # type: ignore[no-any-return]
