"""Backward of a sharded call that is itself differentiated, as for forces: ``create_graph=True``.

The rows of sources are fetched again by differentiable calls, and the gradients are a function of edges, see
`of_edges`. Its pieces hold whole neighbourhoods, so that reducers compute every reduction at once (`Reducer.whole`). A
sum of copies of rows is linear: its gradient is the transposed sum, whose gradient is the sum again, all by kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardpass.core.aggregation.call import Call, EdgePiece, stand_in
from shardpass.core.aggregation.of_edges import Cut, EdgeFunction, Kind, Pieces, add_found, cut_by_destination, of_edges
from shardpass.core.aggregation.rerun import run_again
from shardpass.core.aggregation.weighted_sums import Factor, WeightedSum
from shardpass.core.aggregation.whole_neighbourhoods import edges_by_destination
from shardpass.core.exchange import gather_halo, sum_to_owners
from shardpass.core.ranks import Linear, begin_call, is_differentiable, linear_call, ordinary_tensors, summed
from shardpass.core.sharding import EdgeShards, smallest_index_dtype
from shardpass.core.tracing import (
    REDUCERS,
    Base,
    Inputs,
    Key,
    Leaf,
    Sides,
    Step,
    StopPass,
    accumulator_dtype,
)
from shardpass.errors import RefusedError


@dataclass
class _Tables:
    """What the message function reads, as tables of a function of edges."""

    keys: list[Key | None] = field(default_factory=list)  # `None` for a tensor that it captures
    kinds: list[Kind] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)

    def take(self, key: Key | None, kind: Kind, rows: Tensor, is_wanted: bool) -> None:
        if is_wanted and is_differentiable(rows):
            self.wanted.append(len(self.rows))
        self.keys.append(key)
        self.kinds.append(kind)
        self.rows.append(rows)


def differentiable_gradients(
    call: Call, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the inputs and captures of a call, which can be differentiated. Collective.

    Args:
        tensors: the inputs of the call, those of its keys and then its captures.
        grads: of its results.
        needed: the tensors whose gradients this rank asks for. Those of sources are computed in any case.
    """
    _refuse(call)
    tables, unread = _tables_of(call, tensors, needed)
    keys = [key for key in tables.keys if key is not None]
    given = {k: grad.contiguous() for k, grad in enumerate(grads) if grad is not None}
    captures = range(len(keys), len(tables.rows))
    if _is_weighted_sums(call, tables):
        by_table = _by_kernels(call, tables, given)
    else:
        by_table = _by_messages(call, tables, _Messages(call, keys, unread), given)
    results = dict[Key, Tensor | None]()
    for number, key in enumerate(keys):
        found = by_table.get(number)
        if key.side == "src" and key in call.gradients:  # other ranks may have found some
            there, back = _carriers(call)
            found = _carried(call, torch.zeros_like(tables.rows[number]) if found is None else found, back, there)
        results[key] = found
    return [*(results.get(key) for key in call.keys), *(by_table.get(number) for number in captures)]


def _is_weighted_sums(call: Call, tables: _Tables) -> bool:
    """Whether the call is sums of source rows, or of these times weights of edges, all of one real dtype."""
    structure, dtypes = call.structure, {rows.dtype for rows in tables.rows} | {*call.given.values()}
    sums = [k for k, reduction in enumerate(structure.reductions) if reduction.form != "ones"]
    dtypes |= {structure.reductions[k].dtype for k in sums}
    is_real = len(dtypes) == 1 and all(dtype.is_floating_point for dtype in dtypes)
    return is_real and not structure.edge_output and all(_factors(call, k) for k in sums)


def _factors(call: Call, k: int) -> dict[Factor, Key]:
    """The source rows that a reduction sums, and the weights of edges that these are multiplied by; else nothing."""
    reduction, formula = call.structure.reductions[k], call.structure.formula
    source, weight = reduction.source, reduction.weight
    if reduction.form == "general" and reduction.op == "sum" and formula is not None:
        step = formula.values[dict(formula.outputs)[k]]
        read = [formula.values[place] for place in step.operands] if isinstance(step, Step) else []
        leaves = {leaf.kind: leaf for leaf in read if isinstance(leaf, Leaf)}
        if not isinstance(step, Step) or step.op != "mul" or {*leaves} != {"src", "edge"} or leaves["src"].repeats > 1:
            return {}
        source, weight = leaves["src"].name, leaves["edge"].name
    elif reduction.form not in ("copy", "scale"):
        return {}
    src: dict[Factor, Key] = {"src": Key("src", call.canonical[source])}
    return {**src, "edge": Key("edge", weight)} if weight else src


