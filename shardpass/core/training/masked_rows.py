"""What losses and metrics share: the masked rows, what is wrong with arguments, sums over ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from shardpass.core.ranks import Ranks, describe, dtype_name
from shardpass.errors import DivergenceError

_FEW = 8
_PROBLEM, _ON_DEVICE = 1.0, 2.0  # a rank has a problem; some of its numbers are on a device
_WIDTH = 6  # so many numbers travel, whatever the loss or metric, so that ranks that differ hear of it
_T = TypeVar("_T")


@dataclass(frozen=True)
class OwnPart(Generic[_T]):
    """What a rank gives to a loss or metric.

    Args:
        numbers: at most three that are summed over ranks. The first is how many rows or entries count.
        found: what else was found on this rank.
        kind: what ranks must agree on, besides the kind of rows. It travels as a checksum.
        row_numbers: `row_numbers` of the mask, if they are known.
    """

    numbers: list[float | Tensor]
    found: _T
    kind: str = ""
    row_numbers: float | None = None


def sums_over_ranks(
    name: str, rows: Any, mask: Any, comm: Ranks, own: Callable[[], OwnPart[_T]]
) -> tuple[list[float | Tensor], _T]:
    """The sums over ranks of the numbers that `own` gives, and what it has found. Collective (once).

    One rank alone is given back its numbers, and waits for no device that has them.

    Args:
        rows: their dtype and trailing dimensions must agree between ranks, and so must whether there is a mask.
        own: computes the part of this rank, or raises ValueError.

    Raises:
        ValueError: on every rank, if `own` raises it on one, no rank has anything that counts, or all ranks pass the
            same row numbers: then they are meant as ids of the whole graph.
        DivergenceError: what must agree does not.
    """
    part, problem = None, None
    try:
        part = own()
    except ValueError as error:
        problem = f"{name}: {error}"
    if part is not None and comm.size == 1:
        sums = part.numbers
    else:
        identity, state = "", [_PROBLEM]
        if part is not None:
            identity = _kind_of_rows(rows, mask) + part.kind
            chosen = row_numbers(mask, rows) if part.row_numbers is None else part.row_numbers
            numbers = [
                n.detach() if isinstance(n, Tensor) else torch.tensor(n, dtype=torch.float64) for n in part.numbers
            ]
            is_on_device = any(number.device.type != "cpu" for number in numbers)
            state = [_ON_DEVICE if is_on_device else 0.0, float(zlib.crc32(identity.encode())), chosen]
            state += [0.0 if number.device.type != "cpu" else float(number) for number in numbers]
        state += [0.0] * (_WIDTH - len(state))
        every = torch.cat(comm.all_gather(torch.tensor([state], dtype=torch.float64), name))
        _check_alike(name, every, problem, identity, comm)
        assert part is not None  # as no rank has a problem
        on_host = every[:, 3 : 3 + len(part.numbers)].sum(0).tolist()
        sums = on_host
        if bool((every[:, 0] == _ON_DEVICE).any()):
            waits = not bool((every[:, 0] == _ON_DEVICE).all())
            sums = _sums_on_device(numbers, on_host, torch.device("cpu") if waits else comm.device, comm, name)
    if sums[0] == 0:
        raise ValueError(
            f"{name}: the mask selects no node on any rank, or none with a label, so there is nothing to average"
        )
    return sums, part.found


def _sums_on_device(
    numbers: list[Tensor], on_host: list[float], device: torch.device, comm: Ranks, name: str
) -> list[float | Tensor]:
    """The sums of all `numbers` of ranks, which nobody waits for if `device` has them; `on_host` of those of hosts."""
    mine = torch.stack(
        [
            n.to(device, torch.float64)
            if n.device.type != "cpu"
            else torch.zeros((), dtype=torch.float64, device=device)
            for n in numbers
        ]
    )
    found = torch.stack(comm.all_gather(mine, name)).sum(0).unbind()
    if device.type == "cpu":
        return [float(one) + other for one, other in zip(found, on_host)]
    return [one if n.device.type != "cpu" else other for one, other, n in zip(found, on_host, numbers)]


def _check_alike(name: str, every: Tensor, problem: str | None, identity: str, comm: Ranks) -> None:
    """Raise unless no rank has a problem, identities have one checksum, and row numbers have others."""
    if bool((every[:, 0] == _PROBLEM).any()):
        problems = comm.all_gather_object(problem, f"{name} problems")
        raise ValueError(next(f"{text} (found on rank {rank})" for rank, text in enumerate(problems) if text))
    if bool((every[:, 1] != every[0, 1]).any()):
        kinds = comm.all_gather_object(identity, f"{name} identities")
        other = next(rank for rank, text in enumerate(kinds) if text != kinds[0])
        raise DivergenceError(
            f"{name}: ranks pass different kinds of rows: {kinds[0]} on rank 0, {kinds[other]} on rank {other}; "
            f"dtype, trailing dimensions, dim, whether there is a mask, ignored class and weights of classes must be "
            f"the same on every rank"
        )
    if every[0, 2] and bool((every[:, 2] == every[0, 2]).all()):
        raise ValueError(
            f"{name}: mask holds the same row numbers on every rank, like ids of the whole graph, but they count the "
            f"rows of each rank: give the nodes a mask of bools before the graph is partitioned"
        )


def row_numbers(mask: Any, rows: Any) -> float:
    """A checksum of a mask of row numbers; 0 of any other, and of so few or of all rows that ranks may well agree."""
    if not isinstance(mask, Tensor) or not isinstance(rows, Tensor) or mask.dtype == torch.bool:
        return 0.0
    if 0 in (mask.dim(), rows.dim()) or not _FEW <= len(mask) < len(rows):
        return 0.0
    return float(zlib.crc32(mask.detach().cpu().long().contiguous().numpy().tobytes()))


def select(rows: Tensor, mask: Tensor | None, device: torch.device | None = None) -> Tensor:
    """The masked rows, on `device` if it is given: labels and masks may be on the host where logits are not."""
    if mask is not None:
        mask = mask.to(rows.device, torch.bool if mask.dtype == torch.bool else torch.int64)
        rows = rows[mask]
    return rows if device is None else rows.to(device)


def check_mask(mask: Tensor | None, num_own: int, entries: torch.Size | None = None) -> None:
    """Raise ValueError for a mask of something else. With `entries`, the shape of rows, it may be a bool for each."""
    if mask is None or (entries is not None and is_of_entries(mask, entries)):
        return
    if not isinstance(mask, Tensor) or mask.dim() != 1 or mask.is_floating_point() or mask.is_complex():
        each = f", or bool {list(entries)}" if entries and len(entries) > 1 else ""
        raise ValueError(f"mask must be a bool tensor [{num_own}] or own row numbers{each}, found {describe(mask)}")
    if mask.dtype == torch.bool:
        if len(mask) != num_own:
            raise ValueError(f"the bool mask must have one entry per own node, {num_own}, found {len(mask)}")
        return
    looks_so = len(mask) == num_own > 2 and bool((mask.long() >> 1 == 0).all())
    if mask.dtype == torch.uint8 or looks_so:  # DGL writes booleans to files as uint8
        raise ValueError(f"mask is {describe(mask)}, which reads as row numbers but looks like a mask: use mask.bool()")
    low, high = (int(mask.min()), int(mask.max())) if len(mask) else (0, -1)
    if low < 0 or high >= num_own:
        raise ValueError(f"row numbers in mask must be in [0, {num_own}), found {low} to {high}")


def is_of_entries(mask: Any, shape: torch.Size) -> bool:
    """Whether a mask has a bool for each entry of rows of this shape, and not one for each row."""
    return isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() > 1 and mask.shape == shape


def check_logits(logits: Tensor, y: Tensor) -> None:
    """Raise ValueError for logits and targets that do not fit, whatever the values of the targets."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating point [num_own, num_classes], found {describe(logits)}")
    if not isinstance(y, Tensor) or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"y must hold class ids or class probabilities, found {describe(y)}")
    expected = list(logits.shape) if y.is_floating_point() else [logits.shape[0]]
    if list(y.shape) != expected:
        remedy = "; pass all own nodes, not only the masked ones" if y.shape[:1] != logits.shape[:1] else ""
        if y.dim() and y.size(0) > logits.size(0):
            remedy = "; take the labels of own nodes, as graph.y has them, not those of the whole graph"
        if y.is_floating_point() and list(y.shape) == [logits.shape[0]]:
            remedy = "; for class ids use y.long()"
        remedy = "; use y.squeeze(1)" if list(y.shape) == [logits.shape[0], 1] else remedy
        raise ValueError(f"y must be {expected} for logits {list(logits.shape)}, found {describe(y)}{remedy}")


def _kind_of_rows(values: Any, mask: Any) -> str:
    if not isinstance(values, Tensor):
        return ""
    each = ", ".join(map(str, ["num_own", *values.shape[1:]]))
    return f"{dtype_name(values.dtype)} [{each}]{' without a mask' if mask is None else ''}"
