"""Decides which rank takes which seeds in which step: one order of all seeds is cut into balanced steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from shardpass.core.exchange import exchange_arrays
from shardpass.core.ranks import Ranks
from shardpass.core.sampling.drawing import keys_of
from shardpass.core.sampling.source import Array


class Seeds(NamedTuple):
    """The seeds of one step on this rank.

    Args:
        columns: one array for each column that was dealt out.
        counted: how many seeds there are. If a rank gets none, its columns hold one seed of another rank, which does
            not count, so that the model runs there too.
    """

    columns: list[Array]
    counted: int


def number_of_steps(total: int, batch_size: int, ranks: int, drop_last: bool) -> int:
    """The number of steps of an epoch over `total` seeds of all ranks, with at most `batch_size` per rank."""
    per_step = batch_size * ranks
    return total // per_step if drop_last else -(-total // per_step)


def is_short(total: int, batch_size: int, ranks: int, drop_last: bool) -> bool:
    """Whether some rank has no seed in the last step: this happens with fewer seeds than ranks, or batches of one."""
    left = total % (batch_size * ranks)
    return 0 < left < ranks and not drop_last and (batch_size == 1 or total < ranks)


def order_of(ids: Array, seed: int | None) -> Array:
    """The keys by which seeds are sorted, int64, all different: random ones, or their ids if `seed` is `None`."""
    return ids if seed is None else keys_of(seed, ids).view(np.int64)


def deal(comm: Ranks, keys: Array, columns: list[Array], batch_size: int, drop_last: bool) -> list[Seeds]:
    """This rank's seeds of every step of an epoch. Collective.

    The seeds of all ranks are put into the order of their keys, and each step takes the next ``batch_size * comm.size``
    of them. Within a step a rank keeps its own seeds and hands on those above its even share. So the seeds of a step do
    not depend on the ranks, and no rank has more than one seed more than another. If the last step would have fewer
    seeds than there are ranks, it gets some from the step before. Memory is bounded by own seeds.

    Args:
        keys: of own seeds, int64. No two seeds of all ranks have the same.
        columns: int64 arrays with one entry per own seed.
        batch_size, drop_last: the same on every rank.
    """
    order = np.argsort(keys, kind="stable")
    keys, columns = keys[order], [column[order] for column in columns]
    total = int(comm.all_reduce(torch.tensor([len(keys)], device=comm.device), "sum", "sampling: seeds"))
    steps = number_of_steps(total, batch_size, comm.size, drop_last)
    ends = np.minimum(np.arange(1, steps + 1) * (batch_size * comm.size), total)
    if steps > 1 and batch_size > 1 and ends[-1] - ends[-2] < comm.size:
        ends[-2] = total - comm.size  # the last step has a seed for every rank
    cuts = np.concatenate([[0], _among_first(comm, keys, ends)]).astype(np.int64)
    mine = torch.from_numpy(np.diff(cuts)).to(comm.device)
    counts = torch.stack(comm.all_gather(mine, "sampling: seeds per step")).cpu().numpy()
    spread = np.arange(comm.size)[:, None]
    quota = counts.sum(0) // comm.size + (spread < counts.sum(0) % comm.size)
    step = np.repeat(np.arange(steps), np.diff(cuts))
    nth = np.arange(len(step)) - cuts[step]
    held = [step, *(column[: len(step)] for column in (keys, *columns))]
    if comm.size > 1:
        held = _balanced(comm, held, nth, counts, quota)
    order = np.lexsort((held[1], held[0]))
    parts = zip(*(np.split(column[order], np.cumsum(quota[comm.rank])[:-1]) for column in held[2:]))
    found = [Seeds(list(part), int(count)) for part, count in zip(parts, quota[comm.rank])]
    return _padded(comm, found) if steps and not quota.all() else found


def _among_first(comm: Ranks, keys: Array, positions: Array) -> Array:
    """For each position p, how many own keys are among the p smallest of all ranks, found by bisection."""
    if comm.size == 1 or not len(positions):
        return positions
    ends = torch.tensor([[keys[0], -1 - keys[-1]]] if len(keys) else np.empty((0, 2)), dtype=torch.int64)
    least = torch.cat(comm.all_gather(ends.to(comm.device), "sampling: range of seeds")).amin(0).tolist()
    low, high = np.full(len(positions), least[0]), np.full(len(positions), -1 - least[1])
    while bool((low < high).any()):
        middle = (low & high) + ((low ^ high) >> 1)
        below = torch.from_numpy(np.searchsorted(keys, middle, side="right")).to(comm.device)
        enough = comm.all_reduce(below, "sum", "sampling: order of seeds").cpu().numpy() >= positions
        low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
    return np.searchsorted(keys, high, side="right")


def _balanced(comm: Ranks, held: list[Array], nth: Array, counts: Array, quota: Array) -> list[Array]:
    """`held` after ranks above their quota have handed seeds to ranks below theirs, in the order of ranks."""
    surplus, deficit = np.maximum(counts - quota, 0), np.maximum(quota - counts, 0)
    step = held[0]
    given = nth >= quota[comm.rank][step]
    slots = (np.cumsum(surplus, 0) - surplus)[comm.rank][step] + nth - quota[comm.rank][step]
    taker = (np.cumsum(deficit, 0)[:, step] <= slots[None, :]).sum(0)
    taker = np.where(given, taker, comm.rank)
    arrays = [[column[taker == rank] for column in held] for rank in range(comm.size)]
    found = exchange_arrays(comm, arrays, "sampling: seeds above the even share")
    return [np.concatenate(columns) for columns in zip(*found)]


def _padded(comm: Ranks, found: list[Seeds]) -> list[Seeds]:
    """`found`, with a seed of rank 0 in the last step if this rank had none there. Collective."""
    last = found[-1]
    spare = torch.tensor([int(column[0]) if comm.rank == 0 else 0 for column in last.columns], dtype=torch.int64)
    spare = comm.broadcast(spare.to(comm.device), 0, "sampling: a seed for ranks without").cpu()
    if last.counted == 0:
        found[-1] = Seeds([np.array([value]) for value in spare.tolist()], 0)
    return found
