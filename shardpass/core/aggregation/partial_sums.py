"""Sums over edges with fewer rows on the wire: where that is fewer, the sum for a destination travels, not its sources.

[Note: partial sums]
The rows that a pair of ranks exchanges for a sum are a minimum vertex cover of their edges (`covers.py`). An edge whose
source is not in the cover is summed by the source's owner. This is a call like any other, on another graph: its sources
are those of the call and, behind them, the sums that this rank makes for others; where a sum arrives, one edge takes
the place of those that it was made of. To make the sums is a function of own rows, with a derivative of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardpass.core.aggregation.agreement import Agreed
from shardpass.core.aggregation.call import Degrees
from shardpass.core.exchange import HaloPlan, Schedule, can_cover, minimum_cover, shares_all_rows
from shardpass.core.kernels import gather_sum, gather_sum_transposed
from shardpass.core.ranks import Known, agree, ordinary_tensors
from shardpass.core.sharding import Block, EdgeShards, Shard, Transposes, build_shards, smallest_index_dtype
from shardpass.core.tracing import Key, Program, Sides, Structure

_OF_HALO, _OF_OWN = 0.05, 0.05
"""Partial sums are made where they save at least these parts of the halo rows and of all rows, which they copy."""


@dataclass(frozen=True, eq=False)
class PartialSums:
    """The call's graph, with sums for other ranks among its sources.

    Args:
        serial: number of the call in which all ranks made it together.
        plan: its own source rows are those of the graph, then the sums.
        edges: of that plan. Edge tensors have the rows of the graph's edges, then one for each sum that arrives.
        sums: the edges from own source rows to the sums, ``num_dst`` of which there are.
        asked: the places of the edges of this rank that each other rank sums, in its order.
        saved, num_summed: how many rows fewer than those of the halo that is, and of how many edges others make sums.
        is_worth_it: compared with the halo.
    """

    serial: int
    plan: HaloPlan
    edges: EdgeShards
    sums: Shard
    asked: list[Tensor]
    saved: int
    num_summed: int
    is_worth_it: bool

    def extended(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """``[num_own_src, ...]`` with the sums behind them; differentiable in `rows` any number of times.

        Args:
            weights: one number for each edge of the sums, or one per head; `None` for a plain sum.
        """
        sums: Tensor = _Sums.apply(rows, self, weights, False)
        return torch.cat([rows, sums])

    def sent(self, weights: Tensor, serial: int, label: str) -> SentWeights:
        """The weights of all edges of both calls, made of those of the graph's edges. Collective."""
        heads = weights.reshape(len(weights), weights.shape[1:].numel())
        of_sums = torch.cat(self.plan.comm.all_to_all([heads[places] for places in self.asked], label=label))
        ones = weights.new_ones(self.edges.num_edges - len(weights), *weights.shape[1:])
        of_sums = of_sums.view(-1) if heads.size(1) == 1 else of_sums
        return SentWeights(serial, of_sums, torch.cat([weights, ones]))


@dataclass(frozen=True)
class SentWeights:
    """Weights of edges.

    Args:
        serial: number of the call in which they were sent, or 0 if there are none.
        of_sums: of the edges of `PartialSums.sums`.
        of_edges: of the edges of `PartialSums.edges`, where a sum that arrives counts once.
    """

    serial: int = 0
    of_sums: Tensor | None = None
    of_edges: Tensor | None = None


