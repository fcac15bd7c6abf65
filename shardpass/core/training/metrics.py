"""Metrics over the nodes of all ranks. Each is collective and gives the same number on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from shardpass.core.ranks import Ranks, describe, fail_together, unfollowed
from shardpass.core.training.masked_rows import (
    check_logits,
    check_mask,
    check_targets,
    ignored,
    is_of_entries,
    kind_of_rows,
    labelled,
    no_nodes,
    row_numbers,
    select,
    sums_over_ranks,
    without_ignored,
)

_NO_LABEL = 2
"""What stands among gathered zeros and ones for an entry that does not count."""


@unfollowed(3)
def accuracy(logits: Tensor, y: Tensor, mask: Tensor | None, comm: Ranks, ignore_index: int = -100) -> float:
    """The fraction of masked nodes of all ranks whose largest logit is that of their class. Collective (once).

    Arguments and errors as in `cross_entropy`, with `y` class ids. Ignored nodes do not count.
    """
    problem = check_logits("accuracy", logits, y, mask)
    if problem is None and y.is_floating_point():
        problem = f"accuracy: y must hold class ids, found {describe(y)}"
    right, count = 0, 0
    if problem is None:
        rows, targets = select(logits.detach(), mask), select(y, mask, logits.device)
        rows, targets = without_ignored(rows, targets, ignore_index)
        problem = check_targets(targets, logits.shape[1], "accuracy")
        count = len(targets)
        if problem is None and count:
            right = int((rows.argmax(1) == targets).sum())
    kind = kind_of_rows(logits, mask) + ignored(ignore_index)
    totals = sums_over_ranks("accuracy", [float(right), float(count)], problem, comm, kind, row_numbers(mask, y))
    if totals[1] == 0:
        raise ValueError(no_nodes("accuracy"))
    return totals[0] / totals[1]


@unfollowed(3)
def f1(
    logits: Tensor, y: Tensor, mask: Tensor | None, comm: Ranks, average: Literal["micro", "macro"] = "micro"
) -> float:
    """The F1 score of the masked nodes of all ranks, as in scikit-learn and torchmetrics. Collective.

    If `y` holds class ids, a node is predicted to be of the class with its largest logit. The micro average is then the
    accuracy, and the macro average leaves out classes that neither a label nor a prediction names. If `y` is a matrix,
    each node may have several labels, and is predicted to have those with a logit above 0. The macro average then
    counts a class without labels and predictions as 0.

    Args:
        logits: [num_own, num_classes], floating point. Subtract the threshold from probabilities.
        y: class ids, integers [num_own]; or zeros and ones of any dtype, [num_own, num_classes], with NaN for what is
            unknown, which does not count.
        mask: as in `cross_entropy`; of a matrix also a bool for each entry.
        comm: the ranks.
        average: over all decisions (``"micro"``), or of the scores of the classes (``"macro"``).

    Raises:
        ValueError: on every rank, if arguments are wrong on one, or no rank has a masked node.
    """
    counts = fail_together(comm, "f1", lambda: _decisions(logits, y, mask, average), ValueError)
    kind = f"{kind_of_rows(logits, mask)}, {average} over {y.dim()}-D labels"
    sums_over_ranks("f1", [], None, comm, kind, row_numbers(mask, y))
    right, wrong, missed, rows = comm.all_reduce(counts.to(comm.device), "sum", "f1").double().cpu()
    if not rows.any():
        raise ValueError(no_nodes("f1"))
    if average == "micro":
        right, wrong, missed = (count.sum(0, keepdim=True) for count in (right, wrong, missed))
    named = right + wrong + missed > 0
    scores = torch.where(named, 2 * right / (2 * right + wrong + missed).clamp(min=1), 0)
    return float(scores[named if y.dim() == 1 else slice(None)].mean())


@unfollowed(3)
def mae(prediction: Tensor, y: Tensor, mask: Tensor | None, comm: Ranks) -> float:
    """The mean of ``abs(prediction - y)`` over all entries of the masked nodes of all ranks. Collective.

    Args:
        prediction, y: [num_own, ...], of one shape; integers are taken as float64. Entries whose `y` is NaN do not
            count.
        mask: as in `cross_entropy`; or a bool for each entry.
        comm: the ranks.

    Raises:
        ValueError: on every rank, if arguments are wrong on one, or no rank has a masked node.
    """
    problem = _check_alike("mae", prediction, y, mask)
    own, count = 0.0, 0
    if problem is None:
        right = select(y.detach(), mask, prediction.device).double()
        errors = (select(prediction.detach(), mask).double() - right).abs()[~right.isnan()]
        own, count = float(errors.sum()), errors.numel()
    total, number = sums_over_ranks(
        "mae", [own, float(count)], problem, comm, kind_of_rows(prediction, mask), row_numbers(mask, y)
    )
    if number == 0:
        raise ValueError(no_nodes("mae"))
    return total / number


@unfollowed(3)
def roc_auc(scores: Tensor, y: Tensor, mask: Tensor | None, comm: Ranks) -> float:
    """The area under the ROC curve of the masked rows of all ranks, as scikit-learn's ``roc_auc_score``. Collective.

    The scores and labels of all ranks are gathered on every rank, so that the area is exact: 5 bytes for each float32
    score. Rows may be nodes, pairs of nodes, or anything else; ranks may have any number of them.

    Args:
        scores: [n], logits or probabilities; or [n, tasks], for the mean over tasks.
        y: zeros and ones, of the shape of `scores` and any dtype. Entries that are NaN have no label and do not count.
        mask: as in `cross_entropy`, over the n rows; or a bool for each entry.
        comm: the ranks.

    Returns:
        NaN if there are no rows of one of the two classes, in any task. But where some entries do not count, the mean
        is over the tasks that have both classes, as OGB's evaluators take it.

    Raises:
        ValueError: on every rank, if arguments are wrong on one, a score is NaN, or no rank has a masked row.
    """
    return _mean_over_tasks("roc_auc", _area, scores, y, mask, comm)


@unfollowed(3)
def average_precision(scores: Tensor, y: Tensor, mask: Tensor | None, comm: Ranks) -> float:
    """The average precision of the masked rows of all ranks, as ``average_precision_score``. Collective.

    Arguments, memory and errors as in `roc_auc`. As in scikit-learn, it is 0 without rows of class 1.
    """
    return _mean_over_tasks("average_precision", _precision, scores, y, mask, comm)


def _decisions(logits: Tensor, y: Tensor, mask: Tensor | None, average: str) -> Tensor:
    """How often each class was predicted rightly, wrongly, and missed, and the number of rows: ``[4, classes]``."""
    if average not in ("micro", "macro"):
        raise ValueError(f"f1: average is 'micro' or 'macro', found {average!r}")
    several = isinstance(y, Tensor) and y.dim() == 2
    rows_mask = None if several and is_of_entries(mask, y.shape) else mask
    problem = check_logits("f1", logits, y.to(logits.dtype) if several and isinstance(logits, Tensor) else y, rows_mask)
    if problem is None and not several:
        problem = check_targets(select(y, mask), logits.shape[1], "f1")
    if problem is not None:
        raise ValueError(problem)
    rows, targets = select(logits.detach(), rows_mask), select(y, rows_mask, logits.device)
    if several:
        counted = labelled(targets, mask)
        _check_binary("f1", targets[counted])
        found, targets = rows > 0, targets.bool()
    else:
        found, targets = (_one_hot(ids, rows.shape[1]) for ids in (rows.argmax(1), targets.long()))
        counted = torch.ones_like(found)
    counts = [found & targets & counted, found & ~targets & counted, ~found & targets & counted, counted]
    return torch.stack([count.sum(0) for count in counts])


def _one_hot(ids: Tensor, classes: int) -> Tensor:
    return ids[:, None] == torch.arange(classes, device=ids.device)


def _mean_over_tasks(
    name: str, measure: Callable[[Tensor, Tensor], float], scores: Tensor, y: Tensor, mask: Tensor | None, comm: Ranks
) -> float:
    def chosen() -> tuple[Tensor, Tensor]:
        problem = _check_alike(name, scores, y, mask)
        if problem is not None or scores.dim() > 2 or not scores.is_floating_point():
            raise ValueError(problem or f"{name}: scores must be floating point [n] or [n, tasks]: {describe(scores)}")
        rows_mask = None if is_of_entries(mask, y.shape) else mask
        own, targets = select(scores.detach(), rows_mask), select(y.detach(), rows_mask, scores.device)
        counted = labelled(targets, mask)
        if own[counted].isnan().any():
            raise ValueError(f"{name}: {int(own[counted].isnan().sum())} of {own.numel()} scores are NaN")
        _check_binary(name, targets[counted])
        return own.contiguous(), targets.where(counted, _NO_LABEL).to(torch.uint8).contiguous()

    parts = fail_together(comm, name, chosen, ValueError)
    sums_over_ranks(name, [], None, comm, kind_of_rows(scores, mask), row_numbers(mask, y))
    found, labels = (torch.cat(comm.all_gather(part, name)).cpu() for part in parts)
    counted = labels != _NO_LABEL
    if not counted.any():
        raise ValueError(no_nodes(name))
    needs_both, values = found.dim() == 2 and not bool(counted.all()), []
    for column, ones, kept in zip(*(entries.view(len(entries), -1).unbind(1) for entries in (found, labels, counted))):
        ones = ones[kept]
        if not needs_both or 0 < int(ones.sum()) < len(ones):
            values.append(measure(*_by_score(column[kept], ones)))
    return sum(values) / len(values) if values else float("nan")


def _by_score(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """How many rows of class 1, and of class 0, have each score, from the smallest score on."""
    _, place = torch.unique(scores + 0.0, return_inverse=True)
    both, ones = torch.bincount(place).double(), torch.bincount(place, labels.double())
    return ones, both - ones


def _area(ones: Tensor, zeros: Tensor) -> float:
    """How likely a row of class 1 has a larger score than one of class 0, where ties count half."""
    below = zeros.cumsum(0) - zeros
    return float((ones * (below + zeros / 2)).sum() / (ones.sum() * zeros.sum()))


def _precision(ones: Tensor, zeros: Tensor) -> float:
    above = (ones + zeros).flip(0).cumsum(0)
    precision = ones.flip(0).cumsum(0) / above
    return float((precision * ones.flip(0)).sum() / ones.sum().clamp(min=1))


def _check_alike(name: str, prediction: Any, y: Any, mask: Tensor | None) -> str | None:
    if not isinstance(prediction, Tensor) or not isinstance(y, Tensor) or prediction.dim() == 0:
        return f"{name}: expected tensors with one row per own node, found {describe(prediction)}, {describe(y)}"
    if prediction.shape != y.shape or prediction.is_complex() or y.is_complex():
        return f"{name}: expected two tensors of one shape, found {describe(prediction)} and y {describe(y)}"
    return check_mask(name, mask, len(prediction), prediction.shape)


def _check_binary(name: str, y: Tensor) -> None:
    odd = y[(y != 0) & (y != 1)]
    if odd.numel():
        raise ValueError(f"{name}: y must hold zeros and ones, found {odd.view(-1)[0].item()}")
