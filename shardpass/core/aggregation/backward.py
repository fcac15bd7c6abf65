"""Backward: from the deepest reductions up, by the adjoint of what forward computed of the edges."""

from __future__ import annotations

from torch import Tensor

from shardpass.core.aggregation.call import Call, EdgePiece, ForwardResult, Operands
from shardpass.core.aggregation.execute import Part, Push, Rows, execute
from shardpass.core.aggregation.formulas import FormulaAdjoints, is_by_formula
from shardpass.core.aggregation.forward import ONLY
from shardpass.core.aggregation.gradients import Gradients, is_linear
from shardpass.core.aggregation.rerun import GradientRun
from shardpass.core.kernels import edge_dot, gather_extremum_transposed, gather_sum_transposed, shares_of_edges
from shardpass.core.sharding import Chunk, Shard, Transposes
from shardpass.core.tracing import KERNEL_FORMS, REDUCERS, Base, Extremum, Key, Reduction, StopPass


def run_backward(call: Call, operands: Operands, results: ForwardResult, gradients: Gradients) -> None:
    """Add the gradients of all inputs to `gradients`. Collective: every rank runs it, whatever its own loss reached.

    Gradients of source rows arrive from all ranks and are whole; those of captures are this rank's share.
    """
    structure = call.structure
    for depth in range(structure.max_depth, -1, -1):
        members = structure.of_depth(depth)
        for k in members:
            if REDUCERS[structure.reductions[k].op].is_global:
                gradients.reductions[k] = call.plan.comm.all_reduce(gradients.reductions[k], "sum", call.label)
                gradients.reached.add(k)
        to_edges = structure.edge_output and structure.edge_depth == depth and structure.edge_differentiable
        part: Part
        if all(structure.reductions[k].form in KERNEL_FORMS for k in members) and not to_edges:
            part = _KernelAdjoints(call, operands, results, members, gradients)
            if part.has_nothing_to_do:
                continue
        elif is_by_formula(call, operands):
            part = FormulaAdjoints(call, operands, results, members, gradients)
        else:
            part = _MessageAdjoints(call, operands, results, members, depth, to_edges, gradients)
        execute(Push(call, operands, gradients), part)


class _KernelAdjoints(Part):
    """Reductions of copies of source rows: transposed kernels give their gradients.

    Gradients of sums need no source rows, so these are fetched for weights and extrema alone.
    """

    def __init__(
        self, call: Call, operands: Operands, results: ForwardResult, members: list[int], gradients: Gradients
    ) -> None:
        self.call, self.operands, self.values, self.gradients = call, operands, results.values, gradients
        self.reductions = {k: call.structure.reductions[k] for k in members}
        self.shares = {k: self._share(k, reduction, results) for k, reduction in self.reductions.items()}
        self.writes_first, self.transposes = is_linear(call), call.plan.comm.caches.of(Transposes)
        self.written: set[tuple[int, str]] = set()  # blocks and sources whose gradients were begun
        self.max_edges = call.chunk_edges(operands)
        self.returns = sorted({r.source for r in self.reductions.values()})
        weighted = {r.source for r in self.reductions.values() if r.weight in gradients.edge}
        compared = {r.source for k, r in self.reductions.items() if self.shares[k] is not None}
        self.reads = sorted(weighted | compared)
        is_wanted = any(call.canonical[name] in gradients.src for name in self.returns)
        self.has_nothing_to_do = not weighted and not is_wanted

    def _share(self, k: int, reduction: Reduction, results: ForwardResult) -> Tensor | None:
        """What each tie of an extremum gets of the gradient; `None` for sums."""
        reducer = REDUCERS[reduction.op]
        if not isinstance(reducer, Extremum):
            return None
        grad = self.gradients.reductions[k]
        return reducer.share(results.states[k], results.values[k], grad, reduction.base).to(reduction.dtype)

    def add(self, number: int, shard: Shard, rows: Rows, into: Rows) -> None:
        self.gradients.ran |= shard.num_edges > 0
        for k, reduction in self.reductions.items():
            if reduction.source in into:
                self._add_to_sources(k, reduction, number, shard, rows, into[reduction.source])
            if reduction.weight in self.gradients.edge and k in self.gradients.reached:
                self._add_to_weights(k, reduction, shard, rows, self.max_edges)

    def _add_to_sources(
        self, k: int, reduction: Reduction, number: int, shard: Shard, rows: dict[str, Tensor], into: Tensor
    ) -> None:
        grad, share, is_reached = self.gradients.reductions[k], self.shares[k], k in self.gradients.reached
        if share is not None:
            if is_reached:
                source = rows[reduction.source]
                gather_extremum_transposed(into, shard, self.transposes, source, self.values[k], share)
            return
        begun = self.call.edges.position(number), self.call.canonical[reduction.source]
        fresh = self.writes_first and begun not in self.written
        self.written.add(begun)
        if is_reached:
            weights = self.call.weights(self.operands, shard, reduction.weight)
            gather_sum_transposed(into, shard, self.transposes, grad, weights, fresh)
        elif fresh:
            into.zero_()

    def _add_to_weights(
        self, k: int, reduction: Reduction, shard: Shard, rows: dict[str, Tensor], max_edges: int
    ) -> None:
        if shard.num_edges == 0:
            return
        num_heads = self.operands.edge[reduction.weight].shape[1:].numel()
        found = edge_dot(shard, rows[reduction.source], self.gradients.reductions[k], max_edges, num_heads)
        into = self.gradients.touch(Key("edge", reduction.weight))
        old = shard.select(into)
        shard.put(into, old + found.reshape(old.shape))


