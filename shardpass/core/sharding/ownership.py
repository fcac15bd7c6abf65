"""Who owns which node: id arithmetic, no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NodeType = str
EdgeType = tuple[str, str, str]

NODE: NodeType = "node"
EDGE: EdgeType = ("node", "to", "node")


@dataclass(frozen=True)
class Ownership:
    """Contiguous ranges of global ids: rank r owns ``[offsets[r], offsets[r + 1])``. Empty ranges are legal."""

    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) < 2 or self.offsets[0] != 0:
            raise ValueError(f"offsets start at 0 and have one more entry than there are ranks, got {self.offsets}")
        if any(b < a for a, b in zip(self.offsets, self.offsets[1:])):
            raise ValueError(f"offsets never decrease, got {self.offsets}")

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Ownership:
        """The ownership in which rank r has ``counts[r]`` nodes."""
        offsets = [0]
        for count in counts:
            offsets.append(offsets[-1] + int(count))
        return cls(tuple(offsets))

    @property
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_total(self) -> int:
        return self.offsets[-1]

    def num_own(self, rank: int) -> int:
        """How many nodes `rank` owns."""
        return self.offsets[rank + 1] - self.offsets[rank]

    def owner_of(self, node_ids: Tensor) -> Tensor:
        """The owning rank of each global id, same shape, int64.

        Raises:
            ValueError: an id lies outside ``[0, num_total)``.
        """
        self._check(node_ids)
        bounds = torch.tensor(self.offsets[1:], dtype=torch.int64, device=node_ids.device)
        return torch.bucketize(node_ids.to(torch.int64), bounds, right=True)

    def to_global(self, rows: Tensor, rank: int) -> Tensor:
        """Global ids of rows of `rank`."""
        return rows + self.offsets[rank]

    def _check(self, node_ids: Tensor) -> None:
        if node_ids.numel() == 0:
            return
        low, high = (int(v) for v in torch.aminmax(node_ids))
        if low < 0 or high >= self.num_total:
            bad = low if low < 0 else high
            raise ValueError(f"node id {bad} lies outside [0, {self.num_total}); check the edge list")
