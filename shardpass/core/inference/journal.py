"""Results of the sharded calls of a forward pass, kept on disk, so that a pass that was ended can continue.

A forward pass without gradients is a sequence of sharded calls with node-wise work between them, the same on every
rank. The journal writes what each call returns. A pass that runs again reads these results without communication, and
computes only what lies between. Every rank keeps its own rows in its own folder, which other ranks need not reach.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from shardpass.core.inference.deferred import Deferral, DeferredRows, block_of, in_memory
from shardpass.core.inference.row_sources import spans
from shardpass.core.ranks import Blocks, Ranks, agree, fail_together
from shardpass.core.training import read_verified, write_verified
from shardpass.errors import RefusedError


class Journal:
    """The results of the calls of one forward pass, in order.

    Args:
        folder: the folder of the run, in which each rank makes its own.
        comm: the ranks.
        fingerprint: a hash of everything that results depend on. A folder with another fingerprint is begun anew.
        progress: called with the name of each call as it begins.
        deferral: makes the stand-ins for results, which stay in their files; `None` if results are to be in memory.
    """

    def __init__(
        self,
        folder: Path,
        comm: Ranks,
        fingerprint: str,
        progress: Callable[[str], None] | None = None,
        deferral: Deferral | None = None,
    ) -> None:
        """Collective: ranks agree on how many results all of them have.

        Raises:
            OSError: a rank cannot use its folder (on every rank).
        """
        self._progress, self._device, self.deferral = progress, comm.device, deferral
        self.folder, self._fingerprint = folder / f"rank-{comm.rank}", fingerprint
        head = json.dumps({"fingerprint": fingerprint, "ranks": comm.size})
        kept = fail_together(comm, "journal: results kept", lambda: self._open(head, comm), OSError)
        self.num_known = min(count for (count,) in agree(comm, "journal: calls kept", [kept]))
        if self.num_known and comm.rank == 0:
            warnings.warn(
                f"{str(folder)!r}: an earlier run did not come to its end, and the results of its first "
                f"{self.num_known} calls are used. If the code of the model has changed since, remove that folder",
                stacklevel=2,
            )
        self._next = 0

    def _open(self, head: str, comm: Ranks) -> int:
        """How many results of this rank are there and whole, one after the other."""
        title = self.folder / "journal.json"
        if not title.is_file() or title.read_bytes() != head.encode():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            title.write_text(head)
        if comm.rank == 0:
            for other in self.folder.parent.glob("rank-*"):  # an ended run on more ranks has left them
                number = other.name.removeprefix("rank-")
                if number.isdecimal() and int(number) >= comm.size:
                    shutil.rmtree(other, ignore_errors=True)
        kept = 0
        while self._entry(kept).exists():
            try:
                self._read(kept)
            except ValueError as error:
                warnings.warn(f"rank {comm.rank}: {error}. What it held is computed again", stacklevel=2)
                break
            kept += 1
        return kept

    def _entry(self, number: int) -> Path:
        return self.folder / f"call-{number:04}.safetensors"

    def _title(self, number: int) -> str:
        """What an entry says of itself, since one that is whole may be in the place of another."""
        return f"{self._fingerprint} {number}"

    def _read(self, number: int) -> dict[str, Tensor]:
        entry = self._entry(number)
        title, found = read_verified(entry)
        if title != self._title(number):
            raise ValueError(f"{str(entry)!r} is of another call")
        return found

    def result(self, name: str, compute: Callable[[], Any]) -> Any:
        """What the next call returns, a tensor or a tuple of tensors. It is read if every rank has it, or else kept."""
        if self._progress is not None:
            self._progress(name)
        number = self._next
        self._next += 1
        if number < self.num_known:
            return self._found(number)
        try:
            rows = compute()
        except RefusedError:  # the caller may know another way
            self._next -= 1
            raise
        tensors = {"rows": rows} if isinstance(rows, Tensor) else {str(i): r for i, r in enumerate(rows)}
        stored = {name: _in_blocks(tensor) for name, tensor in tensors.items()}
        write_verified(self._entry(number), stored, self._title(number))
        if self.deferral is None:
            return rows
        del rows, tensors, stored  # they are in the file now
        return self._found(number)

    def _found(self, number: int) -> Any:
        """The result in an entry: rows that stay there, or are read."""
        if self.deferral is None:
            found = {name: tensor.to(self._device) for name, tensor in self._read(number).items()}
        else:
            found = self.deferral.stored(self._entry(number), self._device)
        return found["rows"] if "rows" in found else tuple(found[str(i)] for i in range(len(found)))

    def begin_again(self) -> None:
        """The forward runs once more from its first call, with results in memory."""
        self._next, self.deferral = 0, None

    def operands(self, *sides: dict[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
        """The tensors that a call reads, with the rows themselves."""
        return in_memory(*sides)

    def deferred(self, rows: list[Tensor]) -> list[Tensor]:
        """What a call has reduced, of which its node function is about to make the result."""
        return rows if self.deferral is None else [self.deferral.held(tensor) for tensor in rows]

    def filled(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What ``func(*args, **kwargs)`` returns, where `func` is `Tensor.new_zeros` or alike in a node function."""
        if self.deferral is None:
            out: Tensor = func(*args, **kwargs)
            return out
        return self.deferral.filled(func, args, kwargs)

    def remove(self) -> None:
        """Remove all results. The last rank removes the folder of the run."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # it holds folders of other ranks, or another rank has removed it
            self.folder.parent.rmdir()


def _in_blocks(tensor: Tensor) -> Tensor | Blocks:
    if not isinstance(tensor, DeferredRows):
        return tensor
    blocks = (block_of(tensor, *span) for span in spans(tensor.size(0), [tensor]))
    return Blocks(tensor.dtype, tuple(tensor.shape), blocks)
