"""Batch normalisation over the rows of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.following import user_line
from shardpass.core.ranks import Ranks, begin_call, computed_again, derived, dtype_name, end_call, torch_private
from shardpass.core.training.moments import (
    Moments,
    RowNorm,
    accumulator_of,
    global_moments,
    moments_again,
    row_chunks,
    shift_of,
    shifted,
)
from shardpass.errors import RefusedError


class DistributedBatchNorm(RowNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` whose training statistics are those of the rows of all ranks together.

    Parameters, buffers and ``state_dict`` keys are BatchNorm1d's. With batch statistics, forward and backward are
    collective: every rank calls them in the same order, with the same number of channels and dtype. The number of rows
    may differ and may be 0. Running statistics are the same bits on every rank. With running statistics (evaluation)
    nothing is communicated. The gradients of weight and bias are this rank's part, and `sync_gradients` sums them. The
    input is ``[rows, channels]``, or ``[batch, channels, ...]`` with the nodes in any dimension but that of channels.
    Rows that are the same on every rank, such as those of a readout, are counted once.
    """

    dims: tuple[int, ...] = (2, 3)  # how many the input may have; those of the class that this one replaces

    def __init__(self, num_features: int, comm: Ranks, **options: Any) -> None:
        """Args: as `torch.nn.BatchNorm1d`, and `comm`, the ranks whose rows form the batch."""
        super().__init__(num_features, **options)
        self.comm = comm

    def forward(self, input: Tensor) -> Tensor:
        """The normalised `input`, of its shape and dtype. Collective with batch statistics.

        Raises:
            ValueError: the ranks together hold one row (as torch raises), or the shape or dtype does not fit.
        """
        if type(input) is not Tensor:
            input = input.view_as(input)  # an autograd Function sees no further than what stands for a tensor
        if input.dim() not in self.dims:
            raise ValueError(f"expected {' or '.join(f'{n}D' for n in self.dims)} input (got {input.dim()}D input)")
        if self.training or self.running_mean is None:
            self.look_at(input)
        if input.dim() == 2:
            output = self._of_rows(input)
        else:
            self._check_channels(input)
            last = input.movedim(1, -1)
            output = self._of_rows(last.reshape(-1, self.num_features)).view(last.shape).movedim(-1, 1)
        if self.comm is not None:
            self.comm.mark_rows_alike(output, input)
        return output

    def _of_rows(self, input: Tensor) -> Tensor:
        """The normalised rows, [num_own, channels]."""
        if not self.training and self.running_mean is not None and self.running_var is not None:
            return super().forward(input)
        self._check_batch(input)
        if self.comm is not None and self.comm.watch is not None:
            return self._inside_message(input, self.comm.watch)
        comm = self.ranks()
        if comm.size == 1:
            return super().forward(input)  # torch's fused kernel: the same statistics
        if comm.has_made_up_edge:
            return torch.cat([self._normalised(input[:0], comm), torch.zeros_like(input)])
        return self._normalised(input, comm)

    def _normalised(self, input: Tensor, comm: Ranks) -> Tensor:
        label = f"batch norm over {input.shape[1]} channels of {dtype_name(input.dtype)}"
        number, token = begin_call(comm, label)
        label = f"{label} #{number}"
        with torch.no_grad():
            moments = global_moments(input.detach(), comm, label)
            self.track(moments, input.shape)
        output, token = _Normalise.apply(
            token, input, self.weight, self.bias, moments.mean, moments.variance, moments.count, self.eps, comm, label,
        )  # fmt: skip
        end_call(comm, token)
        if comm.notes is not None:
            comm.notes.note(
                output, _normalised, input, self.weight, self.bias, moments.mean, moments.variance, self.eps
            )
        return output

    def _inside_message(self, input: Tensor, trace: Any) -> Tensor:
        """The normalised messages, [edges, channels]: these are some of the edges, the statistics are of all."""
        mean, variance = trace.edge_moments(self, input)
        output = (input - mean) * (variance + self.eps).rsqrt()
        if self.weight is not None:
            output = output * self.weight + self.bias
        return output.to(input.dtype)

    def _check_batch(self, input: Tensor) -> None:
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected [rows, {self.num_features}] input, found {list(input.shape)}")
        kept = self.weight if self.weight is not None else self.running_mean
        half = input.dtype in (torch.float16, torch.bfloat16)
        if not input.is_floating_point() or (
            kept is not None and kept.dtype != input.dtype and not (half and kept.dtype == torch.float32)
        ):
            expected = "a floating point dtype" if kept is None else dtype_name(kept.dtype)
            raise ValueError(
                f"expected {expected} input, found {dtype_name(input.dtype)}: convert the input or the module"
            )

    def _check_channels(self, input: Tensor) -> None:
        """Refuse an input of more than two dimensions that is not ``[batch, channels, ...]``, or holds messages."""
        if self.comm is not None and self.comm.row_dim(input) == 1:
            raise RefusedError(
                f"{user_line()}: BatchNorm takes dimension 1 for channels, but there this input {list(input.shape)} "
                f"has the nodes: it would have a weight and statistics for each node, and a rank has some nodes only, "
                f"in another order. Bring the features into dimension 1"
            )
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"{user_line()}: expected [batch, {self.num_features}, ...] input, found {list(input.shape)}. If these "
                f"channels are the nodes of the graph: a rank has some nodes only, so bring the features into "
                f"dimension 1"
            )
        if self.comm is not None and self.comm.watch is not None:
            raise RefusedError(
                f"{user_line()}: BatchNorm inside message() takes [edges, channels], found {list(input.shape)}"
            )

    def track(self, moments: Moments, shape: Sequence[int]) -> None:
        """Update the running statistics as `torch.nn.BatchNorm1d` does."""
        track = self.training and self.track_running_stats
        share = self.momentum if self.momentum is not None else 0.0
        if track and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                share = 1.0 / float(self.num_batches_tracked)
        count = self.count(moments)
        if count == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {list(shape)} "
                f"(1 row on all ranks together)"
            )
        if track and count and self.running_mean is not None and self.running_var is not None:
            unbiased = moments.variance * (count / (count - 1))
            for running, found in ((self.running_mean, moments.mean), (self.running_var, unbiased)):
                # `data` as torch's kernels, which autograd does not see: the graph of an evaluation holds these buffers
                running.data.mul_(1 - share).add_((share * found).to(running.dtype))


