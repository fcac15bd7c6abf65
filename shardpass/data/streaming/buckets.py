"""Records dealt out to files by ranges of their keys: the first half of a sort of more than fits in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.core.ranks import tells_of_full_disk
from shardpass.data.streaming.budget import Budget
from shardpass.data.team import Array

INT32_LIMIT = 2**31 - 1


def integers(largest: int) -> np.dtype[Any]:
    """int32 if numbers up to `largest` fit, else int64."""
    return np.dtype(np.int32 if largest <= INT32_LIMIT else np.int64)


def key_ranges(counts: Tensor, limit: int, breaks: Tensor | None = None) -> Array:
    """Where ranges of keys start, int64 [num_ranges + 1]: each holds at most `limit` records, or a single key.

    `counts` are the records of each key. At each of `breaks`, which are ascending keys, a range starts.
    """
    num_keys = counts.numel()
    ends = counts.cumsum(0)
    wanted = sorted({0, num_keys, *(breaks.tolist() if breaks is not None else ())})
    starts = [0]
    for stop in wanted[1:]:
        while starts[-1] < stop:
            first = starts[-1]
            before = int(ends[first - 1]) if first else 0
            reached = int(torch.searchsorted(ends, before + limit, right=True))
            starts.append(min(stop, max(first + 1, reached)))
    return np.array(starts, dtype=np.int64)


class Buckets:
    """Files of records in a new folder, `folder`, one per range of keys, each on one rank.

    Args:
        starts: what `key_ranges` gave.
        groups: a number for each file. Files of the same number are on the same rank.
    """

    def __init__(self, budget: Budget, starts: Array, groups: Array, record: np.dtype[Any]) -> None:
        self.starts, self.record, self._budget, self._team = starts, record, budget, budget.team
        self.folder = Path(tempfile.mkdtemp(dir=budget.scratch))
        team, owners = budget.team, groups % budget.team.size
        self._paths = [self.folder / f"bucket-{i:05d}" for i in range(len(self))]
        by_owner = np.argsort(owners, kind="stable")
        # by the number of starts that a key has reached; the files of a rank follow each other
        self._place = np.concatenate([[0], np.argsort(by_owner)]).astype(np.int32)
        self._first = np.searchsorted(owners[by_owner], np.arange(team.size + 1))
        self._own = by_owner[slice(*self._first[team.rank : team.rank + 2])]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def fill(self, blocks: Iterable[tuple[Array, Array]], stage: str, total: int) -> None:
        """Append each record to the file of its key. Collective.

        Records keep the order of the blocks, and within those that are added at the same time the order of the ranks.
        The blocks are keys and records; each rank has as many. `total` of `stage` are reported as done in the end.
        """
        coming, received = iter(blocks), list[tuple[Array, Array]]()

        def step() -> tuple[list[Array], list[Array]] | None:
            self._append(received)
            received.clear()
            block = next(coming, None)
            return None if block is None else self._dealt(*block)

        while dealt := self._team.together("sorting edges through files", step):
            records, counts = (self._team.all_to_all("edges of other ranks", arrays) for arrays in dealt)
            received += zip(records, counts)
        self._budget.report(stage, total, total)

    def _dealt(self, keys: Array, records: Array) -> tuple[list[Array], list[Array]]:
        """For each rank the records of its files, one file after the other, and how many are of each file."""
        places = torch.from_numpy(self._place[np.searchsorted(self.starts, keys, side="right")])
        order = torch.sort(places, stable=True).indices.numpy()
        counts = torch.bincount(places, minlength=len(self)).numpy()
        ends = np.concatenate([np.zeros(1, np.int64), counts.cumsum()])[self._first]
        # `take` copies records several times faster than indexing
        return np.split(records.take(order), ends[1:-1]), np.split(counts, self._first[1:-1])

    def _append(self, received: list[tuple[Array, Array]]) -> None:
        ends = [counts.cumsum() for _, counts in received]
        for number, bucket in enumerate(self._own if received else ()):
            pieces = [
                records[end[number] - counts[number] : end[number]] for (records, counts), end in zip(received, ends)
            ]
            if any(map(len, pieces)):
                path = self._paths[bucket]
                with tells_of_full_disk(path, sum(piece.nbytes for piece in pieces)), open(path, "ab") as file:
                    for piece in pieces:
                        file.write(piece.data)

    def read(self, bucket: int, remove: bool = False) -> Array:
        """The records of a file, which is deleted then if you say so."""
        path = self._paths[bucket]
        records = np.fromfile(path, self.record) if path.exists() else np.empty(0, self.record)
        if remove:
            path.unlink(missing_ok=True)
        return records

    def of_range(self, start: int, stop: int) -> range:
        """The buckets whose keys are in `[start, stop)`; both must be starts of ranges."""
        first, last = np.searchsorted(self.starts, [start, stop])
        return range(int(first), int(last))
