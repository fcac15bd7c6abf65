"""Random numbers that a model draws in a forward pass: fine if every rank draws its own, for rows of its own."""

from __future__ import annotations

from typing import Any

import torch

from shardpass.core.following.user_line import user_line
from shardpass.core.ranks import Ranks
from shardpass.errors import RefusedError


def draws(func: Any) -> bool:
    """Whether an operation, as a dispatch mode sees it, draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


class ForwardDraws:
    """Knows whether random numbers of a forward pass come from a seed that the model has set itself.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Ranks) -> None:
        self._num_ranks = comm.size
        self._seed, self._state = torch.initial_seed(), torch.get_rng_state()

    def are_seeded(self, operands: list[Any]) -> bool:
        """Whether an operation that is about to draw takes a seed of the model's."""
        if any(isinstance(operand, torch.Generator) for operand in operands) or torch.initial_seed() != self._seed:
            return True
        fresh = torch.Generator().manual_seed(self._seed).get_state()
        return torch.equal(torch.get_rng_state(), fresh) and not torch.equal(self._state, fresh)

    def refuse_seeded(self, what: str) -> None:
        """Raise: rows of the set called `what` are drawn from a seed of the model's."""
        raise RefusedError(
            f"{user_line()}: draws random numbers for {what} from a seed that the model sets, by torch.manual_seed or "
            f"generator=. Every rank would draw the same numbers for other rows, and none of them those of the whole "
            f"graph. Draw from torch's generator as it is, which shardpass gives a seed per rank, or store the numbers "
            f"as a field of the graph"
        )

    def check_branch(self) -> None:
        """Refuse that a random number of this rank's decides something."""
        if self._num_ranks > 1:
            raise RefusedError(
                f"{user_line()}: a random number decides what the model does, and every rank draws another. Draw it "
                f"with generator=, from a torch.Generator that has the same seed on every rank"
            )

    def check_common(self) -> None:
        """Refuse that all rows meet a random number of this rank's."""
        if self._num_ranks > 1:
            raise RefusedError(
                f"{user_line()}: a random number or mask is the same for all rows here, and every rank draws another. "
                f"Draw it with generator=, from a torch.Generator that has the same seed on every rank"
            )
