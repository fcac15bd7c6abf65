"""Ranks as threads of one process: messages are copies in memory, and all waits are on one condition.

For tests, notebooks and a single machine with much memory. Torch releases the interpreter's lock in its kernels, so the
ranks compute at the same time. CPU only: autograd has one thread per CUDA device, which ranks that wait for each other
in backward would block.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardpass.backends.base import BaseCommunicator
from shardpass.backends.failure import Failure, TransportTimeoutError
from shardpass.backends.identity import MessageKey, combined
from shardpass.backends.turn import Turn, random_states
from shardpass.errors import CommunicationError, DivergenceError, PeerFailure

_LOOK_SECONDS = 0.5  # how often a blocked rank looks why
T = TypeVar("T")
_Place = tuple[int, int, MessageKey]  # source, destination, and what the message is matched by


class ThreadWorld:
    """What the ranks of one process share. CUDA is refused for more than one rank."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        if not isinstance(size, int):
            raise TypeError(f"spawn(fn, ranks): the number of ranks must be an integer, found {type(size).__name__}")
        if size < 1:
            raise ValueError(f"the number of ranks is {size}, but it must be at least 1")
        if size > 1 and self.device.type != "cpu":
            raise ValueError(
                f"{size} ranks as threads of one process cannot use {self.device}: autograd has one thread per device, "
                f"which ranks waiting for each other in backward would block. Use backend='processes', or torchrun"
            )
        self.size = size
        self.changed = threading.Condition()
        self.random = threading.RLock()
        self.failure = Failure()
        self.turn = Turn(self.changed, self.failure)

    def communicators(self) -> list[ThreadCommunicator]:
        """One communicator per rank. Use each in a thread of its own."""
        channel, job = _Channel(self), secrets.token_hex(4)
        made = [ThreadCommunicator(channel, rank) for rank in range(self.size)]
        for comm in made:
            comm.calls.job = job
        return made

    def fail(self, text: str) -> None:
        """End all waits of all ranks. They show ``text`` if this failure is the first."""
        self.failure.set(PeerFailure, text)
        with self.changed:
            self.changed.notify_all()


class _Meeting:
    """One collective: what the ranks have brought, and the result once all have come."""

    def __init__(self) -> None:
        self.brought: dict[int, Any] = {}
        self.result: Any = None
        self.is_over = False


class _Channel:
    """The mailboxes and meetings of one communicator, which all ranks share."""

    def __init__(self, world: ThreadWorld) -> None:
        self.world = world
        self.failure = Failure(world.failure)
        self.mail: dict[_Place, deque[Tensor]] = {}  # sent and not yet expected
        self.expected: dict[_Place, deque[_Arrival]] = {}  # expected and not yet sent
        self.meetings: dict[int, _Meeting] = {}  # by number, those that are not over
        self.published: dict[int, str] = {}  # by rank, see `RawCommunicator._publish`
        self.ended: set[int] = set()


class _Sent:
    """A message that has been copied, so that the sender may overwrite its buffer."""

    def wait(self, timeout: float) -> None:
        """Return at once."""


class _Arrival:
    """A message that ``comm`` expects in ``target``."""

    def __init__(self, comm: ThreadCommunicator, target: Tensor) -> None:
        self._comm = comm
        self.target = target
        self.is_done = False

    def wait(self, timeout: float) -> None:
        """Return when the message is in place."""
        if not self.is_done:
            self._comm.block(lambda: self.is_done, timeout)


