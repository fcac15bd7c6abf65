"""Scores in closed form and their adjoints for a tile of edges, inside the kernels of `triton_attention`.

`own` is the row of the program and `other` are the rows that it gathers; the formulas are symmetric in both.
"""

from __future__ import annotations

import triton
import triton.language as tl

GIVEN = "given"  # scores are computed elsewhere
KINDS = ("additive", "dot", "mixed")  # the formulas below, by `Score.kind`


@triton.jit
def _terms(other: tl.tensor, own: tl.tensor, NUMBER: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """The terms that a score sums over its channels, before they are mixed; 0 where both rows are 0."""
    if KIND == "dot":
        terms = other * own
    else:
        terms = tl.where(other + own >= 0, other + own, (other + own) * NUMBER)
    return terms


@triton.jit
def scores_of_tile(
    other: tl.tensor, own: tl.tensor, mix: tl.tensor, NUMBER: tl.constexpr, KIND: tl.constexpr
) -> tl.tensor:
    """The scores of a tile of edges, ``[BLOCK_E]``, of rows ``[BLOCK_E, BLOCK_S]`` and one row ``[BLOCK_S]``."""
    terms = _terms(other, own[None, :], NUMBER, KIND)
    if KIND == "mixed":
        terms *= mix[None, :]
    score = tl.sum(terms, 1)
    if KIND == "dot":
        score *= NUMBER
    return score


@triton.jit
def scores_adjoint(
    change: tl.tensor, other: tl.tensor, own: tl.tensor, mix: tl.tensor, NUMBER: tl.constexpr, KIND: tl.constexpr
) -> tl.tensor:
    """The gradients of `own` and `mix`, summed over a tile, for the gradients `change` of its scores, ``[BLOCK_E]``."""
    if KIND == "dot":
        to_own = tl.sum(change[:, None] * other, 0) * NUMBER
        to_mix = tl.zeros_like(to_own)
    else:
        to_mix = tl.sum(change[:, None] * _terms(other, own[None, :], NUMBER, KIND), 0)
        to_both = change[:, None] * mix[None, :]
        to_both = tl.where(other + own[None, :] > 0, to_both, to_both * NUMBER)  # at 0 the slope, as torch has it
        to_own = tl.sum(to_both, 0)
    return to_own, to_mix
