"""The largest error of a layer over ranks, assignments and modes, for the two tables of layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

import shardpass as sp
from shardpass.testing import (
    Outcome,
    WholeGraph,
    WholeHeteroGraph,
    differences,
    evaluate_sharded,
    evaluate_whole,
)

from .how_much import MODES, owners_of


def largest_error(
    case: tuple[Callable[[], nn.Module], Any],
    graph: WholeGraph | WholeHeteroGraph,
    wrap: Callable[..., nn.Module],
    ranks: Iterable[int],
    chunk_bytes: int,
    modes: tuple[str, ...] = MODES,
    errors: Callable[[Outcome, Outcome], Mapping[str, float]] = differences,
) -> float:
    """The largest of `errors` between a case on the whole graph and on some ranks.

    Args:
        case: how to make and how to call the model.
        ranks: numbers of ranks.
        errors: the error of every tensor of the second outcome against the first.
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
                worst = max(worst, *errors(whole, found).values())
    return worst


def relative(whole: Outcome, sharded: Outcome) -> dict[str, float]:
    """The largest error of every tensor, relative to its largest entry where that is above 1."""
    sizes = {name: float(t.abs().max()) if t.numel() else 1.0 for name, t in whole.tensors().items()}
    return {name: error / max(1.0, sizes[name]) for name, error in differences(whole, sharded).items()}


def lists_of_layers(found: list[tuple[str, str, float]]) -> str:
    """Lists of ``(name, how, error)``, one for each way: the classes with their variants and largest errors."""
    grouped: dict[str, dict[str, list[tuple[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for name, how, error in found:
        kind, _, variant = name.partition(" ")
        grouped[how][kind].append((variant, error))
    lists = []
    for how, kinds in grouped.items():
        items = "\n".join(f"* {_named(kind, kinds[kind])}" for kind in sorted(kinds, key=str.lower))
        lists.append(f"## {how[0].upper()}{how[1:]}\n\n{items}")
    return "\n\n".join(lists)


def _named(kind: str, variants: list[tuple[str, float]]) -> str:
    largest = f"{max(error for _, error in variants):.0e}"
    if len(variants) == 1:
        return f"{kind} {variants[0][0]}".strip() + f": {largest}"
    return f"{kind} ({', '.join(variant or 'default' for variant, _ in variants)}): {largest}"


def rows_by_reason(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Table rows of ``(class, reason)``: one for each reason."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for name, reason in reasons:
        grouped[reason].append(name)
    return [f"| {', '.join(names)} | {reason} |" for reason, names in grouped.items()]
