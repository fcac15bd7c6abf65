"""`Doubts`: values in a graph that training would stumble over, told when the store is written."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardpass.data.file_rows import FileRows, in_memory
from shardpass.data.team import Team


class Doubts:
    """What was found in the fields of a graph while they were written. It refuses nothing: such values can be meant."""

    def __init__(self) -> None:
        self._sentences: list[str] = []
        self._counts: dict[tuple[str, str], tuple[int, str]] = {}

    def watch(
        self, rows: Iterator[Tensor], ids: Tensor | FileRows, name: str, of: str, columns: Sequence[str] = ()
    ) -> Iterator[Tensor]:
        """`rows` as they come, the values of field `name` for the nodes or edges `ids` of type `of`.

        Args:
            columns: the names of the columns of the field, if it has some.
        """
        start = 0
        for block in rows:
            if block.is_floating_point() or block.is_complex():
                self._count(~torch.isfinite(block), "NaN or infinite", start, ids, name, of, columns)
            elif name == "y" and block.dtype != torch.bool:
                odd = (block.long() < -1) & (block.long() != -100)
                self._count(odd, "below 0, but neither -1 nor -100, which stand for no label", start, ids, name, of)
            start += len(block)
            yield block

    def _count(
        self, wrong: Tensor, what: str, start: int, ids: Tensor | FileRows, name: str, of: str,
        columns: Sequence[str] = (),
    ) -> None:  # fmt: skip
        count = int(wrong.sum())
        if count:
            before, first = self._counts.get((of, name), (0, ""))
            if not before:
                row = start + int(wrong.reshape(len(wrong), -1).any(1).nonzero()[0])
                first = f"{what}; the first that was found is in row {int(in_memory(ids[row : row + 1]))}"
                if columns:
                    first += f", column {columns[int(wrong[row - start].nonzero()[0])]!r}"
            self._counts[of, name] = before + count, first

    def note_empty_parts(self, sizes: list[int]) -> None:
        """Doubt a partition in which some part has no node; `sizes` is the number of nodes of each part."""
        empty = sizes.count(0)
        if empty:
            self._sentences.append(
                f"{empty} of {len(sizes)} parts have no node of {sum(sizes)}: a rank without nodes only waits for the "
                f"others; use fewer parts"
            )

    def gather(self, team: Team) -> None:
        """Add what the other ranks have found. Collective."""
        found, self._counts = team.gather("doubts", [[*key, *entry] for key, entry in self._counts.items()]), {}
        for of, name, count, first in itertools.chain(*found):
            before, earlier = self._counts.get((of, name), (0, first))
            self._counts[of, name] = before + count, earlier

    def tell(self, stacklevel: int) -> None:
        """Warn of everything that was found, once. `stacklevel` is that of `warnings.warn`."""
        found = self._sentences.copy()
        for (of, name), (count, first) in self._counts.items():
            found.append(f"{count} values of field {name!r} of {of} are {first}")
        if found:
            warnings.warn("\n".join(["the graph is written, but:", *found]), stacklevel=stacklevel + 1)
