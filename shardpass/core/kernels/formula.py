"""Formulas of messages over some edges of a shard, by numba's loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardpass.core.kernels.cpu_loops import in_threads, numba_loops_for
from shardpass.core.tracing import MOST_TABLES, Formula, Leaf, State, Step

_REGISTER = 1 << 11  # numbers of a register: those of a formula should fit the second-level cache together


class FormulaEdges(NamedTuple):
    """Some edges.

    Args:
        rows: the row that each edge has in tensors of sources, of destinations, and of edges, ``[3, E]`` int64. Where
            the formula reads no edge tensor, the last may be anything.
        cuts: ``(first, last)`` edge of each thread. No two of them may write to the same row.
    """

    rows: Tensor
    cuts: list[tuple[int, int]]


class FormulaLoop:
    """Computes a formula for edges and adds its outputs where they belong. Only for rows that `handles_formulas` takes.

    Args:
        read: gives the tensor of a leaf that is the same for all edges, with as many numbers as channels, or one.
        ops: what becomes of messages: ``sum``, ``max`` or ``min``. Gradients of leaves are added up.
        dtype: of all values.
    """

    def __init__(
        self, formula: Formula, read: Callable[[Leaf], Tensor], ops: Mapping[int, str], dtype: torch.dtype
    ) -> None:
        from shardpass.core.kernels import numba_formula as loops

        self._go_through, self._outputs = loops.go_through, [what for what, _ in formula.outputs]
        self._leaves = [leaf for leaf in formula.leaves if not leaf.is_fixed]
        registers = _registers(formula)
        fixed = [(at, leaf) for at, leaf in zip(registers, formula.values) if isinstance(leaf, Leaf) and leaf.is_fixed]
        constants = [read(leaf).detach().to(dtype).reshape(1, -1).expand(1, formula.width) for _, leaf in fixed]
        self._program = (
            _table(_loads(loops, formula, registers), 3),
            np.array([at for at, _ in fixed], dtype=np.int64),
            torch.cat([torch.empty(0, formula.width, dtype=dtype), *constants]).numpy(),
            _table(_steps(loops, formula, registers), 5),
            _table([_store(loops, what, ops, registers[place]) for what, place in formula.outputs], 4),
        )
        self.num_registers = max(registers, default=0) + 1
        self._at_once = max(1, _REGISTER // formula.width)

    def run(self, edges: FormulaEdges, read: Callable[[Leaf], Tensor], into: Callable[[Any], State]) -> None:
        """Go over `edges`.

        Args:
            read: gives the rows of a leaf, ``[num_rows, ...]``.
            into: gives what an output is added to, contiguous: the state of the reduction, or the gradient of the leaf.
                That of an ``outside`` leaf has a row for each thread.
        """
        if edges.rows.numel() == 0 or not self._outputs:
            return
        loads, fixed, constants, steps, stores = self._program
        tables = _padded([_flat(read(leaf).detach().contiguous()) for leaf in self._leaves], constants)
        states = [into(what) for what in self._outputs]
        sums = _padded([_flat(state[0]) for state in states], constants)
        no_ties = torch.empty(0, 0, dtype=torch.int32)  # of a sum
        ties = _padded([_flat([*state, no_ties][1]) for state in states], no_ties.numpy())
        index = edges.rows.numpy()

        def work(thread: int, first: int, last: int) -> None:
            given = loads, tables, fixed, constants, steps, stores, sums, ties, index
            self._go_through(*given, first, last, thread, self._at_once, self.num_registers)

        in_threads(work, [(thread, *cut) for thread, cut in enumerate(edges.cuts)])


def handles_formulas(rows: Tensor) -> bool:
    """Whether formulas of rows of this device and dtype can be computed."""
    return numba_loops_for(rows) is not None


def _registers(formula: Formula) -> list[int]:
    """The register of each value. One is used again when nothing reads its value any more: fewer must stay in cache."""
    values = formula.values
    origin: list[int] = []  # of each value; a detached one is its operand
    last_use: dict[int, int] = {}
    for place, value in enumerate(values):
        origin.append(origin[value.operands[0]] if isinstance(value, Step) and value.op == "detach" else place)
        if isinstance(value, Step):
            last_use.update((origin[operand], place) for operand in value.operands)
    last_use.update((origin[place], len(values)) for _, place in formula.outputs)
    leaves = [place for place, value in enumerate(values) if isinstance(value, Leaf)]
    registers, free, count = {place: number for number, place in enumerate(leaves)}, list[int](), len(leaves)
    for place, value in enumerate(values):
        if origin[place] != place or isinstance(value, Leaf):
            continue
        registers[place], count = (free.pop(), count) if free else (count, count + 1)
        ended = {origin[operand] for operand in value.operands if last_use[origin[operand]] == place}
        free += [registers[one] for one in sorted(ended) if not _is_fixed(values[one])]
    return [registers[one] for one in origin]


def _loads(loops: ModuleType, formula: Formula, registers: list[int]) -> list[tuple[int, ...]]:
    read = [(at, leaf) for at, leaf in zip(registers, formula.values) if isinstance(leaf, Leaf) and not leaf.is_fixed]
    return [(at, _side(loops, leaf), leaf.repeats) for at, leaf in read]


def _steps(loops: ModuleType, formula: Formula, registers: list[int]) -> list[tuple[int, ...]]:
    found = []
    for place, value in zip(registers, formula.values):
        if isinstance(value, Step) and value.op != "detach":
            operands = [registers[operand] for operand in value.operands]
            found.append((getattr(loops, value.op.upper()), place, *operands, *operands[:1] * (3 - len(operands))))
    return found


def _store(loops: ModuleType, what: int | Leaf, ops: Mapping[int, str], register: int) -> tuple[int, ...]:
    if isinstance(what, Leaf):
        return loops.SUM, register, _side(loops, what), what.repeats
    return getattr(loops, ops[what].upper()), register, loops.OF_DESTINATION, 1


def _side(loops: ModuleType, leaf: Leaf) -> int:
    sides = {"src": loops.OF_SOURCE, "edge": loops.OF_EDGE, "outside": loops.OF_ALL}
    found: int = sides.get(leaf.kind, loops.OF_DESTINATION)
    return found


def _is_fixed(value: Leaf | Step) -> bool:
    return isinstance(value, Leaf) and value.is_fixed


def _table(rows: Sequence[tuple[int, ...]], width: int) -> Any:
    return np.array(rows, dtype=np.int64).reshape(-1, width)


def _flat(tensor: Tensor) -> Any:
    return tensor.view(tensor.size(0), tensor.shape[1:].numel()).numpy()  # what is written to must not be a copy


def _padded(arrays: list[Any], like: Any) -> tuple[Any, ...]:
    """The arrays, and empty ones: the loop takes tuples of one length."""
    return (*arrays, *[np.empty((0, 0), like.dtype)] * (MOST_TABLES - len(arrays)))
