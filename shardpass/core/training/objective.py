"""Losses over the nodes of all ranks.

[Note: global value, own gradient]
The objective of a step is the sum over ranks of what each rank calls backward on. Every loss here returns the *value*
over all ranks, the same bits on every rank, but the *gradient* of this rank's share of it. The shares add up to the
value, so no gradient is counted twice. Forward is one collective; backward does not communicate.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shardpass.core.ranks import (
    Ranks,
    autograd_leaves,
    describe,
    is_summed_before,
    require_ranks,
    summed,
    unfollowed,
)
from shardpass.core.training.chosen_rows import known_rows
from shardpass.core.training.masked_rows import OwnPart, check_logits, check_mask, select, sums_over_ranks
from shardpass.errors import RefusedError


@unfollowed(3, gives="whole")
def cross_entropy(
    logits: Tensor,
    y: Tensor,
    mask: Tensor | None,
    comm: Ranks,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """The mean cross entropy over the masked nodes of all ranks; its gradient is that of this rank's share.

    Collective in forward (once). The value is that of `torch.nn.functional.cross_entropy` on the rows of all ranks,
    also with class weights, label smoothing and a class to ignore. Half precision logits are computed in float32. A
    rank without masked nodes takes part and gets zero gradients.

    Args:
        logits: [num_own, num_classes], floating point; classes and dtype the same on every rank.
        y: class ids in [0, num_classes), any integer dtype, [num_own]; or class probabilities, floating point,
            [num_own, num_classes].
        mask: the nodes that count: bool [num_own], or own row numbers (a repeated row counts again), or None for all.
        comm: the ranks.
        weight: one weight per class, [num_classes], the same on every rank.
        label_smoothing: in [0, 1].
        ignore_index: the class id of nodes that do not count, neither in the sum nor in what it is divided by. The
            same on every rank. No node is ignored where `y` holds probabilities.

    Returns:
        A 0-dim tensor, the same on every rank.

    Raises:
        ValueError: on every rank, if shapes or class ids are wrong on one, or no rank has a masked node
            that is not ignored.
        DivergenceError: on every rank, if dtypes, numbers of classes, weights of classes or `ignore_index` differ.
    """

    def own() -> _Losses:
        check_logits(logits, y)
        if weight is not None and not (isinstance(weight, Tensor) and weight.shape == logits.shape[1:]):
            raise ValueError(f"weight must have one entry per class, [{logits.shape[1]}], found {describe(weight)}")
        chosen = known_rows(logits, y, mask, weight, ignore_index, comm)
        losses = _row_losses(chosen.of(logits), chosen.of(y.to(logits.device)), weight, label_smoothing)
        return _part(losses, chosen.denominator, chosen.kind, chosen.row_numbers)

    return _over_ranks("cross_entropy", logits, mask, comm, own)


def mean(values: Tensor, mask: Tensor | None, comm: Ranks, dim: Literal[0] | None = None) -> Tensor:
    """The mean of `values` over the masked nodes of all ranks.

    For any loss that is computed per node (``reduction="none"``). Its gradient is that of this rank's share. Collective
    in forward (once).

    With ``dim=0`` it is the mean of each column, ``[...]`` as ``values.mean(0)`` is, to compare rows with or to make a
    loss of. Every rank has it alike, with all of its gradient, so put ``replicated(term, comm)`` around a term that is
    made of it alone. Collective then (twice), and in backward.

    Args:
        values: [num_own, ...], the trailing dimensions the same on every rank; integers and bools are averaged as
            float32. All elements of a masked row count.
        mask: as in `cross_entropy`; or, without `dim`, a bool for each entry of `values`, which then count one by one.
        comm: the ranks.
        dim: 0 to reduce over nodes only; None to reduce over all entries.

    Raises:
        ValueError: on every rank, if shapes are wrong on one, no rank has a masked node, or a value that the mask
            leaves out is NaN, which would make its gradient NaN.
    """
    require_ranks(comm, "mean(values, mask, comm)")
    return _mean(values, mask, comm) if dim is None else _over_nodes("mean", values, mask, comm, dim)


def sum(values: Tensor, mask: Tensor | None, comm: Ranks, dim: Literal[0] | None = None) -> Tensor:
    """The sum of `values` over the masked nodes of all ranks; its gradient is that of this rank's share.

    Collective in forward (once). Arguments, errors and ``dim=0`` as in `mean`, but nodes may be absent everywhere: the
    sum is 0.
    """
    require_ranks(comm, "sum(values, mask, comm)")
    return _sum(values, mask, comm) if dim is None else _over_nodes("sum", values, mask, comm, dim)


@unfollowed(2, gives="whole")
def _mean(values: Tensor, mask: Tensor | None, comm: Ranks) -> Tensor:
    return _over_ranks("mean", values, mask, comm, lambda: _own_values("mean", values, mask, is_mean=True))


@unfollowed(2, gives="total")
def _sum(values: Tensor, mask: Tensor | None, comm: Ranks) -> Tensor:
    return _over_ranks("sum", values, mask, comm, lambda: _own_values("sum", values, mask, is_mean=False))


@unfollowed(3, gives="alike")
def _over_nodes(name: str, values: Tensor, mask: Tensor | None, comm: Ranks, dim: int) -> Tensor:
    """The mean or the sum along dimension 0. Every rank has it alike, and gets all of its gradient."""

    def own() -> OwnPart[Tensor]:
        if dim != 0:
            raise ValueError(
                f"dim must be 0, or None for all entries, found {dim!r}; reduce other dimensions before, as "
                f"in {name}(values.{name}(1), mask, comm)"
            )
        rows = _checked_rows(name, values, mask, None)
        count = float(len(rows)) if name == "mean" else 1.0
        needs_gradient = float(torch.is_grad_enabled() and rows.requires_grad)
        return OwnPart([count, needs_gradient], rows.sum(0, dtype=torch.float64), ", over nodes only")

    (count, needs_gradient), share = sums_over_ranks(name, values, mask, comm, own)
    with torch.set_grad_enabled(bool(needs_gradient)):
        found = summed(share, comm, name) / (count if name == "mean" else 1)
        found = found.to(values.dtype if values.is_floating_point() else torch.float32)
    comm.mark_plain(found)
    return found


@unfollowed(1, gives="replicated")
def replicated(term: Tensor, comm: Ranks) -> Tensor:
    """`term` itself, with a gradient that counts once, for a term that every rank computes alike. Not collective.

    An example is a loss of what `all_reduce_sum` returned: every rank calls backward on it, and gradients are summed
    over ranks, so each rank is given its share. What is made of the parameters of a wrapped model alone, outside of
    it, counts once without this, and is returned as it is. See to it that every rank adds the same term.

    Raises:
        ValueError: `term` is no floating point tensor.
        RefusedError: it is made of parameters of a wrapped model and of something else that is summed over ranks.
    """
    if not isinstance(term, Tensor) or not term.is_floating_point():
        raise ValueError(f"replicated: expected a floating point tensor, found {describe(term)}")
    if comm.size == 1:
        return term
    kinds = {is_summed_before(leaf) for leaf in autograd_leaves(term)}
    if kinds == {True, False}:
        raise RefusedError(
            "replicated: the term is made of parameters of a wrapped model, which count once anyway, and of something "
            "else that is summed over ranks. Call it on the part that has no parameters"
        )
    return term if kinds == {True} else _Share.apply(term, term, comm.size)


@unfollowed(1, gives="sum")
def total(count: int | float | Tensor, comm: Ranks) -> int | float:
    """The sum of `count` over ranks, an int if `count` is one, else a float. Collective (once).

    Args:
        count: a number, or a tensor of one entry.
        comm: the ranks.

    Raises:
        ValueError: `count` has several entries, which ``comm.all_reduce(count, "sum")`` adds up.
    """
    if isinstance(count, Tensor) and count.numel() != 1:
        raise ValueError(
            f"total: expected a number, or a tensor of one entry, found {describe(count)}; to add up each entry over "
            f'ranks, call comm.all_reduce(count, "sum")'
        )
    number = count.item() if isinstance(count, Tensor) else count
    dtype = torch.int64 if isinstance(number, Integral) else torch.float64
    value = torch.tensor([number], dtype=dtype, device=comm.device)
    return comm.all_reduce(value, "sum", "total").item()


def _row_losses(rows: Tensor, targets: Tensor, weight: Tensor | None, label_smoothing: float) -> Tensor:
    """The weighted loss of each row."""
    rows = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    weight = None if weight is None else weight.to(rows)
    targets = targets.to(rows.dtype) if targets.is_floating_point() else targets.long()
    return F.cross_entropy(rows, targets, weight, reduction="none", label_smoothing=label_smoothing)


class _Share(torch.autograd.Function):
    """Forward: `value`, or ``own / denominator`` if it is `None`. Backward: the gradient of the latter.

    See [Note: global value, own gradient].
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, value: Tensor | None, denominator: float) -> Tensor:
        ctx.denominator = denominator
        return own / denominator if value is None else value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] / ctx.denominator, None, None


