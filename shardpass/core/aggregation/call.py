"""One sharded call: a program on a graph, and everything that its forward and backward passes share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardpass.core.aggregation.out_edges import OutEdges
from shardpass.core.exchange import HaloPlan, WalkId, fetch_blocks
from shardpass.core.kernels import EdgeRun, dropout_factors, gather_rows
from shardpass.core.ranks import ParameterCopies, is_differentiable, ordinary_tensors, piece_seed, replayed
from shardpass.core.sharding import (
    Chunk,
    CopyStreams,
    EdgeShards,
    Shard,
    StreamedShards,
    smallest_index_dtype,
    to_device,
)
from shardpass.core.tracing import Drops, Inputs, Key, Program, Sides, State, Structure


@dataclass
class Operands(Sides):
    """The tensors of a call, detached. Forward and backward compute from them.

    Attributes:
        kept: fetched rows by name, one tensor per round, where the mode keeps them for another pass.
    """

    captures: list[Tensor]
    kept: dict[str, list[Tensor]] = field(default_factory=dict)


class EdgePiece(NamedTuple):
    """Some edges of a shard.

    Args:
        src_rows: the row of each source inside the block, ``[E]``.
        dst_rows: the destination of each edge, ``[E]`` int64, counted from the start of `window`.
        window: the destination rows that the edges may end in.
        places: where the edges stand in the edge list that edge tensors follow.
    """

    src_rows: Tensor
    dst_rows: Tensor
    window: slice
    places: slice | Tensor

    @classmethod
    def of_chunk(cls, shard: Shard, chunk: Chunk) -> EdgePiece:
        """The edges of a chunk, and the destinations of that chunk alone."""
        span = slice(chunk.start, chunk.stop)
        return cls(shard.src_rows[span], shard.dst_rows(chunk), slice(chunk.low, chunk.high), shard.places(span))

    @classmethod
    def of_run(cls, shard: Shard, run: EdgeRun) -> EdgePiece:
        """The edges of a run, with all destinations of the rank."""
        return cls(run.src_rows, run.dst_rows, slice(0, shard.num_dst), shard.places(run.positions))


class Degrees:
    """The in-degrees of own nodes in one edge list, and which of them are 0, once they were asked for."""

    of_nodes: Tensor | None = None
    isolated: Tensor | None = None


@dataclass
class ForwardResult:
    """What forward found; in backward, as much of it as backward reads.

    Attributes:
        values, states: of the reductions by their number, ``[num_dst, ...]`` each.
        edges: the edge result, ``[num_edges, ...]``, or `None`.
    """

    values: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    edges: Tensor | None = None


@dataclass
class Call:
    """One sharded call, from its forward to the end of its backward.

    Args:
        program: the message function, without its tensors: those are inputs of the autograd function; see `Operands`.
        plan, edges: the graph.
        structure: what the message function computes, agreed by all ranks.
        number: of the call, the same on every rank.
        canonical: source name -> the name under which the same tensor is fetched.
        keys: of the inputs, in the order in which autograd is given them. Equal source tensors come once.
        gradients: the inputs that require grad on some rank.
        captured: the captured tensors themselves, which are substituted when the message function runs again.
        seed: of the random numbers of this call.
        pull: the out-edges over which backward pulls, or `None` where it pushes.

    Attributes:
        given: dtype in which the message function is given each source; see `widened`.
        walks: how many walks over the rounds have been made.
        norm_moments: edges, mean and variance that forward found for batch norms inside the message function.
        autocast: whether autocast was enabled in forward, and its dtype.
        copies: what modules held in the place of parameters in forward.
    """

    program: Program
    plan: HaloPlan
    edges: EdgeShards
    structure: Structure
    number: int
    canonical: dict[str, str]
    keys: list[Key]
    gradients: frozenset[Key]
    captured: list[Tensor]
    seed: int
    pull: OutEdges | None = None
    given: dict[str, torch.dtype] = field(default_factory=dict)
    walks: int = 0
    norm_moments: dict[int, tuple[int, Tensor, Tensor]] = field(default_factory=dict)
    autocast: tuple[bool, torch.dtype] = field(default_factory=lambda: _autocast_state())
    copies: tuple[ParameterCopies, ...] = ()

    @property
    def label(self) -> str:
        return f"call {self.number} {self.program.name}"

    @property
    def streamed_to(self) -> torch.device | None:
        """The device to which edges are copied block by block; `None` where they are there already."""
        return self.program.streamed_to

    @property
    def reads_sources_again(self) -> bool:
        """Whether backward reads source rows. Sums of copies, or of rows times constants, do not need them."""
        structure = self.structure
        if structure.edge_output or structure.attention is not None or structure.max_depth > 0:
            return True
        linear = [r for r in structure.reductions if r.form in ("copy", "scale")]
        others = [r for r in structure.reductions if r.differentiable and r.form not in ("copy", "scale")]
        return bool(others) or any(r.differentiable and Key("edge", r.weight) in self.gradients for r in linear)

    @property
    def keeps_rows(self) -> bool:
        """Whether fetched rows are kept for another pass. A pulling backward does not read them."""
        wanted = self.reads_sources_again or self.structure.num_stages > 1
        return self.plan.options.mode != "sar" and self.pull is None and wanted

    def degrees(self) -> Tensor:
        """In-degree of each own node, ``[num_dst]`` integers, on the device of node rows."""
        kept = self.plan.comm.caches.of(Degrees, self.edges)
        if kept.of_nodes is None:
            with ordinary_tensors():
                kept.of_nodes = self.edges.degrees().to(smallest_index_dtype(self.edges.num_edges))
        found = kept.of_nodes
        return found if self.streamed_to is None else to_device(found, self.streamed_to)

    def isolated(self) -> Tensor:
        """Which own nodes have no in-edge, ``[num_dst, 1]`` bool, on the device of node rows."""
        kept = self.plan.comm.caches.of(Degrees, self.edges)
        if kept.isolated is None:
            with ordinary_tensors():
                kept.isolated = (self.edges.degrees() == 0).unsqueeze(-1)
        found = kept.isolated
        return found if self.streamed_to is None else to_device(found, self.streamed_to)

    def operands(self, tensors: Sequence[Tensor]) -> Operands:
        """The inputs of the autograd function, detached: those of `keys`, then the captures."""
        detached = [t.detach() if t.requires_grad else t for t in tensors]
        own = Sides.of(zip(self.keys, detached))
        src = {name: own.src[canonical] for name, canonical in self.canonical.items()}
        return Operands(src, own.dst, own.edge, captures=detached[len(self.keys) :])

    def next_walk(self) -> WalkId:
        """Identity of the next walk over the rounds."""
        self.walks += 1
        return WalkId(self.number, self.walks, self.label)

    def walk(
        self, operands: Operands, names: list[str], placed: bool = False
    ) -> Iterator[tuple[int, Shard, dict[str, Any]]]:
        """Yield ``(number, shard, {name: rows of its block})`` shard by shard. Collective if `names` is not empty.

        Args:
            placed: rows may be `PlacedRows`.
        """
        wanted = sorted({self.canonical[name] for name in names})
        missing = [name for name in wanted if name not in operands.kept]
        tensors, keep = [operands.src[name] for name in missing], self.keeps_rows
        streamed = self.streamed_to
        rounds = fetch_blocks(self.plan, tensors, self.next_walk(), keep=keep, placed=placed and streamed is None)
        copies = self.plan.comm.caches.of(CopyStreams)
        shards = self.edges.shards if streamed is None else StreamedShards(self.edges, streamed, copies)
        for position, _, fetched in rounds:
            rows = dict(zip(missing, fetched))
            for name in wanted:
                if name not in rows:
                    rows[name] = operands.src[name] if position == 0 else operands.kept[name][position - 1]
            if keep and position > 0:
                for name in missing:
                    blocks = operands.kept.setdefault(name, [])
                    if len(blocks) == position - 1:
                        blocks.append(rows[name])
            for number in self.edges.numbers(position):
                yield number, shards[number], {name: rows[self.canonical[name]] for name in names}

    def chunk_edges(self, operands: Operands) -> int:
        """How many edges are processed at a time, so that a temporary stays within ``options.chunk_bytes``."""
        tensors = [*operands.src.values(), *operands.dst.values(), *operands.edge.values()]
        widths = [t.itemsize * t.shape[1:].numel() for t in tensors]
        tails = [torch.Size(r.tail).numel() * r.dtype.itemsize for r in self.structure.reductions]
        return max(1, self.plan.options.chunk_bytes // max([*widths, *tails, 1]))

    def inputs(self, operands: Operands, piece: EdgePiece, rows: dict[str, Tensor], leaves: bool = False) -> Inputs:
        """What the message function sees of some edges. With `leaves`, inputs that need gradients are fresh leaves.

        A source tensor that is not among `rows` is not read in this pass; NaN stands in for it, so that an error in
        following dependences cannot go unnoticed. The same goes for destination rows that are not read at all.
        """
        count, unread = piece.src_rows.numel(), self.structure.unread

        def given(key: Key, tensor: Tensor) -> Tensor:
            is_leaf = leaves and key in self.gradients and is_differentiable(tensor)
            return tensor.detach().requires_grad_() if is_leaf else tensor

        src = {}
        for name, tensor in operands.src.items():
            if name in rows:
                src[name] = given(Key("src", name), gather_rows(rows[name], piece.src_rows))
            else:
                src[name] = stand_in(tensor, count, self.given.get(name, tensor.dtype))
        dst = {
            name: stand_in(tensor, count, tensor.dtype)
            if Key("dst", name) in unread
            else given(Key("dst", name), gather_rows(tensor[piece.window], piece.dst_rows))
            for name, tensor in operands.dst.items()
        }
        edge = {
            name: given(Key("edge", name), self._edge_rows(tensor, piece.places))
            for name, tensor in operands.edge.items()
        }
        return Inputs(src, dst, edge, piece.dst_rows, piece.window.stop - piece.window.start)

    def _edge_rows(self, edge_tensor: Tensor, places: slice | Tensor) -> Tensor:
        rows = edge_tensor[places]
        return rows if self.streamed_to is None else to_device(rows, self.streamed_to)

    def weights(self, operands: Operands, shard: Shard, name: str) -> Tensor | None:
        """The weights of a shard's edges, ``[num_edges]`` or ``[num_edges, heads]``; `None` for a plain copy."""
        if not name:
            return None
        rows = shard.select(operands.edge[name])
        heads = rows.shape[1:].numel()
        return rows.reshape(-1, heads) if heads > 1 else rows.reshape(-1)

    def seed_of(self, number: int, first_edge: int = 0) -> int:
        """A seed for the edges of shard `number` from `first_edge` on, the same in every pass."""
        return piece_seed(self.seed, number, first_edge)

    def drops(self, places: slice | Tensor) -> Drops:
        """Gives the factors of dropout of the edges at `places`, the same in every pass and however edges are cut."""
        return lambda number, rows, p: dropout_factors(self.seed_of(number), places, rows, p)

    @contextmanager
    def scope(self, number: int, first_edge: int) -> Iterator[None]:
        """The conditions under which the message function runs, the same in every pass: random numbers, autocast."""
        with self.plan.comm.in_message(), ExitStack() as stack:
            enabled, dtype = self.autocast
            device = self.plan.comm.device
            if enabled or torch.is_autocast_enabled(device.type):
                stack.enter_context(torch.autocast(device.type, dtype=dtype, enabled=enabled))
            for copies in self.copies if self.captured else ():
                stack.enter_context(copies.held(self.captured))
            if self.structure.random:
                stack.enter_context(replayed(self.plan.comm, self.seed_of(number, first_edge)))
            yield


def stand_in(tensor: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """`count` rows in the place of rows of `tensor` that nothing depends on: NaN, or 0 where there is none."""
    filler = float("nan") if is_differentiable(tensor) else 0
    return tensor.new_full((count, *tensor.shape[1:]), filler, dtype=dtype)  # not expanded: it may be viewed


def _autocast_state() -> tuple[bool, torch.dtype]:
    device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
