"""Modules that compute with the rows of all ranks, for which they need a communicator."""

from __future__ import annotations

import copy
from typing import Any

from shardpass.core.ranks.ranks import Ranks
from shardpass.errors import ShardpassError


class OnRanks:
    """A base class of modules over the rows of all ranks. Deep copies share the communicator, pickles drop it."""

    comm: Ranks | None

    def ranks(self) -> Ranks:
        """The communicator.

        Raises:
            ShardpassError: it was dropped by pickling.
        """
        if self.comm is None:
            raise ShardpassError(
                f"this {type(self).__name__} has no communicator (pickling drops it): set its .comm, or wrap the "
                f"model again"
            )
        return self.comm

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy on the same communicator."""
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        memo[id(self.comm)] = self.comm
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """What pickle keeps: everything but the communicator."""
        return {**self.__dict__, "comm": None}
