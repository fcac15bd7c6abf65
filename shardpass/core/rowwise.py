"""Row-wise or refused: a body must treat edges independently, or cutting the edges changes the answer.

The body runs on a block of made-up edges and on its two halves, with dropout and other random numbers switched off.
Reductions are given the same values in each run, so only the edge part itself is compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardpass.core.program import Inputs, Program, Structure
from shardpass.core.reducers import REDUCERS, Base
from shardpass.core.tracing import EdgeTrace
from shardpass.errors import RefusedError

BLOCK_EDGES = 12
DROPOUTS = frozenset(
    [
        "dropout",
        "dropout_",
        "alpha_dropout",
        "alpha_dropout_",
        "feature_alpha_dropout",
        "feature_dropout",
        "dropout1d",
        "dropout2d",
    ]
)
RANDOM_FILLS = frozenset(
    ["rand_like", "randn_like", "bernoulli", "bernoulli_", "normal_", "uniform_", "rand", "randn", "exponential_"]
)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}


class _RowPhase:
    """Notes the messages of each reduction; answers with given values, or reduces and keeps the values."""

    def __init__(self, num_dst: int, whole_dst: int, answers: list[Tensor] | None) -> None:
        self.num_dst, self.offset, self.whole_dst = num_dst, 0, whole_dst
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
        return self.answers[k]


class _QuietTrace(EdgeTrace):
    """An `EdgeTrace` without random numbers."""

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]) -> Any:
        if name in DROPOUTS:
            return args[0] if args else kwargs["input"]
        out = super().run(func, name, args, kwargs, operands)
        if name in RANDOM_FILLS and isinstance(out, Tensor):
            return out.fill_(0.5)
        return out


def _made_up(tensor: Tensor, generator: torch.Generator) -> Tensor:
    shape = (BLOCK_EDGES, *tensor.shape[1:])
    if tensor.is_floating_point():
        values = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
        return values.to(tensor.dtype).to(tensor.device)
    if tensor.size(0) == 0:
        return tensor.new_zeros(shape)
    rows = torch.randint(tensor.size(0), (BLOCK_EDGES,), generator=generator)
    return tensor.index_select(0, rows.to(tensor.device))


def _run(program: Program, inputs: Inputs, whole_dst: int, answers: list[Tensor] | None) -> _RowPhase:
    phase = _RowPhase(inputs.num_dst, whole_dst, answers)
    with _QuietTrace(program, inputs.index, phase):
        message = program.message(inputs)
        if program.aggregate is not None:
            program.aggregate(message, inputs)
    phase.messages.append(message)
    return phase


def check_row_wise(program: Program, structure: Structure, num_dst: int) -> None:
    """Refuse a body whose result on a block of edges is not that on its two halves. Not collective.

    Raises:
        RefusedError: naming the program and what to do.
    """
    generator = torch.Generator().manual_seed(0)
    whole = {
        kind: {key: _made_up(t.detach(), generator) for key, t in tensors.items()}
        for kind, tensors in (("src", program.src), ("dst", program.dst), ("edge", program.edge))
    }
    device = structure.message.device if structure.message is not None else torch.device("cpu")
    index = (torch.arange(BLOCK_EDGES) % 4).to(device)
    state = torch.random.get_rng_state()
    with torch.no_grad():
        full = _run(program, Inputs(**whole, index=index, num_dst=4), num_dst, None)
        for part in (slice(0, BLOCK_EDGES // 2), slice(BLOCK_EDGES // 2, BLOCK_EDGES)):
            cut = {kind: {key: t[part] for key, t in tensors.items()} for kind, tensors in whole.items()}
            half = _run(program, Inputs(**cut, index=index[part].clone(), num_dst=4), num_dst, full.answers)
            for mine, theirs in zip(half.messages, full.messages):
                _compare(program.name, mine, theirs, part)
    torch.random.set_rng_state(state)


def _compare(name: str, half: Tensor, full: Tensor, part: slice) -> None:
    same = full.dim() > 0 and full.size(0) == BLOCK_EDGES and half.shape == full[part].shape
    if same and half.is_floating_point():
        expected = full[part].double()
        scale = expected.nan_to_num(0, 0, 0).abs().max().clamp(min=1e-6) if expected.numel() else 1.0
        bound = TOLERANCE.get(half.dtype, 1e-3) * float(scale)
        same = torch.allclose(half.double(), expected, rtol=0, atol=bound, equal_nan=True)
    elif same:
        same = torch.equal(half, full[part])
    if not same:
        raise RefusedError(
            f"{name}: the message of an edge depends on other edges (for example a norm, a mean or a softmax over all "
            f"edges inside message()), so it cannot be computed in pieces. Compute that quantity per node or per edge"
            f" outside message() and pass it to propagate()"
        )
