"""Watching a body run: scatters along the destination index become reductions over all of a node's in-edges.

[Note: bodies run in pieces]
The body of a program is ordinary torch code, written for all edges at once. The engine runs it on a few edges at a
time under `EdgeTrace`, a TorchFunctionMode. Whatever is row-wise needs no attention. A scatter onto the destinations
is a reduction over edges that are not all here; the trace hands its messages to a *phase* (forward: accumulate;
backward: note the messages, give back the known result as a leaf; tail: give back the finished reduction) and returns
what the phase answers. Any other use of the destination index that would need a whole neighbourhood at once (sorting,
counting, comparing) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardpass.core.tracing.program import Program
from shardpass.core.tracing.reducers import Base
from shardpass.errors import NeedsHaloError, RefusedError

SCATTERS = {
    "scatter_add_": "sum",
    "scatter_add": "sum",
    "index_add_": "sum",
    "index_add": "sum",
    "scatter_reduce_": "",
    "scatter_reduce": "",
}
REDUCE_NAMES = {"sum": "sum", "amax": "max", "amin": "min", "prod": "prod"}
SHAPE_OPS = frozenset(
    [
        "view",
        "expand",
        "expand_as",
        "unsqueeze",
        "squeeze",
        "reshape",
        "contiguous",
        "clone",
        "to",
        "long",
        "detach",
        "flatten",
        "view_as",
        "alias",
    ]
)
INDEX_OPS = frozenset(["index_select", "gather", "__getitem__", "take_along_dim"])
HARMLESS_OPS = frozenset(
    [
        "size",
        "dim",
        "numel",
        "__get__",
        "ones_like",
        "new_ones",
        "new_zeros",
        "new_full",
        "new_empty",
        "zeros_like",
        "empty_like",
        "full_like",
        "__len__",
        "is_floating_point",
        "is_complex",
        "ndimension",
        "stride",
        "element_size",
        "data_ptr",
        "is_contiguous",
        "nelement",
        "__repr__",
    ]
)
DROPOUTS = frozenset(
    [
        "dropout",
        "dropout_",
        "alpha_dropout",
        "alpha_dropout_",
        "feature_alpha_dropout",
        "feature_dropout",
        "dropout1d",
        "dropout2d",
    ]
)


class StopPass(BaseException):
    """Raised inside a body once everything the running pass needs has been seen. Never reaches a user."""


class Phase(Protocol):
    """What becomes of reductions, and of other calls, in one run of the body."""

    num_dst: int
    offset: int  # first whole destination row of this piece
    whole_dst: int  # destination rows of the rank

    def known_base(self, k: int) -> Base | None:
        """What the structure says of the base of reduction `k`; None where it is to be found out."""
        ...

    def reduce(self, k: int, op: str, values: Tensor, index: Tensor, base: Base) -> Tensor:
        """The value of reduction `k` for the destinations of this piece, ``[num_dst, ...]``."""
        ...


def sequence_number() -> int:
    """The number autograd gives to the next node: nodes made before have smaller ones."""
    if torch.is_inference_mode_enabled():
        return 0
    with torch.enable_grad():
        return (torch.ones((), requires_grad=True) * 1).grad_fn._sequence_nr()  # type: ignore[union-attr]


def tensors_in(args: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments, looked for one list or tuple deep."""
    found = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += [item for item in arg if isinstance(item, Tensor)]
    return found


