"""Whether what an operation makes of several rows is a sum, so that the ranks may add up theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardpass.core.following.draws import draws
from shardpass.core.following.rows import Rows
from shardpass.core.following.trial import alike, called, made_up
from shardpass.core.ranks import is_out_of_memory

_COUNT, _FIRST = 12, 5
"""How many rows are made up, and how many of them are on the first of two ranks."""


def adds_up(
    function: Callable[..., Any], leaves: Sequence[Any], structure: Any, rows: Mapping[int, Rows], sums: Sequence[int]
) -> bool:
    """Whether what `function` gives on two ranks adds up to what it gives on the whole graph.

    It runs on made-up rows, and on made-up numbers in place of sums over rows.

    Args:
        function: a primitive operation.
        leaves, structure: its arguments, as `tree_flatten` gives them for ``(args, kwargs)``.
        rows: where the leaves hold rows, by position.
        sums: the positions of leaves that were summed over rows.
    """
    if draws(function):
        return False
    spreads = (False, True) if sums else (False,)
    return all(_adds_up(function, leaves, structure, rows, sums, far_apart) for far_apart in spreads)


def _adds_up(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    structure: Any,
    rows: Mapping[int, Rows],
    sums: Sequence[int],
    far_apart: bool,
) -> bool:
    """See `adds_up`. If `far_apart`, sums of ranks are large and of opposite signs, past zero and thresholds."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randperm(_COUNT, generator=generator)
    whole, one, other = ([_wide(leaf) for leaf in leaves] for _ in range(3))
    for i, where in rows.items():
        whole[i] = made_up(leaves[i], where, _COUNT, torch.float64, 0, generator)
        picks = numbers.to(leaves[i].device)
        one[i], other[i] = (where.picked(whole[i], pick) for pick in (picks[:_FIRST], picks[_FIRST:]))
    for i in sums:
        one[i], other[i] = (_numbers_like(leaves[i], generator) for _ in range(2))
        if far_apart:
            one[i], other[i] = one[i] * 10**5, one[i] * -(3 * 10**5)
        whole[i] = one[i] + other[i]
    try:
        found = [called(function, given, structure) for given in (whole, one, other)]
        return bool(found[0]) and all(_is_sum_of(*three) for three in zip(*found))
    except Exception as error:  # whatever the operation raises for shapes or dtypes that do not fit
        if is_out_of_memory(error):
            raise
        return False


def _is_sum_of(whole: Tensor, one: Tensor, other: Tensor) -> bool:
    """Whether `whole` is the sum of the two. Where all three are infinite, as divided by zero, nothing is told."""
    if not whole.shape == one.shape == other.shape:
        return False
    told = ~(whole.isinf() & one.isinf() & other.isinf())
    if not told.any() and told.numel():
        return False
    return not (whole.isnan() | one.isnan() | other.isnan()).any() and alike(whole[told], (one + other)[told])


def _wide(leaf: Any) -> Any:
    """A copy of a tensor, in float64 if it is floating point: small numbers tell too."""
    return (
        leaf.to(leaf.dtype if not leaf.is_floating_point() else torch.float64, copy=True)
        if isinstance(leaf, Tensor)
        else leaf
    )


def _numbers_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    values = 4 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return _wide(values.to(tensor.device, tensor.dtype))