class _Sums(torch.autograd.Function):
    """The sums of own rows, or the adjoint of that."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, of: PartialSums, weights: Tensor | None, is_adjoint: bool) -> Tensor:
        ctx.of, ctx.weights, ctx.is_adjoint = of, weights, is_adjoint
        count = of.sums.block.num_rows if is_adjoint else of.sums.num_dst
        out = rows.new_empty(count, *rows.shape[1:])
        if is_adjoint:
            transposes = of.plan.comm.caches.of(Transposes)
            gather_sum_transposed(out, of.sums, transposes, rows.contiguous(), weights, fresh=True)
        else:
            gather_sum(out, of.sums, rows.contiguous(), weights, fresh=True)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Sums.apply(grads[0], ctx.of, ctx.weights, not ctx.is_adjoint), None, None, None


class KnownSums:
    """What is known of the partial sums of one edge list."""

    def __init__(self) -> None:
        self.found: PartialSums | None = None
        self.weights: Known[SentWeights] = Known()

    def offer(self, program: Program, structure: Structure, edges: EdgeShards) -> tuple[int, int]:
        """What this rank tells others: the serial numbers of sums and of weights, 0 for none, or -1."""
        if not edges.is_stored or not can_cover():
            return -1, -1
        weights = _weights(program, structure)
        sent = self.weights.find(None, weights) if weights and self.found is not None else None
        return 0 if self.found is None else self.found.serial, 0 if sent is None else sent.serial


def with_partial_sums(
    agreed: Agreed, plan: HaloPlan, edges: EdgeShards, number: int
) -> tuple[HaloPlan, EdgeShards, Sides] | None:
    """The graph and the inputs with which a call moves fewer rows, or `None`. Collective where ranks make sums.

    What is decided here depends on the graph and on widths alone, never on earlier calls: a run that goes on from a
    checkpoint gives the same bits as one that was not disturbed. So weights are worth sending if they cost fewer bytes
    than they save, though they are sent again only when they change.

    Args:
        agreed: with the tensors of the call, as wide as it computes.
        number: of the call.
    """
    program, structure, gradients, offers = agreed
    if not _is_sum(plan, program, structure, gradients):
        return None
    if any(offer.sums < 0 for offer in offers):
        return None
    known = plan.comm.caches.of(KnownSums, edges)
    sums = known.found
    if sums is None or any(offer.sums != sums.serial for offer in offers):
        with ordinary_tensors():
            sums = known.found = _build(plan, edges, number, f"call {number} {program.name}: partial sums")
    weights = _weights(program, structure)
    if not sums.is_worth_it or not _saves_more(sums, program, weights):
        return None
    sent = _sent_weights(sums, known.weights, weights, agreed, number)
    name = next((reduction.weight for reduction in structure.reductions if reduction.form == "scale"), "")
    extended = {id(rows): sums.extended(rows, sent.of_sums) for rows in program.src.values()}
    src = {source: extended[id(rows)] for source, rows in program.src.items()}
    edge = program.edge if sent.of_edges is None else {**program.edge, name: sent.of_edges}
    return sums.plan, sums.edges, Sides(src, program.dst, edge)


def _weights(program: Program, structure: Structure) -> list[Tensor]:
    """The weights of weighted sums; `_is_sum` has no call with several."""
    return [program.edge[reduction.weight] for reduction in structure.reductions if reduction.form == "scale"]


def _saves_more(sums: PartialSums, program: Program, weights: list[Tensor]) -> bool:
    """Whether rows that do not travel have more bytes than the weights that travel for them."""
    rows = {id(one): one.shape[1:].numel() * one.dtype.itemsize for one in program.src.values()}
    of_edge = sum(one.shape[1:].numel() * one.dtype.itemsize for one in weights)
    return sums.saved * sum(rows.values()) > sums.num_summed * of_edge


def _sent_weights(
    sums: PartialSums, known: Known[SentWeights], weights: list[Tensor], agreed: Agreed, number: int
) -> SentWeights:
    """The weights of the edges that others sum. Collective if they are new on a rank."""
    if not weights:
        return SentWeights()
    sent = known.find(None, weights)
    if sent is not None and sent.serial and all(offer.weights == sent.serial for offer in agreed.offers):
        return sent
    with ordinary_tensors():
        made = sums.sent(weights[0].detach(), number, f"call {number} {agreed.program.name}: weights")
    known.keep(None, weights, made)
    return made


def _is_sum(plan: HaloPlan, program: Program, structure: Structure, gradients: frozenset[Key]) -> bool:
    """Whether a call adds up rows that others send, by constant weights if any, and needs gradients of them."""
    options, sums = plan.options, [r for r in structure.reductions if r.form != "ones"]
    if plan.comm.size == 1 or not options.partial_sums or options.stream_structure or options.backward == "pull":
        return False
    if structure.edge_output or structure.attention is not None or structure.max_depth:
        return False
    if options.share_memory and shares_all_rows(plan.comm):
        return False
    if any(reduction.op != "sum" or reduction.form not in ("copy", "scale") for reduction in sums):
        return False
    are_alike = len(sums) == 1 if any(reduction.form == "scale" for reduction in sums) else bool(sums)
    are_wide = all(rows.dtype in (torch.float32, torch.float64) for rows in program.src.values())
    sides = {key.side for key in gradients}
    return are_alike and are_wide and "src" in sides and "edge" not in sides


@dataclass
class _Pair:
    """What travels to this rank from one other rank.

    Args:
        sources: which of the rows that this rank needs there, ``[num_needed]`` bool.
        ends: the destination rows for which a sum travels, ascending.
        degrees: of how many edges each sum is made.
        columns: the sources of those edges, by their number among the needed rows.
        asked: the places of those edges.
        edges: the number of the source among those that travel, destination, and place of the edges that are left.
    """

    sources: Tensor
    ends: Tensor
    degrees: Tensor
    columns: Tensor
    asked: Tensor
    edges: tuple[Tensor, Tensor, Tensor]


def _build(plan: HaloPlan, edges: EdgeShards, serial: int, label: str) -> PartialSums:
    comm, rank, num_own = plan.comm, plan.comm.rank, plan.num_own_src
    pairs = [_pair(plan, edges, owner) for owner in range(comm.size)]
    num_summed = sum(pair.asked.numel() for pair in pairs)
    mine = [n for pair in pairs for n in (int(pair.sources.sum()), pair.ends.numel())]
    every = agree(comm, label, [*mine, num_own, num_summed])
    counts = [[row[2 * q] + row[2 * q + 1] for q in range(comm.size)] for row in every]
    index = torch.int64
    told = [torch.cat([p.sources.nonzero().view(-1), p.degrees, p.columns]).to(comm.device, index) for p in pairs]
    asked = comm.all_to_all(told, label=label)
    send_rows, degrees, columns, first = [], [], [], num_own
    for peer, message in enumerate(asked):
        num_sources, num_sums = every[peer][2 * rank : 2 * rank + 2]
        rows_of_sums = torch.arange(first, first + num_sums, device=comm.device)
        needed = plan.send_rows[peer]
        send_rows.append(torch.cat([needed[message[:num_sources]], rows_of_sums]))
        degrees.append(message[num_sources : num_sources + num_sums])
        columns.append(needed[message[num_sources + num_sums :]])
        first += num_sums
    schedule = Schedule.ring(counts, plan.options.block_rows)
    fewer = HaloPlan.over(comm, plan.options, schedule, first, plan.num_dst, send_rows)
    fewer = replace(fewer, ends=plan.ends, edges=plan.edges, last_node=plan.last_node, relation=plan.relation)
    shards = _edges(fewer, edges, pairs)
    degrees_of_sums = torch.cat(degrees)
    indptr = torch.zeros(degrees_of_sums.numel() + 1, dtype=torch.int64, device=comm.device)
    torch.cumsum(degrees_of_sums, 0, out=indptr[1:])
    rows = torch.cat(columns)
    sums = Shard(
        Block(rank, 0, num_own), indptr.to(smallest_index_dtype(rows.numel())),
        rows.to(smallest_index_dtype(max(num_own, 1))), slice(0, 0),
    )  # fmt: skip
    known, of_nodes = comm.caches.of(Degrees, shards), edges.degrees()
    known.of_nodes, known.isolated = of_nodes.to(smallest_index_dtype(edges.num_edges)), (of_nodes == 0).unsqueeze(-1)
    of_halo, of_own, all_summed = sum(map(sum, plan.schedule.counts)), *(sum(row[n] for row in every) for n in (-2, -1))
    saved = of_halo - sum(map(sum, counts))
    is_worth_it = saved >= max(_OF_HALO * of_halo, _OF_OWN * of_own)
    asked = [pair.asked for pair in pairs]
    return PartialSums(serial, fewer, shards, sums, asked, saved, all_summed, is_worth_it)


def _pair(plan: HaloPlan, edges: EdgeShards, owner: int) -> _Pair:
    """The cover of the edges from sources of `owner`, another rank, and what that means for them."""
    first, stop = plan.halo_start[owner], plan.halo_start[owner + 1]
    shards = [shard for shard in edges.shards if shard.block.owner == owner and owner != plan.comm.rank]
    none = torch.zeros(0, dtype=torch.int64, device=plan.comm.device)
    src = torch.cat([none, *(shard.src_rows.long() + (shard.block.start - first) for shard in shards)])
    dst = torch.cat([none, *(shard.dst_rows() for shard in shards)])
    places = torch.cat([none, *(_places(shard) for shard in shards)])
    is_source = torch.zeros(stop - first, dtype=torch.bool)
    if src.numel():
        is_source, _ = minimum_cover(src, dst, stop - first, edges.num_dst)
    is_source = is_source.to(plan.comm.device)
    stays = is_source[src]
    ends, of_edge = dst[~stays].unique(return_inverse=True)
    order = of_edge.argsort(stable=True)
    number = is_source.long().cumsum(0) - 1
    left = number[src[stays]], dst[stays], places[stays]
    degrees = of_edge.bincount(minlength=ends.numel())
    return _Pair(is_source, ends, degrees, src[~stays][order], places[~stays][order], left)


def _places(shard: Shard) -> Tensor:
    places = shard.places(slice(0, shard.num_edges))
    if isinstance(places, slice):
        return torch.arange(places.start, places.stop, device=shard.src_rows.device)
    return places.long()


def _edges(plan: HaloPlan, edges: EdgeShards, pairs: list[_Pair]) -> EdgeShards:
    """The edges of `plan`: those from own sources as they were, those that are left, and one for each sum."""
    src, dst, places, last = [], [], [], edges.num_edges
    halo = list(accumulate((0, *plan.schedule.counts[plan.comm.rank])))
    for owner, pair in enumerate(pairs):
        number, ends, of_left = pair.edges
        start = plan.num_own_src + halo[owner]
        num_sums, sources = pair.ends.numel(), int(pair.sources.sum())
        src += [number + start, torch.arange(num_sums, device=ends.device) + (start + sources)]
        dst += [ends, pair.ends]
        places += [of_left, torch.arange(last, last + num_sums, device=ends.device)]
        last += num_sums
    at = torch.cat(places)
    built = build_shards(torch.cat(src), torch.cat(dst), plan.blocks, edges.num_dst)
    own = [replace(edges.shards[number], block=plan.blocks[0]) for number in edges.numbers(0)]
    others = [replace(shard, rows=at[_places(shard)]) for shard in built.shards[1:]]
    return EdgeShards((*own, *others), edges.num_dst, last, num_own=edges.num_own)