_Losses = OwnPart[tuple[Tensor, torch.dtype]]
"""Their sum in float64, which has a gradient, and their dtype. The numbers are its value and what divides it."""


def _part(losses: Tensor, divisor: float | None, kind: str = "", row_numbers: float | None = None) -> _Losses:
    share = losses.sum(dtype=torch.float64)
    numbers: list[float | Tensor] = [1.0, share]  # a sum may be that of nothing
    if divisor is not None:
        numbers = [float(losses.numel()), share, divisor]
    return OwnPart(numbers, (share, losses.dtype), kind, row_numbers)


def _over_ranks(name: str, rows: Any, mask: Any, comm: Ranks, own: Callable[[], _Losses]) -> Tensor:
    """The sum of all losses, over that of what divides them, if anything does."""
    (_, value, *divisors), (share, dtype) = sums_over_ranks(name, rows, mask, comm, own)
    denominator = float(divisors[0]) if divisors else 1.0
    if denominator == 0:
        raise ValueError(f"{name}: the weights of the masked nodes add up to 0 on all ranks together")
    found = None if comm.size == 1 else torch.zeros_like(share) + value / denominator
    return _Share.apply(share, found, denominator).to(dtype)


def _own_values(name: str, values: Tensor, mask: Tensor | None, is_mean: bool) -> _Losses:
    rows = _checked_rows(name, values, mask, values.shape if isinstance(values, Tensor) else None)
    return _part(rows, float(rows.numel()) if is_mean else None)


def _checked_rows(name: str, values: Tensor, mask: Tensor | None, entries: torch.Size | None) -> Tensor:
    """The masked rows, in a floating dtype. Raises ValueError for arguments that are not as those of `mean`.

    Args:
        entries: the shape of values, if the mask may have a bool for each of them.
    """
    if not isinstance(values, Tensor) or values.dim() == 0:
        raise ValueError(
            f"values must have one row per own node, found {describe(values)}; compute the loss with "
            f'reduction="none", and pass a term that all ranks compute alike through replicated(term, comm)'
        )
    if values.is_complex():
        raise ValueError(f"expected real values, found {describe(values)}; take abs() or .real of them")
    check_mask(mask, values.shape[0], entries)
    if mask is not None and mask.dtype == torch.bool and values.requires_grad:
        left_out = int(values.detach()[~mask.to(values.device)].isnan().sum())
        if left_out:
            raise ValueError(
                f"{left_out} values that the mask leaves out are NaN, and so are their gradients, as 0 times "
                f"NaN is: leave them out before the loss, {name}(loss(out[mask], y[mask]), None, comm)"
            )
    return select(values if values.is_floating_point() else values.float(), mask)
