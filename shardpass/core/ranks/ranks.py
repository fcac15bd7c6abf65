"""`Ranks`: a communicator, and what the engine keeps of the run on it. Every call of the engine is given one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from shardpass.backends.communicator import Communicator, Handle, ReduceOp
from shardpass.core.ranks.caches import Caches


class MessageWatch(Protocol):
    """What watches a message function while it runs on a piece of the edges, and reduces over all edges for it."""

    name: str

    def edge_moments(self, norm: nn.Module, rows: Tensor) -> Tensor:
        """Mean and population variance of `rows` ``[E, channels]`` over the edges of all ranks, ``[2, channels]``."""
        ...

    def first_extremum(self, op: str, values: Tensor, places: Tensor, base: float = 0.0) -> Tensor:
        """The largest or smallest of `values` ``[E, ...]`` per destination; its gradient goes to the first tie."""
        ...


class RecomputationNotes(Protocol):
    """What notes how activations are made, so that backward can compute them again."""

    def note(self, output: Tensor, function: Callable[..., Tensor], *inputs: Any) -> None:
        """Note that `output` is ``function(*inputs)``."""
        ...


class KeptCalls(Protocol):
    """What keeps the results of sharded calls, so that an interrupted forward can continue."""

    def result(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """What the next call returns: the result that is kept, or else what `compute` returns."""
        ...


@dataclass
class ForwardPass:
    """What lasts for one outermost forward of a model.

    Attributes:
        token: the 0-dim tensor that the latest differentiable collective call returned. The next call takes it as an
            autograd input; see the note in `autograd_order.py`. `None` without gradients.
        graph_is_hidden: the graph was not among the arguments, so that the self-check has not seen it.
    """

    token: Tensor | None
    graph_is_hidden: bool = False


class Ranks(Communicator):
    """One rank's end of a group of ranks, with the forward pass that is in progress.

    It is a `Communicator` itself: all of that protocol goes to `transport`.

    Args:
        transport: the communicator on which tensors travel.

    Attributes:
        calls: how many collective calls have begun; the number of a call is the same on every rank.
        forwards: how many outermost forwards have begun.
        forward: the outermost forward in progress, or `None`.
        watch: what watches the message function that is running, or `None`.
        notes: notes how activations are made where backward computes them again, or `None`.
        has_made_up_edge: a message function runs on one made-up edge, because this rank has none; it must not count.
        drops_in_messages: whether dropout inside message functions drops anything. The self-check switches it off.
        kept_calls: keeps the results of sharded calls during an inference that can be continued, or `None`.
        caches: what is kept for as long as the run lasts, such as shared memory.
    """

    def __init__(self, transport: Communicator) -> None:
        self.transport = transport
        self.calls = 0
        self.forwards = 0
        self.forward: ForwardPass | None = None
        self.watch: MessageWatch | None = None
        self.notes: RecomputationNotes | None = None
        self.has_made_up_edge = False
        self.drops_in_messages = True
        self.kept_calls: KeptCalls | None = None
        self.caches = Caches()
        self._is_silent = False

    @contextmanager
    def made_up_edge(self, is_made_up: bool = True) -> Iterator[None]:
        """A block in which a message function runs on a made-up edge, if `is_made_up`."""
        self.has_made_up_edge = is_made_up
        try:
            yield
        finally:
            self.has_made_up_edge = False

    @contextmanager
    def silent(self) -> Iterator[None]:
        """A block in which communication raises, since the other ranks wait for this one to end it."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    @property
    def _wire(self) -> Communicator:
        if self._is_silent:
            raise RuntimeError(
                "the model communicates over the ranks of the whole run, while one rank runs a copy of it on a small "
                "graph. Use graph.comm, or keep the communicator as an attribute of the model"
            )
        return self.transport

    # ---- the protocol

    rank: int = property(lambda self: self.transport.rank)  # type: ignore[assignment]
    size: int = property(lambda self: self.transport.size)  # type: ignore[assignment]
    device: torch.device = property(lambda self: self.transport.device)  # type: ignore[assignment]
    local_ranks: tuple[int, ...] = property(lambda self: self.transport.local_ranks)  # type: ignore[assignment]
    shares_memory: bool = property(lambda self: self.transport.shares_memory)  # type: ignore[assignment]
    serves_threads: bool = property(lambda self: self.transport.serves_threads)  # type: ignore[assignment]
    bytes_sent: int = property(lambda self: self.transport.bytes_sent)  # type: ignore[assignment]

    def exchange(
        self, send: Tensor | None, to: int, recv: Tensor | None, source: int, tag: int, label: str = ""
    ) -> Handle:
        """See `Communicator.exchange`."""
        return self._wire.exchange(send, to, recv, source, tag, label)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", label: str = "") -> Tensor:
        """See `Communicator.all_reduce`."""
        return self._wire.all_reduce(tensor, op, label)

    def all_gather(self, tensor: Tensor, label: str = "") -> list[Tensor]:
        """See `Communicator.all_gather`."""
        return self._wire.all_gather(tensor, label)

    def broadcast(self, tensor: Tensor, root: int = 0, label: str = "") -> Tensor:
        """See `Communicator.broadcast`."""
        return self._wire.broadcast(tensor, root, label)

    def all_to_all(self, tensors: Sequence[Tensor], label: str = "") -> list[Tensor]:
        """See `Communicator.all_to_all`."""
        return self._wire.all_to_all(tensors, label)

    def all_gather_object(self, obj: Any, label: str = "") -> list[Any]:
        """See `Communicator.all_gather_object`."""
        return self._wire.all_gather_object(obj, label)

    def barrier(self, label: str = "") -> None:
        """See `Communicator.barrier`."""
        self._wire.barrier(label)

    def duplicate(self, name: str) -> Ranks:
        """Collective. The same ranks on a duplicate of the communicator, with a run of their own."""
        return Ranks(self._wire.duplicate(name))

    def background(self) -> Communicator | None:
        """See `Communicator.background`."""
        return self._wire.background()

    def give_up(self, reason: str) -> None:
        """See `Communicator.give_up`."""
        self.transport.give_up(reason)

    def share(self, num_bytes: int, label: str = "") -> dict[int, Tensor] | None:
        """See `Communicator.share`."""
        return self._wire.share(num_bytes, label)

    def random_lock(self) -> AbstractContextManager[Any]:
        """See `Communicator.random_lock`."""
        return self.transport.random_lock()

    def let_first_rank_go(self) -> None:
        """See `Communicator.let_first_rank_go`."""
        self.transport.let_first_rank_go()

    def abort(self, reason: str) -> None:
        """See `Communicator.abort`."""
        self.transport.abort(reason)

    def close(self) -> None:
        """See `Communicator.close`."""
        self.transport.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a communicator belongs to its process; save model.state_dict() instead")

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self

    def __copy__(self) -> Ranks:
        return self

    def __repr__(self) -> str:
        return f"Ranks({self.transport!r})"
