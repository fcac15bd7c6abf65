"""What losses and metrics share: the masked rows, what is wrong with arguments, sums over ranks."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from shardpass.core.ranks import Ranks, describe, dtype_name
from shardpass.errors import DivergenceError

_FEW = 8


def sums_over_ranks(
    name: str, values: list[float], problem: str | None, comm: Ranks, identity: str, chosen: float = 0.0
) -> list[float]:
    """The sums of `values` over ranks. The first problem of any rank is raised on all of them. Collective.

    Args:
        identity: what must agree between ranks (`kind_of_rows`, `ignored`, `class_weights`). It travels as a checksum.
        chosen: `row_numbers` of the mask.
    """
    if comm.size == 1 and problem is None:
        return values
    state = [float(problem is not None), float(zlib.crc32(identity.encode())), chosen]
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
            f"dtype, trailing dimensions, whether there is a mask, ignored class and weights of classes must be the "
            f"same on every rank"
        )
    _refuse_same_rows(name, rows[:, 2])
    sums: list[float] = rows[:, 3:].sum(0).tolist()
    return sums


def row_numbers(mask: Any, rows: Any) -> float:
    """A checksum of a mask of row numbers; 0 of any other, and of so few or of all rows that ranks may well agree."""
    if (
        not isinstance(mask, Tensor)
        or not isinstance(rows, Tensor)
        or mask.dtype == torch.bool
        or 0 in (mask.dim(), rows.dim())
    ):
        return 0.0
    if not _FEW <= len(mask) < len(rows):
        return 0.0
    return float(zlib.crc32(mask.detach().cpu().long().contiguous().numpy().tobytes()))


def _refuse_same_rows(name: str, found: Tensor) -> None:
    """Refuse the `row_numbers` of all ranks if they are the same: then they are meant as ids of the whole graph."""
    if len(found) > 1 and found[0] and bool((found == found[0]).all()):
        raise ValueError(
            f"{name}: mask holds the same row numbers on every rank, like ids of the whole graph, but they count the "
            f"rows of each rank: give the nodes a mask of bools before the graph is partitioned"
        )


def select(rows: Tensor, mask: Tensor | None, device: torch.device | None = None) -> Tensor:
    """The masked rows, on `device` if it is given: labels and masks may be on the host where logits are not."""
    if mask is not None:
        mask = mask.to(rows.device, torch.bool if mask.dtype == torch.bool else torch.int64)
        rows = rows[mask]
    return rows if device is None else rows.to(device)


def check_mask(name: str, mask: Tensor | None, num_own: int, entries: torch.Size | None = None) -> str | None:
    """What is wrong with a mask. With `entries`, the shape of the rows, it may also be a bool for each entry."""
    if mask is None or (entries is not None and is_of_entries(mask, entries)):
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 1 or mask.is_floating_point() or mask.is_complex():
        each = f", or bool {list(entries)}" if entries and len(entries) > 1 else ""
        return f"{name}: mask must be a bool tensor [{num_own}] or own row numbers{each}, found {describe(mask)}"
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


def is_of_entries(mask: Any, shape: torch.Size) -> bool:
    """Whether a mask has a bool for each entry of rows of this shape, and not one for each row."""
    return isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() > 1 and mask.shape == shape


def labelled(y: Tensor, mask: Tensor | None) -> Tensor:
    """A bool for each entry of `y`: whether it is not NaN and, if `mask` is of entries, the mask has it."""
    found = ~y.isnan()
    return found & mask.to(y.device) if is_of_entries(mask, y.shape) and mask is not None else found


def without_ignored(rows: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The rows whose class id is another, and their class ids; all rows where targets are probabilities."""
    if targets.is_floating_point():
        return rows, targets
    kept = targets.long() != ignore_index
    return (rows, targets) if bool(kept.all()) else (rows[kept], targets[kept])


def check_logits(name: str, logits: Tensor, y: Tensor, mask: Tensor | None) -> str | None:
    """What is wrong with logits, targets and a mask, but for the values of the targets."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point():
        return f"{name}: logits must be floating point [num_own, num_classes], found {describe(logits)}"
    if not isinstance(y, Tensor) or y.is_complex() or y.dtype == torch.bool:
        return f"{name}: y must hold class ids or class probabilities, found {describe(y)}"
    expected = list(logits.shape) if y.is_floating_point() else [logits.shape[0]]
    if list(y.shape) != expected:
        remedy = "; pass all own nodes, not only the masked ones" if y.shape[:1] != logits.shape[:1] else ""
        if y.dim() and y.size(0) > logits.size(0):
            remedy = "; take the labels of own nodes, as graph.y has them, not those of the whole graph"
        if y.is_floating_point() and list(y.shape) == [logits.shape[0]]:
            remedy = "; for class ids use y.long()"
        remedy = "; use y.squeeze(1)" if list(y.shape) == [logits.shape[0], 1] else remedy
        return f"{name}: y must be {expected} for logits {list(logits.shape)}, found {describe(y)}{remedy}"
    return check_mask(name, mask, logits.shape[0])


def check_targets(targets: Tensor, num_classes: int, name: str) -> str | None:
    """What is wrong with the masked class ids."""
    if targets.is_floating_point() or not len(targets):
        return None
    targets = targets.long()
    low, high = int(targets.min()), int(targets.max())
    if low >= 0 and high < num_classes:
        return None
    for number in (-1, -100):  # torch's own losses skip the second
        if unlabelled := int((targets == number).sum()):
            return (
                f"{name}: {unlabelled} of {len(targets)} masked nodes have no label (y = {number}); "
                f"leave them out of the mask: mask & (y >= 0)"
            )
    return f"{name}: class ids must be in [0, {num_classes}), found {low if low < 0 else high}"


def no_nodes(name: str) -> str:
    """The error of a mean over nothing."""
    return f"{name}: the mask selects no node on any rank, or none with a label, so there is nothing to average"


def kind_of_rows(values: Any, mask: Any) -> str:
    """What of rows and their mask must agree between ranks; see `sums_over_ranks`."""
    if not isinstance(values, Tensor):
        return ""
    each = ", ".join(map(str, ["num_own", *values.shape[1:]]))
    return f"{dtype_name(values.dtype)} [{each}]{' without a mask' if mask is None else ''}"


def ignored(ignore_index: int) -> str:
    """What of class ids that are ignored must agree between ranks, as `kind_of_rows`."""
    return "" if ignore_index == -100 else f" without class {ignore_index}"


def class_weights(weight: Tensor) -> str:
    """What of class weights must agree between ranks, as `kind_of_rows`: weights of a rank's own labels do not."""
    values = weight.detach().double().tolist()
    shown = ", ".join(f"{value:.6g}" for value in values[:_FEW]) + (", ..." if len(values) > _FEW else "")
    return f" with the class weights [{shown}] (checksum {zlib.crc32(repr(values).encode()):08x})"
