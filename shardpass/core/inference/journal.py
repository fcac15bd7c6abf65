"""Results of the sharded calls of a forward, kept on disk, so that one that was ended goes on where it stood.

A forward without gradients is a sequence of sharded calls with node-wise work between them, the same on every rank.
What a call returned is written as it comes; a forward that runs again takes it from there, without communication, and
computes only what lies between. Every rank keeps its own rows in a folder of its own, which others need not reach.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from shardpass.core.ranks import Ranks, agree

_ENTRY = "call-{:04}.safetensors"


class Journal:
    """The calls of one forward, in order.

    Args:
        folder: of this run; each rank makes one of its own in it.
        comm: the ranks.
        fingerprint: of everything that results depend on. A folder of another fingerprint is begun anew.
        progress: told the name of each call as it begins.
    """

    def __init__(
        self, folder: Path, comm: Ranks, fingerprint: str, progress: Callable[[str], None] | None = None
    ) -> None:
        """Collective: ranks agree how many calls every one of them has."""
        self._progress, self._device = progress, comm.device
        self.folder = folder / f"rank-{comm.rank}"
        head = json.dumps({"fingerprint": fingerprint, "ranks": comm.size})
        title = self.folder / "journal.json"
        if not title.exists() or title.read_text() != head:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            title.write_text(head)
        if comm.rank == 0:
            for other in folder.glob("rank-*"):  # what an ended run on more ranks left
                if int(other.name.removeprefix("rank-")) >= comm.size:
                    shutil.rmtree(other, ignore_errors=True)
        kept = 0
        while (self.folder / _ENTRY.format(kept)).exists():
            kept += 1
        self.num_known = min(count for (count,) in agree(comm, "journal: calls kept", [kept]))
        self._next = 0

    def result(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """What the next call returns, ``[num_own, ...]``: read if every rank has it, else computed and written."""
        from safetensors.torch import load_file, save_file

        if self._progress is not None:
            self._progress(name)
        entry = self.folder / _ENTRY.format(self._next)
        self._next += 1
        if self._next <= self.num_known:
            return load_file(entry)["rows"].to(self._device)
        rows = compute()
        save_file({"rows": rows.detach().cpu().contiguous()}, partial := entry.with_suffix(".partial"))
        os.replace(partial, entry)  # an entry that is there is whole
        return rows

    def remove(self) -> None:
        """Forget everything; the folder of the run goes with its last rank."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # other ranks' folders are in it, or one of them was quicker
            self.folder.parent.rmdir()