def _by_kernels(call: Call, tables: _Tables, given: Mapping[int, Tensor]) -> dict[int, Tensor | None]:
    """Gradients of the tables by their numbers, given those of the results."""
    found = dict[int, Tensor | None]()
    for k, grad in given.items():
        numbers = {factor: tables.keys.index(key) for factor, key in _factors(call, k).items()}
        if not numbers:  # a count
            continue
        factors: dict[Factor, Tensor] = {"dst": grad}
        factors |= {factor: tables.rows[number] for factor, number in numbers.items()}
        shapes = {factor: rows.shape for factor, rows in factors.items()}
        product = WeightedSum(call, shapes, _most_edges(call, tables))
        for factor, number in numbers.items():
            if number in tables.wanted:
                found[number] = add_found(found.get(number), product.by(factor, factors))
    return found


def _by_messages(
    call: Call, tables: _Tables, messages: _Messages, given: Mapping[int, Tensor]
) -> dict[int, Tensor | None]:
    """See `_by_kernels`. Collective where batch norms are inside the message function."""
    pieces, others = _pieces(call, tables), _others(call, tables)
    norms = [_moments(call, k, tables, messages, pieces, others) for k in sorted(call.structure.norms)]
    of_results: Kind = "edge" if call.structure.edge_output else "dst"
    function = EdgeFunction(messages, tuple(tables.kinds), others=others)
    adjoint = function.adjoint([*given], [of_results] * len(given), tables.wanted)
    found = dict(zip(tables.wanted, of_edges(adjoint, pieces, [*tables.rows, *given.values()])))
    for norm in reversed(norms):
        norm.add_gradients(call, tables, pieces, found)
    return found


def _tables_of(call: Call, tensors: Sequence[Tensor], needed: Sequence[bool]) -> tuple[_Tables, dict[str, Tensor]]:
    """The tables that the message function reads, and the sources that it does not read, by name. Collective."""
    tables, read, unread = _Tables(), {call.canonical[name] for name in call.structure.sources}, dict[str, Tensor]()
    for key, tensor, is_needed in zip(call.keys, tensors, needed):
        is_wanted = key in call.gradients
        if key.side != "src":
            tables.take(key, key.side, tensor, is_wanted and is_needed)
        elif key.name in read:
            there, back = _carriers(call)
            rows = _carried(call, tensor, there, back) if is_wanted else there(tensor)
            tables.take(key, "src", rows, is_wanted)
        else:
            unread[key.name] = tensor
    for tensor, is_needed in zip(tensors[len(call.keys) :], needed[len(call.keys) :]):
        tables.take(None, "whole", tensor, is_needed)
    return tables, unread


@dataclass
class _EdgeNorm:
    """Mean and variance that a batch norm inside the message function reads, over the edges of all ranks.

    They are made of sums, which are a function of edges: of ``v - mean`` and its square, where `known` holds the mean
    that forward found, so that nothing cancels.

    Args:
        number: of the table of mean and variance, ``[1, 2, channels]``.
        count: of the edges.
        function: gives the sums of a piece from the tables before `number` and `known`.
        shift: the sum of ``v - mean`` over `count`, which is 0 but has derivatives.
    """

    number: int
    count: int
    function: EdgeFunction
    known: Tensor
    shift: Tensor

    def add_gradients(self, call: Call, tables: _Tables, pieces: Pieces, by_table: dict[int, Tensor | None]) -> None:
        """Add to gradients of tables what reaches them through mean and variance. Collective."""
        found = by_table.get(self.number)
        of_mean, of_variance = (torch.zeros_like(self.known) if found is None else found).unbind(1)
        of_sums = torch.stack([of_mean - 2 * self.shift * of_variance, of_variance], dim=1) / self.count
        of_sums = summed(of_sums, call.plan.comm, f"{call.label} batch norm {self.number}")
        wanted = [number for number in tables.wanted if number < self.number]
        adjoint = self.function.adjoint([0], ["whole"], wanted)
        more = of_edges(adjoint, pieces, [*tables.rows[: self.number], self.known, of_sums])
        for number, one in zip(wanted, more):
            by_table[number] = add_found(by_table.get(number), one)


