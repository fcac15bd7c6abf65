"""`LiveBytes`: how much memory tensors take, counted and not measured."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardpass.core.ranks import torch_private


class LiveBytes(torch_private.TorchDispatchMode):
    """Counts the bytes of all tensors made or looked at under it that are still alive, whoever holds them.

    Attributes:
        peak: the most bytes that were alive after an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[torch_private.StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in torch_private.tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._made[torch_private.StorageWeakRef(storage)] = storage.nbytes()
        self.peak = max(self.peak, self.count())
        return out

    def count(self) -> int:
        """The bytes alive now."""
        self._made = {storage: size for storage, size in self._made.items() if not storage.expired()}
        return sum(self._made.values())
