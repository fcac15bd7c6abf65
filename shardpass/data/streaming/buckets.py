"""Records dealt out to files by ranges of their keys: the first half of a sort of more than fits in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


def key_ranges(counts: Tensor, limit: int, breaks: Tensor | None = None) -> Array:
    """Where ranges of keys start, int64 [num_ranges + 1]: each holds at most `limit` records, or a single key.

    Args:
        counts: records of each key, int64 [num_keys].
        breaks: keys, ascending, at which a range must start.
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
    """Files of records, one per range of keys. Within a file, records keep the order in which they were added.

    Args:
        scratch: an existing folder; the files are in a new one in it, `folder`.
        starts: what `key_ranges` gave.
        record: NumPy's dtype of a record.
    """

    def __init__(self, scratch: Path, starts: Array, record: np.dtype[Any]) -> None:
        self.starts, self.record = starts, record
        self.folder = Path(tempfile.mkdtemp(dir=scratch))
        self._paths = [self.folder / f"bucket-{i:05d}" for i in range(len(self))]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def add(self, keys: Array, records: Array) -> None:
        """Append each record to the file of its key."""
        places = torch.from_numpy(np.searchsorted(self.starts, keys, side="right") - 1)
        order = torch.sort(places.int(), stable=True).indices.numpy()
        ends = torch.bincount(places, minlength=len(self)).cumsum(0).numpy()
        for bucket in np.flatnonzero(np.diff(ends, prepend=0)):
            first = ends[bucket - 1] if bucket else 0
            with open(self._paths[bucket], "ab") as file:
                file.write(records[order[first : ends[bucket]]].data)

    def read(self, bucket: int) -> Array:
        """The records of a file."""
        path = self._paths[bucket]
        return np.fromfile(path, self.record) if path.exists() else np.empty(0, self.record)

    def of_range(self, start: int, stop: int) -> range:
        """The buckets whose keys are in `[start, stop)`; both must be starts of ranges."""
        first, last = np.searchsorted(self.starts, [start, stop])
        return range(int(first), int(last))

    def remove(self, bucket: int) -> None:
        """Delete a file."""
        self._paths[bucket].unlink(missing_ok=True)
