"""PyG's norms over a graph, with the statistics of all ranks' nodes.

Each class here is a subclass of the norm that it stands for, and keeps its parameters, buffers, ``state_dict`` keys and
options. `distribute_norms` changes the class of a norm in place. With batch statistics, forward and backward are
collective: every rank calls them in the same order. ``batch`` is `None` or ``graph.batch``, since a sharded graph is
one graph. On one rank PyG's own code runs. Inside ``message()`` a norm is exact in ``halo`` mode, where its rows are
the edges of all ranks, and refused in the other modes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from shardpass.core.graphs import BatchIndex
from shardpass.core.ranks import Ranks, refuse_inside_message
from shardpass.core.training import RowNorm, global_moments, row_moments, shifted, total_rows
from shardpass.errors import RefusedError


class DistributedNorm(RowNorm):
    """What all of these norms share: the meaning of ``batch``, and which rows count."""

    hint = ""  # after the name of the norm, where it is refused inside a message

    def forward(
        self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None, dim_size: int | None = None
    ) -> Tensor:
        """The normalised rows, ``[num_own, channels]``. Collective where statistics are taken.

        Args:
            x: own rows, ``[num_own, channels]``.
            batch: `None`, ``graph.batch``, or zeros.
            batch_size, dim_size: `None` or the number of graphs.

        Raises:
            RefusedError: `batch` or `batch_size` mean several graphs; the norm is inside a message that runs in pieces.
        """
        comm, name = self.ranks(), type(self).__bases__[-1].__name__
        refuse_inside_message(comm, name + self.hint)
        if not self._takes_statistics():
            return super().forward(x)  # type: ignore[misc, no-any-return]
        self.look_at(x)
        if comm.size == 1:
            plain = batch.plain if isinstance(batch, BatchIndex) else batch
            return super().forward(x, plain, dim_size or batch_size)  # type: ignore[misc, no-any-return]
        if isinstance(batch, BatchIndex) and batch.num_graphs > 1:
            return super().forward(x, batch, dim_size or batch_size)  # type: ignore[misc, no-any-return]
        several = batch is not None and not isinstance(batch, BatchIndex) and bool(batch.any())
        if several or (dim_size or batch_size or 1) != 1:
            raise RefusedError(
                f"{name}: `batch` means several graphs, but is not graph.batch: store it as the node field 'batch' "
                f"when you partition, and pass graph.batch"
            )
        weight = getattr(self, "weight", None)
        if weight is not None:
            x = x.to(torch.promote_types(x.dtype, weight.dtype))  # as under autocast
        if comm.has_made_up_edge:  # that row does not count
            return torch.cat([self._normalised(x[:0], batch is not None, comm), torch.zeros_like(x)])
        return self._normalised(x, batch is not None, comm)

    def _takes_statistics(self) -> bool:
        """Whether this call computes statistics of its rows. Otherwise it uses the running ones."""
        return True

    def _normalised(self, x: Tensor, batch_given: bool, comm: Ranks) -> Tensor:
        """The normalised rows of `x`, ``[num_own, channels]``. Collective."""
        raise NotImplementedError


def _affine(norm: Any, scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """`scale` times the weight of `norm`, and its bias, in float64; `scale` and `None` for a norm without them."""
    if norm.weight is None or norm.bias is None:
        return scale, None
    return scale * norm.weight.double(), norm.bias.double()


class DistributedGraphNorm(DistributedNorm, gnn.GraphNorm):
    """`torch_geometric.nn.GraphNorm` over the nodes of all ranks (Cai et al., ICML 2021, arXiv 2009.03294)."""

    def _normalised(self, x: Tensor, batch_given: bool, comm: Ranks) -> Tensor:
        # the mean of (x - a m)^2 is var + ((1 - a) m)^2
        _, mean, variance = row_moments(x, comm)
        share = self.mean_scale.double()
        variance = variance + ((1 - share) * mean).square()
        return shifted(x, share * mean, *_affine(self, (variance + self.eps).rsqrt()))


class DistributedInstanceNorm(DistributedNorm, gnn.InstanceNorm):
    """`torch_geometric.nn.InstanceNorm` over the nodes of all ranks (Ulyanov et al., arXiv 1607.08022).

    With running statistics (evaluation) nothing is communicated.
    """

    def _takes_statistics(self) -> bool:
        return self.training or not self.track_running_stats

    def _normalised(self, x: Tensor, batch_given: bool, comm: Ranks) -> Tensor:
        moments, mean, variance = row_moments(x, comm)
        count = self.count(moments)
        if count == 1 and not batch_given:
            raise ValueError(
                f"Expected more than 1 spatial element when training, got input size {[1, *x.shape[::-1]]}"
            )
        with torch.no_grad():
            unbiased = variance * (count / max(count - 1, 1))
            for running, found in ((self.running_mean, mean), (self.running_var, unbiased)):
                if running is not None:
                    running.mul_(1 - self.momentum).add_((self.momentum * found).to(running.dtype))
        return shifted(x, mean, *_affine(self, (variance + self.eps).rsqrt()))


class DistributedLayerNorm(DistributedNorm, gnn.LayerNorm):
    """`torch_geometric.nn.LayerNorm` with ``mode="graph"``: over all channels of all nodes of all ranks."""

    hint = " over the graph (PyG's default; mode='node' takes each row by itself)"

    def _normalised(self, x: Tensor, batch_given: bool, comm: Ranks) -> Tensor:
        # as in PyG, eps is added to the deviation without `batch`, and to the variance with it
        _, means, variances = row_moments(x, comm)
        mean = means.mean()
        variance = (variances + (means - mean).square()).mean()
        if batch_given:
            inverse = (variance + self.eps).rsqrt()
        else:  # torch's std has gradient 0 at 0
            deviation = torch.where(variance > 0, variance, torch.ones_like(variance)).sqrt() * (variance > 0)
            inverse = (deviation + self.eps).reciprocal()
        return shifted(x, mean, *_affine(self, inverse))


class DistributedPairNorm(DistributedNorm, gnn.PairNorm):
    """`torch_geometric.nn.PairNorm` over the nodes of all ranks (Zhao and Akoglu, ICLR 2020, arXiv 1909.12223)."""

    def _normalised(self, x: Tensor, batch_given: bool, comm: Ranks) -> Tensor:
        # the mean square length of centred rows is the sum of the channels' variances
        _, mean, variance = row_moments(x, comm)
        if not self.scale_individually:
            return shifted(x, mean, self.scale * (self.eps + variance.sum()).rsqrt())
        centred = shifted(x, mean, torch.ones_like(mean))
        return self.scale * centred / (self.eps + centred.norm(2, -1, keepdim=True))


class DistributedMeanSubtractionNorm(DistributedNorm, gnn.MeanSubtractionNorm):
    """`torch_geometric.nn.MeanSubtractionNorm` over the nodes of all ranks (Yang et al., arXiv 2003.13663)."""

    def _normalised(self, x: Tensor, batch_given: bool, comm: Ranks) -> Tensor:
        _, mean, _ = row_moments(x, comm)
        return shifted(x, mean, torch.ones_like(mean))


class DistributedGraphSizeNorm(DistributedNorm, gnn.GraphSizeNorm):
    """`torch_geometric.nn.GraphSizeNorm` with the number of nodes of all ranks (Dwivedi et al., arXiv 2003.00982)."""

    def _normalised(self, x: Tensor, batch_given: bool, comm: Ranks) -> Tensor:
        moments, _, _ = row_moments(x.detach().flatten(1), comm)
        count = self.count(moments) if self._took else moments.count  # of nodes, where nobody followed
        return x * max(1, count) ** -0.5


class DistributedSingleBatchNorm(RowNorm, gnn.BatchNorm):
    """`torch_geometric.nn.BatchNorm` with ``allow_single_element``: a graph of one node uses running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        """The normalised rows, ``[num_own, channels]``. Collective in training.

        Raises:
            RefusedError: each of several ranks has one row. That may be the output of a readout, one row for the whole
                graph, or one node per rank: they look alike.
        """
        comm = self.ranks()
        refuse_inside_message(comm, "BatchNorm with allow_single_element")
        if not self.training:
            return self.module(x)  # type: ignore[no-any-return]
        counts = total_rows(x[:0] if comm.has_made_up_edge else x, comm)
        if comm.size > 1 and set(counts) == {1}:
            raise RefusedError(
                "BatchNorm(allow_single_element=True) with one row on every rank: one graph-level row and one node per "
                "rank look alike. Leave that option out, or normalise before the readout"
            )
        return gnn.BatchNorm.forward(self, x) if sum(counts) <= 1 else self.module(x)  # type: ignore[no-any-return]


