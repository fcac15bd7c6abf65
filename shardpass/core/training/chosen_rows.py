"""The rows that a loss over classes counts. What a mask and labels decide is found again while they are the same."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from shardpass.core.ranks import Known, Ranks
from shardpass.core.training.masked_rows import check_mask, row_numbers

_SHOWN = 8


class ChosenRows(NamedTuple):
    """What counts of the rows of logits.

    Args:
        numbers: of the rows, ``[rows]``; `None` for all.
        denominator: what the sum of the losses is divided by for the mean; without weights, the number of rows.
        kind: what ranks must agree on, besides the kind of rows.
        row_numbers: `row_numbers` of the mask.
    """

    numbers: Tensor | None
    denominator: float
    kind: str
    row_numbers: float

    def of(self, rows: Tensor) -> Tensor:
        """Those of `rows` that count."""
        return rows if self.numbers is None else rows.index_select(0, self.numbers)


class _KnownRows(Known[ChosenRows]):
    pass


def known_rows(
    logits: Tensor, y: Tensor, mask: Tensor | None, weight: Tensor | None, ignore_index: int, comm: Ranks
) -> ChosenRows:
    """The `chosen_rows` of these arguments. Reads labels and mask only if they have changed."""
    tensors = [given for given in (y, mask, weight) if isinstance(given, Tensor)]
    key = logits.shape, logits.dtype, logits.device, ignore_index, mask is None, weight is None
    is_kept = not y.is_floating_point() and not any(given.requires_grad for given in tensors)
    known = comm.caches.of(_KnownRows)
    found = known.find(key, tensors) if is_kept else None
    if found is None:
        found = chosen_rows(logits, y, mask, weight, ignore_index)
        if is_kept:
            known.keep(key, tensors, found)
    return found


def chosen_rows(
    logits: Tensor, y: Tensor, mask: Tensor | None, weight: Tensor | None = None, ignore_index: int | None = None
) -> ChosenRows:
    """What counts of `logits`, which have passed `check_logits` with `y`.

    Args:
        y, mask, weight, ignore_index: as of `cross_entropy`; no class is ignored for `None`.

    Raises:
        ValueError: the mask is something else, or a class id that counts is out of range.
    """
    check_mask(mask, logits.size(0))
    numbers = torch.arange(logits.size(0), device=logits.device) if mask is None else mask.to(logits.device)
    numbers = numbers.nonzero().view(-1) if numbers.dtype == torch.bool else numbers.long()
    targets = y.to(logits.device).index_select(0, numbers)
    is_class = not targets.is_floating_point()
    if is_class and ignore_index is not None:
        kept = targets.long() != ignore_index
        if not bool(kept.all()):
            numbers, targets = numbers[kept], targets[kept]
    if is_class:
        _check_classes(targets.long(), logits.size(1))
    denominator = float(len(targets))
    if is_class and weight is not None:
        of_classes = weight.to(logits.device, torch.promote_types(logits.dtype, torch.float32))
        denominator = float(of_classes[targets.long()].sum(dtype=torch.float64))
    kind = "" if ignore_index in (None, -100) else f" without class {ignore_index}"
    kind += "" if weight is None else _class_weights(weight)
    is_all = mask is None and len(numbers) == logits.size(0)
    return ChosenRows(None if is_all else numbers, denominator, kind, row_numbers(mask, y))


def _check_classes(targets: Tensor, num_classes: int) -> None:
    low, high = (int(targets.min()), int(targets.max())) if len(targets) else (0, 0)
    if low >= 0 and high < num_classes:
        return
    for number in (-1, -100):  # torch's own losses skip the second
        if unlabelled := int((targets == number).sum()):
            raise ValueError(
                f"{unlabelled} of {len(targets)} masked nodes have no label (y = {number}); "
                f"leave them out of the mask: mask & (y >= 0)"
            )
    raise ValueError(f"class ids must be in [0, {num_classes}), found {low if low < 0 else high}")


def _class_weights(weight: Tensor) -> str:
    """What of class weights must agree between ranks: weights of a rank's own labels do not."""
    values = weight.detach().double().tolist()
    shown = ", ".join(f"{value:.6g}" for value in values[:_SHOWN]) + (", ..." if len(values) > _SHOWN else "")
    return f" with the class weights [{shown}] (checksum {zlib.crc32(repr(values).encode()):08x})"
