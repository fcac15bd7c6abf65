"""Forward: the reductions of a call, stage by stage. Mathematics, no buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from shardpass.core.aggregation.call import Call, EdgePiece, ForwardResult, Operands
from shardpass.core.aggregation.execute import Part, Push, Rows, execute
from shardpass.core.aggregation.formulas import FormulaStage, is_by_formula
from shardpass.core.aggregation.rerun import run_again
from shardpass.core.kernels import gather_extremum, gather_sum, shaped, take_extremum
from shardpass.core.sharding import HOST, Chunk, Shard
from shardpass.core.tracing import KERNEL_FORMS, REDUCERS, Base, State, StopPass, accumulator_dtype, rescale
from shardpass.errors import DivergenceError

ONLY = slice(0, 1)  # the one row of a reduction over all edges


def run_forward(call: Call, operands: Operands) -> ForwardResult:
    """All reductions of the call, or its edge result. Collective; runs without gradients."""
    result, structure = ForwardResult(), call.structure
    result.values.update(counts(call))
    for stage in range(structure.num_stages):
        members = [k for k in structure.of_stage(stage) if structure.reductions[k].form != "ones"]
        to_edges = structure.edge_output and stage == structure.num_stages - 1
        by_kernels = all(structure.reductions[k].form in KERNEL_FORMS for k in members) and not to_edges
        _start_states(call, members, by_kernels, result)
        if to_edges:
            shape = call.edges.num_edges, *(structure.edge_tail or ())  # some edges may be left out
            place = call.plan.comm.device if call.streamed_to is None else HOST
            result.edges = torch.zeros(shape, dtype=structure.edge_dtype, device=place)
        part: Part | None = None
        if by_kernels:
            part = _KernelSums(call, operands, members, result)
        elif members and is_by_formula(call, operands):
            part = FormulaStage(call, operands, members, result)
        elif members or to_edges:
            part = _Messages(call, operands, members, stage, to_edges, result)
        if part is not None:
            execute(Push(call, operands), part)
        _finish_values(call, members, result)
    return result


def counts(call: Call) -> dict[int, Tensor]:
    """The reductions that count in-edges, which take no pass."""
    found = {}
    for k, reduction in enumerate(call.structure.reductions):
        if reduction.form == "ones":
            degrees = shaped(call.degrees().to(reduction.dtype, copy=True), [1] * len(reduction.tail))
            is_wide = any(width != 1 for width in reduction.tail)
            found[k] = degrees.expand(-1, *reduction.tail).contiguous() if is_wide else degrees
    return found


def _start_states(call: Call, members: list[int], by_kernels: bool, result: ForwardResult) -> None:
    for k in members:
        reduction = call.structure.reductions[k]
        device = call.plan.comm.device
        if by_kernels and reduction.op == "sum":  # the first block writes it
            shape = (call.edges.num_dst, *reduction.tail)
            result.states[k] = [torch.empty(shape, dtype=accumulator_dtype(reduction.dtype), device=device)]
        else:
            like = torch.empty(0, dtype=reduction.dtype, device=device)
            result.states[k] = REDUCERS[reduction.op].init(call.edges.num_dst, reduction.tail, like)


def _finish_values(call: Call, members: list[int], result: ForwardResult) -> None:
    for k in members:
        reduction = call.structure.reductions[k]
        reducer = REDUCERS[reduction.op]
        if reducer.is_global:
            _merge_ranks(call, k, result.states[k])
        result.values[k] = reducer.value(result.states[k], reduction.base).to(reduction.dtype)


def _merge_ranks(call: Call, k: int, state: State) -> None:
    """Merge the states of all ranks, in rank order, into `state`. Collective."""
    reducer = REDUCERS[call.structure.reductions[k].op]
    widths = [part.numel() for part in state]
    gathered = call.plan.comm.all_gather(torch.cat([part.reshape(1, -1) for part in state], dim=1), label=call.label)
    merged = None
    for row in gathered:
        theirs = [flat.view_as(part) for flat, part in zip(row[0].split(widths), state)]
        if merged is None:
            merged = [part.clone() for part in theirs]
        else:
            reducer.merge(merged, theirs)
    assert merged is not None
    for part, value in zip(state, merged):
        part.copy_(value)


class _KernelSums(Part):
    """Reductions of copies of source rows, by kernels."""

    def __init__(self, call: Call, operands: Operands, members: list[int], result: ForwardResult) -> None:
        self.call, self.operands, self.members, self.states = call, operands, members, result.states
        self.reads = call.structure.sources_of(members)
        self.takes_placed = all(call.structure.reductions[k].form != "extremum" for k in members)

    def add(self, number: int, shard: Shard, rows: Rows, into: Rows) -> None:
        for k in self.members:
            reduction, state = self.call.structure.reductions[k], self.states[k]
            if reduction.form == "extremum":
                gather_extremum(reduction.op, state, shard, rows[reduction.source])
                continue
            weights = self.call.weights(self.operands, shard, reduction.weight)
            gather_sum(state[0], shard, rows[reduction.source], weights, fresh=number == 0)


class _Messages(Part):
    """The reductions of one stage, or the edge result, by the message function, run on chunks of edges."""

    def __init__(
        self, call: Call, operands: Operands, members: list[int], stage: int, to_edges: bool, result: ForwardResult
    ) -> None:
        self.call, self.operands, self.stage, self.result = call, operands, stage, result
        self.to_edges, self.last = to_edges, None if to_edges else max(members)
        self.reads = call.structure.sources_of(members, with_edges=to_edges)
        self.max_edges = call.chunk_edges(operands)

    def add(self, number: int, shard: Shard, rows: Rows, into: Rows) -> None:
        call = self.call
        for chunk in shard.chunks(self.max_edges):
            phase = ForwardPhase(call, chunk, self.stage, self.last, self.result)
            piece = EdgePiece.of_chunk(shard, chunk)
            inputs = call.inputs(self.operands, piece, rows)
            run = run_again(call, inputs, phase, (number, chunk.start), call.drops(piece.places))
            if run.message is None:
                continue
            if call.program.aggregate is not None or run.num_reductions != len(call.structure.reductions):
                raise DivergenceError(
                    f"{call.program.name} on rank {call.plan.comm.rank}: the message function made "
                    f"{run.num_reductions} reductions on some edges and {len(call.structure.reductions)} on others; a "
                    f"Python branch depends on the data of a few edges"
                )
            if self.to_edges:
                assert self.result.edges is not None
                shard.put(self.result.edges, run.message, chunk)


def _take(op: str, state: State, values: Tensor, index: Tensor) -> None:
    if op in ("max", "min"):
        take_extremum(op, state, values, index)
    else:
        REDUCERS[op].accumulate(state, values, index)


class ForwardPhase:
    """Accumulates the reductions of one stage for one chunk; earlier stages are known, later ones not reached."""

    def __init__(self, call: Call, chunk: Chunk, stage: int, last: int | None, result: ForwardResult) -> None:
        self.num_dst, self.offset, self.whole_dst = chunk.high - chunk.low, chunk.low, call.edges.num_dst
        self._reductions = call.structure.reductions
        self._leaders = {r.leader for r in self._reductions if r.leader is not None}
        self._window = slice(chunk.low, chunk.high)
        self._stage, self._last, self._result = stage, last, result
        self._shift: dict[int, tuple[Tensor, Tensor]] = {}

    def known_base(self, k: int) -> Base | None:
        return self._reductions[k].base if k < len(self._reductions) else None

    def reduce(self, k: int, op: str, values: Tensor, index: Tensor, base: Base) -> Tensor:
        reduction = self._reductions[k]
        window = ONLY if REDUCERS[op].is_global else self._window
        if k in self._result.values:
            return self._result.values[k][window]
        answer = values.new_zeros((*REDUCERS[op].lead(self.num_dst), *values.shape[1:]))
        if reduction.stage == self._stage:
            state = [part[window] for part in self._result.states[k]]
            if reduction.leader is not None:
                self._follow(state[0], values, index, reduction.leader)
            elif k in self._leaders:
                answer = self._lead(k, op, state, values, index)
            else:
                _take(op, state, values, index)
        if k == self._last:
            raise StopPass
        return answer

    def _lead(self, k: int, op: str, state: State, values: Tensor, index: Tensor) -> Tensor:
        """Take a maximum, and answer that of this chunk alone, from which the sum that follows is measured."""
        reducer = REDUCERS[op]
        part = reducer.init(self.num_dst, values.shape[1:], values)
        _take(op, part, values, index)
        before = state[0].clone()
        reducer.merge(state, part)
        self._shift[k] = (rescale(before, state[0]), rescale(part[0], state[0]))
        return part[0].masked_fill(part[0] == float("-inf"), 0)

    def _follow(self, total: Tensor, values: Tensor, index: Tensor, leader: int) -> None:
        """Add a sum of exponentials, after the maximum it is measured from may have grown (online softmax)."""
        mine, theirs = self._shift[leader]
        part = torch.zeros_like(total).index_add_(0, index, values.to(total.dtype))
        total.mul_(mine).add_(part * theirs)
