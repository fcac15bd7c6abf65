"""Row-wise or refused: a message function must treat edges one by one, or else pieces would give another answer.

It runs on a few made-up edges while its rows are followed (see `shardpass.core.following`): what it takes of edges is
rows of edges, a reduction by the destination index gives rows of nodes, and no other operation may put rows together.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shardpass.core.following import Apart, FollowFunctions, FollowRows, first_refusal, function_of_user, user_line
from shardpass.core.ranks import RowSet, get_random_state, set_random_state
from shardpass.core.sharding import to_device
from shardpass.core.tracing.edge_trace import EdgeTrace, tensors_in
from shardpass.core.tracing.program import Inputs, NeedsMessagesError, Program, Sides
from shardpass.core.tracing.reducers import REDUCERS, Base
from shardpass.core.tracing.structure import Structure
from shardpass.errors import RefusedError

_NUM_EDGES, _NUM_NODES = 211, 53
"""How many are made up: sizes that no tensor has by chance."""


def _edges() -> RowSet:
    return RowSet("edges of the message function", _NUM_EDGES, "edges")


def _nodes() -> RowSet:
    return RowSet("nodes of the message function", _NUM_NODES, "nodes")


class _FollowedReductions:
    """Reduces the made-up edges, and says what the rows are; the phase of an `EdgeTrace`."""

    num_dst, offset = _NUM_NODES, 0

    def __init__(self, follower: FollowRows, whole_dst: int) -> None:
        self.follower, self.whole_dst = follower, whole_dst
        self.line_without_grad = ""  # of a reduction where gradients are off, as in the forward of a Function

    def known_base(self, k: int) -> Base | None:
        return None

    def reduce(self, k: int, op: str, values: Tensor, index: Tensor, base: Base) -> Tensor:
        self.follower.require(values, _edges())
        if not torch.is_grad_enabled():
            self.line_without_grad = str(user_line())
        reducer = REDUCERS[op]
        with self.follower.paused():
            state = reducer.init(self.num_dst, values.shape[1:], values)
            reducer.accumulate(state, values.detach(), index)
            out = reducer.value(state, base).to(values.dtype).requires_grad_(values.requires_grad)
        if not reducer.is_global:
            self.follower.mark(out, _nodes())
        return out


class _FollowedTrace(EdgeTrace):
    """An `EdgeTrace` that says which tables have a row per destination."""

    phase: _FollowedReductions

    def _base_value(self, base: Tensor, name: str) -> float:
        with self.phase.follower.paused():
            return super()._base_value(base, name)

    def _of_piece(self, table: Tensor, dim: int) -> Tensor:
        follower = self.phase.follower
        if table.size(dim) == self.phase.num_dst:
            return table
        if table.size(dim) == 0:
            cut = super()._of_piece(table, dim)
            follower.mark(cut, _nodes(), dim)
            return cut
        with follower.paused():
            places = torch.arange(self.phase.num_dst, device=table.device) % max(1, table.size(dim))
            cut = super()._of_piece(table.index_select(dim, places), dim)
        follower.mark(cut, _nodes(), dim)
        return cut


def check_row_wise(program: Program, structure: Structure, num_dst: int) -> None:
    """Refuse a message function in which the message of an edge depends on other edges. Not collective.

    Raises:
        RefusedError: naming the program, the operation and the line.
    """
    state = get_random_state()
    outer = program.ranks.forward.rows if program.ranks is not None and program.ranks.forward is not None else None
    beside = outer if isinstance(outer, FollowRows) else None
    follower = FollowRows(beside=beside, in_pieces=True)
    follower.marks.known = [_edges(), _nodes()]
    device = tensors_in([structure.message])[0].device
    index = (torch.arange(_NUM_EDGES) % _NUM_NODES).to(device)
    follower.mark(index, _edges(), points_to=_nodes())
    is_known = beside is not None and beside.in_known
    wants_grad = torch.is_grad_enabled() and not is_known
    made = Sides.of((key, _made_up(t, program, follower, key.side == "edge")) for key, t in program.inputs.items())
    leaves = _with_leaves(made, follower) if wants_grad else []
    num_nodes: Any = _NUM_NODES if is_known else follower.count_of(_nodes())
    inputs = Inputs(made.src, made.dst, made.edge, index, num_nodes)
    try:
        reductions = _FollowedReductions(follower, num_dst)
        trace = _FollowedTrace(program, inputs, reductions)
        counts = nullcontext() if is_known else FollowFunctions(follower)
        apart = nullcontext() if beside is None else beside.left_to_another()
        with torch.set_grad_enabled(wants_grad), apart, unseen_by_checkpoint(), counts, trace, follower:
            message = program.message(inputs)
            for rows in tensors_in([message]):
                follower.require(rows, _edges())
            result: Any = message
            if program.aggregate is not None:
                result = program.aggregate(message, inputs)
                _check_result(program, follower, result)
        follower.marks.check_refusals()
        if leaves:
            _refuse_functions(reductions.line_without_grad, tensors_in([message, result]))
            _go_backward(tensors_in([message, result]), leaves)
    except NeedsMessagesError:
        raise
    except RefusedError as refusal:
        refusal = first_refusal(refusal)
        raise type(refusal)(
            f"{program.name}: messages are computed in pieces, each from its edge alone. {refusal}. What takes all "
            f"edges is computed outside message() and passed to propagate()"
        ) from None
    finally:
        set_random_state(state)


def rows_apart(name: str, messages: Any, inputs: Inputs) -> AbstractContextManager[Any]:
    """A block for the node function of a program, given all `messages` of a rank, that may not put them together."""
    return Apart(name, tensors_in([messages]), (inputs.index.numel(), inputs.num_dst))


def _check_result(program: Program, follower: FollowRows, result: Any) -> None:
    follower.marks.check_result(result)
    for tensor in tensors_in([result]):
        rows = follower.marks.rows.get(tensor)
        if rows is not None and rows.of == _edges():
            raise NeedsMessagesError(f"{program.name}: aggregate() returns rows of edges")


def _with_leaves(made: Sides, follower: FollowRows) -> list[Tensor]:
    """Let the tensors that are `made` want gradients, and return the leaves that these are of."""
    leaves = []
    for side in (made.src, made.dst, made.edge):
        for name, rows in side.items():
            if rows.is_floating_point() or rows.is_complex():
                leaves.append(rows.requires_grad_())
                side[name] = rows.clone()  # which may be changed in place
                follower.mark(side[name], _edges())
    return leaves


def _refuse_functions(line: str, found: list[Tensor]) -> None:
    """Refuse a Function of the user's in which edges are reduced: its backward would be given a piece of them."""
    if line and (function := function_of_user(found)) is not None:
        raise RefusedError(
            f"{line}: the torch.autograd.Function {function.__name__} reduces edges to nodes "
            f"itself, so its backward needs all of them at once. Let operations of torch reduce them, outside of it"
        )


def unseen_by_checkpoint() -> AbstractContextManager[Any]:
    """A block whose saved tensors torch.utils.checkpoint does not count: when it repeats a call, there may be no trial.

    They are detached, since an operation that saved its own result would hold itself for ever.
    """
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)


def _go_backward(found: list[Tensor], leaves: list[Tensor]) -> None:
    """For what the user's hooks and functions do in backward, which the follower looks at."""
    outputs = [tensor for tensor in found if tensor.requires_grad]
    try:
        torch.autograd.grad(outputs, leaves, [torch.zeros_like(one) for one in outputs], allow_unused=True)
    except RefusedError:
        raise
    except RuntimeError:  # as after a change in place: it is raised again where backward gets there
        pass


def _made_up(tensor: Tensor, program: Program, follower: FollowRows, is_of_edges: bool) -> Tensor:
    tensor = tensor.detach()
    places = torch.arange(_NUM_EDGES, device=tensor.device) % max(1, tensor.size(0))
    rows = tensor.index_select(0, places) if tensor.size(0) else tensor.new_zeros((_NUM_EDGES, *tensor.shape[1:]))
    if is_of_edges and program.streamed_to is not None:
        rows = to_device(rows, program.streamed_to)
    follower.mark(rows, _edges())
    return rows
