"""Losses over the nodes of all ranks.

[Note: global value, own gradient]
The objective of a step is the sum over ranks of what each rank calls backward on. Every loss here returns the *value*
over all ranks, the same bits on every rank, but the *gradient* of this rank's share of it. The shares add up to the
value, so no gradient is counted twice. Forward is one collective; backward does not communicate.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardpass.core.ranks import Ranks, describe, torch_private, unfollowed
from shardpass.core.training.masked_rows import (
    check_logits,
    check_mask,
    check_targets,
    class_weights,
    ignored,
    kind_of_rows,
    no_nodes,
    row_numbers,
    select,
    sums_over_ranks,
    without_ignored,
)
from shardpass.errors import RefusedError


@unfollowed(3)
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
    problem = check_logits("cross_entropy", logits, y, mask) or _check_weight(weight, logits)
    losses, denominator = torch.zeros(0), 0.0
    if problem is None:
        rows, targets = without_ignored(select(logits, mask), select(y, mask, logits.device), ignore_index)
        problem = check_targets(targets, logits.shape[1], "cross_entropy")
    if problem is None:
        losses, denominator = _row_losses(rows, targets, weight, label_smoothing)
    weights = "" if weight is None or problem else class_weights(weight)
    kind = kind_of_rows(logits, mask) + ignored(ignore_index) + weights
    return _global_mean("cross_entropy", losses, denominator, problem, comm, kind, row_numbers(mask, y))


@unfollowed(2)
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


@unfollowed(2)
def sum(values: Tensor, mask: Tensor | None, comm: Ranks) -> Tensor:
    """The sum of `values` over the masked nodes of all ranks; its gradient is that of this rank's share.

    Collective in forward (once). Arguments and errors as in `mean`, but nodes may be absent everywhere: the sum is 0.
    """
    chosen, problem = _rows_of("sum", values, mask)
    own = chosen.sum(dtype=torch.float64)
    kind = kind_of_rows(values, mask)
    totals = sums_over_ranks("sum", [float(own.detach())], problem, comm, kind, row_numbers(mask, values))
    return _Share.apply(own, torch.full_like(own, totals[0]), 1.0, comm).to(chosen.dtype)


@unfollowed(1)
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
    kinds = {is_summed_before(leaf) for leaf in _leaves(term)}
    if kinds == {True, False}:
        raise RefusedError(
            "replicated: the term is made of parameters of a wrapped model, which count once anyway, and of something "
            "else that is summed over ranks. Call it on the part that has no parameters"
        )
    note_objective(comm)
    return term if kinds == {True} else _Share.apply(term, term, comm.size, comm)


def is_summed_before(leaf: Any) -> bool:
    """Whether a leaf of autograd is a parameter of a wrapped model, whose gradients are summed before they reach it."""
    return getattr(leaf, "shardpass_summed", False)


def _leaves(term: Tensor) -> Iterator[Any]:
    """The leaves of autograd that `term` is made of; `None` for each call of the engine, behind which nobody looks."""
    nodes, seen = [term.grad_fn], set[Any]()
    if term.grad_fn is None:
        yield term
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = torch_private.function_of(node)
        if function is not None and function.__module__.startswith("shardpass."):
            yield None
        elif hasattr(node, "variable"):
            yield node.variable
        else:
            nodes += [before for before, _ in node.next_functions]


@unfollowed(1)
def total(count: int | float, comm: Ranks) -> int | float:
    """The sum of `count` over ranks, an int if `count` is an int, else a float. Collective (once)."""
    dtype = torch.int64 if isinstance(count, Integral) else torch.float64
    value = torch.tensor([count], dtype=dtype, device=comm.device)
    return comm.all_reduce(value, "sum", "total").item()


def _row_losses(rows: Tensor, targets: Tensor, weight: Tensor | None, label_smoothing: float) -> tuple[Tensor, float]:
    """The weighted loss of each row, and the number by which torch divides their sum for the mean."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    weight = None if weight is None else weight.to(rows)
    targets = targets.to(rows.dtype) if targets.is_floating_point() else targets.long()
    losses = F.cross_entropy(rows, targets, weight, reduction="none", label_smoothing=label_smoothing)
    if weight is None or targets.is_floating_point():
        return losses, float(len(targets))
    return losses, float(weight[targets].sum(dtype=torch.float64))


class _ThisStep:
    """What backward has come through since gradients were summed last."""

    def __init__(self) -> None:
        self.came_through_ours = False
        self.has_warned = False


def note_objective(comm: Ranks) -> None:
    """Say that the loss of this step is over the nodes of all ranks, so that `warn_of_own_loss` says nothing."""
    comm.caches.of(_ThisStep).came_through_ours = True


def warn_of_own_loss(comm: Ranks, stacklevel: int) -> None:
    """Warn once on rank 0 if backward came through no function of this file since this was called last.

    Args:
        comm: the ranks.
        stacklevel: of the line to name, as `warnings.warn` counts.
    """
    step = comm.caches.of(_ThisStep)
    if comm.size > 1 and comm.rank == 0 and not step.came_through_ours and not step.has_warned:
        step.has_warned = True
        warnings.warn(
            f"gradients are summed over {comm.size} ranks, but the loss came through none of shardpass.cross_entropy, "
            f"mean, sum and replicated. A loss that averages the rows of this rank, such as "
            f"F.cross_entropy(out[mask], y[mask]), trains another objective than on the whole graph: use "
            f"shardpass.cross_entropy(out, y, mask, comm), or shardpass.mean(losses, mask, comm) of losses computed "
            f'with reduction="none". If you divide a sum over own rows by a count over all ranks, the gradients are '
            f"right, and you can ignore this",
            stacklevel=stacklevel + 1,
        )
    step.came_through_ours = False


class _Share(torch.autograd.Function):
    """Forward: `value`. Backward: the gradient of ``own / denominator``. See [Note: global value, own gradient]."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, value: Tensor, denominator: float, comm: Ranks) -> Tensor:
        ctx.denominator, ctx.comm = denominator, comm
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        note_objective(ctx.comm)
        return grads[0] / ctx.denominator, None, None, None


def _global_mean(
    name: str, losses: Tensor, denominator: float, problem: str | None, comm: Ranks, identity: str, chosen: float
) -> Tensor:
    """The sum of `losses` over the sum of `denominator`, both over ranks, in float64."""
    own = losses.sum(dtype=torch.float64)
    numerator, denominator, count = sums_over_ranks(
        name, [float(own.detach()), denominator, float(losses.numel())], problem, comm, identity, chosen
    )
    if count == 0:
        raise ValueError(no_nodes(name))
    if denominator == 0:
        raise ValueError(f"{name}: the weights of the masked nodes add up to 0 on all ranks together")
    return _Share.apply(own, torch.full_like(own, numerator / denominator), denominator, comm).to(losses.dtype)


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
