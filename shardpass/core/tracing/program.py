"""What is computed on edges, as data: the body a frontend gives, and the structure that one trace of it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from shardpass.core.ranks import Ranks
from shardpass.core.tracing.reducers import Base


@dataclass
class Inputs:
    """What the body sees of some edges.

    Args:
        src: rows of source nodes, one per edge, ``[E, ...]`` each.
        dst: rows of destination nodes, one per edge, ``[E, ...]`` each.
        edge: rows of edge tensors, ``[E, ...]`` each.
        index: destination of each edge, ``[E]`` int64, counted inside the piece: in ``[0, num_dst)``.
        num_dst: destinations in the piece.
        max_degree: the largest in-degree of the whole graph, where all in-edges are here at once; else None.
    """

    src: dict[str, Tensor]
    dst: dict[str, Tensor]
    edge: dict[str, Tensor]
    index: Tensor
    num_dst: int
    max_degree: int | None = None


@dataclass
class Program:
    """One neighbourhood computation, given by a frontend.

    Args:
        name: what the user calls it, for messages, e.g. ``"GATConv (convs.1)"``.
        src: whole tensors of the source nodes, ``[num_own_src, ...]``.
        dst: whole tensors of the destination nodes, ``[num_dst, ...]``.
        edge: tensors that may have one row per edge, ``[num_edges, ...]``. Ranks agree which of them do; the others
            are left out of ``Inputs.edge``, and the body must use them whole.
        message: edge part of the body, ``[E, ...]``. Treats edges independently; reduces over in-edges with torch's
            scatter functions along ``Inputs.index`` only.
        aggregate: node part: from the message, ``[num_dst, ...]``. None: the messages themselves are the result.
        node_dim: dimension of destinations in what `aggregate` returns.
        checked: signatures of this body that passed the row-wise check; kept by the frontend between calls.
        watch: told the structure once ranks agree on it.
        reads: inputs (``"s:x"``, ``"d:x"``, ``"e:w"``) that the body has read, entered by itself as it runs: others are
            not gathered. None: all are read.
        parts: where the message is several tensors side by side, those of the latest run, each ``[E, ...]``. Backward
            leaves out a part without a gradient, as plain autograd does with what nothing uses.
        seed: of the random numbers of the call; None: drawn, where it uses any.
        streamed_to: the device to which edge tensors are copied, set by the engine; None where they are there.
        ranks: set by the engine: no collective call may begin on them while the message function runs.
    """

    name: str
    src: dict[str, Tensor]
    dst: dict[str, Tensor]
    edge: dict[str, Tensor]
    message: Callable[[Inputs], Tensor]
    aggregate: Callable[[Tensor, Inputs], Tensor] | None
    node_dim: int = 0
    checked: set[str] = field(default_factory=set)
    watch: Callable[[Structure], None] | None = None
    reads: set[str] | None = None
    ranks: Ranks | None = None
    streamed_to: torch.device | None = None
    parts: Callable[[], list[Tensor]] = list
    seed: int | None = None

    def columns(self, message: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What backward starts from where messages are the result: ``(tensor, its gradient)`` of each part in use."""
        parts = self.parts()
        if not parts:
            return [(message, grad)]
        columns = grad.split([part.shape[1:].numel() for part in parts], dim=1)
        pairs = [(part, column.reshape(part.shape)) for part, column in zip(parts, columns)]
        return [(part, column) for part, column in pairs if part.requires_grad and column.any()]

    def of_what_is_read(self, structure: Structure) -> Program:
        """This program without the inputs that its body does not read."""
        if self.reads is None:
            return self
        members = list(range(len(structure.reductions)))
        read = self.reads | {f"s:{name}" for name in structure.sources_of(members, with_edges=True)}
        src, dst, edge = (
            {name: tensor for name, tensor in tensors.items() if f"{kind}:{name}" in read}
            for kind, tensors in (("s", self.src), ("d", self.dst), ("e", self.edge))
        )
        return replace(self, src=src, dst=dst, edge=edge)


