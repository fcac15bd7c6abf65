"""What is computed on edges, as data: the program that a frontend gives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardpass.core.ranks import Ranks
from shardpass.core.tracing.findings import Dependence, Findings
from shardpass.core.tracing.linear_maps import LinearMap
from shardpass.core.tracing.structure import Structure
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
        findings: what earlier calls found out about the program. The frontend keeps it between calls.
        depends_on: all that both functions depend on besides their inputs, where that is known, and where running them
            has no other effect than what they return. None where it is not known, as of code of a user.
        watch: is called with the structure once the ranks agree on it.
        reads: keys of the inputs that the message function has read; it enters them itself as it runs. The others are
            not gathered. None means that it reads all.
        parts: if the message is several tensors side by side, gives those of the latest run, each ``[E, ...]``.
            Backward leaves out a part without a gradient, as plain autograd does with what nothing uses.
        seed: of the random numbers of the call. With None the engine draws one if it is needed.
        streamed_to: the device to which the engine copies edge tensors, or None if they are there already.
        maps: linear maps whose rows of the ends are inputs already, under `LinearMap.table_name`; see
            `shardpass.core.tracing.linear_maps`.
        ranks: set by the engine: no collective call may begin on them while the message function runs.
    """

    name: str
    src: dict[str, Tensor]
    dst: dict[str, Tensor]
    edge: dict[str, Tensor]
    message: Callable[[Inputs], Any]
    aggregate: Callable[[Any, Inputs], Any] | None
    node_dim: int = 0
    findings: Findings = field(default_factory=Findings)
    depends_on: Dependence | None = None
    watch: Callable[[Structure], None] | None = None
    reads: set[Key] | None = None
    ranks: Ranks | None = None
    streamed_to: torch.device | None = None
    parts: Callable[[], list[Tensor]] = list
    seed: int | None = None
    maps: tuple[LinearMap, ...] = ()

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
