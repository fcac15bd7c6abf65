"""Ranks as threads of one process: messages are copies in memory, waits are on one condition.

For tests, notebooks and one machine with much memory. Torch releases the interpreter's lock in its kernels, so ranks
compute at the same time. CPU only: autograd has one thread per CUDA device, and ranks waiting for each other in
backward would block it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from shardpass.backends.base import BaseCommunicator
from shardpass.backends.deadlock import Position
from shardpass.backends.failure import Failure, TransportTimeoutError, first_failure
from shardpass.backends.identity import MessageKey
from shardpass.errors import CommunicationError, DivergenceError, PeerFailure

_LOOK_SECONDS = 0.5  # how long a rank is blocked before it looks for a circle of waits


class ThreadWorld:
    """What the ranks of one process share.

    Args:
        size: number of ranks.
        device: of their tensors; CUDA is refused for more than one rank.
        in_turn: one rank computes at a time, until it has to wait for another.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu", in_turn: bool = False) -> None:
        self.device = torch.device(device)
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
        self.turn = _Turn(in_turn)

    def communicators(self) -> list[ThreadCommunicator]:
        """One communicator per rank; use each in a thread of its own."""
        channel = _Channel(self)
        return [ThreadCommunicator(channel, rank) for rank in range(self.size)]

    def fail(self, rank: int, reason: str) -> None:
        """End all waits of all ranks; ``reason`` is shown where it is the first."""
        self.failure.set(PeerFailure, first_failure(rank, reason))
        with self.changed:
            self.changed.notify_all()


class _Turn:
    """What a rank's thread holds while it computes, if ranks compute one at a time."""

    def __init__(self, is_needed: bool) -> None:
        self.is_needed = is_needed
        self._lock = threading.Lock()
        self._holder: int | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """The block runs while no other rank computes."""
        if not self.is_needed:
            yield
            return
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Others may compute during the block. Threads that hold nothing, as those beside a rank's own, just run it."""
        if not self.is_needed or self._holder != threading.get_ident():
            yield
            return
        self._holder = None
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self._holder = threading.get_ident()


class _Channel:
    """The mailboxes and the meeting point of one communicator (and its counterparts on the other ranks)."""

    def __init__(self, world: ThreadWorld) -> None:
        self.world = world
        self.failure = Failure(world.failure)
        self.mail: dict[tuple[int, int, MessageKey], deque[Tensor]] = {}  # sent and not yet expected
        self.expected: dict[tuple[int, int, MessageKey], deque[_Arrival]] = {}
        self.deposits: dict[int, Any] = {}
        self.round = 0
        self.results: dict[int, list[Any]] = {}
        self.left: dict[int, int] = {}
        self.positions: dict[int, Position] = {}
        self.ended: set[int] = set()
        self.first_entered = 0  # collectives that rank 0 has entered


class _Sent:
    """A message that has been copied: the sender may overwrite its buffer."""

    def wait(self, timeout: float) -> None:
        """Return at once."""


class _Arrival:
    """A message expected by ``comm`` into ``target``."""

    def __init__(self, comm: ThreadCommunicator, source: int, target: Tensor) -> None:
        self._comm = comm
        self._source = source
        self.target = target
        self.done = False

    def wait(self, timeout: float) -> None:
        """Return when the message is in place."""
        if not self.done:
            self._comm.block(lambda: self.done, timeout)


