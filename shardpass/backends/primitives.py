"""What lies under `base`: the state of a communicator, the raw primitives that a backend supplies, and waiting."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from shardpass.backends.call_log import CallLog
from shardpass.backends.communicator import Communicator, OfOneProcess
from shardpass.backends.deadlock import COLLECTIVE, Position, Postings, describe_stuck, stuck_ranks
from shardpass.backends.failure import (
    Failure,
    TransportLostError,
    TransportTimeoutError,
    add_note,
    first_failure,
    reason_of,
)
from shardpass.backends.identity import MessageKey
from shardpass.errors import CommunicationError, DivergenceError, PeerFailure

DEFAULT_TIMEOUT = 1800.0  # seconds; a rank may be compiling a kernel, and a dead one is found by other means
_FIRST_LOOK_SECONDS = 1.0  # how long a rank is blocked before it looks for a circle of waits
_LOOK_SECONDS = 0.5  # how long it then waits before it looks again
Step = tuple[Position, Callable[[float], None]]
"""Where this rank is while it waits for a message, and what waits for it; the seconds are for each of its parts."""
C = TypeVar("C", bound="RawCommunicator")
E = TypeVar("E", bound=BaseException)


class Clock(Protocol):
    """What a communicator reads the time from, and sleeps by: the module `time`, or a simulated clock."""

    def monotonic(self) -> float:
        """Seconds since some moment."""

    def sleep(self, seconds: float, /) -> None:
        """Return after that many seconds."""


class Pending(Protocol):
    """One raw message under way. It keeps the memory of its message alive."""

    def wait(self, timeout: float) -> None:
        """Return when the message has completed.

        Raises:
            TransportTimeoutError, TransportLostError: without words, which `RawCommunicator.waiting` adds.
            CommunicationError: another rank has failed.
        """


class ExchangeHandle:
    """A transfer under way: one message in, one message out, or both.

    Args:
        comm: the communicator on which the messages travel.
        steps: for each message; none if the transfer has completed already.
    """

    def __init__(self, comm: RawCommunicator, steps: Sequence[Step] = ()) -> None:
        self._comm, self._steps = comm, list(steps)
        self._error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Return when both messages have completed; see `Handle.wait`."""
        if self._error is not None:
            raise self._error
        try:
            while self._steps:
                position, complete = self._steps[0]
                with self._comm.waiting(position, timeout) as seconds:
                    complete(seconds)
                del self._steps[0]
        except BaseException as error:
            self._error = error
            raise


