"""What is computed on edges, as data: the program a frontend gives, and the structure that one run of it shows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shardpass.core.ranks import Ranks
from shardpass.core.tracing.reducers import Base
from shardpass.errors import RefusedError

Side = Literal["src", "dst", "edge"]


class Key(NamedTuple):
    """Which input of a program: one of its sources, of its destinations, or of its edges, by name."""

    side: Side
    name: str


@dataclass
class Sides:
    """The inputs of a program by name: tensors of sources, of destinations, of edges."""

    src: dict[str, Tensor]
    dst: dict[str, Tensor]
    edge: dict[str, Tensor]

    @staticmethod
    def of(items: Iterable[tuple[Key, Tensor]]) -> Sides:
        """The inputs with these keys."""
        found = Sides({}, {}, {})
        for key, tensor in items:
            found._side(key.side)[key.name] = tensor
        return found

    def items(self) -> Iterator[tuple[Key, Tensor]]:
        """``(key, tensor)`` of each input, by side and then by name: in the same order on every rank."""
        sides: tuple[Side, ...] = ("src", "dst", "edge")
        for side in sides:
            yield from ((Key(side, name), tensor) for name, tensor in sorted(self._side(side).items()))

    def __contains__(self, key: Key) -> bool:
        return key.name in self._side(key.side)

    def __getitem__(self, key: Key) -> Tensor:
        return self._side(key.side)[key.name]

    def only(self, keys: Collection[Key]) -> Sides:
        """The inputs whose keys are among `keys`."""
        return Sides.of((key, tensor) for key, tensor in self.items() if key in keys)

    def _side(self, side: Side) -> dict[str, Tensor]:
        return {"src": self.src, "dst": self.dst, "edge": self.edge}[side]


Messages = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""What a message function returns of some edges: tensors with a row for each."""


@dataclass
class Inputs(Sides):
    """What the message function sees of some edges. All of `src`, `dst` and `edge` have one row per edge, ``[E, ...]``.

    Args:
        src: rows of the source nodes.
        dst: rows of the destination nodes.
        edge: rows of the edge tensors.
        index: destination of each edge, ``[E]`` int64, counted inside the piece: in ``[0, num_dst)``.
        num_dst: destinations in the piece.
        max_degree: the largest in-degree of the whole graph where all in-edges are here at once, else None.
    """

    index: Tensor
    num_dst: int
    max_degree: int | None = None


class NeedsMessagesError(RefusedError):
    """A node function returns rows of edges, or scatters onto all own nodes: it needs all messages of the rank."""


@dataclass
class Program:
    """One neighbourhood computation, given by a frontend.

    Args:
        name: what the user calls it, for messages, e.g. ``"GATConv (convs.1)"``.
        src: whole tensors of the source nodes, ``[num_own_src, ...]``.
        dst: whole tensors of the destination nodes, ``[num_dst, ...]``.
        edge: tensors that may have one row per edge, ``[num_edges, ...]``. The ranks agree which of them do. The others
            are left out of ``Inputs.edge``, and the message function must use them whole.
        message: the message function, which returns ``[E, ...]``, or with a node function a tuple of such tensors. It
            treats edges independently, and reduces over in-edges only with torch's scatter functions along
            ``Inputs.index``.
        aggregate: the node function: makes ``[num_dst, ...]``, or a tuple of such tensors, from the message. With None
            the messages are the result.
        node_dim: dimension of destinations in what `aggregate` returns.
        checked: signatures under which the message function passed the row-wise check. The frontend keeps it between
            calls.
        watch: is called with the structure once the ranks agree on it.
        reads: keys of the inputs that the message function has read; it enters them itself as it runs. The others are
            not gathered. None means that it reads all.
        parts: if the message is several tensors side by side, gives those of the latest run, each ``[E, ...]``.
            Backward leaves out a part without a gradient, as plain autograd does with what nothing uses.
        seed: of the random numbers of the call. With None the engine draws one if it is needed.
        streamed_to: the device to which the engine copies edge tensors, or None if they are there already.
        ranks: set by the engine: no collective call may begin on them while the message function runs.
    """

    name: str
    src: dict[str, Tensor]
    dst: dict[str, Tensor]
    edge: dict[str, Tensor]
    message: Callable[[Inputs], Any]
    aggregate: Callable[[Any, Inputs], Any] | None
    node_dim: int = 0
    checked: set[str] = field(default_factory=set)
    watch: Callable[[Structure], None] | None = None
    reads: set[Key] | None = None
    ranks: Ranks | None = None
    streamed_to: torch.device | None = None
    parts: Callable[[], list[Tensor]] = list
    seed: int | None = None

    @property
    def inputs(self) -> Sides:
        """The whole tensors."""
        return Sides(self.src, self.dst, self.edge)

    def columns(self, message: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What backward starts from where messages are the result: ``(tensor, its gradient)`` of each part in use."""
        parts = self.parts()
        if not parts:
            return [(message, grad)]
        columns = grad.split([part.shape[1:].numel() for part in parts], dim=1)
        pairs = [(part, column.reshape(part.shape)) for part, column in zip(parts, columns)]
        return [(part, column) for part, column in pairs if part.requires_grad and column.any()]

    def of_what_is_read(self, structure: Structure) -> Program:
        """This program without the inputs that its message function does not read."""
        if self.reads is None:
            return self
        fetched = {Key("src", name) for name in structure.sources}
        kept = self.inputs.only(self.reads | fetched)
        return replace(self, src=kept.src, dst=kept.dst, edge=kept.edge)


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
        drops: the message function uses dropout, for which every piece of edges has its own generator.
        random: the message function draws other random numbers.
        norms: batch norms in the message function, by the number of their reduction.
        message: what the message function returned for the few edges, detached.
        attention: the attention that the whole program is, if it is one.
        mix: the tensor of its `MixedScore`, detached. `captures` is empty where gradients are off.
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
