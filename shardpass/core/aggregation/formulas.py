"""Messages that are formulas: forward and backward go through their steps, and no tensor has a row per edge.

Forward adds the messages of a chunk to the states of its reductions. A sum that is measured from a maximum (online
softmax) follows once the maximum of the chunk is known. Backward goes through the formula of the gradients, which
computes the messages again. With several threads it does so twice: by destination, and by source for the gradients of
sources, so that no two threads add to the same row.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shardpass.core.aggregation.call import Call, ForwardResult, Operands
from shardpass.core.aggregation.execute import Part, Rows
from shardpass.core.aggregation.gradients import Gradients
from shardpass.core.kernels import (
    FormulaEdges,
    FormulaLoop,
    RowRun,
    by_destination,
    by_source,
    cut_edges,
    handles_formulas,
)
from shardpass.core.ranks import ordinary_tensors
from shardpass.core.sharding import Shard, Transposes
from shardpass.core.tracing import REDUCERS, Extremum, Key, Leaf, State, rescale

_BYTES_PER_EDGE = 24  # of the rows at both ends, and of the place of an edge


def is_by_formula(call: Call, operands: Operands) -> bool:
    """Whether the messages of the call are computed by their formula."""
    formula = call.structure.formula
    if formula is None or call.streamed_to is not None:
        return False
    dtype = next(r.dtype for r in call.structure.reductions if r.form != "ones")  # of everything
    result = torch.empty(0, dtype=dtype, device=call.plan.comm.device)
    inputs = [operands[key] for leaf in formula.leaves if (key := _input(leaf)) is not None]  # maybe none: of degrees
    return all(map(handles_formulas, [result, *inputs]))


class _Tables:
    """The rows that the leaves of a formula read, contiguous: they are read chunk by chunk."""

    def __init__(self, call: Call, operands: Operands, values: dict[int, Tensor]) -> None:
        self._call, self._operands, self._values = call, operands, values
        self._kept: dict[Leaf, Tensor] = {}
        self._block: dict[str, Tensor] = {}

    def of_block(self, rows: dict[str, Tensor]) -> None:
        """From now on, sources are those of a block."""
        self._block = {name: tensor.contiguous() for name, tensor in rows.items()}

    def keep(self, leaf: Leaf, rows: Tensor) -> None:
        """The rows of a leaf that is neither an input nor a result."""
        self._kept[leaf] = rows.contiguous()

    def rows(self, leaf: Leaf) -> Tensor:
        """``[num_rows, ...]``."""
        if leaf.kind == "src":
            return self._block[leaf.name]
        if leaf not in self._kept:
            key = _input(leaf)
            self.keep(leaf, self._values[leaf.number] if key is None else self._operands[key])
        return self._kept[leaf]

    def constant(self, leaf: Leaf) -> Tensor:
        """What a leaf that is the same for all edges holds."""
        if leaf.kind == "number":
            return torch.tensor([leaf.value], dtype=torch.float64)
        captures = self._operands.captures or self._call.structure.outside
        return captures[leaf.number]


class FormulaStage(Part):
    """The reductions of one stage. Those that follow a maximum are reduced once it is known for a chunk."""

    def __init__(self, call: Call, operands: Operands, members: list[int], result: ForwardResult) -> None:
        reductions, formula = call.structure.reductions, call.structure.formula
        assert formula is not None
        self.tables, self.states = _Tables(call, operands, result.values), result.states
        self.leaders = {k: leader for k in members if (leader := reductions[k].leader) is not None}
        ops, dtype = {k: reductions[k].op for k in members}, reductions[members[0]].dtype
        self.reads, self.most, self.edges = call.structure.sources_of(members), _most_edges(call), _Edges(call)
        leading = [k for k in members if k not in self.leaders]
        self.first, self.after = (
            FormulaLoop(formula.only(part), self.tables.constant, ops, dtype) for part in (leading, list(self.leaders))
        )

    def add(self, number: int, shard: Shard, rows: Rows, into: Rows) -> None:
        self.tables.of_block(rows)
        for run in by_destination(shard, self.most):
            self._reduce(shard, run)

    def _reduce(self, shard: Shard, run: RowRun) -> None:
        """Take the edges of a run into the states."""
        low, high = run.bounds.low, run.bounds.high
        tops = {leader: self.states[leader][0][low:high] for leader in self.leaders.values()}
        before = {leader: top.clone() for leader, top in tops.items()}
        edges = self.edges.of(shard, run, low)

        def rows(leaf: Leaf) -> Tensor:
            if leaf.kind == "reduced" and leaf.number in tops:
                top = tops[leaf.number]
                return top.masked_fill(top == float("-inf"), 0)
            found = self.tables.rows(leaf)
            return found[low:high] if leaf.kind in ("dst", "reduced") else found

        def states(k: int) -> State:
            return [part[low:high] for part in self.states[k]]

        self.first.run(edges, rows, states)
        for k, leader in self.leaders.items():
            states(k)[0].mul_(rescale(before[leader], tops[leader]))
        self.after.run(edges, rows, states)


class FormulaAdjoints(Part):
    """The reductions of one depth: the formula of their gradients."""

    def __init__(
        self, call: Call, operands: Operands, results: ForwardResult, members: list[int], gradients: Gradients
    ) -> None:
        self.call, self.operands, self.members, self.gradients = call, operands, members, gradients
        reductions, formula = call.structure.reductions, call.structure.formula
        assert formula is not None
        reached = {k: reductions[k].op for k in members if k in gradients.reached}
        self.depth, self.dtype = reductions[members[0]].depth, reductions[members[0]].dtype
        self.formula = formula.gradient(reached, [leaf for leaf in formula.leaves if self._is_wanted(leaf)])
        self.tables = _Tables(call, operands, results.values)
        for k in reached:
            reducer, grad = REDUCERS[reductions[k].op], gradients.reductions[k]
            if isinstance(reducer, Extremum):
                share = reducer.share(results.states[k], results.values[k], grad, reductions[k].base)
                self.tables.keep(Leaf("share", number=k), share.to(self.dtype))
            else:
                self.tables.keep(Leaf("grad", number=k), grad)
        self.own = {leaf: self._zeros(leaf) for leaf in self._outputs() if leaf.kind in ("reduced", "outside")}
        self.reads = self.returns = call.structure.sources_of(members)
        self.most, self.transposes, self.has_run = _most_edges(call), call.plan.comm.caches.of(Transposes), False
        self.edges = _Edges(call)
        of_src = [leaf for leaf in self._outputs() if leaf.kind == "src" and torch.get_num_threads() > 1]
        of_dst = [leaf for leaf in self._outputs() if leaf not in of_src]
        self.reads_edges = any(leaf.kind == "edge" for leaf in self.formula.only(of_src).leaves)
        self.by_dst, self.by_src = (
            FormulaLoop(self.formula.only(part), self.tables.constant, {}, self.dtype) if part else None
            for part in (of_dst, of_src)
        )

    def _is_wanted(self, leaf: Leaf) -> bool:
        """Whether a leaf needs a gradient."""
        if leaf.kind == "reduced":
            reduction = self.call.structure.reductions[leaf.number]
            return reduction.differentiable and reduction.depth < self.depth
        if leaf.kind == "src":
            return self.call.canonical[leaf.name] in self.gradients.src
        key = _input(leaf)
        return leaf.kind == "outside" if key is None else key in self.gradients

    def _outputs(self) -> list[Leaf]:
        return [leaf for leaf, _ in self.formula.outputs if isinstance(leaf, Leaf)]

    def _zeros(self, leaf: Leaf) -> Tensor:
        if leaf.kind == "reduced":
            return torch.zeros_like(self.gradients.reductions[leaf.number], memory_format=torch.contiguous_format)
        captured = self.operands.captures[leaf.number]
        return captured.new_zeros((torch.get_num_threads(), captured.numel()))

    def add(self, number: int, shard: Shard, rows: Rows, into: Rows) -> None:
        self.tables.of_block(rows)
        target = partial(self._target, into)
        if self.by_dst is not None:
            for run in by_destination(shard, self.most):
                self.by_dst.run(self.edges.of(shard, run), self.tables.rows, target)
        if self.by_src is not None:
            for run in by_source(shard, self.transposes, self.most, self.reads_edges):
                self.by_src.run(self.edges.of(shard, run, is_by_source=True), self.tables.rows, target)
        self.has_run |= shard.num_edges > 0 and bool(self.gradients.reached.intersection(self.members))

    def finish(self) -> None:
        """Add the gradients of reductions and captures, now that all edges have been seen."""
        gradients = self.gradients
        gradients.ran |= self.has_run
        for leaf, found in self.own.items() if self.has_run else ():
            number = leaf.number
            if leaf.kind == "reduced":
                gradients.reductions[number] = gradients.reductions[number] + found
                gradients.reached.add(number)
            else:
                gradients.add_capture(number, found.sum(0).view(self.operands.captures[number].shape))

    def _target(self, into: dict[str, Tensor], leaf: int | Leaf) -> State:
        """What the gradient of a leaf is added to."""
        assert isinstance(leaf, Leaf)
        if leaf.kind == "src":
            return [into[leaf.name]]
        key = _input(leaf)
        return [self.own[leaf] if key is None else self.gradients.touch(key)]


def _input(leaf: Leaf) -> Key | None:
    """The input that a leaf reads, if it is one."""
    return Key(leaf.kind, leaf.name) if leaf.kind in ("src", "dst", "edge") else None


def _most_edges(call: Call) -> int:
    """How many edges are taken at a time."""
    return max(1, call.plan.options.chunk_bytes // _BYTES_PER_EDGE) * torch.get_num_threads()


class _KeptEdges(dict[tuple[int, bool, bool, int], FormulaEdges]):
    """The edges of one shard in the forms in which formulas have read them."""


class _Edges:
    """Gives runs of edges the form in which formulas read them. It is kept of a list that fits one run."""

    def __init__(self, call: Call) -> None:
        self._caches, self._are_few = call.plan.comm.caches, call.edges.num_edges <= _most_edges(call)

    def of(self, shard: Shard, run: RowRun, first_dst: int = 0, is_by_source: bool = False) -> FormulaEdges:
        """The edges of a run, whose destinations are counted from `first_dst`."""
        key = first_dst, is_by_source, run.positions is None, torch.get_num_threads()
        kept = self._caches.of(_KeptEdges, shard) if self._are_few else {}
        if key not in kept:
            with ordinary_tensors():
                kept[key] = _edges_of(shard, run, first_dst, is_by_source)
        return kept[key]


def _edges_of(shard: Shard, run: RowRun, first_dst: int, is_by_source: bool) -> FormulaEdges:
    src_rows, dst_rows = run.ends(is_by_source)
    places: slice | Tensor = src_rows if run.positions is None else shard.places(run.positions)
    if isinstance(places, slice):
        places = torch.arange(places.start, places.stop)
    rows = [one.to(torch.int64) for one in (src_rows, dst_rows - first_dst, places)]
    return FormulaEdges(torch.stack(rows), cut_edges(run))