class _MessageAdjoints(Part):
    """The reductions of one depth: the message function, differentiated by chunks."""

    def __init__(
        self,
        call: Call,
        operands: Operands,
        results: ForwardResult,
        members: list[int],
        depth: int,
        to_edges: bool,
        gradients: Gradients,
    ) -> None:
        self.call, self.operands, self.results = call, operands, results
        self.members, self.depth, self.to_edges, self.gradients = members, depth, to_edges, gradients
        self.reads = self.returns = call.structure.sources_of(members, with_edges=to_edges)
        self.is_reached = (to_edges and gradients.edges is not None) or bool(gradients.reached & {*members})
        self.max_edges = call.chunk_edges(operands)

    def add(self, number: int, shard: Shard, rows: Rows, into: Rows) -> None:
        for chunk in shard.chunks(self.max_edges) if self.is_reached else ():
            self.gradients.ran = True
            self._differentiate(number, shard, chunk, rows, into)

    def _differentiate(
        self, number: int, shard: Shard, chunk: Chunk, rows: dict[str, Tensor], into: dict[str, Tensor]
    ) -> None:
        run = GradientRun(self.call, self.operands, EdgePiece.of_chunk(shard, chunk), rows)
        phase = BackwardPhase(self, chunk)
        message, _ = run.run(phase, (number, chunk.start), self.call.drops(run.piece.places))
        outputs, cotangents = self._cotangents(phase, run, shard, chunk, message)
        known = [(k, t) for k, t in phase.known.items() if t.requires_grad]
        found = run.add_gradients(outputs, cotangents, into, self.gradients, others=[t for _, t in known])
        for (k, _), part in zip(known, found):
            if part is not None:
                self.gradients.reductions[k][self._window(k, chunk)] += part
                self.gradients.reached.add(k)

    def _window(self, k: int, chunk: Chunk) -> slice:
        is_global = REDUCERS[self.call.structure.reductions[k].op].is_global
        return ONLY if is_global else slice(chunk.low, chunk.high)

    def _cotangents(
        self, phase: BackwardPhase, run: GradientRun, shard: Shard, chunk: Chunk, message: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What to differentiate, and the gradient of each."""
        outputs, cotangents, gradients = [], [], self.gradients
        for k, values in phase.messages.items():
            if not values.requires_grad or k not in gradients.reached:
                continue
            reduction, window = self.call.structure.reductions[k], self._window(k, chunk)
            value = self.results.values[k][window] if k in self.results.values else values
            state = [part[window] for part in self.results.states.get(k, [])]
            reducer, grad, index = REDUCERS[reduction.op], gradients.reductions[k][window], run.inputs.index
            if isinstance(reducer, Extremum):
                share = reducer.share(state, value, grad, reduction.base)
                grad = shares_of_edges(values.detach(), index, value, share)
            else:
                grad = reducer.vjp(values.detach(), index, state, value, grad, reduction.base)
            outputs.append(values)
            cotangents.append(grad.to(values.dtype))
        if self.to_edges and message is not None and message.requires_grad and gradients.edges is not None:
            for part, grad in self.call.program.columns(message, shard.select(gradients.edges, chunk)):
                outputs.append(part)
                cotangents.append(grad)
        return outputs, cotangents


class BackwardPhase:
    """Notes the messages of the reductions being differentiated; shallower ones are known and given as leaves."""

    def __init__(self, owner: _MessageAdjoints, chunk: Chunk) -> None:
        self.num_dst, self.offset, self.whole_dst = chunk.high - chunk.low, chunk.low, owner.call.edges.num_dst
        self._reductions = owner.call.structure.reductions
        self._window = slice(chunk.low, chunk.high)
        self._owner = owner
        self._last = None if owner.to_edges else max(owner.members)
        self.messages: dict[int, Tensor] = {}
        self.known: dict[int, Tensor] = {}

    def known_base(self, k: int) -> Base | None:
        return self._reductions[k].base

    def reduce(self, k: int, op: str, values: Tensor, index: Tensor, base: Base) -> Tensor:
        reduction = self._reductions[k]
        if k in self._owner.members:
            self.messages[k] = values
        if k == self._last:
            raise StopPass
        reducer = REDUCERS[op]
        if k not in self._owner.results.values:
            return values.new_zeros((*reducer.lead(self.num_dst), *values.shape[1:]))
        known = self._owner.results.values[k][ONLY if reducer.is_global else self._window].detach()
        if reduction.differentiable and reduction.depth < self._owner.depth:
            known.requires_grad_()
        self.known[k] = known
        return known