class ThreadCommunicator(BaseCommunicator):
    """One rank of a `ThreadWorld`."""

    moves_device_memory = True

    def __init__(self, channel: _Channel, rank: int) -> None:
        world = channel.world
        super().__init__(rank, world.size, world.device, channel.failure)
        self._channel = channel
        self._world = world
        self._rounds = 0
        self.serves_threads = not world.turn.is_needed  # a rank that waits for its other thread would keep its turn
        self.local_ranks = tuple(range(world.size))

    def block(self, ready: Callable[[], bool], timeout: float) -> None:
        """Wait until ``ready()``, which is called with the world's condition held."""
        with self._world.changed:
            if ready():
                return
        with self._world.turn.given_up():
            self._wait(ready, timeout)

    def _wait(self, ready: Callable[[], bool], timeout: float) -> None:
        deadline = monotonic() + timeout
        changed = self._world.changed
        while True:
            with changed:
                seconds = min(_LOOK_SECONDS, deadline - monotonic())
                if changed.wait_for(lambda: ready() or self.failure.happened.is_set(), max(0.0, seconds)):
                    if ready():
                        return
                    self.failure.check()
            if monotonic() >= deadline:
                raise TransportTimeoutError
            circle = self.check_stuck()
            if circle is not None:
                self._diverge(circle)
            self._check_ended(ready)

    def _check_ended(self, ready: Callable[[], bool]) -> None:
        position, ended = self._where, self._channel.ended
        if position is None or not ended:
            return
        missing = sorted(ended) if position.kind == "collective" else sorted(ended & {position.peer})
        with self._world.changed:
            if missing and not ready():
                raise CommunicationError(
                    f"rank {self.rank} waits in {position.text}, but rank {missing[0]} has ended: it made fewer calls "
                    f"than the others"
                )

    def _raw_send(self, flat: Tensor, to: int, key: MessageKey) -> _Sent:
        place = (self.rank, to, key)
        with self._world.changed:
            waiting = self._channel.expected.get(place)
            if waiting:
                arrival = waiting.popleft()
                if not waiting:
                    del self._channel.expected[place]
            else:
                self._channel.mail.setdefault(place, deque()).append(flat.clone())
                return _Sent()
        arrival.target.copy_(flat)
        with self._world.changed:
            arrival.done = True
            self._world.changed.notify_all()
        return _Sent()

    def _raw_receive(self, flat: Tensor, source: int, key: MessageKey) -> _Arrival:
        place = (source, self.rank, key)
        arrival = _Arrival(self, source, flat)
        with self._world.changed:
            letters = self._channel.mail.get(place)
            if not letters:
                self._channel.expected.setdefault(place, deque()).append(arrival)
                return arrival
            letter = letters.popleft()
            if not letters:
                del self._channel.mail[place]
        flat.copy_(letter)
        arrival.done = True
        return arrival

    def let_first_rank_go(self) -> None:
        """See `Communicator.let_first_rank_go`."""
        if self.rank > 0:
            channel, mine = self._channel, self._rounds
            self.block(lambda: channel.first_entered > mine or 0 in channel.ended, self.timeout)

    def _meet(self, deposit: Any, combine: Callable[[list[Any]], list[Any]], timeout: float) -> Any:
        """Collective: the last rank to come makes every rank's result from the deposits, in rank order."""
        channel, world = self._channel, self._world
        self._rounds += 1
        current = self._rounds
        with world.changed:
            if self.rank == 0:
                channel.first_entered = current
                world.changed.notify_all()
            channel.deposits[self.rank] = deposit
            last = len(channel.deposits) == world.size
            if last:
                deposits = [channel.deposits.pop(rank) for rank in range(world.size)]
        if last:
            results = combine(deposits)
            with world.changed:
                channel.results[current] = results
                channel.left[current] = world.size
                world.changed.notify_all()
        else:
            self.block(lambda: current in channel.results, timeout)
        with world.changed:
            result = channel.results[current][self.rank]
            channel.left[current] -= 1
            if channel.left[current] == 0:
                del channel.results[current], channel.left[current]
        return result

    def _raw_gather(self, block: bytes, timeout: float) -> list[bytes]:
        if self.size > 1 and self._world.random._is_owned():  # type: ignore[attr-defined]
            raise CommunicationError(
                f"rank {self.rank} calls the other ranks while it holds torch's random generator, which they wait for: "
                f"a `with shardpass.seed(...)` block must not communicate. Build the model inside it, wrap it after"
            )
        return list(self._meet(block, lambda blocks: [blocks] * self.size, timeout))

    def _raw_reduce(self, tensor: Tensor, op: str, timeout: float) -> None:
        tensor.copy_(self._meet(tensor, lambda tensors: [_reduce(tensors, op)] * self.size, timeout))

    def _raw_broadcast(self, flat: Tensor, root: int, timeout: float) -> None:
        value = self._meet(flat, lambda tensors: [tensors[root].clone()] * self.size, timeout)
        if self.rank != root:
            flat.copy_(value)

    def _raw_duplicate(self, name: str) -> BaseCommunicator:
        channel = self._meet(None, lambda _: [_Channel(self._world)] * self.size, self.timeout)
        return ThreadCommunicator(channel, self.rank)

    def random_lock(self) -> AbstractContextManager[Any]:
        """The lock of the world: torch's generator is one for the whole process."""
        return self._world.random

    def _publish(self, position: Position | None) -> None:
        if position is not None:
            self._channel.positions[self.rank] = position
        elif self.rank in self._channel.positions:
            self._channel.positions.pop(self.rank, None)

    def _positions(self) -> dict[int, Position]:
        return dict(self._channel.positions)

    def _spread_divergence(self, text: str) -> None:
        self.failure.set(DivergenceError, text)
        with self._world.changed:
            self._world.changed.notify_all()

    def abort(self, reason: str) -> None:
        """See `Communicator.abort`; raises on this rank as well."""
        self._world.fail(self.rank, reason)
        self.failure.check()

    def end(self) -> None:
        """Note that this rank makes no further calls, so that ranks waiting for it are told."""
        with self._world.changed:
            self._channel.ended.add(self.rank)
            self._world.changed.notify_all()


def _reduce(tensors: list[Tensor], op: str) -> Tensor:
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        if op == "sum":
            result += tensor
        elif op == "prod":
            result *= tensor
        elif op == "max":
            torch.maximum(result, tensor, out=result)
        else:
            torch.minimum(result, tensor, out=result)
    return result