class SteadyNorms:
    """The batch norms of a model that are in evaluation mode now. Backward runs message functions again, with them.

    Args:
        models: whatever holds modules; other objects are left out.
    """

    def __init__(self, *models: Any) -> None:
        modules = [module for model in models if isinstance(model, nn.Module) for module in model.modules()]
        norms = [module for module in modules if isinstance(module, DistributedBatchNorm) and not module.training]
        counts = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
        self._versions = [(count, torch_private.version_of(count)) for count in counts]

    def check(self, name: str) -> None:
        """Raise if one has been trained since, so that messages would differ from those of forward.

        Args:
            name: of the layer or the message function.

        Raises:
            RefusedError: a norm has been trained.
        """
        if any(torch_private.version_of(count) != version for count, version in self._versions):
            raise RefusedError(
                f"{user_line()}: a BatchNorm of {name} was in evaluation mode, and was called in training mode before "
                f"this backward. Messages are computed again in backward, and with the running statistics of now they "
                f"would be others. Call backward before the layer is called in training mode"
            )


class _Normalise(torch.autograd.Function):
    """Rows normalised with given global moments, and the closed-form backward through those moments.

    Backward is that of Ioffe and Szegedy (2015), section 3, with the sums over the batch taken over all ranks. The
    gradients of weight and bias are this rank's part. Saved are the input rows and three vectors of [channels].
    """

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, rows: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
        variance: Tensor, count: int, eps: float, comm: Ranks, label: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(token, rows, weight, bias, mean, variance)
        ctx.count, ctx.eps, ctx.comm, ctx.label = count, eps, comm, label
        return _normalised(rows, weight, bias, mean, variance, eps), torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, arrived: Tensor) -> tuple[Tensor | None, ...]:
        token, rows, weight, bias, mean, variance = ctx.saved_tensors
        if torch.is_grad_enabled():
            again = partial(_normalised_again, count=ctx.count, eps=ctx.eps, comm=ctx.comm, label=ctx.label)
            inputs = [rows, weight, bias]
            found = derived(ctx.comm, arrived, lambda: computed_again(again, inputs, [grad]))
            return *found, *[None] * 6
        dtype = accumulator_of(rows)
        shift = mean.to(dtype)
        inverse = (variance + ctx.eps).rsqrt()
        sums = torch.zeros(2, rows.shape[1], dtype=torch.float64, device=rows.device)
        for part in row_chunks(rows):  # sum of g and of g (x - shift)
            own = grad[part].to(dtype)
            sums[0] += own.sum(0)
            sums[1] += (rows[part] - shift).mul_(own).sum(0)
        sums[1] -= (mean - shift.double()) * sums[0]
        total = ctx.comm.all_reduce(sums, "sum", f"{ctx.label} backward") / max(ctx.count, 1)
        grad_rows = None
        if ctx.needs_input_grad[1]:
            grad_rows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
            scale = inverse if weight is None else inverse * weight.double()
            shift, slope, constant = shift_of(mean, -scale * inverse.square() * total[1], -scale * total[0], dtype)
            for part in row_chunks(rows):
                value = (rows[part] - shift).mul_(slope).add_(constant)
                torch.addcmul(value, grad[part].to(dtype), scale.to(dtype), out=grad_rows[part])
        grad_weight = None if weight is None else (sums[1] * inverse).to(weight.dtype)
        grad_bias = None if bias is None else sums[0].to(bias.dtype)
        return torch.zeros_like(token), grad_rows, grad_weight, grad_bias, *[None] * 6


