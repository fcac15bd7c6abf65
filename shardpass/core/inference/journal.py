"""Results of the sharded calls of a forward pass, kept on disk, so that a pass that was ended can continue.

A forward pass without gradients is a sequence of sharded calls with node-wise work between them, the same on every
rank. The journal writes what each call returns. A pass that runs again reads these results without communication, and
computes only what lies between. Every rank keeps its own rows in its own folder, which other ranks need not reach.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from shardpass.core.ranks import Ranks, agree
from shardpass.errors import RefusedError

_ENTRY = "call-{:04}.safetensors"


class Journal:
    """The results of the calls of one forward pass, in order.

    Args:
        folder: the folder of the run, in which each rank makes its own.
        comm: the ranks.
        fingerprint: a hash of everything that results depend on. A folder with another fingerprint is begun anew.
        progress: called with the name of each call as it begins.
    """

    def __init__(
        self, folder: Path, comm: Ranks, fingerprint: str, progress: Callable[[str], None] | None = None
    ) -> None:
        """Collective: ranks agree on how many results all of them have."""
        self._progress, self._device = progress, comm.device
        self.folder = folder / f"rank-{comm.rank}"
        head = json.dumps({"fingerprint": fingerprint, "ranks": comm.size})
        title = self.folder / "journal.json"
        if not title.exists() or title.read_text() != head:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            title.write_text(head)
        if comm.rank == 0:
            for other in folder.glob("rank-*"):  # an ended run on more ranks has left them
                if int(other.name.removeprefix("rank-")) >= comm.size:
                    shutil.rmtree(other, ignore_errors=True)
        kept = 0
        while (self.folder / _ENTRY.format(kept)).exists():
            kept += 1
        self.num_known = min(count for (count,) in agree(comm, "journal: calls kept", [kept]))
        self._next = 0

    def result(self, name: str, compute: Callable[[], Any]) -> Any:
        """What the next call returns, a tensor or a tuple of tensors. It is read if every rank has it, or else kept."""
        from safetensors.torch import load_file, save_file

        if self._progress is not None:
            self._progress(name)
        entry = self.folder / _ENTRY.format(self._next)
        self._next += 1
        if self._next <= self.num_known:
            found = {name: tensor.to(self._device) for name, tensor in load_file(entry).items()}
            return found["rows"] if "rows" in found else tuple(found[str(i)] for i in range(len(found)))
        try:
            rows = compute()
        except RefusedError:  # the caller may know another way
            self._next -= 1
            raise
        named = {"rows": rows} if isinstance(rows, Tensor) else {str(i): part for i, part in enumerate(rows)}
        named = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
        save_file(named, partial := entry.with_suffix(".partial"))
        os.replace(partial, entry)  # an entry that is there is whole
        return rows

    def remove(self) -> None:
        """Remove all results. The last rank removes the folder of the run."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # it holds folders of other ranks, or another rank has removed it
            self.folder.parent.rmdir()