def _moments(
    call: Call, k: int, tables: _Tables, messages: _Messages, pieces: Pieces, others: Mapping[int, Tensor]
) -> _EdgeNorm:
    """Makes the table that batch norm `k` reads. Collective."""
    count, mean, variance = call.norm_moments[k]
    known = torch.stack([mean, variance])[None].to(accumulator_dtype(call.structure.reductions[k].dtype))
    number, count = len(tables.rows), max(count, 1)
    function = EdgeFunction(_SumsOfMoments(messages, k), (*tables.kinds, "whole"), like=(number,), others=others)
    (found,) = of_edges(function, pieces, [*tables.rows, known])
    sums = torch.zeros_like(known) if found is None else found
    shift, squares = (summed(sums, call.plan.comm, f"{call.label} batch norm {number}") / count).unbind(1)
    tables.take(None, "whole", torch.stack([known[:, 0] + shift, squares - shift.square()], dim=1), True)
    messages.norms.append(k)
    return _EdgeNorm(number, count, function, known, shift)


def _carried(call: Call, rows: Tensor, there: Linear, back: Linear) -> Tensor:
    """``there(rows)``, a differentiable call of its own where rows travel at all."""
    comm = call.plan.comm
    if not call.plan.schedule.rounds:
        return rows
    _, token = begin_call(comm, call.label)
    return linear_call(comm, token, call.label, rows, there, back)


def _carriers(call: Call) -> tuple[Linear, Linear]:
    """What fetches the rows of sources, and what sums such rows into their owners."""
    plan = call.plan
    return (
        lambda rows: gather_halo(rows, plan, call.next_walk()),
        lambda rows: sum_to_owners(rows, plan, call.next_walk()),
    )


def _others(call: Call, tables: _Tables) -> dict[int, Tensor]:
    """The captured tensors themselves, by the numbers of their tables."""
    first = tables.keys.index(None) if None in tables.keys else len(tables.keys)
    return {first + i: tensor for i, tensor in enumerate(call.captured) if tensor.requires_grad}


class _ByDestination:
    """The edges of a list in order of their destinations, and where they are cut, once they were asked for."""

    def __init__(self) -> None:
        self.cuts: dict[int, list[Cut]] = {}
        self._edges: tuple[Tensor, ...] | None = None

    def pieces(self, edges: EdgeShards, most: int, streamed_to: torch.device | None) -> Pieces:
        """Pieces of `most` edges, or more where a node has more."""
        if self._edges is None:
            with ordinary_tensors():
                numbers = edges_by_destination(edges, None)
                self._edges = tuple(map(_narrow, numbers))
        if most not in self.cuts:
            self.cuts[most] = cut_by_destination(edges.degrees(), most)
        src_rows, dst_rows, places = self._edges
        return Pieces(src_rows, dst_rows, places, self.cuts[most], streamed_to)


def _narrow(numbers: Tensor) -> Tensor:
    return numbers.to(smallest_index_dtype(int(numbers.max()) + 1 if numbers.numel() else 0))


def _pieces(call: Call, tables: _Tables) -> Pieces:
    return call.plan.comm.caches.of(_ByDestination, call.edges).pieces(
        call.edges, _most_edges(call, tables), call.streamed_to
    )


