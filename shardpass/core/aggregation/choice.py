"""Which way a sharded call goes: sums that are kept, the linear map first, gradients pulled or pushed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from shardpass.core.aggregation.agreement import Agreed, Offer
from shardpass.core.aggregation.call import Call
from shardpass.core.aggregation.constants import ConstantSums
from shardpass.core.aggregation.ends_first import ends_mapped
from shardpass.core.aggregation.linear_first import describe_map, transformed_first
from shardpass.core.aggregation.partial_sums import KnownSums, with_partial_sums
from shardpass.core.aggregation.pull import choose_pull, known_out_edges, mix_of
from shardpass.core.aggregation.widening import widened
from shardpass.core.exchange import HaloPlan
from shardpass.core.ranks import digest, draw_seed
from shardpass.core.sharding import EdgeShards
from shardpass.core.tracing import Key, Program, Sides, Structure


class OwnOffer:
    """Makes this rank's `Offer`.

    Attributes:
        sums: the kept sums of the call, or `None`.
    """

    def __init__(self, plan: HaloPlan, edges: EdgeShards, weight: Tensor | None) -> None:
        self._plan, self._edges, self._weight = plan, edges, weight
        self.sums: dict[int, Tensor] | None = None

    def __call__(self, program: Program, structure: Structure, needs_gradients: bool) -> Offer:
        plan, edges = self._plan, self._edges
        self.sums = None
        if plan.options.cache_constant_inputs and not needs_gradients:
            self.sums = constant_sums(plan).find(program.of_what_is_read(structure), structure, edges)
        known = known_out_edges(plan, edges)
        serial = -1 if known is None else known.serial
        ends = digest(" ".join(one.describe() for one in structure.maps))
        has_sums, follows = int(self.sums is not None), digest(describe_map(self._weight))
        of_sums: tuple[int, ...] = ()
        if plan.options.partial_sums and plan.comm.size > 1:
            of_sums = plan.comm.caches.of(KnownSums, edges).offer(program, structure, edges)
        return Offer(has_sums, follows, ends, serial, mix_of(plan, structure), *of_sums)


@dataclass(frozen=True)
class Way:
    """How a call is carried out.

    Args:
        program: with the tensors that it reads.
        inputs: those tensors, as wide as the call computes.
        call: what is to be computed.
        weight: the linear map that is still to be applied to the result, or `None`.
        only_scales: the node function does no more than scale the sum; a linear map was given.
        sums: the results, where all ranks have kept them, or `None`.
    """

    program: Program
    inputs: Sides
    call: Call
    weight: Tensor | None
    only_scales: bool
    sums: dict[int, Tensor] | None


def choose_way(
    agreed: Agreed,
    plan: HaloPlan,
    edges: EdgeShards,
    number: int,
    weight: Tensor | None,
    sums: dict[int, Tensor] | None,
) -> Way:
    """The way that moves the fewest bytes; the same on every rank. Collective where ranks do not know their out-edges.

    Args:
        number: of the call.
        weight: of a linear map of the result, or `None`.
        sums: that this rank has kept.
    """
    program, structure, gradients, offers = agreed
    if not plan.options.fuse_attention:
        structure = replace(structure, attention=None)
    if program.watch is not None:
        program.watch(structure)
    # a hook may be on one rank alone
    if structure.maps and all(offer.end_maps == offers[0].end_maps for offer in offers):
        program, structure, gradients = ends_mapped(program, structure, gradients, plan, edges)
    program = program.of_what_is_read(structure)
    only_scales = weight is not None
    if weight is not None and all(offer.linear_map == offers[0].linear_map for offer in offers):
        keeps_sums = plan.options.cache_constant_inputs
        first = transformed_first(program, structure, gradients, weight, keeps_sums)
        if first is not None:
            (program, structure, gradients), weight = first, None
    inputs, structure = widened(program, structure)
    wide = replace(program, src=inputs.src, dst=inputs.dst, edge=inputs.edge)
    fewer = with_partial_sums(Agreed(wide, structure, gradients, offers), plan, edges, number)
    if fewer is not None:
        plan, edges, inputs = fewer
        wide = replace(wide, src=inputs.src, dst=inputs.dst, edge=inputs.edge)
    call = _call_of(wide, plan, edges, structure, number, gradients)
    call.given = {name: rows.dtype for name, rows in program.src.items()}
    if all(offer.has_sums for offer in offers):
        return Way(program, inputs, call, weight, only_scales, sums)
    call.pull = choose_pull(call, wide, offers) if fewer is None else None
    return Way(program, inputs, call, weight, only_scales, None)


def constant_sums(plan: HaloPlan) -> ConstantSums:
    """The sums over the edges of `plan` that are kept between epochs."""
    return plan.comm.caches.of(ConstantSums, plan)


def _call_of(
    program: Program, plan: HaloPlan, edges: EdgeShards, structure: Structure, number: int, gradients: frozenset[Key]
) -> Call:
    first: dict[int, str] = {}
    canonical = {name: first.setdefault(id(program.src[name]), name) for name in sorted(program.src)}
    read = {canonical[name] for name in structure.sources}
    unused = {Key("src", name) for name in canonical.values() if name not in read}
    seed = program.seed
    if seed is None:
        seed = draw_seed(plan.comm) if structure.random or structure.drops else number
    return Call(
        program=replace(program, src={}, dst={}, edge={}),
        plan=plan,
        edges=edges,
        structure=structure,
        number=number,
        canonical=canonical,
        keys=[key for key, _ in program.inputs.items() if key.side != "src" or canonical[key.name] == key.name],
        gradients=gradients - unused,  # they get none, as in plain autograd: not zeros
        captured=list(structure.captures),
        seed=seed,
        copies=() if plan.comm.forward is None else plan.comm.forward.copies,
    )
