"""The edges of a part as they are stored, and the checks that they can be used, in bounded memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from torch import Tensor

from shardpass.core.sharding import OwnerEdges
from shardpass.data import keys
from shardpass.data.manifest import Manifest
from shardpass.data.raw import EdgeType
from shardpass.data.tensor_file import TensorFile
from shardpass.errors import StoreError


@dataclass(frozen=True)
class PartEdges:
    """A part's edges of one type, sorted by (source part, destination, original id). They stay in their file.

    counts: the number of edges from each part.
    halo_starts: num_parts + 1 numbers; the halo rows from part q are `[halo_starts[q], halo_starts[q + 1])`.
    """

    file: TensorFile
    edge_type: EdgeType
    num_dst: int
    counts: Sequence[int]
    halo_starts: Sequence[int]

    @property
    def num_edges(self) -> int:
        return sum(self.counts)

    @property
    def edge_starts(self) -> list[int]:
        """Where the edges from each part begin, and the number of all: num_parts + 1 numbers."""
        return list(accumulate(self.counts, initial=0))

    def array(self, name: str) -> Tensor:
        """One of `keys.EDGE_ARRAYS`, a view of the mapped file."""
        return self.file.tensor(keys.edge_array_key(self.edge_type, name))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of the numbers `[start, stop)` of one of `keys.EDGE_ARRAYS`."""
        return self.file.read(keys.edge_array_key(self.edge_type, name), start, stop)

    def row_starts(self, parts: range) -> Tensor:
        """A copy of the row pointers of the edges from a run of parts, [len(parts), num_dst + 1]."""
        width = self.num_dst + 1
        return self.read("row_starts", parts.start * width, parts.stop * width).view(len(parts), width)

    def halo_rows(self, part: int) -> Tensor:
        """A copy of the rows of another part that these edges begin at, ascending."""
        return self.read("halo_rows", *self.halo_starts[part : part + 2])

    def from_part(self, part: int) -> OwnerEdges:
        """The edges from one part, as views of the mapped file."""
        width, edges = self.num_dst + 1, slice(*self.edge_starts[part : part + 2])
        return OwnerEdges(
            self.array("halo_rows")[slice(*self.halo_starts[part : part + 2])],
            self.array("row_starts")[part * width : (part + 1) * width],
            self.array("src_rows")[edges],
        )


def check_edges(manifest: Manifest, edge_type: EdgeType, part: int, file: TensorFile, mapped: bool) -> PartEdges:
    """The edges of a part, after every number has been found to be where it must be. Edge ids are not looked at.

    With `mapped`, they are looked at in the mapped file, since they will be used there.
    """
    sources, targets = manifest.offsets[edge_type[0]], manifest.offsets[edge_type[2]]
    num_dst, num_edges = targets[part + 1] - targets[part], manifest.part_edges[edge_type][part]
    num_halo, nodes = manifest.halo_rows[edge_type][part], [stop - start for start, stop in pairwise(sources)]

    def key(name: str) -> str:
        return keys.edge_array_key(edge_type, name)

    halo_starts = file.verified(key("halo_starts")).tolist()
    sizes = [after - before for before, after in pairwise(halo_starts)]
    if halo_starts[0] != 0 or halo_starts[-1] != num_halo or min(sizes) < 0 or sizes[part]:
        raise StoreError(f"{file.path}: {key('halo_starts')} does not fit the {num_halo} halo rows")

    def wrong_halo(source: int, rows: Tensor, before: int | None) -> bool:
        low = -1 if before is None else before
        return int(rows[0]) <= low or bool((rows[1:] <= rows[:-1]).any()) or int(rows[-1]) >= nodes[source]

    check = partial(_check, file, mapped)
    check(key("halo_rows"), halo_starts, wrong_halo, "are not ascending rows of their parts")
    counts = [0] * manifest.num_parts

    def wrong_starts(source: int, starts: Tensor, before: int | None) -> bool:
        counts[source] = int(starts[-1])
        first = int(starts[0])
        return bool((starts[1:] < starts[:-1]).any()) or (first != 0 if before is None else first < before)

    ends = range(0, manifest.num_parts * (num_dst + 1) + 1, num_dst + 1)
    check(key("row_starts"), ends, wrong_starts, "are not row pointers, which ascend from 0")
    if sum(counts) != num_edges:
        raise StoreError(f"{file.path}: {key('row_starts')} are pointers to {sum(counts)} edges, there are {num_edges}")
    limits = [nodes[part] if source == part else size for source, size in enumerate(sizes)]

    def wrong_rows(source: int, rows: Tensor, before: int | None) -> bool:
        return not 0 <= int(rows.amin()) <= int(rows.amax()) < limits[source]

    edges = PartEdges(file, edge_type, num_dst, counts, halo_starts)
    check(key("src_rows"), edges.edge_starts, wrong_rows, "are not among the rows that the part needs")
    return edges


def _check(
    file: TensorFile,
    mapped: bool,
    key: str,
    starts: Sequence[int],
    wrong: Callable[[int, Tensor, int | None], bool],
    words: str,
) -> None:
    """Raise if the numbers of some segment of a tensor are `wrong`; an altered tensor is told as such first."""
    found = False
    for segment, numbers, before in _pieces(file.blocks(key, mapped), starts):
        found = found or wrong(segment, numbers, before)
    if found:
        raise StoreError(f"{file.path}: {key} {words}; the store is not as partition writes it")


def _pieces(blocks: Iterable[Tensor], starts: Sequence[int]) -> Iterator[tuple[int, Tensor, int | None]]:
    """The numbers of each segment `[starts[i], starts[i + 1])`: its number, some of them, and the one before these."""
    position, last = 0, None
    for block in blocks:
        stop = position + block.numel()
        segment = bisect_right(starts, position) - 1
        while position < stop:
            end = min(stop, starts[segment + 1])
            if end > position:
                numbers = block[block.numel() - (stop - position) :][: end - position]
                yield segment, numbers, None if position == starts[segment] else last
                last = int(numbers[-1])
            position, segment = end, segment + 1
