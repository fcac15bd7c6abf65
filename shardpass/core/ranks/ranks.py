"""`Ranks`: a communicator, and what the engine keeps of the run on it. Every call of the engine is given one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardpass.backends.communicator import Communicator
from shardpass.backends.delegating import DelegatingCommunicator
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

    def note(self, out: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Note that `out` is ``function(*args, **kwargs)``."""
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


class Ranks(DelegatingCommunicator):
    """One rank's end of a group of ranks, with the forward pass that is in progress.

    It is a `Communicator` itself and passes all of that protocol on to `inner`.

    Args:
        inner: the communicator on which tensors travel.

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

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
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

    def move_to(self, device: torch.device) -> None:
        """Have all tensors on `device` from now on."""
        self.inner.device = device

    def before(self, kind: str, label: str, tensors: Sequence[Tensor] = ()) -> None:
        """Refuse to communicate while the block of `silent` runs."""
        if self._is_silent:
            raise RuntimeError(
                "the model communicates over the ranks of the whole run, while one rank runs a copy of it on a small "
                "graph. Use graph.comm, or keep the communicator as an attribute of the model"
            )

    def duplicate(self, name: str) -> Ranks:
        """Collective. The same ranks on a duplicate of the communicator, with a run of their own."""
        self.before("duplicate", name)
        return Ranks(self.inner.duplicate(name))

    def __repr__(self) -> str:
        return f"Ranks({self.inner!r})"
