"""What PyG's layers and models compute over all nodes or edges besides message passing, on the nodes of all ranks.

Each function takes the place of one method of one module; the table in `frontends/pyg/methods.py` says which. It is
called with that module, the communicator and the arguments of the method.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import global_add_pool
from torch_geometric.nn.models import CorrectAndSmooth
from torch_geometric.nn.models.autoencoder import EPS, MAX_LOGSTD
from torch_geometric.utils import get_laplacian, one_hot, softmax

from shardpass.core.following import unfollowed_anywhere
from shardpass.core.graphs import BatchIndex, GraphArgument, ShardedEdgeIndex, node_ids
from shardpass.core.ranks import Ranks, all_reduce_sum
from shardpass.core.sampling import negative_sampling
from shardpass.core.training import average_precision, objective, roc_auc
from shardpass.errors import RefusedError


def cheb_norm(
    conv: Any, comm: Ranks, edge_index: Tensor, num_nodes: int | None, edge_weight: Tensor | None,
    normalization: str | None, lambda_max: Tensor | None = None, dtype: torch.dtype | None = None,
    batch: Tensor | None = None,
) -> Any:  # fmt: skip
    """`ChebConv.__norm__` with the largest Laplacian weight of the whole graph for lambda_max (Defferrard 2016)."""
    if lambda_max is None and isinstance(edge_index, ShardedEdgeIndex):
        weights = edge_weight.clone() if edge_weight is not None else None
        _, weights = get_laplacian(edge_index, weights, normalization, dtype, num_nodes)
        lambda_max = 2.0 * _max_over_ranks(weights, comm)
    return type(conv).__norm__(conv, edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype, batch)


def _max_over_ranks(values: Tensor, comm: Ranks) -> Tensor:
    """The largest of all ranks' `values`, 0-dim; ties share its gradient evenly, as in torch. Collective."""
    flat = values.detach().reshape(-1)
    mine = flat.max() if flat.numel() else flat.new_tensor(float("-inf"))
    largest = comm.all_reduce(mine.view(1), "max", "largest value")
    hits = values == largest
    count = comm.all_reduce(hits.sum().view(1), "sum", "ties of the largest value")
    return all_reduce_sum(torch.where(hits, values, 0).sum() / count[0], comm, "largest value")


