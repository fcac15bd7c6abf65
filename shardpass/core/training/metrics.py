"""Metrics over the nodes of all ranks. Each is collective and gives the same number on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from shardpass.core.ranks import Ranks, describe, unfollowed
from shardpass.core.training.chosen_rows import chosen_rows
from shardpass.core.training.masked_rows import (
    OwnPart,
    check_logits,
    check_mask,
    is_of_entries,
    select,
    sums_over_ranks,
)

_NO_LABEL = 2  # what stands among gathered zeros and ones for an entry that does not count


@unfollowed(3)
def accuracy(logits: Tensor, y: Tensor, mask: Tensor | None, comm: Ranks, ignore_index: int = -100) -> float:
    """The fraction of masked nodes of all ranks whose largest logit is that of their class. Collective (once).

    Arguments and errors as in `cross_entropy`, with `y` class ids. Ignored nodes do not count.
    """

    def own() -> OwnPart[None]:
        check_logits(logits, y)
        if y.is_floating_point():
            raise ValueError(f"y must hold class ids, found {describe(y)}")
        chosen = chosen_rows(logits, y, mask, None, ignore_index)
        right = chosen.of(logits.detach()).argmax(1) == chosen.of(y.to(logits.device))
        return OwnPart([chosen.denominator, right.sum()], None, chosen.kind, chosen.row_numbers)

    (count, right), _ = sums_over_ranks("accuracy", logits, mask, comm, own)
    return float(right) / float(count)


@unfollowed(3, gives="number")
def f1(
    logits: Tensor,
    y: Tensor,
    mask: Tensor | None,
    comm: Ranks,
    average: Literal["micro", "macro", "weighted"] | None = "micro",
) -> float | Tensor:
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
        average: over all decisions (``"micro"``); of the scores of the classes (``"macro"``), or by how many labels
            each has (``"weighted"``); or None.

    Returns:
        A float; for None the score of each class, [num_classes] on the host, 0 for a class that is not named.

    Raises:
        ValueError: on every rank, if arguments are wrong on one, or no rank has a masked node.
    """
    _, counts = sums_over_ranks("f1", logits, mask, comm, lambda: _decisions(logits, y, mask, average))
    right, wrong, missed = comm.all_reduce(counts.to(comm.device), "sum", "f1").double().cpu()
    if average == "micro":
        right, wrong, missed = (count.sum(0, keepdim=True) for count in (right, wrong, missed))
    named = right + wrong + missed > 0
    scores = torch.where(named, 2 * right / (2 * right + wrong + missed).clamp(min=1), 0)
    if average is None:
        return scores
    if average == "weighted":
        labels = right + missed
        return float((scores * labels).sum() / labels.sum().clamp(min=1))
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

    def own() -> OwnPart[None]:
        _check_shapes(prediction, y)
        check_mask(mask, len(y), y.shape)
        right = select(y.detach(), mask, prediction.device).double()
        errors = (select(prediction.detach(), mask).double() - right).abs()[~right.isnan()]
        return OwnPart([float(errors.numel()), errors.sum()], None)

    (count, total), _ = sums_over_ranks("mae", prediction, mask, comm, own)
    return float(total) / float(count)


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


def _decisions(logits: Tensor, y: Tensor, mask: Tensor | None, average: str | None) -> OwnPart[Tensor]:
    """How often each class was predicted rightly, wrongly, and missed, [3, classes]."""
    if average not in ("micro", "macro", "weighted", None):
        raise ValueError(f"average is 'micro', 'macro', 'weighted' or None, found {average!r}")
    if isinstance(y, Tensor) and y.dim() == 2:
        check_logits(logits, y.to(logits.dtype) if isinstance(logits, Tensor) else y)
        rows, labels, counted = _labelled(logits, y, mask)
        found, wanted = rows > 0, labels == 1
    else:
        check_logits(logits, y)
        chosen = chosen_rows(logits, y, mask)
        ids, labels = chosen.of(logits.detach()).argmax(1), chosen.of(y.to(logits.device))
        found, wanted = (each[:, None] == torch.arange(logits.size(1), device=each.device) for each in (ids, labels))
        counted = torch.ones_like(found)
    kinds = [found & wanted & counted, found & ~wanted & counted, ~found & wanted & counted]
    counts = torch.stack([kind.sum(0) for kind in kinds])
    return OwnPart([counted.sum()], counts, f", {average} over {y.dim()}-D labels")


def _labelled(scores: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The masked rows of scores and labels, and a bool for each entry: whether it has a label and the mask has it.

    Raises ValueError for a mask of something else, and for labels that are neither 0 nor 1.
    """
    check_mask(mask, len(y), y.shape)
    rows_mask = None if is_of_entries(mask, y.shape) else mask
    rows, labels = select(scores.detach(), rows_mask), select(y.detach(), rows_mask, scores.device)
    counted = ~labels.isnan()
    if mask is not rows_mask and mask is not None:
        counted &= mask.to(counted.device)
    odd = labels[counted & (labels != 0) & (labels != 1)]
    if odd.numel():
        raise ValueError(f"y must hold zeros and ones, found {odd[0].item()}")
    return rows, labels, counted


def _mean_over_tasks(
    name: str, measure: Callable[[Tensor, Tensor], float], scores: Tensor, y: Tensor, mask: Tensor | None, comm: Ranks
) -> float:
    def own() -> OwnPart[tuple[Tensor, Tensor]]:
        _check_shapes(scores, y)
        if scores.dim() > 2 or not scores.is_floating_point():
            raise ValueError(f"scores must be floating point [n] or [n, tasks]: {describe(scores)}")
        rows, labels, counted = _labelled(scores, y, mask)
        if rows[counted].isnan().any():
            raise ValueError(f"{int(rows[counted].isnan().sum())} of {rows.numel()} scores are NaN")
        labels = labels.where(counted, _NO_LABEL).to(torch.uint8)
        return OwnPart([counted.sum()], (rows.contiguous(), labels.contiguous()))

    _, parts = sums_over_ranks(name, scores, mask, comm, own)
    found, labels = (torch.cat(comm.all_gather(part, name)).cpu() for part in parts)
    counted = labels != _NO_LABEL
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


def _check_shapes(prediction: Any, y: Any) -> None:
    if not isinstance(prediction, Tensor) or not isinstance(y, Tensor) or prediction.dim() == 0:
        raise ValueError(f"expected tensors with one row per own node, found {describe(prediction)}, {describe(y)}")
    if prediction.shape != y.shape or prediction.is_complex() or y.is_complex():
        raise ValueError(f"expected two tensors of one shape, found {describe(prediction)} and y {describe(y)}")
