"""What one run of a program on a few edges shows: its reductions, in which order they are made, and of what."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from shardpass.core.tracing.formula import Formula
from shardpass.core.tracing.linear_maps import LinearMap
from shardpass.core.tracing.reducers import Base
from shardpass.core.tracing.scores import Score

Messages = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""What a message function returns of some edges: tensors with a row for each."""

Form = Literal["general", "ones", "copy", "scale", "extremum"]
KERNEL_FORMS = ("copy", "scale", "extremum")  # kernels compute these, no message function runs


@dataclass(frozen=True)
class Reduction:
    """One reduction over in-edges inside a program.

    Args:
        op: name of the reducer.
        base: what a destination without a message holds.
        tail: shape of one message, with the node dimension moved first.
        dtype: of the messages.
        stage: the walk of forward in which it is computed, from 0.
        depth: length of the chain of reductions it hangs on, from 0; backward goes from the deepest up.
        sources: names of the source tensors its messages depend on, not counting what earlier reductions saw.
        parents: earlier reductions it depends on directly.
        leader: the max reduction of the same pass that this sum is rescaled by (online softmax), or None.
        differentiable: gradients flow through its messages.
        form: ``ones`` (in-degree), ``copy`` of a source tensor, ``scale`` of one by an edge scalar,
            ``extremum`` (max or min of a copy), else ``general``.
        source, weight: the source and edge tensor of a ``copy``, ``scale`` or ``extremum``.
    """

    op: str
    base: Base
    tail: tuple[int, ...]
    dtype: torch.dtype
    stage: int
    depth: int
    sources: frozenset[str]
    parents: frozenset[int]
    leader: int | None
    differentiable: bool
    form: Form = "general"
    source: str = ""
    weight: str = ""


@dataclass(frozen=True)
class Attention:
    """A message function that is one softmax-weighted sum of a source tensor.

    Args:
        maximum, total, output: its three reductions: largest score, sum of weights, weighted sum.
        value: the source tensor.
        heads: scores of an edge.
        eps: added to the sum of weights.
        dropout: probability with which a weight is dropped.
        score: the closed form of the scores. With None the message function computes them.
    """

    maximum: int
    total: int
    output: int
    value: str
    heads: int
    eps: float
    dropout: float
    score: Score | None

    @property
    def members(self) -> tuple[int, int, int]:
        return self.maximum, self.total, self.output


@dataclass(frozen=True)
class Structure:
    """What one run of a program on a few edges shows. It is equal on every rank but for the values of the tensors.

    Args:
        reductions: in the order in which the program makes them.
        num_message: how many of them the message function makes; the node function makes the others.
        num_stages: walks of forward, the one for an edge result included.
        edge_tail, edge_dtype: of the message if it is the result, else None.
        edge_depth, edge_sources, edge_differentiable: as in `Reduction`, for an edge result.
        captures: tensors that require grad, were made outside the message function, and are used in it.
        drops: the message function uses dropout, which draws by the place of an edge.
        random: the message function draws other random numbers.
        norms: batch norms in the message function, by the number of their reduction.
        message: what the message function returned for the few edges, detached.
        attention: the attention that the whole program is, if it is one.
        mix: the tensor that weighs the channels of its scores, detached. `captures` is empty where gradients are off.
        reads_values: Python has read numbers of a tensor made outside, such as a parameter, which may change.
        maps: the linear maps of rows of the ends that can be applied to nodes instead of to edges.
        unread: the inputs on which nothing depends.
        formula: the messages of all reductions but counts, where they are computed channel by channel.
        outside: the captures that the formula reads, by number. `captures` is empty where gradients are off.
    """

    reductions: tuple[Reduction, ...]
    num_message: int
    num_stages: int
    edge_tail: tuple[int, ...] | None
    edge_dtype: torch.dtype | None
    edge_depth: int
    edge_sources: frozenset[str]
    edge_differentiable: bool
    captures: tuple[Tensor, ...]
    drops: bool
    random: bool
    norms: dict[int, nn.Module]
    message: Messages
    attention: Attention | None
    mix: Tensor | None
    reads_values: bool = False
    maps: tuple[LinearMap, ...] = ()
    unread: frozenset[Hashable] = frozenset()
    formula: Formula | None = None
    outside: tuple[Tensor, ...] = ()

    @property
    def edge_output(self) -> bool:
        return self.edge_tail is not None

    @property
    def differentiable(self) -> bool:
        """Whether a gradient flows through the program at all."""
        return self.edge_differentiable or any(r.differentiable for r in self.reductions)

    def of_stage(self, stage: int) -> list[int]:
        """The reductions that forward computes in walk `stage`."""
        return [k for k, r in enumerate(self.reductions) if r.stage == stage]

    def of_depth(self, depth: int) -> list[int]:
        """The differentiable reductions at `depth`."""
        return [k for k, r in enumerate(self.reductions) if r.depth == depth and r.differentiable]

    @property
    def max_depth(self) -> int:
        """The deepest level of reductions or of the edge result."""
        depths = [r.depth for r in self.reductions]
        return max([*depths, self.edge_depth] if self.edge_output else depths, default=-1)

    @property
    def sources(self) -> list[str]:
        """The source tensors that are fetched at all, sorted."""
        return self.sources_of(list(range(len(self.reductions))), with_edges=True)

    def sources_of(self, members: list[int], with_edges: bool = False) -> list[str]:
        """The source tensors that a walk for `members` (and the edge result) has to fetch, sorted."""
        names: set[str] = set(self.edge_sources) if with_edges else set()
        for k in members:
            names |= self.reductions[k].sources
        return sorted(names)

    def describe(self) -> str:
        """One line that is equal on ranks that agree."""
        parts = [
            f"{r.op}{list(r.tail)} {r.dtype} stage {r.stage} depth {r.depth} of {sorted(r.sources)} {r.form} "
            f"{r.source}{'*' + r.weight if r.weight else ''}{'' if r.differentiable else ' constant'}"
            for r in self.reductions
        ]
        if self.attention:
            parts.append(str(self.attention))
        if self.edge_output:
            parts.append(f"edges {list(self.edge_tail or ())} {self.edge_dtype} of {sorted(self.edge_sources)}")
        parts.append(f"captures {[(t.dim(), tuple(t.shape[1:]), str(t.dtype)) for t in self.captures]}")
        return "; ".join(parts)
