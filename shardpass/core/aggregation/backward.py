"""The backward loop: from the deepest reductions up, refetching blocks and rerunning the body under grad."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardpass.core.aggregation.call import Call, Operands
from shardpass.core.aggregation.forward import ONLY
from shardpass.core.exchange import GradientReturn
from shardpass.core.kernels import edge_dot, gather_extremum_transposed, gather_sum_transposed
from shardpass.core.sharding import Chunk, Shard, Transposes
from shardpass.core.tracing import KERNEL_FORMS, REDUCERS, Base, EdgeTrace, Extremum, Inputs, Reduction, State, StopPass


@dataclass
class Gradients:
    """Gradients of a call's inputs; tensors of the own rows, None where none is needed.

    `reached` are the reductions to which this rank's loss leads. Of others nothing is computed, as in plain autograd,
    where zero times the infinite slope of some function would be NaN; their rounds are walked for the other ranks.
    `touched` are the edge and destination inputs to which something was added; `ran` says whether this rank had edges
    to go over.
    """

    src: dict[str, Tensor]
    dst: dict[str, Tensor]
    edge: dict[str, Tensor]
    captures: list[Tensor | None]
    reductions: dict[int, Tensor]
    edges: Tensor | None
    reached: set[int]
    touched: set[str] = field(default_factory=set)
    ran: bool = False

    def of_edges(self, name: str) -> Tensor:
        """The gradient of an edge tensor, to be added to."""
        self.touched.add(f"e:{name}")
        return self.edge[name]

    def of_dst(self, name: str) -> Tensor:
        """The gradient of a destination tensor, to be added to."""
        self.touched.add(f"d:{name}")
        return self.dst[name]

    def add_capture(self, number: int, part: Tensor) -> None:
        """Add to the gradient of a captured tensor, in its shape."""
        old = self.captures[number]
        self.captures[number] = part if old is None else old + part

    def found(self, key: str) -> Tensor | None:
        """The gradient of an input (``"s:x"``, ``"d:x"``, ``"e:w"``); None where none is needed or none arrived."""
        kind, name = key[0], key[2:]
        gradient = {"s": self.src, "d": self.dst, "e": self.edge}[kind].get(name)
        if gradient is None:
            return None
        is_reached = bool(self.reached) or self.edges is not None
        if kind == "s":  # other ranks may have sent some
            return gradient if is_reached or gradient.any() else None
        return gradient if key in self.touched or (is_reached and not self.ran) else None


def needed_values(call: Call) -> tuple[list[int], list[int]]:
    """``(values, states)``: the reductions whose value, and whose state, backward reads."""
    structure = call.structure
    if structure.attention is not None:
        return [structure.attention.output], [structure.attention.maximum]
    values: set[int] = set()
    for reduction in structure.reductions:
        if reduction.differentiable:
            values |= reduction.parents
    if structure.edge_output:
        values |= {k for k, r in enumerate(structure.reductions) if r.depth < structure.edge_depth}
    states = [k for k, r in enumerate(structure.reductions) if r.differentiable and r.op != "sum"]
    return sorted(values | set(states)), states


def is_linear(call: Call) -> bool:
    """Whether kernels do all of backward: then they write the source gradients first, and nothing need be zero."""
    structure = call.structure
    differentiable = [r for r in structure.reductions if r.differentiable]
    sources = {call.canonical[r.source] for r in differentiable if r.form in ("copy", "scale")}
    return (
        not structure.edge_output
        and structure.max_depth == 0
        and all(r.form in ("copy", "scale") for r in differentiable)
        and sources
        == {call.canonical[name] for name in call.canonical if f"s:{call.canonical[name]}" in call.gradients}
    )


def zero_gradients(
    call: Call, operands: Operands, grad_reductions: dict[int, Tensor], grad_edges: Tensor | None
) -> Gradients:
    """Gradients to be added to: zeros for each input that needs them, and those of the outputs."""

    def zeros(kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        make = torch.empty_like if kind == "s" and is_linear(call) else torch.zeros_like
        return {
            name: make(t, memory_format=torch.contiguous_format)
            for name, t in tensors.items()
            if f"{kind}:{name}" in call.gradients
        }

    structure = call.structure
    alone = structure.max_depth == 0 or structure.attention is not None
    reductions = {}
    for k, reduction in enumerate(structure.reductions):
        if not reduction.differentiable:
            continue
        if k in grad_reductions:  # deeper reductions add to those they hang on
            reductions[k] = grad_reductions[k] if alone else grad_reductions[k].clone()
        else:
            shape = (1, 2) if REDUCERS[reduction.op].is_global else (call.edges.num_dst,)
            reductions[k] = torch.zeros((*shape, *reduction.tail), dtype=reduction.dtype, device=call.plan.comm.device)
    return Gradients(
        src={n: t for n, t in zeros("s", operands.src).items() if call.canonical[n] == n},
        dst=zeros("d", operands.dst),
        edge=zeros("e", operands.edge),
        captures=[None] * len(operands.captures),
        reductions=reductions,
        edges=grad_edges,
        reached=set(grad_reductions),
    )


def run_backward(
    call: Call, operands: Operands, values: dict[int, Tensor], states: dict[int, State], gradients: Gradients
) -> None:
    """Add the gradients of all inputs. Collective: every rank runs it, whatever its own loss reached.

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
        if all(structure.reductions[k].form in KERNEL_FORMS for k in members) and not to_edges:
            shares = {k: _share(structure.reductions[k], k, values, states, gradients) for k in members}
            _run_kernels(call, operands, members, values, shares, gradients)
        else:
            _Pass(call, operands, values, states, members, depth, to_edges, gradients).run()