def _normalised(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """``(rows - mean) / sqrt(variance + eps) * weight + bias``, [num_own, channels], in the dtype of `rows`."""
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight.double()
    near, scale, constant = shift_of(mean, scale, bias, accumulator_of(rows))
    output = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    for part in row_chunks(rows):
        torch.addcmul(constant, rows[part] - near, scale, out=output[part])
    return output


def _normalised_again(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, count: int, eps: float, comm: Ranks, label: str
) -> list[Tensor]:
    """The normalised rows, which can be differentiated any number of times. Collective."""
    mean, variance = moments_again(rows, count, comm, label)
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight.double()
    return [shifted(rows, mean, scale, None if bias is None else bias.double())]


BATCH_NORMS: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
    nn.SyncBatchNorm: (2, 3, 4, 5),
}
"""The norms of torch that are replaced, and how many dimensions their input may have."""


def replace_batch_norms(module: nn.Module, comm: Ranks) -> nn.Module:
    """`module` with every norm of `BATCH_NORMS` replaced by a `DistributedBatchNorm`.

    Subclasses of these types are left alone. Norms are replaced in place in their parents. Parameters, buffers, hooks
    and the training flag are the same objects, and a norm in several places is converted once. Not collective.

    Returns:
        `module` itself, or its replacement where it is a batch norm.
    """
    converted: dict[nn.Module, DistributedBatchNorm] = {}
    for path, child in list(module.named_modules(remove_duplicate=False)):
        if type(child) in BATCH_NORMS:
            if child not in converted:
                converted[child] = norm = DistributedBatchNorm.__new__(DistributedBatchNorm)
                norm.__dict__.update(child.__dict__)
                norm.comm, norm.dims = comm, BATCH_NORMS[type(child)]
            norm = converted[child]
            parent, _, name = path.rpartition(".")
            if not name:
                return norm
            setattr(module.get_submodule(parent), name, norm)
    return module
