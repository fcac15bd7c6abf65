"""User-defined message and reduce functions: what they see of edges and nodes, and how they run again in backward."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardpass.core.ranks import Ranks, RowSet, torch_private
from shardpass.core.tracing import Inputs, Key, Side
from shardpass.core.training import SteadyNorms
from shardpass.core.wrapping import OutermostCall, copy_of
from shardpass.errors import RefusedError
from shardpass.frontends.dgl.closed import refused
from shardpass.frontends.dgl.frames import LazyFields
from shardpass.frontends.dgl.private import EdgeBatch, NodeBatch
from shardpass.frontends.dgl.structure import CanonicalType


class ShardedEdgeBatch(EdgeBatch):
    """What a user's message function sees of some edges."""

    index: Tensor
    """With an entry for each edge of the piece."""

    def batch_size(self) -> int:
        """The number of edges of the piece, which may be a size and nothing else."""
        return self.index.size(0)

    def __len__(self) -> int:
        return len(self.index)

    def edges(self) -> NoReturn:
        """Refused, since each rank numbers its nodes and edges by itself."""
        raise refused(
            "edges.edges() in a message function", "put the ids you need into srcdata, dstdata or edata before"
        )


class ShardedNodeBatch(NodeBatch):
    """What a user's reduce or apply function sees of some nodes.

    Attributes:
        alike: what the rows are, as those of one in-degree that this rank has.
        is_group: there are other groups, of other in-degrees.
    """

    alike: RowSet | None = None
    is_group = False
    comm: Ranks | None = None

    def batch_size(self) -> Any:
        """The number of these nodes, which may be a size and nothing else."""
        count = super().batch_size()
        return count if self.alike is None or self.comm is None else self.comm.count_of(self.alike)

    def __len__(self) -> int:
        count = int(super().batch_size())
        if self.comm is not None and not self.is_group:  # a few nodes, whose number many others have
            self.comm.note_count(count)
        return count

    def nodes(self) -> NoReturn:
        """Refused, since each rank numbers its nodes by itself."""
        raise refused("nodes.nodes() in a user's function", "read graph.ndata[dgl.NID] there, the original ids")


class EdgeFunction:
    """A user's function of edges as a message function of the engine, which returns fields by name.

    Args:
        function: takes an `EdgeBatch`.
        canonical: the type of the edges.
        reads: a set to which the keys of the inputs that it reads are added; see `Program.reads`.
        hidden: fields that are not listed; see `LazyFields`.
    """

    def __init__(
        self,
        function: Callable[[Any], dict[str, Tensor]],
        canonical: CanonicalType,
        reads: set[Key],
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self.function, self.canonical, self.reads, self.hidden = frozen(function), canonical, reads, hidden
        self.norms = SteadyNorms(*_held_by(self.function))
        self.name = getattr(self.function, "__qualname__", None) or type(self.function).__name__

    def __call__(self, inputs: Inputs) -> dict[str, Tensor]:
        def fields(side: Side, rows: dict[str, Tensor]) -> LazyFields:
            return LazyFields(rows, lambda tensor: tensor, lambda name: self.reads.add(Key(side, name)), self.hidden)

        self.norms.check(self.name)
        places = torch.arange(inputs.index.numel(), device=inputs.index.device)
        batch = ShardedEdgeBatch(
            None,
            places,
            self.canonical,
            fields("src", inputs.src),
            fields("edge", inputs.edge),
            fields("dst", inputs.dst),
        )
        batch.index = inputs.index
        try:
            found = self.function(batch)
        except KeyError as error:
            known = {side: sorted(rows) for side, rows in vars(inputs).items() if isinstance(rows, dict)}
            raise KeyError(f"the message function {self.name} reads {error}, but there are {known}") from error
        if not isinstance(found, Mapping) or not found:
            raise RefusedError(f"the message function {self.name} must return a dict of fields, not {type(found)}")
        count = inputs.index.numel()
        for name, value in found.items():
            if not isinstance(value, Tensor) or value.dim() == 0 or value.size(0) != count:
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise RefusedError(
                    f"the message function {self.name} returns {name!r} of the shape {shape} for {count} edges; "
                    f"expected a tensor with a row for each of them"
                )
        return dict(found)


def frozen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of `function` that keeps what it holds now.

    Backward runs it again, when a loop variable or a setting may have changed. What it holds is the contents of its
    closure or `functools.partial`, the attributes of modules among them, and those of the object whose method it is.
    """
    if isinstance(function, OutermostCall):  # a method of the wrapped model, or of a part of it
        function = function.plain
    if isinstance(function, types.MethodType):
        return types.MethodType(frozen(function.__func__), _snapshot(function.__self__))
    if isinstance(function, partial):
        return partial(frozen(function.func), *function.args, **function.keywords)
    if not isinstance(function, types.FunctionType):
        return _snapshot(function)
    if not function.__closure__:
        return function

    def cell(kept: Any) -> Any:
        try:
            held = kept.cell_contents
        except ValueError:  # not assigned yet
            return kept
        return types.CellType(_snapshot(held) if isinstance(held, nn.Module) else held)

    return copy_of(function, function.__globals__, tuple(cell(kept) for kept in function.__closure__))


def _held_by(function: Callable[..., Any]) -> list[Any]:
    """What a function holds: the object whose method it is, or the contents of its closure; or itself."""
    if isinstance(function, partial):
        return [*function.args, *function.keywords.values(), *_held_by(function.func)]
    if isinstance(function, types.MethodType):
        return [function.__self__]
    if isinstance(function, types.FunctionType):
        return [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    return [function]


def _snapshot(held: Any) -> Any:
    """A copy of an object that keeps its attributes as they are now. It shares parameters and buffers with `held`."""
    if isinstance(held, torch.jit.ScriptModule) or type(held).__new__ is not object.__new__:
        return held
    attributes = getattr(held, "__dict__", None)
    if isinstance(held, type) or not attributes:
        return held
    other = object.__new__(type(held))
    other.__dict__.update({name: value for name, value in attributes.items() if not isinstance(value, OutermostCall)})
    if isinstance(held, nn.Module):
        other.__dict__["_modules"] = {
            name: _snapshot(module) for name, module in torch_private.children_of(held).items()
        }
    return other


class Packing:
    """Several fields of one dtype as one tensor, side by side."""

    def __init__(self) -> None:
        self._layout: list[tuple[str, torch.Size]] = []
        self.parts: list[Tensor] = []
        self.dtypes: dict[str, torch.dtype] = {}

    def pack(self, fields: Mapping[str, Tensor], only: torch.dtype | None = None) -> Tensor:
        """The fields of the dtype `only` (or the first one's) as ``[E, columns]``. A single one stays as it is."""
        self.dtypes = {name: tensor.dtype for name, tensor in fields.items()}
        only = only or next(iter(fields.values())).dtype
        chosen = {name: tensor for name, tensor in fields.items() if tensor.dtype == only}
        self._layout = [(name, tensor.shape[1:]) for name, tensor in chosen.items()]
        self.parts = list(chosen.values()) if len(chosen) > 1 else []
        if len(chosen) == 1:
            return next(iter(chosen.values()))
        return torch.cat([tensor.reshape(tensor.size(0), -1) for tensor in chosen.values()], dim=1)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """The fields, by name."""
        if len(self._layout) == 1:
            return {self._layout[0][0]: packed}
        widths = [shape.numel() for _, shape in self._layout]
        parts = packed.split(widths, dim=1)
        return {name: part.reshape(-1, *shape) for (name, shape), part in zip(self._layout, parts)}
