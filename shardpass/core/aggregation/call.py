"""One sharded call: a program on a graph, with everything its forward and backward passes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardpass.core.aggregation.out_edges import OutEdges
from shardpass.core.exchange import HaloPlan, Stream, fetch_blocks
from shardpass.core.ranks import piece_seed, replayed
from shardpass.core.sharding import Chunk, CopyStreams, EdgeShards, Shard, StreamedShards, to_device
from shardpass.core.tracing import Inputs, Program, Structure


@dataclass
class Operands:
    """The tensors of a call, detached: what forward and backward compute from. `kept` holds fetched rows by name."""

    src: dict[str, Tensor]
    dst: dict[str, Tensor]
    edge: dict[str, Tensor]
    captures: list[Tensor]
    kept: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass
class Call:
    """One sharded call.

    Args:
        program: the body, without its tensors: those are inputs of the autograd function (see `Operands`).
        plan, edges: the graph.
        structure: of the body, agreed by all ranks.
        number: of the call, the same on every rank.
        canonical: source name -> the name under which the same tensor is fetched.
        dst_names, edge_names: of the destination and edge tensors, sorted.
        gradients: the inputs (``"s:x"``, ``"d:x"``, ``"e:w"``) that require grad on some rank.
        captured: the captured tensors themselves, to be substituted when the body runs again.
        seed: of the random numbers of this call.
        pull: the out-edges over which backward pulls; None: it pushes.
        walks: how many walks over the rounds have been made.
        norm_moments: what forward found for batch norms inside the body: edges, mean, variance.
    """

    program: Program
    plan: HaloPlan
    edges: EdgeShards
    structure: Structure
    number: int
    canonical: dict[str, str]
    dst_names: list[str]
    edge_names: list[str]
    gradients: frozenset[str]
    captured: list[Tensor]
    seed: int
    pull: OutEdges | None = None
    walks: int = 0
    norm_moments: dict[int, tuple[int, Tensor, Tensor]] = field(default_factory=dict)
    autocast: tuple[bool, torch.dtype] = field(default_factory=lambda: _autocast_state())

    @property
    def streamed_to(self) -> torch.device | None:
        """The device to which edges are copied block by block; None where they are there."""
        return self.program.streamed_to

    def degrees(self) -> Tensor:
        """In-degree of each own node, ``[num_dst]`` int64, where rows of nodes are."""
        found = self.edges.degrees()
        return found if self.streamed_to is None else to_device(found, self.streamed_to)

    @property
    def label(self) -> str:
        return f"call {self.number} {self.program.name}"

    @property
    def src_names(self) -> list[str]:
        """Source tensors that are fetched under their own name, sorted."""
        return sorted(set(self.canonical.values()))

    def operands(self, tensors: Sequence[Tensor]) -> Operands:
        """The inputs of the autograd function (sources, destinations, edges, captures, in order of name), detached."""
        detached = [t.detach() for t in tensors]
        a = len(self.src_names)
        b, c = a + len(self.dst_names), a + len(self.dst_names) + len(self.edge_names)
        own = dict(zip(self.src_names, detached[:a]))
        return Operands(
            src={name: own[canonical] for name, canonical in self.canonical.items()},
            dst=dict(zip(self.dst_names, detached[a:b])),
            edge=dict(zip(self.edge_names, detached[b:c])),
            captures=detached[c:],
        )

    @property
    def keeps_rows(self) -> bool:
        """Whether fetched rows are kept for another pass; a pulling backward does not read them."""
        wanted = self.reads_sources_again or self.structure.num_stages > 1
        return self.plan.options.runs_as != "sar" and self.pull is None and wanted

    @property
    def reads_sources_again(self) -> bool:
        """Whether backward reads source rows: for sums of copies, or of rows times constants, it does not."""
        structure = self.structure
        if structure.edge_output or structure.attention is not None or structure.max_depth > 0:
            return True
        linear = [r for r in structure.reductions if r.form in ("copy", "scale")]
        others = [r for r in structure.reductions if r.differentiable and r.form not in ("copy", "scale")]
        return bool(others) or any(r.differentiable and f"e:{r.weight}" in self.gradients for r in linear)

    def stream(self) -> Stream:
        """Identity of the next walk over the rounds."""
        self.walks += 1
        return Stream(self.number, self.walks, self.label)

    def chunk_edges(self, operands: Operands) -> int:
        """How many edges are processed at a time, so that a temporary stays within ``options.chunk_bytes``."""
        tensors = [*operands.src.values(), *operands.dst.values(), *operands.edge.values()]
        widths = [t.itemsize * max(1, t[:0].new_empty((1, *t.shape[1:])).numel()) for t in tensors]
        tails = [torch.Size(r.tail).numel() * r.dtype.itemsize for r in self.structure.reductions]
        return max(1, self.plan.options.chunk_bytes // max([*widths, *tails, 1]))

    def walk(
        self, operands: Operands, names: list[str], placed: bool = False
    ) -> Iterator[tuple[int, Shard, dict[str, Any]]]:
        """Yield ``(position, shard, {name: rows of the block})`` block by block. Collective if `names` is not empty.

        Args:
            placed: rows may be `PlacedRows`.
        """
        wanted = sorted({self.canonical[name] for name in names})
        missing = [name for name in wanted if name not in operands.kept]
        tensors, keep = [operands.src[name] for name in missing], self.keeps_rows
        streamed = self.streamed_to
        rounds = fetch_blocks(self.plan, tensors, self.stream(), keep=keep, placed=placed and streamed is None)
        copies = self.plan.caches.of(CopyStreams)
        shards = self.edges.shards if streamed is None else StreamedShards(self.edges, streamed, copies)
        for position, _, fetched in rounds:
            rows = dict(zip(missing, fetched))
            for name in wanted:
                if name not in rows:
                    rows[name] = operands.src[name] if position == 0 else operands.kept[name][position - 1]
            if self.keeps_rows and position > 0:
                self._keep(operands, missing, position, rows)
            yield position, shards[position], {name: rows[self.canonical[name]] for name in names}

    def _keep(self, operands: Operands, missing: list[str], position: int, rows: dict[str, Tensor]) -> None:
        for name in missing:
            blocks = operands.kept.setdefault(name, [])
            if len(blocks) == position - 1:
                blocks.append(rows[name])

    def inputs(
        self, operands: Operands, shard: Shard, chunk: Chunk, rows: dict[str, Tensor], leaves: bool = False
    ) -> Inputs:
        """What the body sees of a chunk. With `leaves`, inputs that need gradients are fresh leaves.

        A source tensor that is not among `rows` is not read in this pass; NaN stands in for it, so that an error in
        following dependences cannot go unnoticed.
        """
        index = shard.dst_rows(chunk)
        source = shard.src_rows[chunk.start : chunk.stop]
        window = slice(chunk.low, chunk.high)
        places = shard.places(slice(chunk.start, chunk.stop))
        found = self.gathered(operands, source, index, places, rows, leaves, window)
        found.num_dst = chunk.high - chunk.low
        return found

    def gathered(
        self,
        operands: Operands,
        source: Tensor,
        index: Tensor,
        places: slice | Tensor,
        rows: dict[str, Tensor],
        leaves: bool = False,
        window: slice = slice(None),
    ) -> Inputs:
        """What the body sees of edges given by their rows of the block, destinations, and places in the edge list.

        Args:
            window: the destination rows that `index` counts in.
        """
        src = {}
        for name, tensor in operands.src.items():
            if name in rows:
                src[name] = self._leaf("s:" + name, rows[name].index_select(0, source), leaves)
            else:
                filler = float("nan") if tensor.is_floating_point() else 0
                src[name] = tensor.new_full((1, *tensor.shape[1:]), filler).expand(source.numel(), *tensor.shape[1:])
        dst = {
            name: self._leaf("d:" + name, t[window].index_select(0, index), leaves) for name, t in operands.dst.items()
        }
        edge = {name: self._leaf("e:" + name, self._rows_at(t, places), leaves) for name, t in operands.edge.items()}
        return Inputs(src, dst, edge, index, self.edges.num_dst)

    def _rows_at(self, edge_tensor: Tensor, places: slice | Tensor) -> Tensor:
        rows = edge_tensor[places]
        return rows if self.streamed_to is None else to_device(rows, self.streamed_to)

    def _leaf(self, key: str, tensor: Tensor, leaves: bool) -> Tensor:
        if leaves and key in self.gradients and tensor.is_floating_point():
            return tensor.detach().requires_grad_()
        return tensor

    def weights(self, operands: Operands, shard: Shard, name: str) -> Tensor | None:
        """The weights of a shard's edges, ``[num_edges]`` or ``[num_edges, heads]``; None for a plain copy."""
        if not name:
            return None
        rows = shard.select(operands.edge[name])
        heads = rows.shape[1:].numel()
        return rows.reshape(-1, heads) if heads > 1 else rows.reshape(-1)

    def generator(self, position: int, chunk: Chunk) -> Callable[[], torch.Generator]:
        """Makes the generator of a chunk's dropout, the same in every pass."""
        return lambda: torch.Generator(self.plan.comm.device).manual_seed(self.seed_of(position, chunk.start))

    def seed_of(self, position: int, first_edge: int = 0) -> int:
        """A seed for the edges of the block at `position` from `first_edge` on, the same in every pass."""
        return piece_seed(self.seed, position, first_edge)

    @contextmanager
    def scope(self, position: int = 0, first_edge: int = 0) -> Iterator[None]:
        """The conditions under which the body runs, the same in every pass: random numbers, autocast."""
        with ExitStack() as stack:
            enabled, dtype = self.autocast
            device = self.plan.comm.device
            if enabled or torch.is_autocast_enabled(device.type):
                stack.enter_context(torch.autocast(device.type, dtype=dtype, enabled=enabled))
            if self.structure.random:
                stack.enter_context(replayed(self.plan.comm, self.seed_of(position, first_edge)))
            yield


def _autocast_state() -> tuple[bool, torch.dtype]:
    device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