class EdgeTrace(TorchFunctionMode):
    """Runs a body on a piece of the edges.

    Args:
        program: whose body it is.
        index: the piece's destination index.
        phase: what reductions become.
        substitutes: tensors to put in the place of others, by id.
        expected: when the body runs again, ids of the tensors that require grad and were there before it; a body that
            uses another one is refused, since its gradient would be lost. None: any may be used.
        generator: makes the generator from which dropout inside the body draws, the same whenever this piece runs.
            None: torch's own, which ranks that are threads share.
        returned: reductions whose result the body takes from what the scatter returns, not from the tensor that it
            scatters into: nothing is copied there.
    """

    def __init__(
        self,
        program: Program,
        index: Tensor,
        phase: Phase,
        substitutes: dict[int, Tensor] | None = None,
        expected: set[int] | None = None,
        generator: Callable[[], torch.Generator] | None = None,
        returned: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self._returned = returned
        self.name, self.phase, self._ranks = program.name, phase, program.ranks
        self.substitutes = substitutes or {}
        self._expected = expected
        self._make_generator = generator
        self._generator: torch.Generator | None = None
        self.num_drops = 0
        self._first_node = sequence_number() if expected is not None else 0
        self.count = 0
        self._index = index
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
        if self.substitutes:
            args, kwargs = self._substituted(args, kwargs)
        operands = tensors_in((*args, *kwargs.values()))
        if self._expected is not None:
            self._check_expected(operands)
        return self.run(func, name, args, kwargs, operands)

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]) -> Any:
        """Carry out one intercepted call."""
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
        if name in DROPOUTS and self._ranks is not None and not self._ranks.drops_in_messages:
            return args[0] if args else kwargs["input"]
        if name == "dropout" and self._make_generator is not None:
            return self._dropout(*args, **kwargs)
        if not any(id(t) in self._aliases for t in operands):
            return func(*args, **kwargs)
        if name in SCATTERS:
            return self._scatter(name, args, kwargs)
        first = args[0] if args else None
        if name in SHAPE_OPS and self.is_index(first):
            out = func(*args, **kwargs)
            self._aliases[id(out)] = out
            return out
        if name == "__getitem__" and self.is_index(first) and _adds_dimensions(args[1]):
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
            f"{self.name}: `{name}` on the destination index needs all in-edges of a node at once, so it cannot be "
            f"computed one shard at a time. Use Options(mode='halo') for this model"
        )

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """`torch.nn.functional.dropout` from a generator of this piece's own."""
        if not training or p == 0:
            return input
        self.num_drops += 1
        if self._generator is None:
            assert self._make_generator is not None
            self._generator = self._make_generator()
        kept = torch.empty_like(input).bernoulli_(1 - p, generator=self._generator)
        scaled = kept if p == 1 else kept.div_(1 - p)
        return input.mul_(scaled) if inplace else input * scaled

    def _check_expected(self, operands: list[Tensor]) -> None:
        assert self._expected is not None
        for tensor in operands:
            if tensor.requires_grad and id(tensor) not in self._expected:
                node = tensor.grad_fn
                if node is None or node._sequence_nr() < self._first_node:
                    raise RefusedError(
                        f"{self.name}: in backward the message uses a tensor of shape {list(tensor.shape)} that it did "
                        f"not use in forward: the layer keeps it on itself, and was called again or changed since. "
                        f"Pass it to propagate() as an argument"
                    )

    def edge_moments(self, norm: Any, rows: Tensor) -> Tensor:
        """Mean and population variance of `rows` ``[E, channels]`` over all edges of all ranks: ``[2, channels]``.

        Args:
            norm: the batch norm that asks; its running statistics are updated once the result is known.
        """
        k, self.count = self.count, self.count + 1
        with torch._C.DisableTorchFunction():
            return self.phase.reduce(k, "edge_moments", rows, self._index, Base())[0].to(rows.dtype)

    def first_extremum(self, op: str, values: Tensor, places: Tensor, base: float = 0.0) -> Tensor:
        """The largest or smallest of `values` ``[E, ...]`` per destination: ``[num_dst, ...]``.

        Args:
            op: ``max`` or ``min``.
            places: of the edges in an order of each destination's edges, ``[E]``; the gradient goes to the first tie.
            base: what a destination without a message holds.
        """
        k, self.count = self.count, self.count + 1
        with torch._C.DisableTorchFunction():
            dtype = torch.promote_types(values.dtype, torch.float32)
            places = places.to(dtype).view(-1, *[1] * (values.dim() - 1)).expand_as(values)
            pair = torch.stack([values.to(dtype), places], dim=-1)
            return self.phase.reduce(k, f"first_{op}", pair, self._index, Base(base))[..., 0].to(values.dtype)

    def is_index(self, value: Any) -> bool:
        """Whether `value` is the destination index or a reshaped copy of it."""
        return isinstance(value, Tensor) and id(value) in self._aliases

    def _substituted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def swap(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self.substitutes.get(id(value), value)
            if type(value) in (list, tuple) and any(id(v) in self.substitutes for v in value):
                return type(value)(swap(v) for v in value)
            return value

        return tuple(swap(a) for a in args), {key: swap(value) for key, value in kwargs.items()}

    def _indexable(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments in which a tensor over all own destinations is cut to those of this piece."""
        phase, table = self.phase, args[0]
        dim = 0 if name == "__getitem__" else int(args[1])
        if name == "__getitem__" and isinstance(args[1], tuple):
            dims = [d for d, item in enumerate(args[1]) if self.is_index(item)]
            if len(dims) != 1 or any(item is Ellipsis for item in args[1]):
                raise RefusedError(f"{self.name}: indexing with a tuple of destination indices is not supported")
            dim = dims[0]
        rows = table.size(dim)
        if rows == phase.num_dst:
            return args
        if rows == phase.whole_dst:
            return (table.narrow(dim, phase.offset, phase.num_dst), *args[1:])
        raise RefusedError(
            f"{self.name}: a tensor with {rows} rows is indexed by destination; expected {phase.whole_dst} rows "
            f"(the own destination nodes of this rank)"
        )

    def _scatter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        names = ("self", "dim", "index", "src" if "index" not in name else "source", "reduce")
        bound = {**dict(zip(names, args)), **kwargs}
        base: Tensor = bound["self"] if "self" in bound else bound["input"]
        dim, index = bound["dim"], bound["index"]
        source = bound.get("src", bound.get("source"))
        if not self.is_index(index) or not isinstance(source, Tensor) or bound.get("alpha", 1) != 1:
            raise RefusedError(f"{self.name}: `{name}` is used with the destination index in an unsupported way")
        op = SCATTERS[name] or REDUCE_NAMES.get(bound["reduce"], "")
        if not op:
            raise NeedsHaloError(
                f"{self.name}: aggregation {bound['reduce']!r} cannot be computed one shard at a time. "
                f"Use Options(mode='halo') for this model"
            )
        dim = dim % source.dim()
        self._check_index(index, source, dim, name)
        k, self.count = self.count, self.count + 1
        fill = self.phase.known_base(k)
        if fill is None:
            included = op == "sum" or bool(bound.get("include_self", True))
            fill = Base(self._base_value(base, name), included)
        # the very tensor where it can be: the probe recognises simple messages by identity
        value = self.phase.reduce(k, op, source.movedim(dim, 0) if dim else source, self._index, fill)
        value = (value.movedim(0, dim) if dim else value).to(base.dtype)
        if k in self._returned:
            return value
        return base.copy_(value) if name.endswith("_") else value.clone()

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


def _adds_dimensions(key: Any) -> bool:
    items = key if isinstance(key, tuple) else (key,)
    return all(item is None or item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in items)
