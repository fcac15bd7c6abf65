"""Where a tensor without rows of its own comes from, if it has as many entries as there are rows."""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor


class Origin(IntEnum):
    """From what the model made a tensor; of several operands the largest counts."""

    EMPTY = -1  # torch.empty, of which torch has not seen what was put into it
    FREE = 0  # random numbers
    ZEROS = 1  # torch.zeros, not yet written into
    CONSTANT = 2  # numbers in the code
    SEEDED = 3  # random numbers from a seed of the model's
    NUMBERS = 4  # torch.arange with an entry for each row: numbers of own rows, whatever is made of them
    STATE = 5  # a parameter or a buffer


def repeats_one_row(tensor: Tensor, dim: int) -> bool:
    """Whether all rows along `dim` are equal, as those of `torch.zeros` are."""
    return tensor.size(dim) == 0 or bool((tensor == tensor.narrow(dim, 0, 1)).all())
