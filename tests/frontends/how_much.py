"""How much the parity tests run: by default three ranks, and a mode and an assignment in turn; the rest when long.

The tables of layers are made with `largest_error`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shardpass as sp
from shardpass.testing import (
    WholeGraph,
    WholeHeteroGraph,
    assert_exact,
    assignments,
    differences,
    evaluate_sharded,
    evaluate_whole,
    hetero_assignments,
)

MODES = ("sar", "keep", "halo")
OWNED = ("random", "empty part", "no edges")
"""The assignments of owners on several ranks; one rank has the first."""
EACH_MODE_ONCE = tuple((mode,) for mode in MODES)
"""Of `assert_exact_in`: every mode, and every assignment, but not each with each."""
ONE_PART_EMPTY = ((), ("sar",))
"""Of `assert_exact_in`: one run, in which a rank has no nodes if there are several."""


def _with_long(default: int, *others: int) -> list[Any]:
    return [default, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in others)]


def some_by_default(names: Iterable[Any], *default: Any) -> list[Any]:
    """`names`, of which all but `default` are with the long tests."""
    return [name if name in default else pytest.param(name, marks=pytest.mark.long) for name in names]


def one_each(names: Iterable[Any], others: Sequence[Any] = MODES) -> list[Any]:
    """All pairs; by default each of `names` with one of `others`, in turn, and the rest with the long tests."""
    return [
        pytest.param(name, other, marks=[] if k == i % len(others) else pytest.mark.long)
        for i, name in enumerate(names)
        for k, other in enumerate(others)
    ]


def each_way(names: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Of `name`, ranks and mode: by default three ranks and one mode for the names of `default`, in turn; else all."""
    found = []
    for i, name in enumerate(names):
        for ranks in (3, 1, 4):
            for j, mode in enumerate(MODES):
                is_long = name not in default or ranks != 3 or j != i % len(MODES)
                found.append(pytest.param(name, ranks, mode, marks=[pytest.mark.long] if is_long else []))
    return found


def in_turn(
    names: Iterable[Any],
    modes: Sequence[str] = MODES,
    later: Iterable[int] = (1, 2, 3, 4),
    only: Iterable[str] | None = None,
) -> list[Any]:
    """Of `name`, `ranks` and `modes`, as `assert_exact_in` takes them.

    By default a name, of `only` these if they are given, has three ranks, one mode and one assignment, and the next
    name has others. The long tests have all modes on all assignments of `later` ranks.
    """
    found = []
    for i, name in enumerate(names):
        if only is None or name in only:
            one = *[()] * (i // len(modes) % 3), (modes[i % len(modes)],)
            found.append(pytest.param(name, 3, one, id=f"{name}-3"))
        found += [
            pytest.param(name, n, (tuple(modes),) * 3, marks=pytest.mark.long, id=f"{name}-{n}-all") for n in later
        ]
    return found


def owned_in_turn(names: Iterable[Any], ranks: Iterable[int] = (3, 1)) -> list[Any]:
    """Of `name`, `ranks` and `owned`, the name of an assignment of owners.

    By default a name has the first of `ranks` and one assignment, in turn. The long tests have the rest.
    """
    first, *later = ranks
    found = []
    for i, name in enumerate(names):
        quick = pytest.param(name, first, OWNED[i % len(OWNED)])
        rest = [(first, owned) for owned in OWNED if owned != OWNED[i % len(OWNED)]]
        rest += [(count, owned) for count in later for owned in (OWNED if count > 1 else OWNED[:1])]
        found += [quick, *(pytest.param(name, *one, marks=pytest.mark.long) for one in rest)]
    return found


ONE_TO_FOUR = _with_long(3, 1, 2, 4)
ONE_OR_THREE = _with_long(3, 1)
ONE_TWO_FOUR = _with_long(2, 1, 4)


def assert_exact_in(
    modes: Iterable[tuple[str, ...]],
    model: nn.Module,
    graph: WholeGraph | WholeHeteroGraph,
    call: Any,
    wrap: Callable[..., nn.Module],
    ranks: int,
    options: sp.Options | None = None,
    **bounds: Any,
) -> None:
    """As `assert_exact`, on the first, second, ... assignment of owners in the first, second, ... of `modes`.

    The last assignment, which for one rank is the only one, takes all that are left of `modes`.
    """
    owned = [*owners_of(graph, ranks).items()]
    chosen: dict[int, dict[str, None]] = {}
    for i, several in enumerate(modes):
        chosen.setdefault(min(i, len(owned) - 1), {}).update(dict.fromkeys(several))
    for i, several in chosen.items():
        if several:
            owners = dict(owned[i : i + 1])
            assert_exact(model, graph, call, wrap, ranks=ranks, modes=several, owners=owners, options=options, **bounds)


def owners_of(graph: WholeGraph | WholeHeteroGraph, ranks: int) -> Mapping[str, Any]:
    """The assignments of owners on which parity is tested, by name."""
    if isinstance(graph, WholeHeteroGraph):
        return hetero_assignments(graph, ranks)
    return assignments(graph.num_nodes, ranks, graph.edge_index)


def assert_case_exact(
    case: tuple[Callable[[], nn.Module], Any],
    graph: WholeGraph | WholeHeteroGraph,
    wrap: Callable[..., nn.Module],
    ranks: int = 3,
    modes: Iterable[tuple[str, ...]] = (MODES,) * 3,
    **options: Any,
) -> None:
    """A case, which says how to make and how to call a model, is exact.

    Args:
        modes: as in `assert_exact_in`.
        options: all but the mode.
    """
    make, call = case
    torch.manual_seed(0)
    assert_exact_in(modes, make().double(), graph, call, wrap, ranks, sp.Options(**options))


def largest_error(
    case: tuple[Callable[[], nn.Module], Any],
    graph: WholeGraph | WholeHeteroGraph,
    wrap: Callable[..., nn.Module],
    ranks: Iterable[int],
    chunk_bytes: int,
    modes: tuple[str, ...] = MODES,
    relative: bool = False,
) -> float:
    """The largest error between a case on the whole graph and on some ranks.

    Args:
        case: how to make and how to call the model.
        ranks: numbers of ranks.
        relative: as in `shardpass.testing.differences`.
    """
    make, call = case
    torch.manual_seed(0)
    model, worst = make().double(), 0.0
    whole = evaluate_whole(model, graph, call)
    for count in ranks:
        for owners in owners_of(graph, count).values():
            for mode in modes:
                options = sp.Options(mode=mode, chunk_bytes=chunk_bytes)
                found = evaluate_sharded(model, graph, call, owners, count, wrap, options, whole)
                worst = max(worst, *differences(whole, found, relative).values())
    return worst