Form = Literal["general", "ones", "copy", "scale", "extremum"]
KERNEL_FORMS = ("copy", "scale", "extremum")  # no body runs for these


@dataclass(frozen=True)
class Reduction:
    """One reduction over in-edges inside a body.

    Args:
        op: name of the reducer.
        base: what a destination without a message holds.
        tail: shape of one message, with the node dimension moved first.
        dtype: of the messages.
        stage: forward pass in which it is computed, from 0.
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
class AdditiveScore:
    """``leaky_relu(source[j] + destination[i], slope)`` of node tensors with a number per head (GATConv)."""

    source: str
    destination: str
    slope: float


@dataclass(frozen=True)
class DotScore:
    """``factor * <destination[i], source[j]>``, head by head (TransformerConv)."""

    source: str
    destination: str
    factor: float


@dataclass(frozen=True)
class MixedScore:
    """``<mix, leaky_relu(source[j] + destination[i], slope)>``, head by head (GATv2Conv). `mix`: which capture."""

    source: str
    destination: str
    slope: float
    mix: int


Score = AdditiveScore | DotScore | MixedScore


@dataclass(frozen=True)
class Attention:
    """A body that is one softmax-weighted sum of a source tensor.

    Args:
        maximum, total, output: its three reductions: largest score, sum of weights, weighted sum.
        value: the source tensor.
        heads: scores of an edge.
        eps: added to the sum of weights.
        dropout: probability with which a weight is dropped.
        score: the closed form of the scores; None: whatever the body computes.
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


@dataclass
class Structure:
    """What one trace of a body shows; equal on every rank but for the tensors of `captures`, which equal in number.

    Args:
        reductions: in program order.
        num_message: how many of them the edge part makes (the node part's follow).
        num_stages: forward passes, the one for an edge result included.
        edge_tail, edge_dtype: of the message when it is the result, else None.
        edge_depth, edge_sources, edge_differentiable: as in `Reduction`, for an edge result.
        captures: tensors that require grad, made outside the body, that it uses.
        drops: the body uses dropout, for which every piece of edges has a generator of its own.
        random: the body draws other random numbers.
        norms: batch norms in the body, by the number of their reduction.
        attention: what the whole body is, where it is that.
        mix: the tensor of its `MixedScore`, detached; captures are not kept where gradients are off.
    """

    reductions: list[Reduction]
    num_message: int
    num_stages: int
    edge_tail: tuple[int, ...] | None
    edge_dtype: torch.dtype | None
    edge_depth: int
    edge_sources: frozenset[str]
    edge_differentiable: bool
    captures: list[Tensor] = field(default_factory=list)
    drops: bool = False
    random: bool = False
    norms: dict[int, Any] = field(default_factory=dict)
    message: Tensor | None = None
    attention: Attention | None = None
    mix: Tensor | None = None

    @property
    def edge_output(self) -> bool:
        return self.edge_tail is not None

    @property
    def differentiable(self) -> bool:
        """Whether a gradient flows through the body at all."""
        return self.edge_differentiable or any(r.differentiable for r in self.reductions)

    def of_stage(self, stage: int) -> list[int]:
        """The reductions computed in forward pass `stage`."""
        return [k for k, r in enumerate(self.reductions) if r.stage == stage]

    def of_depth(self, depth: int) -> list[int]:
        """The differentiable reductions at `depth`."""
        return [k for k, r in enumerate(self.reductions) if r.depth == depth and r.differentiable]

    @property
    def max_depth(self) -> int:
        """The deepest level of reductions or of the edge result."""
        depths = [r.depth for r in self.reductions]
        return max([*depths, self.edge_depth] if self.edge_output else depths, default=-1)

    def sources_of(self, members: list[int], with_edges: bool = False) -> list[str]:
        """The source tensors that a pass over `members` (and the edge result) has to fetch, sorted."""
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