class RawCommunicator(OfOneProcess, Communicator):
    """The part of `BaseCommunicator` that lies under exchanges and collectives.

    Attributes:
        path: ``"world"``, or the name of a duplicate after the path of what it duplicates; the same on every rank.
        timeout: seconds that a wait may take unless the caller says otherwise.
        max_message_bytes: longer messages are split; the same on every rank.
        calls: the last calls of this rank, on all communicators of its job.
    """

    serves_threads = True  # whether a duplicate may be used by another thread at the same time
    moves_device_memory = False  # whether raw primitives take tensors on `device`; otherwise they are staged on the CPU
    is_direct = False  # whether tensors on `device` travel by `_raw_move`, and never over the host
    shares_memory = False  # whether the engine is to use `share` for rows between ranks of one host
    clock: Clock = time

    def __init__(self, rank: int, size: int, device: torch.device, failure: Failure, path: str = "world") -> None:
        self.rank, self.size, self.device, self.failure, self.path = rank, size, device, failure, path
        self.local_ranks: tuple[int, ...] = (rank,)
        self.processes: tuple[int, ...] = ()
        self.shares_memory = self.shares_memory and device.type == "cpu"
        self.bytes_sent = 0
        self.timeout = DEFAULT_TIMEOUT
        self.max_message_bytes = 1 << 30
        self.calls = CallLog(rank, size)
        self.collectives = 0
        self._epoch = 0
        self._postings = Postings()
        self._moved: Counter[tuple[str, int]] = Counter()  # messages and collectives between devices, by their ends
        self._moving: list[list[Position]] = []  # groups of messages between devices that have not ended, as awaited
        self._have_moved: Counter[str] = Counter()  # messages between devices that have ended, as the peer awaits them
        self._num_duplicates: Counter[str] = Counter()
        self._where: Position | None = None
        self._next_look = 0.0
        self._stuck: list[tuple[int, int]] = []
        self._is_published = False
        self._publishing = threading.Lock()
        self._closed = False

    # ---- raw primitives -------------------------------------------------------------------------------------------

    def _raw_send(self, flat: Tensor, to: int, key: MessageKey) -> Pending:
        """Start sending the bytes ``flat`` (uint8, 1-D, not empty)."""
        raise NotImplementedError

    def _raw_receive(self, flat: Tensor, source: int, key: MessageKey) -> Pending:
        """Start receiving into the bytes ``flat``."""
        raise NotImplementedError

    def _raw_move(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> list[Pending]:
        """Start a group of messages between devices: bytes on `device`, each with its peer. Only if `is_direct`.

        Two messages from one rank to another one are matched by their order alone, and a group may begin only when
        the one before it has ended. What is pending may be waited for without an end of time.
        """
        raise NotImplementedError

    def _raw_gather(self, block: bytes, timeout: float) -> list[bytes]:
        """Collective: the blocks of all ranks, all of the same length. Returns when every rank has entered."""
        raise NotImplementedError

    def _raw_reduce(self, tensor: Tensor, op: str, timeout: float) -> None:
        """Collective: reduce in place. The tensor is never half precision, bool or empty."""
        raise NotImplementedError

    def _raw_broadcast(self, flat: Tensor, root: int, timeout: float) -> None:
        """Collective: fill the bytes ``flat``, which are not empty, in place."""
        raise NotImplementedError

    def _raw_duplicate(self: C, path: str) -> C:
        """Collective: a communicator with this path over the same ranks, with channels of its own."""
        raise NotImplementedError

    def _publish(self, text: str) -> None:
        """Let the other ranks read ``text``, which replaces what this rank has published before."""

    def _published(self) -> dict[int, str]:
        """The latest text of each other rank, as far as it has arrived here."""
        return {}

    def _spread_divergence(self, text: str) -> None:
        """Make every rank's waits on this communicator raise ``text`` as a `DivergenceError`."""
        self.failure.set(DivergenceError, text)

    def _spread_failure(self, text: str) -> None:
        """Make every rank fail with ``text`` in its present or next call, unless something has failed before."""
        self.failure.set(PeerFailure, text)

    def _silent(self) -> list[int]:
        """The ranks that are there, and have not been heard of for a while."""
        return []

    def _explain_lost(self, peers: Sequence[int]) -> CommunicationError | None:
        """The failure behind a closed connection with one of ``peers``, if it becomes known shortly."""
        return self.failure.error()

    # ---- waiting --------------------------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, position: Position, timeout: float | None = None) -> Iterator[float]:
        """A block in which this rank is blocked at ``position``. Yields the seconds that each transfer may take."""
        seconds = self.timeout if timeout is None else timeout
        self._epoch += 1
        self._stuck = []
        self._next_look = self.clock.monotonic() + _FIRST_LOOK_SECONDS
        self._where = position
        try:
            yield seconds
        except TransportTimeoutError:
            self._check_failed()
            silent = ", ".join(f"rank {rank}" for rank in self._silent())
            why = (
                f"{silent} has not been heard of for a while, though its host answers: its process is stopped, or the "
                f"host is swapping"
                if silent
                else "The other ranks are alive: one of them is slower than that, or has taken another path"
            )
            text = f"rank {self.rank} has waited {seconds:.0f} s in {position.text}, and nothing came. {why}"
            raise self.with_note(CommunicationError(text)) from None
        except TransportLostError as error:
            peers = sorted({one.peer for one in self._waits()})
            known = self._explain_lost(range(self.size) if -1 in peers else peers)
            if known is not None:
                raise self.with_note(known) from None
            peer = " or ".join(f"rank {peer}" if peer >= 0 else "another rank" for peer in peers)
            text = (
                f"rank {self.rank} lost its connection with {peer} in {position.text}; that rank died, or ended before "
                f"the others ({error})"
            )
            raise self.with_note(CommunicationError(text)) from None
        except CommunicationError as error:
            self.with_note(error)
            raise
        finally:
            self._where = None
            self._show(None)

    def look_for_circle(self) -> None:
        """Spread a divergence if the ranks wait for each other in a circle.

        A backend calls this from any thread, as often as it likes, while the rank is blocked. It does something only
        once the rank has been blocked for a second. The same ranks must be stuck twice, since what other ranks have
        published may just be going out of date.
        """
        epoch = self._epoch  # read first: with the position of a later wait it says less, and never too much
        position, now = self._where, self.clock.monotonic()
        if position is None or now < self._next_look or self.failure.happened:
            return
        self._next_look = now + _LOOK_SECONDS
        position = replace(position, epoch=epoch, posted={**self._postings.posted(), COLLECTIVE: self.collectives})
        self._show(position)
        texts = {rank: text for rank, text in self._published().items() if text and rank != self.rank}
        positions = {self.rank: position, **{rank: Position.from_json(text) for rank, text in texts.items()}}
        stuck = [(rank, positions[rank].epoch) for rank in stuck_ranks(positions)]
        if stuck and stuck == self._stuck:
            self._spread_divergence(describe_stuck(positions))
        self._stuck = stuck

    def _show(self, position: Position | None) -> None:
        """Publish where this rank is blocked, or `None` if it goes on, unless that is published already."""
        with self._publishing:
            is_blocked = position is not None and self._where is not None
            if is_blocked != self._is_published:
                self._is_published = is_blocked
                self._publish(position.to_json() if position is not None and is_blocked else "")

    def publish_end(self) -> None:
        """Let the other ranks know through which collectives and messages between devices this rank has been."""
        posted = {COLLECTIVE: self.collectives, **self._have_moved}
        self._publish(Position("its end", "", 0, self.rank, posted=posted).to_json())

    def _is_to_blame(self, ended: int) -> bool:
        """Whether this rank waits for a rank that has ended, and not only for what that rank has sent before."""
        text = self._published().get(ended)
        posted = Position.from_json(text).posted if text else {}
        return any(posted.get(one.awaits, 0) < one.count for one in self._waits() if one.peer in (-1, ended))

    def _waits(self) -> list[Position]:
        """What this rank waits for."""
        position = self._where
        if position is None or not position.is_queued:
            return [] if position is None else [position]
        return [message for group in list(self._moving) for message in group]

    def blame_ended(self, ended: Iterable[int]) -> None:
        """Make it the first failure if this rank waits for one of the ranks that have ``ended``."""
        position = self._where
        for rank in ended:
            if position is not None and self._is_to_blame(rank) and not self.failure.happened:
                self._spread_failure(
                    f"rank {rank} ended first, after fewer calls than the others make (its program came to its end, or "
                    f"called sys.exit): rank {self.rank} waits in {position.text}"
                )

    def check_ended(self, ended: Iterable[int]) -> None:
        """Raise if this rank waits for one of the ranks that have ``ended``."""
        self.blame_ended(ended)
        self.failure.check()

    def diverge(self, text: str) -> NoReturn:
        """Raise ``text`` as a `DivergenceError`, here and in the waits of every rank."""
        self._spread_divergence(text)
        self.failure.check()
        raise DivergenceError(text)

    # ---- life -----------------------------------------------------------------------------------------------------

    def take_turns(self) -> None:
        """Nothing: where ranks share no process, each has generators of its own."""

    def run_at_once(self) -> None:
        """Nothing: ranks run at once."""

    def out_of_turn(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def random_lock(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def announce(self, reason: str) -> None:
        """Make every rank, this one included, fail with ``reason`` in its present or next call."""
        self._spread_failure(first_failure(self.rank, reason))
        self.calls.write(first_failure(self.rank, reason))

    def last_words(self, reason: str) -> str:
        """What this rank prints when it fails. Its last calls are written."""
        text = first_failure(self.rank, reason)
        words = self.calls.write(text)
        return f"shardpass: {text}" + f" ({words})" * bool(words)

    def with_note(self, error: E) -> E:
        """``error``, with a note that names the file with this rank's last calls, which is written."""
        is_told = isinstance(error, CommunicationError)
        add_note(error, self.calls.write(str(error) if is_told else first_failure(self.rank, reason_of(error))))
        return error

    def abort(self, reason: str) -> None:
        """End every rank with this rank's ``reason``. It raises on this rank as well."""
        self.announce(reason)
        self._check_failed()

    def give_up(self) -> None:
        """End this rank because another one has failed. The caller raises, or ends the process."""

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise CommunicationError(f"the communicator {self.path!r} of rank {self.rank} has been closed")
        self._check_failed()

    def _check_failed(self) -> None:
        error = self.failure.error()
        if error is not None:
            raise self.with_note(error)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(path={self.path!r}, rank={self.rank}, size={self.size}, device={self.device})"