class DistributedHeteroBatchNorm(RowNorm, gnn.HeteroBatchNorm):
    """`torch_geometric.nn.HeteroBatchNorm` over the rows of each type on all ranks.

    As in PyG, no gradient passes through its statistics, and the running variance is the biased one.
    """

    def forward(self, x: Tensor, type_vec: Tensor) -> Tensor:
        """The normalised rows, ``[num_own, channels]``. Collective with batch statistics, not in backward.

        Args:
            x: own rows, ``[num_own, channels]``.
            type_vec: the type of each row, ``[num_own]`` in ``[0, num_types)``.
        """
        comm = self.ranks()
        refuse_inside_message(comm, "HeteroBatchNorm")
        self.look_at(x)
        if comm.size == 1 or (not self.training and self.track_running_stats):
            return super().forward(x, type_vec)  # type: ignore[no-any-return]
        mean, variance = self._moments(x, type_vec, comm)
        mean, variance = mean.to(x.dtype), variance.to(x.dtype)
        out = (x - mean[type_vec]) / variance.clamp(self.eps).sqrt()[type_vec]
        return out * self.weight[type_vec] + self.bias[type_vec] if self.affine else out

    @torch.no_grad()
    def _moments(self, x: Tensor, type_vec: Tensor, comm: Ranks) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each type, float64 ``[num_types, channels]``; updates the running ones."""
        rows = x[:0] if comm.has_made_up_edge else x
        kinds = type_vec[: rows.size(0)]
        found = [global_moments(rows[kinds == k], comm, f"moments of type {k}") for k in range(self.num_types)]
        mean, variance = torch.stack([m.mean for m in found]), torch.stack([m.variance for m in found])
        if self.training and self.track_running_stats:
            share = self.momentum
            if share is None:
                self.num_batches_tracked.add_(1)
                share = 1.0 / float(self.num_batches_tracked)
            seen = torch.tensor([m.count > 0 for m in found], device=x.device)
            for running, values in ((self.running_mean, mean), (self.running_var, variance)):
                running[seen] = (1 - share) * running[seen] + (share * values[seen]).to(running.dtype)
        return mean, variance


DISTRIBUTED: dict[type[nn.Module], Any] = {
    gnn.BatchNorm: DistributedSingleBatchNorm,
    gnn.GraphNorm: DistributedGraphNorm,
    gnn.GraphSizeNorm: DistributedGraphSizeNorm,
    gnn.HeteroBatchNorm: DistributedHeteroBatchNorm,
    gnn.InstanceNorm: DistributedInstanceNorm,
    gnn.LayerNorm: DistributedLayerNorm,
    gnn.MeanSubtractionNorm: DistributedMeanSubtractionNorm,
    gnn.PairNorm: DistributedPairNorm,
}


def distribute_norms(model: nn.Module, comm: Ranks) -> None:
    """Give every PyG norm of `model` over a graph its distributed class, in place. Not collective.

    Norms that are right on own rows keep their class: ``LayerNorm(mode="node")``, and ``BatchNorm``, whose inner norm
    is replaced. So do classes derived from those in `DISTRIBUTED`.
    """
    for module in model.modules():
        if type(module) in DISTRIBUTED and _is_over_graph(module, type(module)):
            distribute(module, DISTRIBUTED[type(module)], comm)


def distribute(module: Any, kind: type, comm: Ranks) -> None:
    """Make `module`, in place, one of the class `kind` over the rows of all ranks."""
    module.comm, module.__class__ = comm, kind


def is_unknown_norm(module: nn.Module) -> bool:
    """Whether the class of `module` is derived from a norm over a graph, which `distribute_norms` leaves alone."""
    bases = [kind for kind in DISTRIBUTED if isinstance(module, kind) and type(module) is not kind]
    return any(_is_over_graph(module, kind) for kind in bases)


def _is_over_graph(module: Any, kind: type[nn.Module]) -> bool:
    """Whether `module`, a `kind`, takes statistics of all nodes itself."""
    if kind is gnn.LayerNorm:
        return bool(module.mode == "graph")
    return bool(module.allow_single_element) if kind is gnn.BatchNorm else True
