"""DGL's own attention layers as one sharded call.

``apply_edges``, ``edge_softmax``, dropout and ``update_all`` of such a layer become one pass over the edges, in which
no tensor has a row per edge. The layer runs its own unmodified ``forward`` on an `AttentionGraph`. There,
``apply_edges`` computes nothing: it gives `Scores`, which remember how the scores are made. ``edge_softmax`` makes
`Weights` of them, and ``update_all`` with such weights is the sharded call. If the layer does anything else with scores
or weights, they are computed whole, by the calls that it makes on an ordinary graph. They never leave the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardpass.core.aggregation import aggregate
from shardpass.core.kernels import dropout_factors
from shardpass.core.ranks import draw_seed, is_parameter, piece_seed, torch_private
from shardpass.core.tracing import Findings, Inputs, Program, Structure
from shardpass.core.wrapping import with_names
from shardpass.frontends.dgl.frames import Frame
from shardpass.frontends.dgl.functions import message_of, operands
from shardpass.frontends.dgl.graph import ShardedDGLGraph
from shardpass.frontends.dgl.messages import MessagePassing, summed
from shardpass.frontends.dgl.private import ALL, softmax_kernel
from shardpass.frontends.dgl.structure import differentiated_once

Step = Callable[[Tensor], Tensor]


class _Uncomputed:
    """Edge data of which only the formula is kept. Torch's functions take it where they take a tensor."""

    def whole(self) -> Tensor:
        """The values, ``[num_edges, ...]``. Collective."""
        raise NotImplementedError

    def followed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func` makes of it where that needs no values, else NotImplemented."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(given for given in (*args, *kwargs.values()) if isinstance(given, _Uncomputed))
        found = first.followed(func, args, kwargs)
        return func(*whole(args), **whole(kwargs)) if found is NotImplemented else found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.whole(), name)

    def __mul__(self, other: Any) -> Any:
        return torch.mul(self, other)  # type: ignore[arg-type]

    def __truediv__(self, other: Any) -> Any:
        return torch.div(self, other)  # type: ignore[arg-type]

    def sum(self, dim: int) -> Any:
        """As `torch.sum`."""
        return torch.sum(self, dim=dim)  # type: ignore[call-overload]

    def unsqueeze(self, dim: int) -> Any:
        """As `torch.unsqueeze`."""
        return torch.unsqueeze(self, dim=dim)  # type: ignore[arg-type]


_ROW_BY_ROW = (F.leaky_relu, Tensor.mul, Tensor.__mul__, torch.mul, torch.div, torch.sum, torch.unsqueeze)
"""The functions by which DGL's layers make scores of what ``apply_edges`` gives. None of them mixes edges there."""


@dataclass(eq=False)
class Scores(_Uncomputed):
    """What ``apply_edges`` gives in an attention layer.

    Args:
        passing: the edges, with the fields that `message` reads as they were then.
        message: the built-in message function.
        steps: what was done to the rows since.
    """

    passing: MessagePassing
    message: Any
    steps: tuple[Step, ...] = ()

    def whole(self) -> Tensor:
        """The scores, ``[num_edges, ...]``. Collective."""
        return _after(self.passing.per_edge(self.message)[self.message.out_field], self.steps)

    def followed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The scores after one more of the functions that treat rows one by one, with numbers or parameters."""
        given = [*args, *kwargs.values()]
        if func not in _ROW_BY_ROW or any(isinstance(a, Tensor) and not is_parameter(a) for a in given):
            return NotImplemented

        def step(rows: Tensor) -> Tensor:
            return func(*(rows if a is self else a for a in args), **kwargs)  # type: ignore[no-any-return]

        return replace(self, steps=(*self.steps, step))


@dataclass(eq=False)
class Weights(_Uncomputed):
    """The softmax of scores over the in-edges of a node.

    Args:
        scores: the scores.
        dropout: the probability with which an entry is set to 0.
        seed: decides which entries those are, in every use alike, by the rule of the engine's attention. `None` without
            dropout.
    """

    scores: Scores
    dropout: float = 0.0
    seed: int | None = None
    _value: list[Tensor] = field(default_factory=list)

    def whole(self) -> Tensor:
        """The weights, ``[num_edges, ...]``. Collective on the first use."""
        if not self._value:
            edges = self.scores.passing.edges
            rows: Tensor = softmax_kernel(edges.index, differentiated_once(self.scores.whole()))
            if self.seed is not None:
                seed, places = piece_seed(self.seed, 0), slice(0, rows.size(0))
                rows = rows * dropout_factors(seed, places, rows, self.dropout).view_as(rows)
            self._value.append(rows)
        return self._value[0]

    def followed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The weights of which `torch.nn.functional.dropout` drops some."""
        return self._dropped(*args, **kwargs) if func is F.dropout and self.seed is None else NotImplemented

    def _dropped(self, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or p == 0:
            return self
        if inplace or not 0 < p < 1:
            return NotImplemented
        return Weights(self.scores, p, draw_seed(self.scores.passing.edges.plan.comm))


def whole(value: Any) -> Any:
    """`value`, in which scores and weights are computed. Collective."""
    return torch_private.tree_map(lambda leaf: leaf.whole() if isinstance(leaf, _Uncomputed) else leaf, value)


class AttentionFrame(Frame):
    """Edge data in an attention layer, where a field may be `Scores` or `Weights`."""

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, _Uncomputed):
            self._own[name] = value  # type: ignore[assignment]
        else:
            super().__setitem__(name, value)


class AttentionGraph(ShardedDGLGraph):
    """What an attention layer of DGL sees of a graph: the same, but for ``apply_edges`` and ``update_all``."""

    @staticmethod
    def of(graph: ShardedDGLGraph) -> AttentionGraph:
        """`graph`, for the time of the layer's ``forward``."""
        other = graph.copied_as(AttentionGraph)
        other._edge_frames = {kind: frame.clone(AttentionFrame) for kind, frame in graph.frames.edges.items()}
        return other

    def apply_edges(self, func: Any, edges: Any = ALL, etype: Any = None) -> None:
        """Note what `func`, a built-in function, computes on all edges."""
        kind = self.to_canonical_etype(etype)
        self._edge_frames[kind][func.out_field] = Scores(self._passing(kind).only_read_by(func), func)  # type: ignore[assignment]

    def update_all(self, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None) -> None:
        """Sum the rows of the sources, each times the weight of its edge. Collective."""
        kind = self.to_canonical_etype(etype)
        (_, value), (_, weight) = operands(message_func)
        weights: Any = self._edge_frames[kind][weight]
        if isinstance(weights, Weights):
            found = _weighted_sum(self._passing(kind), message_func, value, weights)
            if found is not None:
                self._dst_frames[kind[2]][reduce_func.out_field] = found
                return
            self._edge_frames[kind][weight] = weights.whole()
        super().update_all(message_func, reduce_func, apply_node_func, etype)


class _NotAttentionError(Exception):
    """Ends a call before any row is sent: the engine does not recognise it, so weights are computed whole."""


def _weighted_sum(passing: MessagePassing, message: Any, value: str, weights: Weights) -> Tensor | None:
    """The sum over in-edges of source rows `value` times `weights`, in one pass. `None` where that cannot be done."""
    scores, edges, steps = weights.scores, passing.edges, weights.scores.steps
    read, _ = scores.passing.program_of(scores.message, "scores by ")
    score_of, weighted_by = message_of(scores.message), message_of(message)
    (_, weight), dropout = operands(message)[1], weights.dropout

    def weighted(inputs: Inputs) -> Tensor:
        rows = _softmax(_after(score_of(inputs), steps), inputs)
        rows = F.dropout(rows, dropout, True) if dropout else rows
        return weighted_by(Inputs({value: inputs.src[_VALUE]}, {}, {weight: rows}, inputs.index, inputs.num_dst))

    def watch(structure: Structure) -> None:
        if structure.attention is None:
            raise _NotAttentionError

    program = Program(
        f"attention by {message.name}{passing.where}", {**read.src, _VALUE: passing.src[value]}, read.dst, read.edge,
        weighted, summed, watch=watch, seed=weights.seed,
    )  # fmt: skip
    name = program.name, scores.message.name, len(steps)
    program.findings = passing.findings.setdefault(name, Findings())
    try:
        return aggregate(program, edges.plan, edges.shards)
    except _NotAttentionError:
        return None


_VALUE = "value of the attention"


def _after(rows: Tensor, steps: tuple[Step, ...]) -> Tensor:
    for step in steps:
        rows = step(rows)
    return rows


def _softmax(scores: Tensor, inputs: Inputs) -> Tensor:
    """The softmax of some scores over the in-edges of each destination, in functions that the engine recognises."""
    index, size = inputs.index, (inputs.num_dst, *scores.shape[1:])
    place = index.view(-1, *[1] * (scores.dim() - 1)).expand_as(scores)
    top = scores.new_full(size, float("-inf")).scatter_reduce(0, place, scores.detach(), "amax", include_self=False)
    weights = (scores - top.index_select(0, index)).exp()
    return weights / scores.new_zeros(size).index_add(0, index, weights).index_select(0, index)


def _edge_softmax(graph: AttentionGraph, logits: Any) -> Any:
    """DGL's ``edge_softmax`` in an attention layer."""
    if isinstance(logits, Scores):
        return Weights(logits)
    return softmax_kernel(graph.edges_of(None).index, differentiated_once(logits))


class Attends:
    """A base class that comes before one of DGL's attention layers and makes it one sharded call."""

    def forward(self, graph: Any, *args: Any, **kwargs: Any) -> Any:
        """What the layer computes on own rows. Collective."""
        original = super().forward  # type: ignore[misc]
        if not _is_fused(graph):
            return original(graph, *args, **kwargs)
        attending = with_names(original.__func__, edge_softmax=_edge_softmax)
        return whole(attending(self, AttentionGraph.of(graph), *args, **kwargs))


def _is_fused(graph: Any) -> bool:
    if not isinstance(graph, ShardedDGLGraph) or torch.is_autocast_enabled("cuda"):
        return False
    return all(graph.edges_of(kind).plan.options.fuse_attention for kind in graph.canonical_etypes)
