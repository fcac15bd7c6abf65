"""One trace of a body on a few edges, without communication: which reductions it makes, of what, in which order.

[Note: what the probe decides]
The engine has to know before it communicates how many passes over the source blocks a body takes, what each pass must
fetch, and what backward will differentiate; and all ranks have to agree. So the body first runs on a few edges of this
rank (on a made-up edge where it has none) with every input a fresh leaf. Dependence is tracked per storage through
every call the trace sees; a tensor of unknown origin that autograd says was made inside counts as depending on
everything. Tensors that require grad and were made outside are captures: they become inputs of the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardpass.core.program import Form, Inputs, Program, Reduction, Structure
from shardpass.core.reducers import REDUCERS, Base
from shardpass.core.shard import EdgeShards
from shardpass.core.tracing import SHAPE_OPS, EdgeTrace, sequence_number
from shardpass.errors import RefusedError

SAMPLE_EDGES = 16
EVERYTHING = "*"
KEEPS_VALUES = frozenset(["view", "reshape", "unsqueeze", "contiguous", "clone", "to", "view_as"])
SHAPE_ONLY = frozenset(["new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like", "new_empty"])
LEAVES_TORCH = frozenset(
    "numpy tolist __array__ __dlpack__ item __bool__ __int__ __float__ __index__ __complex__".split()
)


class ProbePhase:
    """Reduces the sample's own messages and hands the result back as a fresh leaf."""

    def __init__(self, num_dst: int, whole_dst: int) -> None:
        self.num_dst, self.offset, self.whole_dst = num_dst, 0, whole_dst
        self.found: list[tuple[str, Tensor, Base, Tensor]] = []

    def known_base(self, k: int) -> Base | None:
        return None

    def reduce(self, k: int, op: str, values: Tensor, index: Tensor, base: Base) -> Tensor:
        reducer = REDUCERS[op]
        state = reducer.init(self.num_dst, values.shape[1:], values.detach())
        reducer.accumulate(state, values.detach(), index)
        result = reducer.value(state, base).to(values.dtype)
        if result.is_floating_point():
            result = result.requires_grad_()
        self.found.append((op, values, base, result))
        return result


