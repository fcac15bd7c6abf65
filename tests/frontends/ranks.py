"""Numbers of ranks: one that crosses every boundary by default, the others with the long tests."""

import pytest


def _with_long(default: int, *others: int) -> list:
    return [default, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in others)]


ONE_TO_FOUR = _with_long(3, 1, 2, 4)
ONE_TWO_FOUR = _with_long(2, 1, 4)
