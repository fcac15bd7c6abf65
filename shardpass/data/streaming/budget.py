"""How much may be in memory at once, and where the rest goes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardpass.core.ranks import bytes_text
from shardpass.data.team import Team

Progress = Callable[[str, int, int], None]
"""Called as `report(stage, done, total)`."""

MEMORY_BYTES = 1 << 30
_BYTES_PER_RECORD = 80  # of an edge while a bucket is sorted: the record, its key, the order, the sorted columns
_BYTES_PER_EDGE = 200  # of an edge while a block is dealt out to the buckets
_MOST_AT_ONCE = 1 << 21
"""Records or edges. More are slower: they leave the caches, and the C library returns arrays above 32 MB to the kernel
each time, which has to clear the pages of the next one."""


@dataclass(frozen=True)
class Budget:
    """Memory for edges while a graph in files is partitioned; arrays with a number per node come on top.

    scratch: a folder for temporary files. memory_bytes: for edges, of each rank. report: told of the progress.
    team: the ranks that do the work.
    """

    scratch: Path = Path(tempfile.gettempdir())
    memory_bytes: int = MEMORY_BYTES
    report: Progress = lambda stage, done, total: None
    team: Team = field(default_factory=Team)

    @property
    def bucket_records(self) -> int:
        """Records of one file that is sorted in memory."""
        return max(1, min(self.memory_bytes // _BYTES_PER_RECORD, _MOST_AT_ONCE))

    @property
    def block_edges(self) -> int:
        """Edges that a rank reads at once, so few that one rank could get those of all."""
        return max(1, min(self.memory_bytes // _BYTES_PER_EDGE // self.team.size, _MOST_AT_ONCE))

    @property
    def alone(self) -> Budget:
        """The same for this rank alone."""
        return replace(self, team=Team())

    def file(self) -> Path:
        """A new temporary file."""
        descriptor, name = tempfile.mkstemp(dir=self.scratch)
        os.close(descriptor)
        return Path(name)

    def require_disk(self, num_bytes: int, what: str) -> None:
        """Return when the disk has room for `num_bytes` of temporary files. Collective."""
        self.team.together("room for temporary files", lambda: self._require_disk(num_bytes, what))

    def _require_disk(self, num_bytes: int, what: str) -> None:
        free = shutil.disk_usage(self.scratch).free
        if num_bytes > free:
            raise ValueError(
                f"{what} needs {bytes_text(num_bytes)} of temporary files beside the store, and the disk of "
                f"{self.scratch.parent} has {bytes_text(free)} left; free some, or write to another disk"
            )
