"""What counts as the sum of what two ranks have, where numbers are not finite."""

import pytest
import torch

from shardpass.core.following.sums import _is_sum_of

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("whole", "one", "other", "is_sum"),
    [
        ([5.0, 1.0], [2.0, 3.0], [3.0, -2.0], True),
        ([5.0, INF], [2.0, INF], [3.0, -INF], True),  # divided by zero
        ([INF], [INF], [-INF], False),  # nothing is told
        ([NAN], [NAN], [1.0], False),  # a root or a logarithm of a negative number
        ([0.0], [INF], [0.0], False),  # an exponential
    ],
)
def test_where_numbers_are_not_finite(whole, one, other, is_sum):
    assert _is_sum_of(*map(torch.tensor, (whole, one, other))) == is_sum