def hypergraph(conv: Any, comm: Ranks, x: Tensor, hyperedge_index: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`HypergraphConv.forward` that takes the number of own hyperedges from the graph, not from the own edges."""
    if isinstance(hyperedge_index, ShardedEdgeIndex) and len(args) < 3 and kwargs.get("num_edges") is None:
        kwargs["num_edges"] = hyperedge_index.plan.num_dst
    return type(conv).forward(conv, x, hyperedge_index, *args, **kwargs)  # type: ignore[no-any-return]


def hetero_linear(module: Any, comm: Ranks, x: Tensor, type_vec: Tensor) -> Tensor:
    """`HeteroLinear.forward`, which sorts the rows by type and puts them back."""
    with unfollowed_anywhere():
        out: Tensor = type(module).forward(module, x, type_vec)
    comm.mark_rows_alike(out, x)
    return out


@torch.no_grad()
def label_propagation(module: Any, comm: Ranks, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`LabelPropagation.forward`: of class ids, every rank makes a column for each class of the whole graph."""
    if y.dtype == torch.long and y.size(0) == y.numel():
        own = y.max().view(1) if y.numel() else y.new_full((1,), -1)
        y = one_hot(y.view(-1), num_classes=int(comm.all_reduce(own, "max", "number of classes")) + 1)
    return type(module).forward(module, y, *args, **kwargs)  # type: ignore[no-any-return]


def correct(
    module: Any, comm: Ranks, y_soft: Tensor, y_true: Tensor, mask: Tensor, edge_index: Tensor,
    edge_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`CorrectAndSmooth.correct`, whose autoscale divides by the mean error of all masked nodes of the graph."""
    if not module.autoscale:
        return CorrectAndSmooth.correct(module, y_soft, y_true, mask, edge_index, edge_weight)  # type: ignore[no-any-return]
    if y_true.dtype == torch.long and y_true.size(0) == y_true.numel():
        y_true = one_hot(y_true.view(-1), num_classes=y_soft.size(-1), dtype=y_soft.dtype)
    error = torch.zeros_like(y_soft)
    error[mask] = y_true - y_soft[mask]
    smoothed = module.prop1(error, edge_index, edge_weight=edge_weight, post_step=lambda x: x.clamp_(-1.0, 1.0))
    own = torch.stack([error[mask].abs().sum(), error.new_tensor(y_true.size(0))])
    total, count = all_reduce_sum(own, comm, "CorrectAndSmooth: mean error").unbind()
    scale = total / count / smoothed.abs().sum(dim=1, keepdim=True)
    scale[scale.isinf() | (scale > 1000)] = 1.0
    return y_soft + scale * smoothed


def kl_loss(module: Any, comm: Ranks, mu: Tensor | None = None, logstd: Tensor | None = None) -> Tensor:
    """`VGAE.kl_loss`: the mean over the nodes of all ranks."""
    mu = module.__mu__ if mu is None else mu
    logstd = module.__logstd__ if logstd is None else logstd.clamp(max=MAX_LOGSTD)
    return objective.mean(-0.5 * (1 + 2 * logstd - mu**2 - logstd.exp() ** 2).sum(1), None, comm)


def recon_loss(module: Any, comm: Ranks, z: Tensor, pos_edge_index: Any, neg_edge_index: Any = None) -> Tensor:
    """`GAE.recon_loss`: the means over the pairs of all ranks. Negatives of a graph are none of its edges."""
    negatives = _negatives_of(pos_edge_index) if neg_edge_index is None else neg_edge_index
    losses = [-torch.log(module.decoder(z, pos_edge_index, sigmoid=True) + EPS)]
    losses.append(-torch.log(1 - module.decoder(z, negatives, sigmoid=True) + EPS))
    return objective.mean(losses[0], None, comm) + objective.mean(losses[1], None, comm)


def _negatives_of(edge_index: Any) -> Tensor:
    if isinstance(edge_index, GraphArgument):
        return node_ids(edge_index.graph, negative_sampling(edge_index.graph))
    raise RefusedError(
        "GAE.recon_loss() without neg_edge_index draws pairs that are not among pos_edge_index, which it can only if "
        "that is the graph. Pass the graph, or "
        "neg_edge_index=shardpass.node_ids(graph, shardpass.negative_sampling(graph))"
    )


@torch.no_grad()
def link_metrics(module: Any, comm: Ranks, z: Tensor, pos_edge_index: Any, neg_edge_index: Any) -> tuple[float, float]:
    """`GAE.test`: the area under the ROC curve and the average precision of the pairs of all ranks."""
    scores = [module.decoder(z, pairs, sigmoid=True) for pairs in (pos_edge_index, neg_edge_index)]
    found, labels = torch.cat(scores), torch.cat([torch.ones_like(scores[0]), torch.zeros_like(scores[1])])
    return roc_auc(found, labels, None, comm), average_precision(found, labels, None, comm)


def infomax_loss(module: Any, comm: Ranks, pos_z: Tensor, neg_z: Tensor, summary: Tensor) -> Tensor:
    """`DeepGraphInfomax.loss`: the means over the nodes of all ranks."""
    real, fake = (module.discriminate(z, summary, sigmoid=True).view(-1) for z in (pos_z, neg_z))
    losses = [objective.mean(-torch.log(rows + EPS), None, comm) for rows in (real, 1 - fake)]
    return losses[0] + losses[1]


def reg_loss(module: Any, comm: Ranks, z: Tensor) -> Tensor:
    """`ARGA.reg_loss`: the mean over the nodes of all ranks."""
    return objective.mean(-torch.log(module.discriminator(z).sigmoid() + EPS), None, comm)


def discriminator_loss(module: Any, comm: Ranks, z: Tensor) -> Tensor:
    """`ARGA.discriminator_loss`: the means over the nodes of all ranks; each rank draws its own noise."""
    real = module.discriminator(torch.randn_like(z)).sigmoid()
    fake = module.discriminator(z.detach()).sigmoid()
    losses = [objective.mean(-torch.log(rows + EPS), None, comm) for rows in (real, 1 - fake)]
    return losses[0] + losses[1]


def attentive_fp(
    module: Any, comm: Ranks, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: BatchIndex
) -> Tensor:
    """`AttentiveFP.forward` with ``graph.batch``: a graph, over all ranks, is a molecule."""

    def dropped(rows: Tensor) -> Tensor:
        return F.dropout(F.elu(rows), module.dropout, module.training)

    x = F.leaky_relu(module.lin1(x))
    x = module.gru(dropped(module.gate_conv(x, edge_index, edge_attr)), x).relu()
    for conv, gru in zip(module.atom_convs, module.atom_grus):
        x = gru(dropped(conv(x, edge_index)), x).relu()
    out = global_add_pool(x, batch, batch.num_graphs).relu()
    for _ in range(module.num_timesteps):
        out = module.mol_gru(dropped(_attend(module.mol_conv, x, out, batch)), out).relu()
    return module.lin2(F.dropout(out, module.dropout, module.training))  # type: ignore[no-any-return]


def _attend(conv: Any, x: Tensor, molecule: Tensor, batch: BatchIndex) -> Tensor:
    """The `GATConv` of `AttentiveFP` from the nodes of a graph to it: a softmax over the nodes of all ranks."""
    own, whole = (conv.lin(rows).view(-1, conv.heads, conv.out_channels) for rows in (x, molecule))
    scores = (own * conv.att_src).sum(-1) + (whole * conv.att_dst).sum(-1)[batch]
    alpha = softmax(F.leaky_relu(scores, conv.negative_slope), batch, num_nodes=batch.num_graphs)
    alpha = F.dropout(alpha, p=conv.dropout, training=conv.training)
    return global_add_pool((alpha.unsqueeze(-1) * own).flatten(1), batch, batch.num_graphs) + conv.bias  # type: ignore[no-any-return]