def _share(
    reduction: Reduction, k: int, values: dict[int, Tensor], states: dict[int, State], gradients: Gradients
) -> Tensor | None:
    reducer = REDUCERS[reduction.op]
    if not isinstance(reducer, Extremum):
        return None
    return reducer.share(states[k], values[k], gradients.reductions[k], reduction.base).to(reduction.dtype)


def _run_kernels(
    call: Call,
    operands: Operands,
    members: list[int],
    values: dict[int, Tensor],
    shares: dict[int, Tensor | None],
    gradients: Gradients,
) -> None:
    """Copies of source rows: the transposed kernels give source gradients. Those of sums need no rows of sources."""
    reductions = [call.structure.reductions[k] for k in members]
    weighted = [r for r in reductions if r.weight in gradients.edge]
    returned = Returned(call, gradients, sorted({r.source for r in reductions}))
    max_edges, linear, transposes = call.chunk_edges(operands), is_linear(call), call.plan.caches.of(Transposes)
    if not weighted and not returned.names:
        return
    compared = [r for k, r in zip(members, reductions) if shares[k] is not None]
    for position, shard, rows in call.walk(operands, sorted({r.source for r in weighted + compared})):
        with returned.block(position, zeroed=not linear) as into:
            written: set[str] = set()
            for k, reduction in zip(members, reductions):
                grad, share = gradients.reductions[k], shares[k]
                if share is not None and reduction.source in into and k in gradients.reached:
                    target = into[reduction.source]
                    gather_extremum_transposed(target, shard, transposes, rows[reduction.source], values[k], share)
                elif share is None and reduction.source in into:
                    scalars = call.weights(operands, shard, reduction.weight)
                    fresh = linear and call.canonical[reduction.source] not in written
                    written.add(call.canonical[reduction.source])
                    if k in gradients.reached:
                        gather_sum_transposed(into[reduction.source], shard, transposes, grad, scalars, fresh)
                    elif fresh:
                        into[reduction.source].zero_()
                gradients.ran |= shard.num_edges > 0
                if reduction.weight in gradients.edge and shard.num_edges and k in gradients.reached:
                    num_heads = operands.edge[reduction.weight].shape[1:].numel()
                    found = edge_dot(shard, rows[reduction.source], grad, max_edges, num_heads)
                    _add_rows(shard, gradients.of_edges(reduction.weight), found)
    returned.finish()


def _add_rows(shard: Shard, target: Tensor, rows: Tensor, chunk: Chunk | None = None) -> None:
    old = shard.select(target, chunk)
    shard.put(target, old + rows.reshape(old.shape), chunk)


class Returned:
    """Where the source gradients of each block go: own rows straight into the result, halo rows back to owners."""

    def __init__(self, call: Call, gradients: Gradients, names: list[str]) -> None:
        wanted = {call.canonical[name] for name in names} & set(gradients.src)
        self.names = sorted(wanted)
        self._alias = {name: call.canonical[name] for name in names if call.canonical[name] in wanted}
        self._own = [gradients.src[name] for name in self.names]
        self._return = GradientReturn(call.plan, self._own, call.stream())
        self._position, self._zeroed = 0, True

    def block(self, position: int, zeroed: bool = True) -> Returned:
        """The block that is entered next; with `zeroed` its gradients start from zero."""
        self._position, self._zeroed = position, zeroed
        return self

    def __enter__(self) -> dict[str, Tensor]:
        into = self._own if self._position == 0 else self._return.buffers(self._position, self._zeroed)
        by_name = dict(zip(self.names, into))
        return {name: by_name[canonical] for name, canonical in self._alias.items()}

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and self._position > 0:
            self._return.send(self._position)

    def finish(self) -> None:
        self._return.finish()


