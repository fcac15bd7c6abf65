"""Losses over the nodes of all ranks.

[Note: global value, own gradient]
The objective of a step is the sum over ranks of what each rank calls backward on. Every loss here returns the *value*
over all ranks, the same bits on every rank, but the *gradient* of this rank's share of it. The shares add up to the
value, so no gradient is counted twice. Forward is one collective; backward does not communicate.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardpass.core.ranks import Ranks, autograd_leaves, describe, unfollowed
from shardpass.core.training.chosen_rows import chosen_rows
from shardpass.core.training.masked_rows import (
    check_logits,
    check_mask,
    ignored,
    kind_of_rows,
    no_nodes,
    row_numbers,
    select,
    sums_over_ranks,
)
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
    problem = check_logits("cross_entropy", logits, y, None) or _check_weight(weight, logits)
    if problem is not None:
        kind = kind_of_rows(logits, mask) + ignored(ignore_index)
        return _global_mean("cross_entropy", None, 0.0, problem, comm, kind, row_numbers(mask, y))
    chosen = chosen_rows("cross_entropy", logits, y, mask, weight, ignore_index, comm)
    losses = None
    if chosen.problem is None:
        losses = _row_losses(chosen.of(logits), chosen.of(y.to(logits.device)), weight, label_smoothing)
    kind = kind_of_rows(logits, mask) + chosen.identity
    return _global_mean("cross_entropy", losses, chosen.denominator, chosen.problem, comm, kind, chosen.checksum)


@unfollowed(2, gives="whole")
def mean(values: Tensor, mask: Tensor | None, comm: Ranks) -> Tensor:
    """The mean of `values` over the masked nodes of all ranks; its gradient is that of this rank's share.

    Collective in forward (once). For any loss that is computed per node (``reduction="none"``).

    Args:
        values: [num_own, ...], the trailing dimensions the same on every rank; integers and bools are averaged as
            float32. All elements of a masked row count.
        mask: as in `cross_entropy`; or a bool for each entry of `values`, which then count one by one.
        comm: the ranks.

    Raises:
        ValueError: on every rank, if shapes are wrong on one, no rank has a masked node, or a value that the mask
            leaves out is NaN, which would make its gradient NaN.
    """
    chosen, problem = _rows_of("mean", values, mask)
    return _global_mean(
        "mean", chosen, float(chosen.numel()), problem, comm, kind_of_rows(values, mask), row_numbers(mask, values)
    )


@unfollowed(2, gives="total")
def sum(values: Tensor, mask: Tensor | None, comm: Ranks) -> Tensor:
    """The sum of `values` over the masked nodes of all ranks; its gradient is that of this rank's share.

    Collective in forward (once). Arguments and errors as in `mean`, but nodes may be absent everywhere: the sum is 0.
    """
    chosen, problem = _rows_of("sum", values, mask)
    own = chosen.sum(dtype=torch.float64)
    kind = kind_of_rows(values, mask)
    totals = sums_over_ranks("sum", [float(own.detach())], problem, comm, kind, row_numbers(mask, values))
    return _Share.apply(own, torch.full_like(own, totals[0]), 1.0, comm).to(chosen.dtype)


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
    kinds = {is_summed_before(leaf) for leaf in autograd_leaves(term)}
    if kinds == {True, False}:
        raise RefusedError(
            "replicated: the term is made of parameters of a wrapped model, which count once anyway, and of something "
            "else that is summed over ranks. Call it on the part that has no parameters"
        )
    return term if kinds == {True} else _Share.apply(term, term, comm.size, comm)


def is_summed_before(leaf: Any) -> bool:
    """Whether a leaf of autograd is a parameter of a wrapped model, whose gradients are summed before they reach it."""
    return getattr(leaf, "shardpass_summed", False)


@unfollowed(1, gives="sum")
def total(count: int | float | Tensor, comm: Ranks) -> int | float:
    """The sum of `count` over ranks, an int if `count` is one, else a float. Collective (once).

    Args:
        count: a number, or a tensor of one entry.
        comm: the ranks.
    """
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
    def forward(ctx: Any, own: Tensor, value: Tensor | None, denominator: float, comm: Ranks) -> Tensor:
        ctx.denominator, ctx.comm = denominator, comm
        return own / denominator if value is None else value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] / ctx.denominator, None, None, None


def _global_mean(
    name: str, losses: Tensor | None, denominator: float, problem: str | None, comm: Ranks, identity: str, chosen: float
) -> Tensor:
    """The sum of `losses` over the sum of `denominator`, both over ranks, in float64. `None` with a `problem`."""
    losses = torch.zeros(0) if losses is None else losses
    own, count, value = losses.sum(dtype=torch.float64), float(losses.numel()), None
    if comm.size > 1 or problem is not None:  # one rank alone needs no number on the host, and waits for no device
        values = [float(own.detach()), denominator, count]
        numerator, denominator, count = sums_over_ranks(name, values, problem, comm, identity, chosen)
        value = torch.full_like(own, numerator / denominator) if denominator else None
    if count == 0:
        raise ValueError(no_nodes(name))
    if denominator == 0:
        raise ValueError(f"{name}: the weights of the masked nodes add up to 0 on all ranks together")
    return _Share.apply(own, value, denominator, comm).to(losses.dtype)


def _rows_of(name: str, values: Tensor, mask: Tensor | None) -> tuple[Tensor, str | None]:
    """The masked rows in a floating dtype, and what is wrong with the arguments."""
    if not isinstance(values, Tensor) or values.dim() == 0:
        return torch.zeros(0), (
            f"{name}: values must have one row per own node, found {describe(values)}; compute the loss with "
            f'reduction="none", and pass a term that all ranks compute alike through replicated(term, comm)'
        )
    if values.is_complex():
        return torch.zeros(0), f"{name}: expected real values, found {describe(values)}; take abs() or .real of them"
    if not values.is_floating_point():
        values = values.float()
    problem = check_mask(name, mask, values.shape[0], values.shape)
    if problem is None and mask is not None and mask.dtype == torch.bool and values.requires_grad:
        left_out = int(values.detach()[~mask.to(values.device)].isnan().sum())
        if left_out:
            problem = (
                f"{name}: {left_out} values that the mask leaves out are NaN, and so are their gradients, as 0 times "
                f"NaN is: leave them out before the loss, {name}(loss(out[mask], y[mask]), None, comm)"
            )
    return (values[:0] if problem else select(values, mask)), problem


def _check_weight(weight: Tensor | None, logits: Tensor) -> str | None:
    if weight is None or (isinstance(weight, Tensor) and weight.shape == logits.shape[1:]):
        return None
    return f"cross_entropy: weight must have one entry per class, [{logits.shape[1]}], found {describe(weight)}"
