"""Watching a message function run: a scatter onto the destinations becomes a reduction over all of a node's in-edges.

[Note: message functions run in pieces]
A program's message function is ordinary torch code, written for all edges at once. The engine runs it on a few edges
at a time under `EdgeTrace`, a TorchFunctionMode. Whatever works row by row needs no attention. A scatter onto the
destinations is a reduction over edges that are not all here. The trace hands its messages to a reduction handler, a
`Phase`, and returns what that answers: in forward it accumulates them; in backward it notes them and answers with the
known result as a leaf. Any other use of the destination index that would need a whole neighbourhood at once (sorting,
counting, comparing) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardpass.core.following import user_line
from shardpass.core.ranks import torch_private
from shardpass.core.tracing.linear_maps import LinearMap
from shardpass.core.tracing.program import Inputs, NeedsMessagesError, Program
from shardpass.core.tracing.reducers import Base
from shardpass.errors import NeedsHaloError, RefusedError

SUMS = frozenset("scatter_add_ scatter_add index_add_ index_add".split())
SCATTERS = SUMS.union("scatter_reduce_ scatter_reduce".split())
REDUCE_NAMES = {"sum": "sum", "amax": "max", "amin": "min", "prod": "prod"}
SHAPE_OPS = frozenset(
    "view expand expand_as unsqueeze squeeze reshape contiguous clone to long detach flatten view_as alias".split()
)
INDEX_OPS = frozenset("index_select gather __getitem__ take_along_dim".split())
METADATA_OPS = frozenset(
    "size dim numel __len__ is_floating_point is_complex ndimension stride element_size is_contiguous nelement".split()
)
HARMLESS_OPS = METADATA_OPS.union(
    "__get__ ones_like new_ones new_zeros new_full new_empty zeros_like empty_like full_like data_ptr __repr__".split()
)
_CONTENTS = (Tensor, list, tuple, dict)


class StopPass(BaseException):
    """Raised inside a message function once the running pass has seen everything it needs. Never reaches a user."""


Drops = Callable[[int, Tensor, float], Tensor]
"""Gives what the n-th dropout of a message function, which has probability p, multiplies rows of edges by; see
`dropout_factors`. It is called with n, the rows and p."""


class Phase(Protocol):
    """What becomes of the reductions in one run of a message function."""

    num_dst: int
    offset: int  # first whole destination row of this piece
    whole_dst: int  # destination rows of the rank

    def known_base(self, k: int) -> Base | None:
        """The base of reduction `k` if the structure is known already, else None: the trace then finds it out."""
        ...

    def reduce(self, k: int, op: str, values: Tensor, index: Tensor, base: Base) -> Tensor:
        """The value of reduction `k` for the destinations of this piece, ``[num_dst, ...]``."""
        ...


def sequence_number() -> int:
    """The number that autograd gives to the next node. Nodes made before have smaller ones."""
    if torch.is_inference_mode_enabled():
        return 0
    with torch.enable_grad():
        return torch_private.next_node_number()


def tensors_in(args: Iterable[Any]) -> list[Tensor]:
    """The tensors among `args` and in the lists and tuples among them; it does not look into nested ones."""
    found = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += [item for item in arg if isinstance(item, Tensor)]
    return found


def transform_refusal(name: str, line: str, transform: str) -> RefusedError:
    """Why a transform of ``torch.func`` cannot run inside a message of the program `name`."""
    return RefusedError(
        f"{name}: {line}: a functional transform ({transform}) inside a message hides from shardpass what the message "
        f"is made of. Write it for all edges at once, and gradients as formulas"
    )


class EdgeTrace(TorchFunctionMode):
    """Runs a message function on a piece of the edges.

    Args:
        program: the program that the message function belongs to.
        inputs: what the message function sees of the piece.
        phase: the reduction handler, which decides what reductions become.
        substitutes: tensors to use in place of others, by id.
        expected: ids of the tensors that require grad and were there before a second run. The trace refuses a message
            function that uses another one, since its gradient would be lost. None allows any.
        drops: gives the factors of dropout inside the message function, the same whenever this piece runs.
        returned: reductions whose result the message function takes from what the scatter returns, not from the tensor
            that it scatters into. The trace copies nothing into that tensor.
    """

    def __init__(
        self,
        program: Program,
        inputs: Inputs,
        phase: Phase,
        substitutes: dict[int, Tensor] | None = None,
        expected: set[int] | None = None,
        drops: Drops | None = None,
        returned: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self._returned = returned
        self.name, self.phase, self._ranks = program.name, phase, program.ranks
        self.substitutes = substitutes or {}
        self._expected = expected
        self._drops = drops
        self.num_drops = 0
        self.norms: dict[int, nn.Module] = {}  # by the number of their reduction
        self._first_node = sequence_number() if expected is not None else 0
        self.count = self.num_linear = 0
        self._maps, self._inputs = {one.number: one for one in program.maps}, inputs
        self._index = index = inputs.index
        self._aliases: dict[int, Tensor] = {id(index): index}  # tensors held, so that ids stay theirs

    def __enter__(self) -> EdgeTrace:
        if self._ranks is not None:
            self._ranks.watch = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._ranks is not None:
            self._ranks.watch = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in METADATA_OPS:  # most of the calls that layers of PyG make
            return func(*args, **kwargs)
        if (transform := torch_private.running_transform()) is not None:
            raise transform_refusal(self.name, str(user_line()), transform)
        if self.substitutes:
            args = tuple([self._substituted(arg) for arg in args])
            kwargs = {key: self._substituted(arg) for key, arg in kwargs.items()}
        if name == "linear":
            self.num_linear += 1
            if (found := self._maps.get(self.num_linear - 1)) is not None:
                return self._mapped(found, *args[:2])
        operands = tensors_in((*args, *kwargs.values()))
        if self._expected is not None:
            self._check_expected(operands)
        if name in ("scatter_reduce", "scatter_reduce_"):
            scatter = _bound(args, kwargs)
            is_only_messages = scatter.get("reduce") == "sum" and scatter.get("include_self") is False
            if (scatter.get("reduce") == "mean" or is_only_messages) and self.is_index(scatter.get("index")):
                return self._sum_or_mean(name, **scatter)
        return self.run(func, name, args, kwargs, operands)

    def _substituted(self, arg: Any) -> Any:
        """`arg` with the substitutes of the tensors in it."""
        if isinstance(arg, Tensor):
            return self.substitutes.get(id(arg), arg)
        is_flat = isinstance(arg, (list, tuple)) and not any(isinstance(item, _CONTENTS) for item in arg)
        if isinstance(arg, _CONTENTS) and not is_flat:  # the search costs more than most operations
            return torch_private.tree_map_only(Tensor, lambda t: self.substitutes.get(id(t), t), arg)
        return arg

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]) -> Any:
        """Carry out one intercepted call."""
        self._check_repeatable(name, args, kwargs)
        if name == "dropout" and self._drops is not None:
            return self._dropout(*args, **kwargs)
        if not any(self.is_index(operand) for operand in operands):
            return func(*args, **kwargs)
        first = args[0] if args else None
        if name in SCATTERS:
            return self._scatter(name, **_bound(args, kwargs))
        if self.is_index(first) and (name in SHAPE_OPS or (name == "__getitem__" and _adds_dimensions(args[1]))):
            out = func(*args, **kwargs)
            self._aliases[id(out)] = out
            return out
        if name in INDEX_OPS and isinstance(first, Tensor) and not self.is_index(first):
            return func(*self._indexable(name, args), **kwargs)
        if name == "max" and self.is_index(first) and len(args) == 1 and not kwargs:
            return torch.tensor(self.phase.num_dst - 1)
        if name in HARMLESS_OPS:
            return func(*args, **kwargs)
        raise NeedsHaloError(
            f"{self.name}: {user_line()}: `{name}` on the destination index needs all in-edges of a node at once, so "
            f"it cannot be computed one shard at a time. Use Options(mode='halo') for this model"
        )

    def reduce(self, op: str, messages: Tensor, base: Base) -> Tensor:
        """The value of the next reduction: `messages` ``[E, ...]`` reduced by destination, ``[num_dst, ...]``."""
        k, self.count = self.count, self.count + 1
        return self.phase.reduce(k, op, messages, self._index, base)

    def reduced(self, op: str, messages: Tensor, base: float = 0.0) -> Tensor:
        """See `MessageWatch`: for layers that ask for a reducer by its name, which torch has no scatter for."""
        with torch_private.DisableTorchFunction():
            return self.reduce(op, messages, Base(base))

    def edge_moments(self, norm: nn.Module, rows: Tensor) -> Tensor:
        """Mean and population variance of `rows` ``[E, channels]`` over all edges of all ranks: ``[2, channels]``.

        Args:
            norm: the batch norm that asks. Its running statistics are updated once the result is known.
        """
        self.norms[self.count] = norm
        with torch_private.DisableTorchFunction():
            moments = self.reduce("edge_moments", rows, Base())
            return self._step(Tensor.to, self._step(torch.select, moments, 0, 0), rows.dtype)

    def is_index(self, value: Any) -> bool:
        """Whether `value` is the destination index or a reshaped copy of it."""
        return isinstance(value, Tensor) and id(value) in self._aliases

    def _check_repeatable(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what would differ from piece to piece, or from one run to the next."""
        if name == "batch_norm" and kwargs.get("training", args[5] if len(args) > 5 else False):
            raise RefusedError(
                f"{self.name}: BatchNorm in training mode inside message() takes statistics over all edges of the "
                f"graph. Use a torch.nn.BatchNorm1d module, which wrap() replaces by one that does"
            )
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise RefusedError(
                f"{self.name}: `{name}` inside a message draws from a generator of its own, but messages run several "
                f"times and in pieces, and must draw the same each time. Leave out `generator`"
            )

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
    ) -> Tensor:
        """`torch.nn.functional.dropout`, or `torch.dropout`, of rows of edges."""
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not training or not train or p == 0:
            return input
        if not self._is_dropped_by_edge(input):
            raise RefusedError(
                f"{self.name}: {user_line()}: dropout inside a message of a tensor of shape {list(input.shape)}. Which "
                f"entries are dropped is drawn by edge, so expected a row per edge, [num_edges, ...]. Drop entries of "
                f"a weight or of rows of nodes before the layer is called, and move the dimension of edges to the front"
            )
        assert self._drops is not None
        number, self.num_drops = self.num_drops, self.num_drops + 1
        factors = self._drops(number, input.detach(), p).view(input.shape)
        return input.mul_(factors) if inplace else input * factors

    def _is_dropped_by_edge(self, rows: Tensor) -> bool:
        return rows.dim() > 0 and rows.size(0) == self._index.size(0)

    def _check_expected(self, operands: list[Tensor]) -> None:
        assert self._expected is not None
        for tensor in operands:
            if tensor.requires_grad and id(tensor) not in self._expected:
                node = tensor.grad_fn
                if node is None or torch_private.node_number(node) < self._first_node:
                    raise RefusedError(
                        f"{self.name}: in backward the message uses a tensor of shape {list(tensor.shape)} that it did "
                        f"not use in forward: the layer keeps it on itself, and was called again or changed since. "
                        f"Pass it to propagate() as an argument"
                    )

    def _mapped(self, found: LinearMap, rows: Tensor, weight: Tensor) -> Tensor:
        """What a linear map of `rows` gives, of which those of the ends have been mapped already."""
        sides = {"src": self._inputs.src, "dst": self._inputs.dst}
        parts = [sides[side][found.table_name] for side in found.sides]
        others = [(start, stop - start) for start, stop in found.others]
        if others:
            if self._expected is not None:
                self._check_expected([rows, weight])
            taken = [self._joined([self._step(torch.narrow, t, -1, *one) for one in others]) for t in (rows, weight)]
            parts.append(self._step(torch.nn.functional.linear, *taken))
        total = parts[0] if len(parts) > 1 else self._step(torch.clone, parts[0])  # it may be written into
        for part in parts[1:]:
            total = self._step(torch.add, total, part)
        return total

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else self._step(torch.cat, parts, -1)

    def _indexable(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments in which a tensor over all own destinations is cut to those of this piece."""
        table = args[0]
        dim = 0 if name == "__getitem__" else int(args[1])
        if name == "__getitem__" and isinstance(args[1], tuple):
            dims = [d for d, item in enumerate(args[1]) if self.is_index(item)]
            if len(dims) != 1 or any(item is Ellipsis for item in args[1]):
                raise RefusedError(f"{self.name}: indexing with a tuple of destination indices is not supported")
            dim = dims[0]
        return self._of_piece(table, dim), *args[1:]

    def _step(self, function: Any, *args: Any) -> Any:
        """``function(*args)``, traced as what the message function calls."""
        return self.run(function, function.__name__, args, {}, tensors_in(args))

    def _of_piece(self, table: Tensor, dim: int) -> Tensor:
        """`table` over the destinations of this piece, or over all own destinations and then cut to those."""
        phase, rows, dim = self.phase, table.size(dim), dim % table.dim()
        if rows == phase.num_dst:
            return table
        if rows == phase.whole_dst == 0:  # the made-up edge of a probe ends in a made-up destination
            made_up = table.new_zeros([*table.shape[:dim], phase.num_dst, *table.shape[dim + 1 :]])
            return self._step(torch.cat, [table, made_up], dim)
        if rows == phase.whole_dst:
            return self._step(torch.narrow, table, dim, phase.offset, phase.num_dst)
        raise RefusedError(
            f"{self.name}: a tensor with {rows} rows is indexed by destination; expected {phase.whole_dst} rows "
            f"(the own destination nodes of this rank)"
        )

    def _scatter(
        self, name: str, base: Tensor, dim: int, index: Any, source: Any, reduce: str = "", include_self: bool = True,
        alpha: float = 1, out: Any = None,
    ) -> Tensor:  # fmt: skip
        op = "sum" if name in SUMS else REDUCE_NAMES.get(reduce)
        supported = op is not None and alpha == 1 and out is None
        if not supported or not self.is_index(index) or not isinstance(source, Tensor):
            raise RefusedError(f"{self.name}: `{name}` is used with the destination index in an unsupported way")
        assert op is not None
        dim = dim % source.dim()
        self._check_index(index, source, dim, name)
        if base.size(dim) != self.phase.num_dst and base.size(dim) == self.phase.whole_dst:
            raise NeedsMessagesError(f"{self.name}: `{name}` onto all own nodes")
        k, fill = self.count, self.phase.known_base(self.count)
        if fill is None:
            fill = Base(self._base_value(base, name), op == "sum" or include_self)
        # the very tensor where it can be: the probe recognises simple messages by identity
        messages = source.movedim(dim, 0) if dim else source
        value = self.reduce(op, messages, fill)
        value = (value.movedim(0, dim) if dim else value).to(base.dtype)
        if k in self._returned:
            return value
        return base.copy_(value) if name.endswith("_") else value.clone()

    def _sum_or_mean(
        self, name: str, base: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool = True
    ) -> Tensor:
        """`scatter_reduce` in steps that the trace sees: a sum, a count, and what torch makes of them.

        A sum comes here where destinations with messages do not add what they held before.

        Both reductions have kernels, which no reduction of its own for the mean would have.
        """
        given, dim = self._of_piece(base, dim), dim % base.dim()
        total = self._step(torch.scatter_add, self._step(torch.zeros_like, given), dim, index, source)
        ones = self._step(Tensor.new_ones, source, self._index.numel())
        zeros = self._step(Tensor.new_zeros, given, given.size(dim))
        count = self._step(torch.scatter_add, zeros, 0, self._index, ones)
        count = count.view([-1 if d == dim else 1 for d in range(given.dim())])
        if include_self:
            total, count = self._step(torch.add, total, given), self._step(torch.add, count, 1)
        found = total
        if reduce == "mean":
            divide = torch.div if given.is_floating_point() else torch.floor_divide
            found = self._step(divide, total, self._step(torch.clamp, count, 1))
        if not include_self:
            found = self._step(torch.where, count > 0, found, given)
        return self._step(Tensor.copy_, given, found) if name.endswith("_") else found

    def _check_index(self, index: Tensor, source: Tensor, dim: int, name: str) -> None:
        others = [d for d in range(index.dim()) if d != dim]
        along = index.dim() == 1 or all(index.stride(d) == 0 or index.size(d) == 1 for d in others)
        if not along or index.size(dim if index.dim() > 1 else 0) != source.size(dim):
            raise RefusedError(f"{self.name}: `{name}` does not scatter whole rows along the destination index")

    def _base_value(self, base: Tensor, name: str) -> float:
        if base.numel() == 0:
            return 0.0
        first = base.detach().reshape(-1)[0]
        if not bool((base.detach() == first).all()):
            raise RefusedError(f"{self.name}: `{name}` onto a tensor that is not filled with one constant")
        return float(first)


def _bound(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a scatter by name, with one set of names for all scatters."""
    names = {"self": "base", "input": "base", "src": "source"}
    positional = dict(zip(("base", "dim", "index", "source", "reduce"), args))
    return positional | {names.get(key, key): value for key, value in kwargs.items()}


def _adds_dimensions(key: Any) -> bool:
    items = key if isinstance(key, tuple) else (key,)
    return all(item is None or item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in items)
