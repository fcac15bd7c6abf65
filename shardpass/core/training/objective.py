"""Losses and metrics over the nodes of all ranks.

[Note: global value, own gradient]
The objective of a step is the sum over ranks of what each rank calls backward on. Every loss here returns the *value*
over all ranks, the same bits on every rank, but the *gradient* of this rank's share of it. The shares add up to the
value, so no gradient is counted twice. Forward is one collective; backward does not communicate.
"""

from __future__ import annotations

import warnings
import zlib
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardpass.core.ranks import Ranks, describe, dtype_name, unfollowed
from shardpass.errors import DivergenceError


@unfollowed(3)
def cross_entropy(
    logits: Tensor,
    y: Tensor,
    mask: Tensor | None,
    comm: Ranks,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The mean cross entropy over the masked nodes of all ranks; its gradient is that of this rank's share.

    Collective in forward (once). The value is that of `torch.nn.functional.cross_entropy` on the rows of all ranks,
    also with class weights and label smoothing. Half precision logits are computed in float32. A rank without masked
    nodes takes part and gets zero gradients.

    Args:
        logits: [num_own, num_classes], floating point; classes and dtype the same on every rank.
        y: class ids in [0, num_classes), any integer dtype, [num_own]; or class probabilities, floating point,
            [num_own, num_classes].
        mask: the nodes that count: bool [num_own], or own row numbers (a repeated row counts again), or None for all.
        comm: the ranks.
        weight: one weight per class, [num_classes].
        label_smoothing: in [0, 1].

    Returns:
        A 0-dim tensor, the same on every rank.

    Raises:
        ValueError: on every rank, if shapes or class ids are wrong on one, or no rank has a masked node.
    """
    problem = _check_logits("cross_entropy", logits, y, mask) or _check_weight(weight, logits)
    losses, denominator = torch.zeros(0), 0.0
    if problem is None:
        rows, targets = _select(logits, mask), _select(y, mask)
        problem = _check_targets(targets, logits.shape[1], "cross_entropy")
    if problem is None:
        losses, denominator = _row_losses(rows, targets, weight, label_smoothing)
    return _global_mean("cross_entropy", losses, denominator, problem, comm, _trailing(logits))


@unfollowed(2)
def mean(values: Tensor, mask: Tensor | None, comm: Ranks) -> Tensor:
    """The mean of `values` over the masked nodes of all ranks; its gradient is that of this rank's share.

    Collective in forward (once). For any loss that is computed per node (``reduction="none"``).

    Args:
        values: [num_own, ...], the trailing dimensions the same on every rank; integers and bools are averaged as
            float32. All elements of a masked row count.
        mask: as in `cross_entropy`.
        comm: the ranks.

    Raises:
        ValueError: on every rank, if shapes are wrong on one, or no rank has a masked node.
    """
    chosen, problem = _rows_of("mean", values, mask)
    return _global_mean("mean", chosen, float(chosen.numel()), problem, comm, _trailing(values))


@unfollowed(2)
def sum(values: Tensor, mask: Tensor | None, comm: Ranks) -> Tensor:
    """The sum of `values` over the masked nodes of all ranks; its gradient is that of this rank's share.

    Collective in forward (once). Arguments and errors as in `mean`, but nodes may be absent everywhere: the sum is 0.
    """
    chosen, problem = _rows_of("sum", values, mask)
    own = chosen.sum(dtype=torch.float64)
    totals = _agree("sum", [float(own.detach())], problem, comm, _trailing(values))
    return _Share.apply(own, torch.full_like(own, totals[0]), 1.0, comm).to(chosen.dtype)


@unfollowed(1)
def replicated(term: Tensor, comm: Ranks) -> Tensor:
    """`term` itself, with its gradient divided by the number of ranks, for a term that every rank computes alike.

    An example is a penalty on the weights: every rank calls backward on it, and the gradients are summed over ranks.
    Not collective; see to it that every rank adds the same term.
    """
    if not isinstance(term, Tensor) or not term.is_floating_point():
        raise ValueError(f"replicated: expected a floating point tensor, found {describe(term)}")
    return _Share.apply(term, term, comm.size, comm)


@unfollowed(3)
def accuracy(logits: Tensor, y: Tensor, mask: Tensor | None, comm: Ranks) -> float:
    """The fraction of masked nodes of all ranks whose largest logit is that of their class. Collective (once).

    Arguments and errors as in `cross_entropy`, with `y` class ids.
    """
    problem = _check_logits("accuracy", logits, y, mask)
    if problem is None and y.is_floating_point():
        problem = f"accuracy: y must hold class ids, found {describe(y)}"
    right, count = 0, 0
    if problem is None:
        targets = _select(y, mask)
        problem = _check_targets(targets, logits.shape[1], "accuracy")
        count = len(targets)
        if problem is None and count:
            right = int((_select(logits.detach(), mask).argmax(1) == targets).sum())
    totals = _agree("accuracy", [float(right), float(count)], problem, comm, _trailing(logits))
    if totals[1] == 0:
        raise ValueError(_no_nodes("accuracy"))
    return totals[0] / totals[1]


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
    name: str, losses: Tensor, denominator: float, problem: str | None, comm: Ranks, identity: str
) -> Tensor:
    """The sum of `losses` over the sum of `denominator`, both over ranks, in float64."""
    own = losses.sum(dtype=torch.float64)
    numerator, denominator, count = _agree(
        name, [float(own.detach()), denominator, float(losses.numel())], problem, comm, identity
    )
    if count == 0:
        raise ValueError(_no_nodes(name))
    if denominator == 0:
        raise ValueError(f"{name}: the weights of the masked nodes add up to 0 on all ranks together")
    return _Share.apply(own, torch.full_like(own, numerator / denominator), denominator, comm).to(losses.dtype)


def _agree(name: str, values: list[float], problem: str | None, comm: Ranks, identity: str) -> list[float]:
    """The sums of `values` over ranks. The first problem of any rank is raised on all of them. Collective.

    `identity` says what must agree between ranks (dtype and trailing shape). It travels as a checksum.
    """
    state = [float(problem is not None), float(zlib.crc32(identity.encode()))]
    row = torch.tensor([[*state, *values]], dtype=torch.float64, device=comm.device)
    rows = torch.cat(comm.all_gather(row, name)).cpu()
    if bool(rows[:, 0].any()):
        problems = comm.all_gather_object(problem, f"{name} problems")
        raise ValueError(next(f"{text} (found on rank {rank})" for rank, text in enumerate(problems) if text))
    if bool((rows[:, 1] != rows[0, 1]).any()):
        found = comm.all_gather_object(identity, f"{name} identities")
        other = next(rank for rank, text in enumerate(found) if text != found[0])
        raise DivergenceError(
            f"{name}: ranks pass different kinds of rows: {found[0]} on rank 0, {found[other]} on rank {other}; "
            f"dtype and trailing dimensions must be the same on every rank"
        )
    sums: list[float] = rows[:, 2:].sum(0).tolist()
    return sums


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
    problem = _check_mask(name, mask, values.shape[0])
    return (values[:0] if problem else _select(values, mask)), problem


def _select(rows: Tensor, mask: Tensor | None) -> Tensor:
    return rows if mask is None else rows[mask if mask.dtype == torch.bool else mask.long()]


def _check_mask(name: str, mask: Tensor | None, num_own: int) -> str | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 1 or mask.is_floating_point() or mask.is_complex():
        return f"{name}: mask must be a bool tensor [{num_own}] or own row numbers, found {describe(mask)}"
    if mask.dtype == torch.bool:
        if len(mask) == num_own:
            return None
        return f"{name}: the bool mask must have one entry per own node, {num_own}, found {len(mask)}"
    looks_so = len(mask) == num_own > 2 and bool((mask.long() >> 1 == 0).all())
    if mask.dtype == torch.uint8 or looks_so:  # DGL writes booleans to files as uint8
        return f"{name}: mask is {describe(mask)}, which reads as row numbers but looks like a mask: use mask.bool()"
    if len(mask) and not (int(mask.min()) >= 0 and int(mask.max()) < num_own):
        return f"{name}: row numbers in mask must be in [0, {num_own}), found {int(mask.min())} to {int(mask.max())}"
    return None


def _check_logits(name: str, logits: Tensor, y: Tensor, mask: Tensor | None) -> str | None:
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point():
        return f"{name}: logits must be floating point [num_own, num_classes], found {describe(logits)}"
    if not isinstance(y, Tensor) or y.is_complex() or y.dtype == torch.bool:
        return f"{name}: y must hold class ids or class probabilities, found {describe(y)}"
    expected = list(logits.shape) if y.is_floating_point() else [logits.shape[0]]
    if list(y.shape) != expected:
        remedy = "; pass all own nodes, not only the masked ones" if y.shape[:1] != logits.shape[:1] else ""
        remedy = "; use y.squeeze(1)" if list(y.shape) == [logits.shape[0], 1] else remedy
        return f"{name}: y must be {expected} for logits {list(logits.shape)}, found {describe(y)}{remedy}"
    return _check_mask(name, mask, logits.shape[0])


def _check_targets(targets: Tensor, num_classes: int, name: str) -> str | None:
    """What is wrong with the masked class ids."""
    if targets.is_floating_point() or not len(targets):
        return None
    targets = targets.long()
    unlabelled = int((targets == -1).sum())
    if unlabelled:
        return (
            f"{name}: {unlabelled} of {len(targets)} masked nodes have no label (y = -1); "
            f"leave them out of the mask: mask & (y >= 0)"
        )
    low, high = int(targets.min()), int(targets.max())
    if low >= 0 and high < num_classes:
        return None
    return f"{name}: class ids must be in [0, {num_classes}), found {low if low < 0 else high}"


def _check_weight(weight: Tensor | None, logits: Tensor) -> str | None:
    if weight is None or (isinstance(weight, Tensor) and weight.shape == logits.shape[1:]):
        return None
    return f"cross_entropy: weight must have one entry per class, [{logits.shape[1]}], found {describe(weight)}"


def _no_nodes(name: str) -> str:
    return f"{name}: the mask selects no node on any rank, so there is nothing to average"


def _trailing(values: Any) -> str:
    if not isinstance(values, Tensor):
        return ""
    return f"{dtype_name(values.dtype)} [{', '.join(map(str, ['num_own', *values.shape[1:]]))}]"
