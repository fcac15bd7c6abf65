"""`Ranks`: a communicator, and what the engine keeps of the run on it. Every call of the engine is given one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn, Protocol, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from shardpass.backends.communicator import Communicator, ReduceOp
from shardpass.backends.delegating import DelegatingCommunicator
from shardpass.core.ranks import torch_private
from shardpass.core.ranks.caches import Caches
from shardpass.core.ranks.ordinary import ordinary_tensors
from shardpass.core.ranks.rows import FollowedTensor, Gives, ResultWatch, RowSet, RowWatch, plain_of
from shardpass.errors import RefusedError

Function = TypeVar("Function", bound=Callable[..., Any])


class MessageWatch(Protocol):
    """What watches a message function while it runs on a piece of the edges, and reduces over all edges for it."""

    name: str

    def edge_moments(self, norm: nn.Module, rows: Tensor) -> Tensor:
        """Mean and population variance of `rows` ``[E, channels]`` over the edges of all ranks, ``[2, channels]``."""
        ...

    def reduced(self, op: str, messages: Tensor, base: float = 0.0) -> Tensor:
        """`messages` ``[E, ...]`` reduced by destination: ``[num_dst, ...]``.

        Args:
            op: the name of a reducer; see `REDUCERS`.
            base: what a destination without a message holds.
        """
        ...


class RecomputationNotes(Protocol):
    """What notes how activations are made, so that backward can compute them again."""

    def note(self, out: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Note that `out` is ``function(*args, **kwargs)``."""
        ...