class ProbeTrace(EdgeTrace):
    """An `EdgeTrace` that also follows dependence, simple expressions, and captures."""

    def __init__(self, program: Program, inputs: Inputs, phase: ProbePhase) -> None:
        device = inputs.index.device
        super().__init__(program, inputs.index, phase, generator=lambda: torch.Generator(device).manual_seed(0))
        self.depends: dict[int, set[str]] = {}
        self.forms: dict[int, tuple[Form, str, str]] = {}
        self.softmax: dict[int, tuple[str, int]] = {}  # tensors on the way from a gathered maximum to exp(x - maximum)
        self.captures: dict[int, Tensor] = {}
        self.norms: dict[int, Any] = {}
        self.reduced: list[set[str]] = []  # what the messages of each reduction depended on when it was made
        self.held: list[Tensor] = []  # keeps ids and storages from being used again
        self.leaves: dict[int, str] = {}
        self.first_node = sequence_number()
        for kind, rows in (("s", inputs.src), ("d", inputs.dst), ("e", inputs.edge)):
            for key, tensor in rows.items():
                self.adopt(tensor, {f"{kind}:{key}"}, f"{kind}:{key}")
                if kind == "s":
                    self.forms[id(tensor)] = ("copy", key, "")
                elif kind == "e" and tensor.numel() == tensor.size(0):
                    self.forms[id(tensor)] = ("scale", "", key)
        self.adopt(inputs.index, set(), "")

    def adopt(self, tensor: Tensor, depends: set[str], leaf: str) -> None:
        """Enter a tensor made by the probe."""
        self.held.append(tensor)
        self.depends.setdefault(_storage(tensor), set()).update(depends)
        if leaf:
            self.leaves[id(tensor)] = leaf

    def edge_moments(self, norm: Any, rows: Tensor) -> Tensor:
        k = self.count
        with torch._C.DisableTorchFunction():
            self.reduced.append(set(self.origin(rows)))
        moments = super().edge_moments(norm, rows)
        self.norms[k] = norm
        with torch._C.DisableTorchFunction():
            self.adopt(self.phase.found[k][3], {f"r:{k}"}, f"r:{k}")  # type: ignore[attr-defined]
            self.adopt(moments, {f"r:{k}"}, "")
        return moments

    def origin(self, tensor: Tensor) -> set[str]:
        """What `tensor` depends on; enters captures on the way."""
        key = _storage(tensor)
        if key in self.depends:
            node = tensor.grad_fn
            if node is not None and node._sequence_nr() < self.first_node:  # shares memory with one seen before
                self.held.append(tensor)
                self.captures[id(tensor)] = tensor
            return self.depends[key]
        self.held.append(tensor)
        if tensor.requires_grad:
            node = tensor.grad_fn
            if node is not None and node._sequence_nr() >= self.first_node:
                self.depends[key] = {EVERYTHING}
                return self.depends[key]
            self.captures[id(tensor)] = tensor
        return set()

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]) -> Any:
        depends: set[str] = set()
        for operand in operands:
            depends |= self.origin(operand)
        if name in SHAPE_ONLY:
            depends = set()
        elif name in SHAPE_OPS:  # expand_as(other) and the like: a view of the first
            depends = self.origin(operands[0]) if operands else set()
        origins = {_storage(operand): set(self.origin(operand)) for operand in operands}
        if name in LEAVES_TORCH and depends:
            raise RefusedError(
                f"{self.name}: `{name}` inside a message takes values of a few edges or nodes out of torch, where they "
                f"cannot be followed; a Python branch on them would differ from piece to piece. Use torch.where"
            )
        before = self.count
        versions = [_version(operand) for operand in operands]
        try:
            out = super().run(func, name, args, kwargs, operands)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" not in str(error):
                raise
            raise RefusedError(
                f"{self.name}: `{name}` changes an input of the message (or a parameter) in place. Use the form that "
                f"returns a new tensor"
            ) from error
        if self.count > before:
            values, result = self.phase.found[-1][1::2]  # type: ignore[attr-defined]
            self.reduced.append(origins[_storage(values)])
            self.adopt(result, {f"r:{before}"}, f"r:{before}")
            depends = {f"r:{before}"}
        for operand, version in zip(operands, versions):
            if version != _version(operand) or (version < 0 and _may_write(name, kwargs, operand, out)):
                self._written(name, operand, depends)
        if self.count > before:
            self.softmax[id(out)] = ("result", before)
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.adopt(tensor, depends, "")
        if not kwargs:
            self._follow(name, args, out)
        return out

    def _written(self, name: str, target: Tensor, depends: set[str]) -> None:
        if _storage(target) not in self.depends:
            raise RefusedError(
                f"{self.name}: `{name}` inside a message changes a tensor made outside it. Messages are computed "
                f"several times and in pieces; change it in forward() instead"
            )
        self.adopt(target, depends, "")
        self._forget(target)

    def _follow(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        """Keep the expression of `out` where it is still a source tensor, an edge scalar, or their product."""
        if not isinstance(out, Tensor) or not args or not isinstance(args[0], Tensor):
            return
        self._follow_softmax(name, args, out)
        first = self.forms.get(id(args[0]))
        if name in KEEPS_VALUES and first is not None and out.dtype == args[0].dtype:
            scalar = first[0] == "scale" and not first[1]
            if (scalar and out.dim() and out.size(0) == out.numel()) or (not scalar and out.shape == args[0].shape):
                self.forms[id(out)] = first
        elif name in ("mul", "__mul__", "__rmul__") and len(args) == 2 and isinstance(args[1], Tensor):
            pair = [first, self.forms.get(id(args[1]))]
            copies = [f for f in pair if f is not None and f[0] == "copy"]
            scales = [f for f in pair if f is not None and f[0] == "scale" and not f[1]]
            if len(copies) == len(scales) == 1:
                copied = args[pair.index(copies[0])]
                if out.shape == copied.shape and out.dtype == copied.dtype:
                    self.forms[id(out)] = ("scale", copies[0][1], scales[0][2])

    def _follow_softmax(self, name: str, args: tuple[Any, ...], out: Tensor) -> None:
        label, k = self.softmax.get(id(args[0]), ("", -1))
        if name == "index_select" and label == "result":
            self.softmax[id(out)] = ("gathered", k)
        elif name in ("sub", "__sub__") and len(args) == 2 and isinstance(args[1], Tensor):
            label, k = self.softmax.get(id(args[1]), ("", -1))
            found = self.phase.found  # type: ignore[attr-defined]
            if label == "gathered" and _storage(found[k][1]) == _storage(args[0]) and out.shape == args[0].shape:
                self.softmax[id(out)] = ("shifted", k)
        elif name == "exp" and label == "shifted":
            self.softmax[id(out)] = ("exp", k)

    def _forget(self, target: Tensor) -> None:
        storage = _storage(target)
        for tensor in self.held:
            if _storage(tensor) == storage:
                self.forms.pop(id(tensor), None)
                self.softmax.pop(id(tensor), None)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _may_write(name: str, kwargs: dict[str, Any], operand: Tensor, out: Any) -> bool:
    """Whether a call may have written into `operand`, where torch keeps no count of it (inference mode)."""
    in_place = name.endswith("_") and not name.endswith("__")
    in_place = in_place or name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return in_place or kwargs.get("out") is operand or (out is operand and name not in KEEPS_VALUES)


def sample_inputs(
    program: Program, edges: EdgeShards, num_own_src: int, grads: bool, count: int = SAMPLE_EDGES
) -> Inputs:
    """Inputs for `count` edges, or for one made-up edge on a rank without any. Values matter little, shapes do."""
    count = max(min(1, count), min(count, edges.num_edges))
    rows = torch.arange(count)

    def take(tensor: Tensor, limit: int) -> Tensor:
        tensor = tensor.detach()
        if limit == 0:
            sample = tensor.new_zeros((count, *tensor.shape[1:]))
        else:
            sample = tensor.index_select(0, (rows % limit).to(tensor.device))
        return sample.requires_grad_() if grads and sample.is_floating_point() else sample

    last = max(0, edges.num_dst - 1)  # no further than tables over own nodes reach
    index = (rows // 2).clamp(max=last).to(edges.shards[0].indptr.device)
    return Inputs(
        src={key: take(t, num_own_src) for key, t in program.src.items()},
        dst={key: take(t, edges.num_dst) for key, t in program.dst.items()},
        edge={key: take(t, edges.num_edges) for key, t in program.edge.items()},
        index=index,
        num_dst=min((count + 1) // 2, last + 1),
    )


def probe(program: Program, edges: EdgeShards, num_own_src: int, needs_grad: set[str]) -> Structure:
    """The structure of `program`'s body on this rank. Not collective.

    Args:
        needs_grad: the inputs (``"s:x"``, ``"d:x"``, ``"e:w"``) that require grad on some rank.

    Raises:
        RefusedError: the body does something that cannot be computed one shard at a time.
    """
    state = torch.random.get_rng_state()
    keep_captures = torch.is_grad_enabled()
    grads = not torch.is_inference_mode_enabled()
    with torch.set_grad_enabled(grads):
        inputs = sample_inputs(program, edges, num_own_src, grads)
        phase = ProbePhase(inputs.num_dst, edges.num_dst)
        trace = ProbeTrace(program, inputs, phase)
        with trace:
            message = program.message(inputs)
            num_message = trace.count
            if program.aggregate is not None:
                program.aggregate(message, inputs)
        random = not torch.equal(state, torch.random.get_rng_state())
        torch.random.set_rng_state(state)
        structure = _structure(program, trace, phase, message, num_message, needs_grad, random)
    if not keep_captures:
        structure.captures.clear()
    return structure


def _structure(
    program: Program,
    trace: ProbeTrace,
    phase: ProbePhase,
    message: Tensor,
    num_message: int,
    needs_grad: set[str],
    random: bool,
) -> Structure:
    reductions: list[Reduction] = []
    gradient_sources = set(needs_grad)
    for k, (op, values, base, _) in enumerate(phase.found):
        depends = trace.reduced[k]
        differentiable = _differentiable(trace, values, gradient_sources)
        reductions.append(_reduction(program, trace, reductions, op, values, base, depends, differentiable))
        if differentiable:
            gradient_sources.add(f"r:{k}")
    edge_tail, edge_dtype, depth, stage, sources = None, None, -1, 0, frozenset[str]()
    differentiable = False
    if program.aggregate is None:
        depends = trace.origin(message)
        parents = _parents(depends, len(reductions))
        depth = 1 + max((reductions[k].depth for k in parents), default=-1)
        stage = 1 + max((reductions[k].stage for k in parents), default=-1)
        edge_tail, edge_dtype = tuple(message.shape[1:]), message.dtype
        sources = _sources(depends, program)
        differentiable = _differentiable(trace, message, gradient_sources)
    last = max([r.stage for r in reductions] + ([stage] if program.aggregate is None else []), default=0)
    return Structure(
        reductions=reductions,
        num_message=num_message,
        num_stages=last + 1,
        edge_tail=edge_tail,
        edge_dtype=edge_dtype,
        edge_depth=depth,
        edge_sources=sources,
        edge_differentiable=differentiable,
        captures=list(trace.captures.values()),
        drops=trace.drops,
        random=random,
        norms=trace.norms,
        message=message.detach(),
    )


def _parents(depends: set[str], count: int) -> frozenset[int]:
    if EVERYTHING in depends:
        return frozenset(range(count))
    return frozenset(int(d[2:]) for d in depends if d.startswith("r:"))


def _sources(depends: set[str], program: Program) -> frozenset[str]:
    if EVERYTHING in depends or torch.is_inference_mode_enabled():
        return frozenset(program.src)
    return frozenset(d[2:] for d in depends if d.startswith("s:"))


def _reduction(
    program: Program,
    trace: ProbeTrace,
    earlier: list[Reduction],
    op: str,
    values: Tensor,
    base: Base,
    depends: set[str],
    differentiable: bool,
) -> Reduction:
    parents = _parents(depends, len(earlier))
    depth = 1 + max((earlier[k].depth for k in parents), default=-1)
    stage = 1 + max((earlier[k].stage for k in parents), default=-1)
    form, source, weight = trace.forms.get(id(values), ("general", "", ""))
    if op != "sum" or base.value or (form == "scale" and not source) or values.dim() < 1:
        form, source, weight = "general", "", ""
    if form == "general" and op == "sum" and not base.value and not depends and bool((values == 1).all()):
        form = "ones"
    leader = _leader(trace, values, op, base, earlier, parents)
    return Reduction(
        op=op,
        base=base,
        tail=tuple(values.shape[1:]),
        dtype=values.dtype,
        stage=earlier[leader].stage if leader is not None else stage,
        depth=depth,
        sources=_sources(depends, program),
        parents=parents,
        leader=leader,
        differentiable=differentiable,
        form=form,
        source=source,
        weight=weight,
    )


def _leader(
    trace: ProbeTrace, values: Tensor, op: str, base: Base, earlier: list[Reduction], parents: frozenset[int]
) -> int | None:
    """The max reduction m where `values` is ``exp(x - m[index])``: such a sum can be rescaled as the maximum grows."""
    label, k = trace.softmax.get(id(values), ("", -1))
    if label != "exp" or op != "sum" or base.value or parents != {k}:
        return None
    maximum = earlier[k]
    plain = not maximum.base.included or maximum.base.value == float("-inf")  # else it is not that of the messages
    return k if maximum.op == "max" and plain and maximum.tail == tuple(values.shape[1:]) else None


def _differentiable(trace: ProbeTrace, value: Tensor, gradient_sources: set[str]) -> bool:
    """Whether gradients flow from `value` to an input that needs them or to a capture; finds hidden captures."""
    if value.grad_fn is None:
        return trace.leaves.get(id(value), "") in gradient_sources or id(value) in trace.captures
    captured_nodes = {t.grad_fn for t in trace.captures.values() if t.grad_fn is not None}
    reached, stack, seen = False, [value.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in captured_nodes:
            reached = True
        elif hasattr(node, "variable"):
            leaf = node.variable
            known = trace.leaves.get(id(leaf))
            if known is None:
                trace.captures.setdefault(id(leaf), leaf)
            reached |= known is None or known in gradient_sources
        elif node._sequence_nr() < trace.first_node:
            raise RefusedError(
                f"{trace.name}: the message uses a tensor computed outside it ({node.name()}) in a way that cannot be "
                f"followed (a custom autograd Function or TorchScript). Pass it to the layer as an argument"
            )
        else:
            stack += [parent for parent, _ in node.next_functions if parent is not None]
    return reached
