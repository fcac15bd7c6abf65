"""What norms over rows share: which rows they count, and how often."""

from __future__ import annotations

from torch import Tensor

from shardpass.core.following import user_line
from shardpass.core.ranks import OnRanks
from shardpass.core.training.moments import Moments
from shardpass.errors import RefusedError


class RowNorm(OnRanks):
    """A norm over the own rows of all ranks, or over rows that every rank has, as those of a readout or a parameter.

    Mean and variance are the same if every rank gives the same rows, but the number of rows is not. Equal moments on
    all ranks say that they are the same, unless the model was followed and the norm took own rows only.
    """

    _took: frozenset[bool] = frozenset()

    def look_at(self, rows: Tensor) -> None:
        """Note whether `rows` are own rows, where the model is followed.

        Raises:
            RefusedError: some of them are, and others are on every rank, so that they would be counted several times.
        """
        if self.comm is None or not self.comm.is_followed:
            return
        copies = self.comm.copies_in(rows)
        if copies:
            raise RefusedError(
                f"{user_line()}: {type(self).__bases__[-1].__name__} over own rows joined with {copies} rows that "
                f"every rank has: they would be counted once for each rank. Join them after the norm, or normalise "
                f"them with a norm of their own"
            )
        self._took |= {self.comm.row_dim(rows) is not None}

    def count(self, moments: Moments) -> int:
        """How many rows have these moments, each of them counted once."""
        return moments.count if self._took == {True} else moments.count // moments.copies
