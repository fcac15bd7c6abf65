"""Running the message function again, on some edges: for values in forward, and for gradients in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardpass.core.aggregation.call import Call, EdgePiece, Operands
from shardpass.core.aggregation.gradients import Gradients
from shardpass.core.kernels import scatter_rows
from shardpass.core.sharding import to_host
from shardpass.core.tracing import Drops, EdgeTrace, Inputs, Key, Phase, StopPass

Place = tuple[int, int]
"""Which edges of a call run: the number of their shard, and the first of its edges. Random numbers depend on it."""


class Run(NamedTuple):
    """What a run of the message function gave.

    Args:
        message: its result, if it is one tensor; `None` where the phase ended the run as soon as it had all it needs.
        num_reductions: how many reductions it came to.
    """

    message: Tensor | None
    num_reductions: int


def run_again(
    call: Call,
    inputs: Inputs,
    phase: Phase,
    place: Place = (0, 0),
    drops: Drops | None = None,
    substitutes: dict[int, Tensor] | None = None,
    expected: set[int] | None = None,
) -> Run:
    """Run the message function and the node function of `call` on `inputs`, until `phase` stops them.

    Args:
        phase: what reductions become.
        place: of the edges.
        drops, substitutes, expected: see `EdgeTrace`.
    """
    program = call.program
    trace = EdgeTrace(program, inputs, phase, substitutes, expected, drops)
    try:
        with call.scope(*place), trace:
            message = program.message(inputs)
            if program.aggregate is not None:
                program.aggregate(message, inputs)
    except StopPass:
        return Run(None, trace.count)
    return Run(message if isinstance(message, Tensor) else None, trace.count)


class GradientRun:
    """A run of the message function under gradients: its inputs, and the tensors it captures, are leaves.

    Args:
        piece: the edges.
        rows: the rows of the block, by name of the source tensor.
    """

    def __init__(self, call: Call, operands: Operands, piece: EdgePiece, rows: dict[str, Tensor]) -> None:
        self.call, self.piece = call, piece
        self._captures = [saved.detach().requires_grad_() for saved in operands.captures]
        with torch.enable_grad():
            self.inputs = call.inputs(operands, piece, rows, leaves=True)

    def run(self, phase: Phase, place: Place = (0, 0), drops: Drops | None = None) -> Run:
        """Run it; what `phase` notes hangs on the leaves afterwards."""
        captured, inputs = self.call.captured, self.inputs
        substitutes = {id(original): leaf for original, leaf in zip(captured, self._captures)}
        expected = {id(t) for _, t in inputs.items()}
        expected |= {id(t) for t in (*self._captures, *captured)}
        with torch.enable_grad():
            return run_again(self.call, inputs, phase, place, drops, substitutes, expected)

    def add_gradients(
        self,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        into: dict[str, Tensor],
        gradients: Gradients,
        others: Sequence[Tensor] = (),
    ) -> Sequence[Tensor | None]:
        """The gradients of `others`. Adds those of the inputs and captures where they belong.

        Args:
            outputs: what was computed from the leaves.
            cotangents: the gradients of `outputs`.
            into: where gradients of the block's source rows are added, by name.
            gradients: where the gradients of all other inputs are added.
            others: leaves that the phase made.
        """
        targets = [(key, t) for key, t in self.inputs.items() if t.requires_grad]
        captures = [*enumerate(self._captures)]
        # The originals as well: paths that bypass the trace (custom Functions, TorchScript) reach those.
        captures += [(i, t) for i, t in enumerate(self.call.captured) if t.requires_grad]
        if gradients.asked is not None:
            captures = [(i, t) for i, t in captures if i in gradients.asked]
        leaves = [*others, *(t for _, t in targets), *(t for _, t in captures)]
        if not outputs or not leaves:
            return [None] * len(others)
        all_found = torch.autograd.grad(list(outputs), leaves, list(cotangents), allow_unused=True)
        of_others, found = all_found[: len(others)], all_found[len(others) :]
        for (key, _), part in zip(targets, found):
            if part is not None:
                self._add(key, part, into, gradients)
        for (number, _), part in zip(captures, found[len(targets) :]):
            if part is not None:
                gradients.add_capture(number, part)
        return of_others

    def _add(self, key: Key, part: Tensor, into: dict[str, Tensor], gradients: Gradients) -> None:
        if key.side == "src":
            scatter_rows(into[key.name], self.piece.src_rows, part)
        elif key.side == "dst":
            scatter_rows(gradients.touch(key)[self.piece.window], self.piece.dst_rows, part)
        else:
            part = part if self.call.streamed_to is None else to_host(part)
            gradients.touch(key)[self.piece.places] += part  # each edge stands there once
