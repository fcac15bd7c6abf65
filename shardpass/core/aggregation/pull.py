"""Backward by pulling: the owner of a source fetches what its destinations know and computes the gradient itself.

For a sum of copies, destinations publish the gradient that arrived there. For an attention with a closed form they
publish what is needed to compute every weight again (the score of the destination, the log-sum-exp) and its gradient
(that of the result, and delta; see `attention.py`). Gradients that belong to destinations return to them. Source rows
are not fetched again, and gradients of source rows do not travel.

Everything else is pushed (`backward.py`), and so is what moves fewer bytes that way. Where all ranks read each other's
memory no bytes move, and copies are pulled, since rows are then read where they lie and nothing is added up twice. All
ranks choose alike, from counts and widths that all of them know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardpass.core.aggregation.agreement import Offer
from shardpass.core.aggregation.attention import chunk_edges, gradient_and_delta
from shardpass.core.aggregation.call import Call, Operands
from shardpass.core.aggregation.execute import Part, Pull, Rows, execute
from shardpass.core.aggregation.gradients import Gradients, is_linear
from shardpass.core.aggregation.out_edges import OutEdges, count_out_edges
from shardpass.core.aggregation.scores import ClosedForm
from shardpass.core.exchange import HaloPlan, Packing, shares_all_rows
from shardpass.core.kernels import (
    ClosedScores,
    Outer,
    ScoreGradients,
    by_destination,
    by_source,
    fused,
    gather_sum,
    shaped,
)
from shardpass.core.ranks import agree, digest, is_local, is_parameter
from shardpass.core.sharding import EdgeShards, Shard, Transposes
from shardpass.core.tracing import Attention, Key, Program, Structure

_OF_DST = "of destination"
"""What scores are made of at a destination."""


@dataclass(frozen=True)
class Widths:
    """Bytes that one row costs in backward: `push` for a source row, `pull` for a destination row."""

    push: int
    pull: int


class KnownOutEdges:
    """The out-edges of one edge list, once all ranks have counted them."""

    out_edges: OutEdges | None = None


def known_out_edges(plan: HaloPlan, edges: EdgeShards) -> OutEdges | None:
    """The out-edges that this rank knows of `edges`; `None` where it knows none, or where nothing is pulled."""
    if plan.comm.size == 1 or not plan.options.may_pull:
        return None
    return plan.comm.caches.of(KnownOutEdges, edges).out_edges


def mix_of(plan: HaloPlan, structure: Structure) -> int:
    """The fingerprint of the tensor that mixes scores, which must be the same on all ranks; 0 where it is by itself."""
    if plan.comm.size == 1 or not plan.options.may_pull or structure.mix is None or structure.attention is None:
        return 0
    form = structure.attention.score
    if form is None or form.mix is None or not structure.captures:  # no gradients
        return 0
    found = structure.captures[form.mix]
    if (
        found.device.type != "cpu" and is_parameter(found) and not is_local(found)
    ):  # which ranks have compared, without waiting for a device
        return 0
    return digest(repr(structure.mix.tolist()))


def choose_pull(call: Call, program: Program, offers: list[Offer]) -> OutEdges | None:
    """The out-edges over which backward will pull, or `None` where it pushes. Collective where ranks differ in them.

    Args:
        program: with its tensors.
        offers: of every rank.
    """
    plan, edges = call.plan, call.edges
    if plan.comm.size == 1 or not plan.options.may_pull:
        return None
    widths = _widths(call, program)
    if widths is None or any(offer.mix != offers[0].mix for offer in offers):
        return None
    cache = plan.comm.caches.of(KnownOutEdges, edges)
    known = cache.out_edges
    if known is None or any(offer.out_edges != known.serial for offer in offers):
        known = cache.out_edges = count_out_edges(plan, edges, call.number, call.label)
    if plan.options.backward == "pull":
        return known
    if call.structure.attention is None and shares_all_rows(plan.comm):
        return known
    pushed = widths.push * sum(map(sum, plan.schedule.counts))
    return known if widths.pull * known.num_rows < pushed else None


def _widths(call: Call, program: Program) -> Widths | None:
    """The widths of a call that can be pulled, or `None`; the same on every rank."""
    structure, plan = call.structure, call.plan

    def width(tensor: Tensor) -> int:
        return Packing([tensor], plan.options.wire_dtype).row_bytes[0]

    wanted = {key.name for key in call.gradients if key.side == "src"}
    attention = structure.attention
    if attention is None:
        names = _copied(call)
        if structure.edge_output or structure.max_depth != 0 or not names:
            return None
        if any(r.form != "copy" for r in structure.reductions if r.differentiable):
            return None
        rows = sum(width(program.src[name]) for name in names)
        return Widths(rows, rows)
    output = structure.reductions[attention.output]
    if attention.score is None or attention.dropout or plan.options.wire_dtype is not None or not output.differentiable:
        return None  # another dtype on the wire would change the weights
    fetched = {call.canonical[name] for name in structure.sources_of(list(attention.members))}
    keeps = plan.options.mode != "sar"
    pushed = sum(width(program.src[name]) * ((not keeps) + (name in wanted)) for name in fetched)
    score = program.dst[attention.score.destination]
    per_head = attention.heads * output.dtype.itemsize
    returned = width(score) if Key("dst", attention.score.destination) in call.gradients else 0
    value = width(program.src[attention.value])
    return Widths(pushed, value + 2 * per_head + width(score) + returned)


def _copied(call: Call) -> list[str]:
    """The sources of copies that need gradients, by the names under which they are fetched, sorted."""
    names = {call.canonical[r.source] for r in call.structure.reductions if r.differentiable and r.form == "copy"}
    return sorted(name for name in names if Key("src", name) in call.gradients)


def _out_edges(call: Call) -> tuple[HaloPlan, EdgeShards]:
    assert call.pull is not None
    return call.pull.of(call.plan, call.edges, call.label)


def pull_copies(call: Call, gradients: Gradients) -> None:
    """Add the gradients of the sources of sums of copies to `gradients`. Collective."""
    reverse, edges = _out_edges(call)
    part = _CopyAdjoints(_copied(call), gradients, is_linear(call))
    gradients.ran |= any(shard.num_edges for shard in call.edges.shards)
    published = {name: _published(call, name, gradients) for name in part.reads}
    execute(Pull(call, reverse, edges, published, {}), part)


class _CopyAdjoints(Part):
    """The gradients of copies of the own sources, by name."""

    takes_placed = True

    def __init__(self, names: list[str], gradients: Gradients, is_linear: bool) -> None:
        self.reads, self.gradients, self.is_linear = names, gradients, is_linear

    def add(self, number: int, shard: Shard, rows: Rows, into: Rows) -> None:
        for name in self.reads:
            fresh = self.is_linear and number == 0
            gather_sum(self.gradients.src[name], shard, rows[name], None, fresh=fresh)


def _published(call: Call, name: str, gradients: Gradients) -> Tensor:
    """The gradient that arrived for copies of a source, ``[num_dst, ...]``; zeros where the loss does not lead here."""
    members = [k for k, r in enumerate(call.structure.reductions) if r.differentiable and r.form == "copy"]
    first, *others = [
        gradients.reductions[k] for k in members if call.canonical[call.structure.reductions[k].source] == name
    ]
    return sum(others, first).contiguous()


def pull_attention(
    call: Call,
    operands: Operands,
    attention: Attention,
    out: Tensor,
    log_sum: Tensor,
    gradients: Gradients,
) -> None:
    """Add the gradients of an attention to `gradients`, for scores in closed form without dropout. Collective."""
    assert attention.score is not None
    key = Key("dst", attention.score.destination)
    reverse, edges = _out_edges(call)
    grad, delta = gradient_and_delta(call, attention, out, gradients)
    reached = attention.output in gradients.reached
    log_sum = log_sum.view_as(delta) if reached else torch.full_like(delta, float("inf"))  # all weights are 0
    reaching = frozenset[int](range(call.plan.comm.size))
    if call.pull is not None and call.pull.are_on_devices:  # or else they wait to see it in what arrives
        every = agree(call.plan.comm, f"{call.label}: reached", [int(reached)])
        reaching = frozenset(rank for rank, (found,) in enumerate(every) if found)
    part = _AttentionAtSources(call, operands, attention, gradients, reaching)
    known = [grad, delta, log_sum, part.form.of_dst]
    to_dst = torch.zeros_like(part.form.of_dst)
    own = {_OF_DST: to_dst} if key in gradients else {}
    execute(Pull(call, reverse, edges, dict(zip(part.reads, known)), own), part)
    if reached and any(shard.num_edges for shard in call.edges.shards):
        gradients.ran = True
        if key in gradients:
            gradients.touch(key).add_(to_dst.view_as(gradients[key]))


class _AttentionAtSources(Part):
    """The gradients of the own sources of an attention. It reads what destinations publish.

    Args:
        reaching: the ranks that the loss may have reached.
    """

    reads = ["grad", "delta", "log_sum", _OF_DST]

    def __init__(
        self, call: Call, operands: Operands, attention: Attention, gradients: Gradients, reaching: frozenset[int]
    ) -> None:
        assert attention.score is not None
        self.reaching, self.looks = reaching, call.pull is None or not call.pull.are_on_devices
        self.form, self.gradients = ClosedForm(operands, attention, attention.score, call.structure.mix), gradients
        self.of_source = shaped(operands.src[attention.score.source], self.form.tail).contiguous()
        values = operands.src[attention.value]
        self.values = values.reshape(-1, attention.heads, values.shape[1:].numel() // attention.heads).contiguous()
        self.chunk_edges = chunk_edges(call, attention, operands, in_one_loop=False)
        self.transposes = call.plan.comm.caches.of(Transposes)
        self._grad_source = self._target(call.canonical[attention.score.source], self.of_source)
        self._grad_values = self._target(call.canonical[attention.value], self.values)
        self._grad_mix = self.form.zero_mix()
        self._ran = False

    def _target(self, name: str, like: Tensor) -> Tensor:
        found = self.gradients.src.get(name)
        return torch.zeros_like(like) if found is None else found.view_as(like)

    def add(self, number: int, shard: Shard, rows: Rows, into: Rows) -> None:
        """See `Part.add`. The order of `shard` is that of the own sources, as if they were destinations."""
        *known, of_dst = (rows[name] for name in self.reads)
        outer = Outer(*known)
        if not shard.num_edges or shard.block.owner not in self.reaching:
            return
        if self.looks and bool((outer.log_sum == float("inf")).all()):
            return
        self._ran = True
        of = ClosedScores(self.form.form, self.of_source, of_dst.contiguous(), self.form.mix, None)
        to_dst = into.get(_OF_DST)
        target = torch.zeros_like(of_dst) if to_dst is None else to_dst
        to = ScoreGradients(self._grad_source, target, self._grad_mix)
        most = max(1, shard.num_edges) if self.form.in_one_loop else self.chunk_edges
        lacks_dst = False
        for run in by_destination(shard, most):
            lacks_dst |= fused.adjoint(run, of, self.values, outer, self._grad_values, to)
        if lacks_dst and to_dst is not None:
            for run in by_source(shard, self.transposes, most, one_by_one=False):
                fused.adjoint_of_dst(run, of, self.values, outer, to_dst)

    def finish(self) -> None:
        """Add the gradient of what mixes scores, as far as it comes from this rank's out-edges."""
        if self._ran:
            self.form.add_mix(self._grad_mix, self.gradients)
