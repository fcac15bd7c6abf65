"""Whether one primitive operation treats rows one by one: it must give some rows the same results as it gives all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardpass.core.following.draws import draws
from shardpass.core.following.rows import Rows
from shardpass.core.ranks import get_random_state, is_out_of_memory, set_random_state, torch_private

ATEN = torch.ops.aten
_SIZES = (7, 11, 13, 17, 19, 23, 29, 31)
"""Numbers of rows to try; one that no operand has as a size, so that nothing fits by chance."""

_ATTEMPTS = 4  # ranks that are threads share a generator, and another may draw from it in between
_DRAWN_BY_VALUE = frozenset(
    [ATEN.poisson, ATEN._standard_gamma, ATEN._sample_dirichlet, ATEN.rrelu_with_noise, ATEN.rrelu_with_noise_]
)
"""Operations that treat rows one by one, though how many random numbers a row takes depends on its values."""


class Found(NamedTuple):
    """The dimension of a result that holds rows, with how they are repeated, as in `Rows`."""

    dim: int
    outer: int
    inner: int


def try_rows(
    function: Callable[..., Any], leaves: Sequence[Any], structure: Any, rows: Mapping[int, Rows]
) -> list[Found | None] | str:
    """For each tensor that `function` returns, where it holds rows; `None` where a row depends on other rows.

    A text says why it could not run.

    `function` runs twice on made-up rows, all and some of them, whatever the values and the number of the real ones.
    If it draws random numbers, some rows on their own would get others. So it runs a third time, on as many rows of
    which some are as before, which must give these rows the same results.

    Args:
        function: a primitive operation.
        leaves, structure: its arguments, as `tree_flatten` gives them for ``(args, kwargs)``.
        rows: where the leaves hold rows, by position.
    """
    error = ""
    sizes = {where.size for where in rows.values()}
    is_size = [type(leaf) is int and leaf in sizes for leaf in leaves]
    slacks = (1, 0) if getattr(function, "namespace", "") == "aten" else (0,)  # others may not check their indices
    for number_as_size in (False, True) if any(is_size) else (False,):
        for dtype, slack in (*((torch.float64, slack) for slack in slacks), (None, 0)):  # not all take float64
            try:
                return _tried(function, leaves, structure, rows, dtype, slack, number_as_size)
            except Exception as caught:  # whatever the operation raises for shapes that do not fit
                if is_out_of_memory(caught):
                    raise
                error = f"{type(caught).__name__}: {str(caught).splitlines()[0][:100] if str(caught) else caught}"
    return error


def _tried(
    function: Any,
    leaves: Sequence[Any],
    structure: Any,
    rows: Mapping[int, Rows],
    dtype: torch.dtype | None,
    slack: int,
    number_as_size: bool,
) -> list[Found | None]:
    taken = {size for leaf in leaves for size in (leaf.shape if isinstance(leaf, Tensor) else [leaf])}
    count = next(size for size in _SIZES if not {size, size // 2 + 1} & taken)
    generator = torch.Generator().manual_seed(count)
    pick = torch.randperm(count, generator=generator)[: count // 2 + 1]
    whole, part = [*leaves], [*leaves]
    for i, leaf in enumerate(leaves):
        if i in rows:
            whole[i] = made_up(leaf, rows[i], count, dtype, slack, generator)
            part[i] = rows[i].picked(whole[i], pick.to(leaf.device))
        elif number_as_size and type(leaf) is int:
            alike = next((where for where in rows.values() if where.size == leaf), None)
            if alike is not None:
                whole[i], part[i] = (alike.outer * number * alike.inner for number in (count, pick.numel()))
        elif isinstance(leaf, Tensor):
            same = leaf.to(dtype) if dtype is not None and leaf.is_floating_point() else leaf
            whole[i], part[i] = same.clone(), same.clone()  # it may be written into
    if not draws(function):
        all_rows, some_rows = (called(function, given, structure) for given in (whole, part))
        return [_found(a, b, a, b, count, pick, rows) for a, b in zip(all_rows, some_rows)]
    others = [*whole]
    for i, where in rows.items() if function.overloadpacket not in _DRAWN_BY_VALUE else ():
        others[i] = made_up(leaves[i], where, count, dtype, slack, generator)
        where.put(others[i], pick.to(leaves[i].device), part[i])
    found: list[Found | None] = []
    for _ in range(_ATTEMPTS):
        copies = [
            [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in given] for given in (whole, part, others)
        ]
        found = [_found(a, b, a, c, count, pick, rows) for a, b, c in zip(*_drawn_alike(function, copies, structure))]
        if all(found):
            break
    return found


def _drawn_alike(function: Any, given: list[list[Any]], structure: Any) -> list[list[Tensor]]:
    """What the function returns for each of `given`, where it draws the same random numbers every time."""
    state, results = get_random_state(), []
    try:
        for leaves in given:
            set_random_state(state)
            results.append(called(function, leaves, structure))
    finally:
        set_random_state(state)
    return results


def called(function: Any, leaves: list[Any], structure: Any) -> list[Tensor]:
    """The tensors that a function returns for these arguments."""
    args, kwargs = torch_private.tree_unflatten(leaves, structure)
    return [out for out in torch_private.tree_leaves(function(*args, **kwargs)) if isinstance(out, Tensor)]


def made_up(
    leaf: Tensor, rows: Rows, count: int, dtype: torch.dtype | None, slack: int, generator: torch.Generator
) -> Tensor:
    """A tensor like `leaf` with `count` rows of other values: floating point in `dtype`, integers in its range."""
    shape = [*leaf.shape]
    shape[rows.dim] = rows.outer * count * rows.inner
    if leaf.is_floating_point() and dtype is None:  # probabilities, which some operations insist on
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(leaf.device, leaf.dtype)
    if leaf.is_floating_point() or leaf.is_complex():
        values = torch.randn(shape, generator=generator, dtype=torch.complex128 if leaf.is_complex() else torch.float64)
        return values.to(leaf.device, leaf.dtype if dtype is None or leaf.is_complex() else dtype)
    if leaf.dtype == torch.bool:
        return (torch.rand(shape, generator=generator) > 0.5).to(leaf.device)
    low, high = (int(leaf.min()), int(leaf.max())) if leaf.numel() else (0, 0)
    high += slack * (leaf.device.type == "cpu")  # equal numbers would hide a sort, and a GPU dies of a bad index
    return torch.randint(low, high + 1, shape, generator=generator).to(leaf.device, leaf.dtype)


def _found(
    whole: Tensor, part: Tensor, mine: Tensor, same: Tensor, count: int, pick: Tensor, rows: Mapping[int, Rows]
) -> Found | None:
    """Where a result holds rows, by the shapes of `whole` and `part`, if `mine` and `same` agree in the rows `pick`.

    `mine` has all rows, `same` has all or only these.
    """
    dims = [dim for dim in range(whole.dim()) if whole.size(dim) != part.size(dim)] if whole.dim() == part.dim() else []
    if len(dims) != 1 or whole.size(dims[0]) % count:
        return None
    times = whole.size(dims[0]) // count
    ways = {(r.outer, r.inner) for r in rows.values()} | {(times, 1), (1, times)}
    for outer, inner in sorted(way for way in ways if way[0] * way[1] == times):
        where = Rows(dims[0], next(iter(rows.values())).of, outer, inner)
        numbers = pick.to(whole.device)
        if where.picked(whole, numbers).shape != part.shape:
            continue
        if alike(where.picked(mine, numbers), same if same.shape == part.shape else where.picked(same, numbers)):
            return Found(dims[0], outer, inner)
    return None


def alike(mine: Tensor, part: Tensor) -> bool:
    """Whether two tensors of one shape are equal as far as their dtype tells."""
    if not (mine.is_floating_point() or mine.is_complex()):
        return torch.equal(mine, part)
    close = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}.get(
        mine.dtype, 0.1
    )
    wide = torch.complex128 if mine.is_complex() else torch.float64
    return torch.allclose(mine.to(wide), part.to(wide), rtol=close, atol=close, equal_nan=True)