def _most_edges(call: Call, tables: _Tables) -> int:
    """How many edges are taken at a time, so that a tensor with a row per edge holds ``options.chunk_bytes``."""
    widths = [t.itemsize * t.shape[1:].numel() for t, kind in zip(tables.rows, tables.kinds) if kind != "whole"]
    widths += [torch.Size(r.tail).numel() * r.dtype.itemsize for r in call.structure.reductions]
    return max(1, call.plan.options.chunk_bytes // max([*widths, 1]))


class _Messages:
    """The message function on a piece that holds whole neighbourhoods: its reductions, or its edge result alone.

    It reads the tables of keys, then the captured tensors, then the moments of `norms`.

    Args:
        keys: of the tables before those of captured tensors.
        unread: source tensors that the call does not fetch, since nothing depends on them.

    Attributes:
        norms: the reductions whose values are tables, those of batch norms.
    """

    def __init__(self, call: Call, keys: Sequence[Key], unread: dict[str, Tensor]) -> None:
        self.call, self.keys, self.unread, self.norms = call, keys, unread, list[int]()

    def __call__(self, piece: EdgePiece, rows: list[Tensor]) -> Sequence[Tensor | None]:
        phase = _WholeReductions(self.call, piece)
        message = self.run(piece, rows, phase)
        if self.call.structure.edge_output:
            return [message]
        return [phase.values.get(k) for k in range(len(self.call.structure.reductions))]

    def run(self, piece: EdgePiece, rows: list[Tensor], phase: _WholeReductions) -> Tensor | None:
        """Run it until `phase` stops it, or to its result."""
        own, after_keys = Sides.of(zip(self.keys, rows)), rows[len(self.keys) :]
        captured, moments = after_keys[: len(self.call.captured)], after_keys[len(self.call.captured) :]
        phase.moments = dict(zip(self.norms, moments))
        call, count = self.call, piece.src_rows.numel()
        src = {
            name: own.src[one] if one in own.src else stand_in(self.unread[one], count, call.given[name])
            for name, one in call.canonical.items()
        }
        dst = {name: table.index_select(0, piece.dst_rows) for name, table in own.dst.items()}
        inputs = Inputs(src, dst, own.edge, piece.dst_rows, piece.window.stop - piece.window.start)
        expected = {id(tensor) for tensor in (*captured, *call.captured, *(t for _, t in inputs.items()))}
        substitutes = {id(original): tensor for original, tensor in zip(call.captured, captured)}
        message, _ = run_again(
            call, inputs, phase, drops=call.drops(piece.places), substitutes=substitutes, expected=expected
        )
        return message


class _SumsOfMoments:
    """Sums over a piece of the rows that batch norm `k` is given, from the mean that is known, and of their squares."""

    def __init__(self, messages: _Messages, k: int) -> None:
        self.messages, self.k = messages, k

    def __call__(self, piece: EdgePiece, rows: list[Tensor]) -> list[Tensor]:
        *rows, known = rows
        phase = _WholeReductions(self.messages.call, piece, self.k)
        self.messages.run(piece, rows, phase)
        shifts = phase.values[self.k].to(known.dtype) - known[:, 0]
        return [torch.stack([shifts.sum(0), shifts.square().sum(0)])[None]]


class _WholeReductions:
    """Computes the reductions of a piece, to which all in-edges of its destinations belong.

    Args:
        stop: the reduction that ends the run, whose messages are kept in its place.
    """

    def __init__(self, call: Call, piece: EdgePiece, stop: int | None = None) -> None:
        self.call, self.window, self.stop = call, piece.window, stop
        self.num_dst, self.offset, self.whole_dst = _length(piece.window), piece.window.start, call.edges.num_dst
        structure = call.structure
        self.last = None if structure.edge_output else len(structure.reductions) - 1
        self.values: dict[int, Tensor] = {}
        self.moments: dict[int, Tensor] = {}

    def known_base(self, k: int) -> Base | None:
        return self.call.structure.reductions[k].base

    def reduce(self, k: int, op: str, values: Tensor, index: Tensor, base: Base) -> Tensor:
        if k in self.moments:
            return self.moments[k]
        if k == self.stop:
            self.values[k] = values
            raise StopPass
        self.values[k] = REDUCERS[op].whole(values, index, self.num_dst, base)
        if k == self.last:
            raise StopPass
        return self.values[k]


def _length(window: slice) -> int:
    found: int = window.stop - window.start
    return found


def _refuse(call: Call) -> None:
    if call.structure.random:
        raise RefusedError(
            f"{call.program.name}: random numbers inside message(), other than those of F.dropout, cannot be drawn "
            f"again in a backward with create_graph=True. Draw them before the layer is called, and pass them as edge "
            f"data"
        )
