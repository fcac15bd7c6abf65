"""The rows that a loss over classes counts. What a mask and labels decide is found again while they are the same."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardpass.core.ranks import Known, Ranks
from shardpass.core.training.masked_rows import (
    check_mask,
    check_targets,
    class_weights,
    ignored,
    row_numbers,
    without_ignored,
)


class ChosenRows(NamedTuple):
    """What counts of the rows of logits.

    Args:
        numbers: of the rows, ``[rows]``; `None` for all.
        denominator: what the sum of the losses is divided by for the mean.
        identity: what ranks must agree on, besides the kind of rows.
        checksum: `row_numbers` of the mask.
        problem: what is wrong with the mask or the class ids.
    """

    numbers: Tensor | None
    denominator: float
    identity: str
    checksum: float
    problem: str | None

    def of(self, rows: Tensor) -> Tensor:
        """Those of `rows` that count."""
        return rows if self.numbers is None else rows.index_select(0, self.numbers)


def chosen_rows(
    name: str, logits: Tensor, y: Tensor, mask: Tensor | None, weight: Tensor | None, ignore_index: int, comm: Ranks
) -> ChosenRows:
    """What counts of `logits`, whose shape has been checked. Reads labels and mask only if they have changed.

    Args:
        name: of the loss.
        y, mask, weight, ignore_index: as of `cross_entropy`.
    """
    tensors = [given for given in (y, mask, weight) if isinstance(given, Tensor)]
    key = name, logits.shape, logits.dtype, logits.device, ignore_index, mask is None, weight is None
    is_kept = not y.is_floating_point() and not any(given.requires_grad for given in tensors)
    known = comm.caches.of(_KnownRows)
    found = known.find(key, tensors) if is_kept else None
    if found is None:
        found = _chosen(name, logits, y, mask, weight, ignore_index)
        if is_kept:
            known.keep(key, tensors, found)
    return found


class _KnownRows(Known[ChosenRows]):
    pass


def _chosen(
    name: str, logits: Tensor, y: Tensor, mask: Tensor | None, weight: Tensor | None, ignore_index: int
) -> ChosenRows:
    checksum, kind = row_numbers(mask, y), ignored(ignore_index)
    if (problem := check_mask(name, mask, logits.size(0))) is not None:
        return ChosenRows(None, 0.0, kind, checksum, problem)
    all_rows = torch.arange(logits.size(0), device=logits.device)
    numbers = all_rows if mask is None else mask.to(logits.device)
    numbers = numbers.nonzero().view(-1) if numbers.dtype == torch.bool else numbers.long()
    numbers, targets = without_ignored(numbers, y.to(logits.device).index_select(0, numbers), ignore_index)
    if (problem := check_targets(targets, logits.size(1), name)) is not None:
        return ChosenRows(None, 0.0, kind, checksum, problem)
    denominator = float(len(targets))
    if weight is not None and not targets.is_floating_point():
        of_classes = weight.to(logits.device, torch.promote_types(logits.dtype, torch.float32))
        denominator = float(of_classes[targets.long()].sum(dtype=torch.float64))
    kind += "" if weight is None else class_weights(weight)
    is_all = mask is None and len(numbers) == len(all_rows)
    return ChosenRows(None if is_all else numbers, denominator, kind, checksum, None)
