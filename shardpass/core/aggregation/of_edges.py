"""Functions that are computed from a few edges at a time, and their derivatives of any order.

Such a function reads rows of sources, destinations and edges, and gives rows of these. To read rows and to add rows are
adjoint. So its vector-Jacobian product is such a function again: it reads what the function reads, and the gradients of
what it gives. It runs the function on each piece of the edges once more, so nothing with a row per edge is kept, at any
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from shardpass.core.aggregation.call import EdgePiece
from shardpass.core.kernels import gather_rows, scatter_rows
from shardpass.core.sharding import to_device, to_host

Kind = Literal["src", "dst", "edge", "whole"]
"""What the rows of a table belong to. A piece sees the source row of each edge, the rows of its destinations, the rows
of its edges, or the whole table."""

Compute = Callable[[EdgePiece, list[Tensor]], Sequence[Tensor | None]]
"""What is computed of a piece; `None` stands for nothing but zeros."""


@dataclass(frozen=True)
class EdgeFunction:
    """A function of tables, computed piece by piece.

    Args:
        compute: what it gives of a piece, from the rows that the piece sees.
        kinds: of the tables that it reads.
        like: for each table that it gives, the number of the table it reads that has its kind and shape.
        others: tensors in whose place some tables are read, by the number of the table. Code that the substitution does
            not reach, as in TorchScript, reads these. Their gradients are added to those of the tables.
    """

    compute: Compute
    kinds: tuple[Kind, ...]
    like: tuple[int, ...] = ()
    others: Mapping[int, Tensor] = field(default_factory=dict)

    def adjoint(self, given: Sequence[int], kinds: Sequence[Kind], wanted: Sequence[int]) -> EdgeFunction:
        """The function that gives the gradients of the tables `wanted`; it also reads those of the results `given`.

        Args:
            kinds: of the results that are `given`.
        """
        count = len(self.kinds)

        def compute(piece: EdgePiece, rows: list[Tensor]) -> Sequence[Tensor | None]:
            is_differentiated = torch.is_grad_enabled()
            inputs, gradients = rows[:count], rows[count:]
            with torch.enable_grad():
                for i in wanted:
                    if not inputs[i].requires_grad:
                        inputs[i] = inputs[i].detach().requires_grad_()
                outputs = self.compute(piece, inputs)
            pairs = [(outputs[k], gradient) for k, gradient in zip(given, gradients)]
            pairs = [(out, gradient) for out, gradient in pairs if out is not None and out.requires_grad]
            extra = [(place, other) for place, i in enumerate(wanted) if (other := self.others.get(i)) is not None]
            leaves = [*(inputs[i] for i in wanted), *(other for _, other in extra)]
            if not pairs or not leaves:
                return [None] * len(wanted)
            outs, grads = zip(*pairs)
            found: list[Tensor | None] = [
                *torch.autograd.grad(outs, leaves, grads, create_graph=is_differentiated, allow_unused=True)
            ]
            for (place, _), more in zip(extra, found[len(wanted) :]):
                found[place] = add_found(found[place], more)
            return found[: len(wanted)]

        return EdgeFunction(compute, (*self.kinds, *kinds), tuple(wanted), self.others)


def add_found(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two gradients, of which `None` is no gradient."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


Cut = tuple[int, int, int, int]
"""A piece of the edges: its first edge, the one after its last, its first destination, the one after its last."""


def cut_by_destination(degrees: Tensor, most: int) -> list[Cut]:
    """Cuts of edges in order of their destinations: `most` edges each, or those of one destination that has more.

    Args:
        degrees: of the destinations, ``[num_dst]``.
    """
    cuts, start, low, stop = list[Cut](), 0, 0, 0
    for number, degree in enumerate(degrees.tolist()):
        if stop + degree - start > most and stop > start:
            cuts.append((start, stop, low, number))
            start, low = stop, number
        stop += degree
    return [*cuts, (start, stop, low, degrees.numel())] if stop > start else cuts


@dataclass(frozen=True)
class Pieces:
    """The edges of a rank, cut so that all in-edges of a node are in one piece.

    Args:
        src_rows, dst_rows, places: of the edges in order of their destinations, ``[num_edges]``; see `EdgePiece`.
        cuts: the pieces.
        streamed_to: the device to which a piece is copied, or `None` where edges are there already.
    """

    src_rows: Tensor
    dst_rows: Tensor
    places: Tensor
    cuts: list[Cut]
    streamed_to: torch.device | None = None

    def __iter__(self) -> Iterator[EdgePiece]:
        for start, stop, low, high in self.cuts:
            src_rows, dst_rows = self.src_rows[start:stop], self.dst_rows[start:stop].long() - low
            if self.streamed_to is not None:
                src_rows, dst_rows = to_device(src_rows, self.streamed_to), to_device(dst_rows, self.streamed_to)
            yield EdgePiece(src_rows, dst_rows, slice(low, high), self.places[start:stop].long())

    def rows(self, kind: Kind, table: Tensor, piece: EdgePiece) -> Tensor:
        """The rows of a table that a piece sees."""
        if kind == "src":
            return gather_rows(table, piece.src_rows)
        if kind == "dst":
            return table[piece.window]
        if kind == "edge":
            rows = table[piece.places]
            return rows if self.streamed_to is None else to_device(rows, self.streamed_to)
        return table

    def add(self, kind: Kind, table: Tensor, piece: EdgePiece, rows: Tensor) -> None:
        """Add rows of a piece to a table."""
        if kind == "src":
            scatter_rows(table, piece.src_rows, rows)
        elif kind == "dst":
            table[piece.window] += rows
        elif kind == "edge":
            table[piece.places] += rows if self.streamed_to is None else to_host(rows)  # each edge is there once
        else:
            table += rows


def of_edges(function: EdgeFunction, pieces: Pieces, tables: Sequence[Tensor]) -> list[Tensor | None]:
    """What `function` gives of all edges, differentiable any number of times. Not collective.

    Returns:
        a table for each entry of ``function.like``; `None` where no piece gave anything.
    """
    return list(_OfEdges.apply(function, pieces, *tables))


class _OfEdges(torch.autograd.Function):
    """Inputs: the function, the pieces, its tables. Outputs: the tables that it gives."""

    @staticmethod
    def forward(ctx: Any, function: EdgeFunction, pieces: Pieces, *tables: Tensor) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.pieces = function, pieces
        ctx.save_for_backward(*tables)
        detached, found = [table.detach() for table in tables], dict[int, Tensor]()
        for piece in pieces:
            rows = [pieces.rows(kind, table, piece) for kind, table in zip(function.kinds, detached)]
            for k, (part, i) in enumerate(zip(function.compute(piece, rows), function.like)):
                if part is None:
                    continue
                if k not in found:
                    found[k] = torch.zeros_like(detached[i], memory_format=torch.contiguous_format)
                pieces.add(function.kinds[i], found[k], piece, part)
        return tuple(found.get(k) for k in range(len(function.like)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        function, tables = ctx.function, ctx.saved_tensors
        given = {k: gradient for k, gradient in enumerate(gradients) if gradient is not None}
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        found = dict[int, Tensor | None]()
        if given:
            adjoint = function.adjoint([*given], [function.kinds[function.like[k]] for k in given], wanted)
            found = dict(zip(wanted, of_edges(adjoint, ctx.pieces, [*tables, *given.values()])))
        return None, None, *(found.get(i) for i in range(len(tables)))