class ThreadCommunicator(BaseCommunicator):
    """One rank of a `ThreadWorld`."""

    moves_device_memory = True

    def __init__(self, channel: _Channel, rank: int, path: str = "world") -> None:
        world = channel.world
        super().__init__(rank, world.size, world.device, channel.failure, path)
        self._channel = channel
        self._world = world
        self._num_meetings = 0
        self.local_ranks = tuple(range(world.size))

    # ---- waiting

    def block(self, ready: Callable[[], bool], timeout: float) -> None:
        """Return once ``ready()``, which is called with the world's condition held, and it is this rank's turn."""
        with self.out_of_turn():
            self._wait(ready, timeout)

    def _wait(self, ready: Callable[[], bool], timeout: float) -> None:
        deadline = monotonic() + timeout
        changed = self._world.changed
        while True:
            with changed:
                seconds = max(0.0, min(_LOOK_SECONDS, deadline - monotonic()))
                if changed.wait_for(lambda: ready() or self.failure.happened, seconds):
                    if ready():
                        return
                    self.failure.check()
                self.check_ended(sorted(self._channel.ended))
            if monotonic() >= deadline:
                raise TransportTimeoutError
            self.look_for_circle()

    def take_turns(self) -> None:
        if not self._world.turn.is_mine:
            self._world.turn.take(random_states(), self.timeout)

    def run_at_once(self) -> None:
        if self._world.turn.is_mine:
            self._world.turn.leave()
            self.barrier("run at once")  # none draws from the generators while another builds a model

    def out_of_turn(self) -> AbstractContextManager[Any]:
        return self._world.turn.left(self.timeout)

    def random_lock(self) -> AbstractContextManager[Any]:
        """The lock of the world, since torch has one generator for the whole process."""
        return self._world.random

    # ---- raw primitives

    def _raw_send(self, flat: Tensor, to: int, key: MessageKey) -> _Sent:
        place = (self.rank, to, key)
        with self._world.changed:
            arrival = _first(self._channel.expected, place)
            if arrival is None:
                self._channel.mail.setdefault(place, deque()).append(flat.clone())
                return _Sent()
        arrival.target.copy_(flat)
        with self._world.changed:
            arrival.is_done = True
            self._world.changed.notify_all()
        return _Sent()

    def _raw_receive(self, flat: Tensor, source: int, key: MessageKey) -> _Arrival:
        place = (source, self.rank, key)
        arrival = _Arrival(self, flat)
        with self._world.changed:
            letter = _first(self._channel.mail, place)
            if letter is None:
                self._channel.expected.setdefault(place, deque()).append(arrival)
                return arrival
        flat.copy_(letter)
        arrival.is_done = True
        return arrival

    def _meet(self, mine: Any, combine: Callable[[list[Any]], T], timeout: float) -> T:
        """Collective: the last rank to come makes the result, for all, of what the ranks bring in rank order."""
        channel, changed = self._channel, self._world.changed
        self._num_meetings += 1
        number = self._num_meetings
        with changed:
            meeting = channel.meetings.setdefault(number, _Meeting())
            meeting.brought[self.rank] = mine
            is_last = len(meeting.brought) == self.size
        if is_last:
            meeting.result = combine([meeting.brought[rank] for rank in range(self.size)])
            with changed:
                del channel.meetings[number]
                meeting.brought.clear()
                meeting.is_over = True
                changed.notify_all()
        else:
            self.block(lambda: meeting.is_over, timeout)
        result: T = meeting.result
        return result

    def _raw_gather(self, block: bytes, timeout: float) -> list[bytes]:
        if self.size > 1 and self._world.random._is_owned():  # type: ignore[attr-defined]
            raise CommunicationError(
                f"rank {self.rank} calls the other ranks while it holds torch's random generator, which they wait for: "
                f"a `with shardpass.seed(...)` block must not communicate. Build the model inside it, wrap it after"
            )
        return self._meet(block, list, timeout)

    def _raw_reduce(self, tensor: Tensor, op: str, timeout: float) -> None:
        tensor.copy_(self._meet(tensor, lambda tensors: combined(tensors, op), timeout))

    def _raw_broadcast(self, flat: Tensor, root: int, timeout: float) -> None:
        value = self._meet(flat, lambda tensors: tensors[root].clone(), timeout)
        if self.rank != root:
            flat.copy_(value)

    def _raw_duplicate(self, path: str) -> ThreadCommunicator:
        return ThreadCommunicator(self._meet(None, lambda _: _Channel(self._world), self.timeout), self.rank, path)

    # ---- failure

    def _publish(self, text: str) -> None:
        self._channel.published[self.rank] = text

    def _published(self) -> dict[int, str]:
        return dict(self._channel.published)

    def _spread_divergence(self, text: str) -> None:
        self.failure.set(DivergenceError, text)
        with self._world.changed:
            self._world.changed.notify_all()

    def _spread_failure(self, text: str) -> None:
        self._world.fail(text)

    def end(self) -> None:
        """Note that this rank makes no further calls, so that a rank that waits for it is told."""
        self._world.turn.leave()
        with self._world.changed:
            self._channel.ended.add(self.rank)
            self._world.changed.notify_all()


def _first(boxes: dict[_Place, deque[T]], place: _Place) -> T | None:
    """What came to ``place`` first, taken out; `None` if there is nothing."""
    if place not in boxes:
        return None
    first = boxes[place].popleft()
    if not boxes[place]:
        del boxes[place]
    return first