class KeptCalls(Protocol):
    """What keeps the results of sharded calls, so that an interrupted forward can continue."""

    def result(self, name: str, compute: Callable[[], Any]) -> Any:
        """What the next call returns: the result that is kept, or else what `compute` returns."""
        ...

    def operands(self, *sides: dict[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
        """The tensors that a call reads, by name, in memory."""
        ...

    def deferred(self, rows: list[Tensor]) -> list[Tensor]:
        """What a call has reduced, as its node function is to be given it."""
        ...

    def filled(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What ``func(*args, **kwargs)`` returns, where `func` is `Tensor.new_zeros` or alike in a node function."""
        ...


@dataclass
class ForwardPass:
    """What lasts for one outermost forward of a model.

    Attributes:
        token: the 0-dim tensor that the latest differentiable collective call returned. The next call takes it as an
            autograd input; see the note in `autograd_order.py`. `None` without gradients.
        rows: follows rows through the operations of the model, or `None`.
        copies: what modules hold in the place of parameters, each a `ParameterCopies`.
        is_derivative: no model runs, but a backward with ``create_graph=True``.
        layers_are_given: what ``graph.layers`` returned is among the arguments, so that the model was looked at for it.
        is_left_out: has later calls followed, where this one is not and others are; or `None`.
        reads_edges: code of the user's has done something with an edge list other than to hand it on.
    """

    token: Tensor | None
    rows: RowWatch | None = None
    layers_are_given: bool = False
    copies: tuple[Any, ...] = ()
    is_derivative: bool = False
    is_left_out: Callable[[], None] | None = None
    reads_edges: bool = True


def require_ranks(comm: Any, call: str) -> None:
    """Raise unless `comm` is what `connect` or `spawn` gave.

    Args:
        call: how the function is called, for the error: ``"load(path, comm)"``.

    Raises:
        TypeError: it is something else.
    """
    if not hasattr(comm, "all_gather_object"):
        raise TypeError(
            f"{call}: `comm` must be what shardpass.connect() returned or shardpass.spawn passed, but got "
            f"{type(comm).__name__} in its place"
        )


def unfollowed(position: int, gives: Gives = "rows") -> Callable[[Function], Function]:
    """Decorates a function that is exact on all ranks, so that nobody follows what it does with rows.

    Args:
        position: of its argument `comm`, or of one that has the ranks as its attribute `comm`.
        gives: what it returns. See `ResultWatch.returned`.
    """

    def decorated(function: Function) -> Function:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        is_named_comm = names[position : position + 1] == ("comm",)
        call = f"{function.__name__}({', '.join(names[: position + 1])})"

        @takes_followed(gives)
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            holder = kwargs["comm"] if "comm" in kwargs else args[position] if position < len(args) else None
            if is_named_comm and ("comm" in kwargs or position < len(args)):
                require_ranks(holder, call)
            comm = holder if isinstance(holder, Ranks) else getattr(holder, "comm", None)
            if comm is None:
                return function(*args, **kwargs)
            outer, comm.met = comm.met, []
            try:
                with comm.unfollowed():
                    out = function(*args, **kwargs)
            finally:
                met, comm.met = comm.met, outer
                if outer is not None:
                    outer.extend(met)
            comm.note_result(out, gives in ("whole", "total", "replicated"))
            return met[0].returned(out, gives) if met and outer is None else out

        return cast(Function, run)

    return decorated


def takes_followed(gives: Gives = "rows") -> Callable[[Function], Function]:
    """Decorates a function of the engine to which a script gives what it has made of the results of a model.

    Args:
        gives: what it returns. See `ResultWatch.returned`.
    """

    def decorated(function: Function) -> Function:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves = torch_private.tree_leaves((args, kwargs))
            if (given := next((one for one in leaves if isinstance(one, FollowedTensor)), None)) is None:
                return function(*args, **kwargs)
            around = given.around
            around.check_given((args, kwargs), gives)
            args, kwargs = torch_private.tree_map(plain_of, (args, kwargs))
            return around.returned(function(*args, **kwargs), gives)

        return cast(Function, run)

    return decorated


class SummedModels:
    """The models of a run whose gradients backward sums over ranks."""

    def __init__(self) -> None:
        self.models: WeakSet[nn.Module] = WeakSet()

    def wait_for(self, tensor: Any) -> bool:
        """Whether the gradient of `tensor`, a parameter of theirs, is held back within `no_sync`."""
        waiting = [model for model in self.models if vars(model)["_shardpass_wrapped"].waits]
        return any(tensor is parameter for model in waiting for parameter in model.parameters())

    def have_gradient(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the gradient of a parameter of theirs."""
        return any(tensor is parameter.grad for model in self.models for parameter in model.parameters())


class _NotDifferentiable(torch.autograd.Function):
    """Gives `out`, made of `tensor` in a way that has no backward, so that a loss which it is a part of says so."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RefusedError(
            "backward comes to a result of comm.all_reduce, which gives no gradients. Use shardpass.all_reduce_sum of "
            "a sum over own rows, or give comm.all_reduce what is detached"
        )


class Ranks(DelegatingCommunicator):
    """One rank's end of a group of ranks, with the forward pass that is in progress.

    It is a `Communicator` itself and passes all of that protocol on to `inner`.

    Args:
        inner: the communicator on which tensors travel.

    Attributes:
        calls: how many collective calls have begun; the number of a call is the same on every rank.
        forwards: how many outermost forwards have begun.
        forward: the outermost forward in progress, or `None`.
        derivative: the token of the latest call of a backward with ``create_graph=True`` outside of a model, or `None`.
        watch: what watches the message function that is running, or `None`.
        notes: notes how activations are made where backward computes them again, or `None`.
        has_made_up_edge: a message function runs on one made-up edge, because this rank has none; it must not count.
        kept_calls: keeps the results of sharded calls during an inference that can be continued, or `None`.
        met: what follows the results of models that a function of ours has found in containers; `None` if none runs.
        caches: what is kept for as long as the run lasts, such as shared memory.
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.calls = 0
        self.forwards = 0
        self.forward: ForwardPass | None = None
        self.derivative: Tensor | None = None
        self.watch: MessageWatch | None = None
        self.notes: RecomputationNotes | None = None
        self.has_made_up_edge = False
        self.kept_calls: KeptCalls | None = None
        self.met: list[ResultWatch] | None = None
        self.caches = Caches()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", label: str = "") -> Tensor:
        if op == "sum" and not label and self.caches.of(SummedModels).have_gradient(tensor):
            raise RefusedError(
                "comm.all_reduce is given the gradient of a wrapped model, which backward has summed over ranks. Leave "
                "it out: every rank has the gradient of the whole graph"
            )
        if self.runs_user_code and self.forward is not None and self.forward.rows is not None:
            self.forward.rows.check_reduced(tensor, op)
            with self.unfollowed():
                found = self.all_reduce(tensor, op, label)
            self.mark_plain(found)
            return found
        if isinstance(tensor, FollowedTensor):
            return tensor.around.reduced(tensor, op, lambda plain: self.all_reduce(plain, op, label))
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return super().all_reduce(tensor, op, label)
        reduced: Tensor = _NotDifferentiable.apply(tensor, super().all_reduce(tensor.detach(), op, label))
        return reduced

    def all_gather(self, tensor: Tensor, label: str = "") -> list[Tensor]:
        return super().all_gather(plain_of(tensor), label)

    def broadcast(self, tensor: Tensor, root: int = 0, label: str = "") -> Tensor:
        return super().broadcast(plain_of(tensor), root, label)

    def as_met(self, value: Any) -> Any:
        """`value`, which a function of ours puts into a container; followed if what it has found in one was."""
        return self.met[0].returned(value, "rows") if self.met else value

    @property
    def is_followed(self) -> bool:
        """Whether the rows of the forward in progress are followed."""
        return self.forward is not None and self.forward.rows is not None

    @property
    def runs_user_code(self) -> bool:
        """Whether what runs now is followed, and not a part of the engine or a known module."""
        return self.forward is not None and self.forward.rows is not None and not self.forward.rows.is_paused

    def count_of(self, of: RowSet) -> Any:
        """How many rows of a set this rank has: a size, with which code that is followed may not compute."""
        if self.runs_user_code and self.forward is not None and self.forward.rows is not None:
            return self.forward.rows.count_of(of)
        return of.count

    def note_count(self, count: int) -> None:
        """See `RowWatch.note_count`; nothing if what runs now is not followed."""
        if self.runs_user_code and self.forward is not None and self.forward.rows is not None:
            self.forward.rows.note_count(count)

    @property
    def has_mixtures(self) -> bool:
        """See `RowWatch.has_mixtures`."""
        return self.forward is not None and self.forward.rows is not None and self.forward.rows.has_mixtures

    def unfollowed(self, keeps: bool = True) -> AbstractContextManager[None]:
        """A block whose operations are the engine's, which knows the rows of other ranks.

        Args:
            keeps: what is made may outlive the call, so it is ordinary (`ordinary_tensors`). `False` where a function
                is carried out for a script, which may write into an inference tensor of its own.
        """
        rows = None if self.forward is None else self.forward.rows
        block = None if rows is None else rows.paused()
        return ordinary_tensors(block) if keeps else block or nullcontext()

    def followed(self) -> AbstractContextManager[None]:
        """A block within `unfollowed` that runs code of the user's."""
        rows = None if self.forward is None else self.forward.rows
        return nullcontext() if rows is None else rows.paused(False)

    def in_message(self) -> AbstractContextManager[None]:
        """A block that runs a message function, which another one follows; so are modules of the user's within it."""
        rows = None if self.forward is None else self.forward.rows
        return nullcontext() if rows is None else rows.left_to_another()

    def mark_rows(self, tensor: Tensor, of: RowSet, dim: int = 0, points_to: RowSet | None = None) -> None:
        """Say what the rows of a tensor are that the engine gives to a model."""
        if self.forward is None:
            base: Any = torch_private.base_of(tensor)  # which its views have in common
            told = base.shardpass_rows = getattr(base, "shardpass_rows", {})
            told[tensor.storage_offset()] = tensor.shape, of, dim, points_to
        elif self.forward.rows is not None:
            self.forward.rows.mark(tensor, of, dim, points_to)

    def note_result(self, out: Any, is_whole: bool = False) -> None:
        """Let what the engine returns to code that is followed be recognised, where it has not said what it is."""
        if self.forward is None or self.forward.rows is None:
            return
        if self.runs_user_code:
            self.forward.rows.recognise(out)
        if is_whole:
            self.forward.rows.mark_whole(out)

    def mark_plain(self, tensor: Tensor) -> None:
        """Say that a tensor that the engine gives to a model holds no rows, whatever its size."""
        if self.forward is not None and self.forward.rows is not None:
            self.forward.rows.mark_plain(tensor)

    def mark_rows_alike(self, tensor: Tensor, like: Tensor) -> None:
        """Say that a tensor that the engine gives to a model holds the rows that `like` holds."""
        if self.forward is not None and self.forward.rows is not None:
            self.forward.rows.mark_alike(tensor, like)

    def row_dim(self, tensor: Tensor) -> int | None:
        """See `RowWatch.row_dim`."""
        return None if self.forward is None or self.forward.rows is None else self.forward.rows.row_dim(tensor)

    def copies_in(self, tensor: Tensor) -> int:
        """See `RowWatch.copies_in`."""
        return 0 if self.forward is None or self.forward.rows is None else self.forward.rows.copies_in(tensor)

    def forget_rows(self, tensor: Tensor) -> None:
        """Say that the engine has written into a tensor of a model."""
        if self.forward is not None and self.forward.rows is not None:
            self.forward.rows.forget(tensor)

    def require_rows(self, tensor: Tensor, of: RowSet, is_table: bool = False) -> None:
        """Refuse a tensor that a model gives to the engine as the rows `of`, if they are made of several rows.

        Args:
            is_table: it may hold anything without rows, which the message of each edge reads as a whole.
        """
        if self.forward is not None and self.forward.rows is not None:
            self.forward.rows.require(tensor, of, is_table)

    def set_of_ids(self, ids: Tensor) -> RowSet:
        """What the rows are that a model fetches by node ids of the whole graph. Refuses numbers of own rows."""
        if self.forward is not None and self.forward.rows is not None:
            return self.forward.rows.set_of_ids(ids)
        return RowSet.fetched(ids.size(0))

    @contextmanager
    def made_up_edge(self, is_made_up: bool = True) -> Iterator[None]:
        """A block in which a message function runs on a made-up edge, if `is_made_up`."""
        self.has_made_up_edge = is_made_up
        try:
            yield
        finally:
            self.has_made_up_edge = False

    def move_to(self, device: torch.device) -> None:
        """Have all tensors on `device` from now on."""
        self.inner.device = device

    def duplicate(self, name: str) -> Ranks:
        """Collective. The same ranks on a duplicate of the communicator, with a run of their own."""
        return Ranks(self.inner.duplicate(name))

    def __repr__(self) -> str:
        return f"Ranks({self.inner!r})"