class _Pass:
    """One walk over the blocks for the reductions of one depth: rerun the body, differentiate chunk by chunk."""

    def __init__(
        self,
        call: Call,
        operands: Operands,
        values: dict[int, Tensor],
        states: dict[int, State],
        members: list[int],
        depth: int,
        to_edges: bool,
        gradients: Gradients,
    ) -> None:
        self.call, self.operands, self.values, self.states = call, operands, values, states
        self.members, self.depth, self.to_edges, self.gradients = members, depth, to_edges, gradients

    def run(self) -> None:
        call = self.call
        names = call.structure.sources_of(self.members, with_edges=self.to_edges)
        returned = Returned(call, self.gradients, names)
        max_edges = call.chunk_edges(self.operands)
        for position, shard, rows in call.walk(self.operands, names):
            with returned.block(position) as into:
                for chunk in shard.chunks(max_edges) if self._is_reached() else ():
                    self._chunk(position, shard, chunk, rows, into)
        returned.finish()

    def _is_reached(self) -> bool:
        return (self.to_edges and self.gradients.edges is not None) or bool(self.gradients.reached & {*self.members})

    def _chunk(
        self, position: int, shard: Shard, chunk: Chunk, rows: dict[str, Tensor], into: dict[str, Tensor]
    ) -> None:
        call, program = self.call, self.call.program
        self.gradients.ran = True
        leaves = [saved.detach().requires_grad_() for saved in self.operands.captures]
        substitutes = {id(original): leaf for original, leaf in zip(call.captured, leaves)}
        with torch.enable_grad():
            inputs = call.inputs(self.operands, shard, chunk, rows, leaves=True)
            phase = BackwardPhase(self, chunk)
            message = None
            expected = {id(t) for rows in (inputs.src, inputs.dst, inputs.edge) for t in rows.values()}
            expected |= {id(t) for t in (*leaves, *call.captured)}
            try:
                generator = call.generator(position, chunk)
                trace = EdgeTrace(program, inputs.index, phase, substitutes, expected, generator)
                with call.scope(position, chunk.start), trace:
                    message = program.message(inputs)
                    if program.aggregate is not None:
                        program.aggregate(message, inputs)
            except StopPass:
                pass
            outs, grads = self._cotangents(phase, shard, chunk, inputs, message)
            targets = self._targets(inputs, phase, leaves)
            found = torch.autograd.grad(outs, [t for *_, t in targets], grads, allow_unused=True) if outs else []
        for (kind, key, _), grad in zip(targets, found):
            if grad is not None:
                self._add(kind, key, grad, shard, chunk, inputs, into)

    def _cotangents(
        self, phase: BackwardPhase, shard: Shard, chunk: Chunk, inputs: Inputs, message: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        outs, grads = [], []
        for k, source in phase.messages.items():
            if not source.requires_grad or k not in self.gradients.reached:
                continue
            reduction = self.call.structure.reductions[k]
            window = ONLY if REDUCERS[reduction.op].is_global else slice(chunk.low, chunk.high)
            value = self.values[k][window] if k in self.values else source
            state = [part[window] for part in self.states.get(k, [])]
            grad = REDUCERS[reduction.op].vjp(
                source.detach(), inputs.index, state, value, self.gradients.reductions[k][window], reduction.base
            )
            outs.append(source)
            grads.append(grad.to(source.dtype))
        if self.to_edges and message is not None and message.requires_grad and self.gradients.edges is not None:
            for part, grad in self.call.program.columns(message, shard.select(self.gradients.edges, chunk)):
                outs.append(part)
                grads.append(grad)
        return outs, grads

    def _targets(self, inputs: Inputs, phase: BackwardPhase, leaves: list[Tensor]) -> list[tuple[str, object, Tensor]]:
        targets: list[tuple[str, object, Tensor]] = []
        for kind, tensors in (("s", inputs.src), ("d", inputs.dst), ("e", inputs.edge)):
            targets += [(kind, name, t) for name, t in tensors.items() if t.requires_grad]
        targets += [("r", k, t) for k, t in phase.known.items() if t.requires_grad]
        targets += [("c", i, t) for i, t in enumerate(leaves)]
        # The originals as well: paths that bypass the trace (custom Functions, TorchScript) reach those.
        targets += [("c", i, t) for i, t in enumerate(self.call.captured) if t.requires_grad]
        return targets

    def _is_global(self, k: object) -> bool:
        return REDUCERS[self.call.structure.reductions[int(str(k))].op].is_global

    def _add(
        self,
        kind: str,
        key: object,
        grad: Tensor,
        shard: Shard,
        chunk: Chunk,
        inputs: Inputs,
        into: dict[str, Tensor],
    ) -> None:
        gradients = self.gradients
        window = ONLY if kind == "r" and self._is_global(key) else slice(chunk.low, chunk.high)
        if kind == "s":
            into[str(key)].index_add_(0, shard.src_rows[chunk.start : chunk.stop], grad)
        elif kind == "d":
            gradients.of_dst(str(key))[window].index_add_(0, inputs.index, grad)
        elif kind == "e":
            _add_rows(shard, gradients.of_edges(str(key)), grad, chunk)
        elif kind == "r":
            gradients.reductions[int(str(key))][window] += grad
            gradients.reached.add(int(str(key)))
        else:
            gradients.add_capture(int(str(key)), grad)


class BackwardPhase:
    """Notes the messages of the reductions being differentiated; shallower ones are known and given as leaves."""

    def __init__(self, owner: _Pass, chunk: Chunk) -> None:
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
        if k not in self._owner.values:
            shape = (1, 2) if REDUCERS[op].is_global else (self.num_dst,)
            return values.new_zeros((*shape, *values.shape[1:]))
        known = self._owner.values[k][ONLY if REDUCERS[op].is_global else self._window].detach()
        if reduction.differentiable and reduction.depth < self._owner.depth:
            known.requires_grad_()
        self.known[k] = known
        return known
