"""Row-wise or refused: a message function must treat edges independently, or else pieces give another answer.

It runs on a block of made-up edges and on the two halves of it, twice: cut in the middle, and shuffled. Dropout and
other random numbers are switched off. Reductions are given the same values in each run, so that only the message
function itself is compared, and the node part, which must come from reductions alone. The first half has one more
destination in front and the second one at the end, both without edges: their presence must not matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardpass.core.sharding import to_device
from shardpass.core.tracing.edge_trace import DROPOUTS, EdgeTrace
from shardpass.core.tracing.program import Inputs, Program, Structure
from shardpass.core.tracing.reducers import REDUCERS, Base
from shardpass.errors import RefusedError

BLOCK_EDGES = 12
BLOCK_DST = 4
RANDOM_FILLS = frozenset(
    "rand_like randn_like bernoulli bernoulli_ normal normal_ uniform_ rand randn exponential_ randint randint_like "
    "multinomial poisson log_normal_ cauchy_ geometric_ random_".split()
)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}


class _RowPhase:
    """Notes the messages of each reduction; answers with given values, or reduces and keeps the values."""

    def __init__(self, num_dst: int, offset: int, whole_dst: int, front: int, answers: list[Tensor] | None) -> None:
        self.num_dst, self.offset, self.whole_dst = num_dst, offset, whole_dst
        self.front = front  # destinations before the first of the given values
        self.given = answers is not None
        self.answers: list[Tensor] = answers if answers is not None else []
        self.messages: list[Tensor] = []

    def known_base(self, k: int) -> Base | None:
        return None

    def reduce(self, k: int, op: str, values: Tensor, index: Tensor, base: Base) -> Tensor:
        self.messages.append(values)
        if not self.given:
            state = REDUCERS[op].init(self.num_dst, values.shape[1:], values)
            REDUCERS[op].accumulate(state, values, index)
            self.answers.append(REDUCERS[op].value(state, base).to(values.dtype))
        answer = self.answers[k]
        extra = self.num_dst - answer.size(0)
        if extra <= 0 or REDUCERS[op].is_global:
            return answer
        return torch.cat([answer[-1:], answer] if self.front else [answer, answer[:1]])


class _QuietTrace(EdgeTrace):
    """An `EdgeTrace` without random numbers."""

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]) -> Any:
        if name in DROPOUTS:
            return args[0] if args else kwargs["input"]
        out = super().run(func, name, args, kwargs, operands)
        if name in RANDOM_FILLS and isinstance(out, Tensor):
            return out.fill_(0.5)
        return out


def _made_up(tensor: Tensor, generator: torch.Generator, signed: bool) -> Tensor:
    shape = (BLOCK_EDGES, *tensor.shape[1:])
    if tensor.is_floating_point():
        values = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
        if signed:
            values *= torch.randint(0, 2, shape, generator=generator) * 2 - 1
        return values.to(tensor.dtype).to(tensor.device)
    if tensor.size(0) == 0:
        return tensor.new_zeros(shape)
    rows = torch.randint(tensor.size(0), (BLOCK_EDGES,), generator=generator)
    return tensor.index_select(0, rows.to(tensor.device))


def _run(program: Program, inputs: Inputs, phase: _RowPhase) -> tuple[_RowPhase, Any]:
    result = None
    with _QuietTrace(program, inputs.index, phase):
        message = program.message(inputs)
        if program.aggregate is not None:
            result = program.aggregate(message, inputs)
    phase.messages.append(message)
    return phase, result


def check_row_wise(program: Program, structure: Structure, num_dst: int) -> None:
    """Refuse a message function whose result on a block of edges is not that on its two halves. Not collective.

    Raises:
        RefusedError: naming the program and what to do.
    """
    if num_dst == 0:
        return  # tables over own nodes have no row to show; the ranks with nodes check
    state = torch.random.get_rng_state()
    first, second = slice(0, BLOCK_EDGES // 2), slice(BLOCK_EDGES // 2, BLOCK_EDGES)
    mixed = torch.tensor([7, 2, 11, 4, 0, 9]), torch.tensor([10, 1, 8, 3, 6, 5])
    with torch.no_grad():  # values that logarithms and roots like, in order; then of both signs, in disorder
        _check_block(program, structure, num_dst, (first, second), signed=False)
        _check_block(program, structure, num_dst, mixed, signed=True)
    torch.random.set_rng_state(state)


def _check_block(program: Program, structure: Structure, num_dst: int, halves: tuple[Any, Any], signed: bool) -> None:
    generator = torch.Generator().manual_seed(int(signed))
    whole = {
        kind: {key: _made_up(t.detach(), generator, signed) for key, t in tensors.items()}
        for kind, tensors in (("src", program.src), ("dst", program.dst), ("edge", program.edge))
    }
    if program.streamed_to is not None:
        whole["edge"] = {key: to_device(t, program.streamed_to) for key, t in whole["edge"].items()}
    device = structure.message.device
    few = max(1, min(BLOCK_DST, num_dst - 2))
    front, back = int(num_dst > few), int(num_dst > few + 1)
    index = (torch.arange(BLOCK_EDGES) % few).to(device)
    inputs = Inputs(whole["src"], whole["dst"], whole["edge"], index, few)
    full, result = _run(program, inputs, _RowPhase(few, front, num_dst, 0, None))
    for part, before, after in ((halves[0], front, 0), (halves[1], 0, back)):
        part = part if isinstance(part, slice) else part.to(device)
        cut = {kind: {key: t[part] for key, t in tensors.items()} for kind, tensors in whole.items()}
        inputs = Inputs(cut["src"], cut["dst"], cut["edge"], index[part] + before, few + before + after)
        phase = _RowPhase(inputs.num_dst, front - before, num_dst, before, full.answers)
        half, half_result = _run(program, inputs, phase)
        for mine, theirs in zip(half.messages, full.messages):
            _compare_messages(program.name, mine, theirs, part)
        _compare_results(program.name, half_result, result, before)


def _compare_messages(name: str, half: Tensor, full: Tensor, part: Any) -> None:
    if not (full.dim() > 0 and full.size(0) == BLOCK_EDGES and _same(half, full[part])):
        raise RefusedError(
            f"{name}: the message of an edge depends on other edges or on how many there are (for example a norm, a "
            f"mean or a softmax over all edges inside message()), so it cannot be computed in pieces. Compute that "
            f"quantity per node or per edge outside message() and pass it to propagate()"
        )


def _compare_results(name: str, half: Any, full: Any, front: int) -> None:
    if not isinstance(full, Tensor):
        return
    for dim in range(min(half.dim(), full.dim())):
        if half.size(dim) == full.size(dim) + 1:  # without the destination it has more
            half = half.narrow(dim, front, full.size(dim))
    if not _same(half, full):
        raise RefusedError(
            f"{name}: what aggregate() returns for a node depends on other nodes, on how many nodes or edges there are,"
            f" or on messages other than through a reduction by `index`, so it cannot be computed in pieces. Move that "
            f"part out of aggregate(), into forward()"
        )


def _same(half: Tensor, expected: Tensor) -> bool:
    if half.shape != expected.shape or half.dtype != expected.dtype:
        return False
    if not half.is_floating_point():
        return torch.equal(half, expected)
    expected = expected.double()
    scale = expected.nan_to_num(0, 0, 0).abs().max().clamp(min=1e-6) if expected.numel() else 1.0
    bound = TOLERANCE.get(half.dtype, 1e-3) * float(scale)
    return torch.allclose(half.double(), expected, rtol=0, atol=bound, equal_nan=True)
