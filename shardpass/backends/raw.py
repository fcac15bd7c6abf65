"""The state of a communicator, the raw primitives a backend supplies, and waiting: what lies under `base`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardpass.backends.deadlock import Position, Tally, describe_circle, find_circle
from shardpass.backends.failure import Failure, TransportLostError, TransportTimeoutError
from shardpass.backends.handle import Pending
from shardpass.backends.identity import MessageKey
from shardpass.errors import CommunicationError, DivergenceError

DEFAULT_TIMEOUT = 1800.0  # seconds; a rank may be compiling a kernel, and a dead one is found by other means


class RawCommunicator:
    """What a backend derives from, through `BaseCommunicator`.

    Attributes:
        name: of this communicator, ``"world"`` or what `duplicate` was given.
        timeout: seconds a wait may take by default.
        max_message_bytes: longer messages are split; the same on every rank.
    """

    name: str = "world"
    serves_threads = True  # whether a duplicate may be used by another thread at the same time
    moves_device_memory = False  # whether raw primitives take tensors on `device`; staged over the CPU otherwise
    shares_memory = False  # whether the engine is to use `share` for rows between ranks of one host

    def __init__(self, rank: int, size: int, device: torch.device, failure: Failure) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.local_ranks: tuple[int, ...] = (rank,)
        self.shares_memory = self.shares_memory and device.type == "cpu"
        self.bytes_sent = 0
        self.timeout = DEFAULT_TIMEOUT
        self.max_message_bytes = 1 << 30
        self.failure = failure
        self._sequence = 0
        self._epoch = 0
        self._tally = Tally()
        self._where: Position | None = None
        self._circle: tuple[list[int], list[int]] | None = None
        self._closed = False
        self._background: Any = None  # see `Communicator.background`
        self.given_up = False  # by this rank

    # ---- raw primitives -------------------------------------------------------------------------------------------

    def _raw_send(self, flat: Tensor, to: int, key: MessageKey) -> Pending:
        """Start sending the bytes ``flat`` (uint8, 1-D, not empty)."""
        raise NotImplementedError

    def _raw_receive(self, flat: Tensor, source: int, key: MessageKey) -> Pending:
        """Start receiving into the bytes ``flat``."""
        raise NotImplementedError

    def _raw_gather(self, block: bytes, timeout: float) -> list[bytes]:
        """Collective: the blocks, all of `HEADER_BYTES`, of all ranks. Returns when every rank has entered."""
        raise NotImplementedError

    def _raw_reduce(self, tensor: Tensor, op: str, timeout: float) -> None:
        """Collective: reduce in place. Never half precision, bool or empty."""
        raise NotImplementedError

    def _raw_broadcast(self, flat: Tensor, root: int, timeout: float) -> None:
        """Collective: fill the bytes ``flat``, not empty, in place."""
        raise NotImplementedError

    def _raw_duplicate(self, name: str) -> Any:
        """Collective: a communicator over the same ranks with channels of its own."""
        raise NotImplementedError

    def _publish(self, position: Position | None) -> None:
        """Let the other ranks see where this one is blocked; None when it goes on."""

    def _positions(self) -> dict[int, Position]:
        """Where the other ranks are blocked, as far as they have published it."""
        return {}

    def _spread_divergence(self, text: str) -> None:
        """Make every rank's waits on this communicator raise ``text`` as a `DivergenceError`."""
        self.failure.set(DivergenceError, text)

    def _explain_lost(self, peer: int) -> CommunicationError | None:
        """The failure behind a closed connection, if it becomes known shortly."""
        return self.failure.error()

    def _diverge(self, text: str) -> NoReturn:
        self._spread_divergence(text)
        self.failure.check()
        raise DivergenceError(text)

    # ---- waiting --------------------------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, position: Position, timeout: float | None) -> Iterator[Callable[[Pending], None]]:
        """While this rank is blocked at ``position``: a function that waits for one raw transfer after the other."""
        limit = self.timeout if timeout is None else timeout
        deadline = monotonic() + limit
        self._epoch += 1
        position.epoch = self._epoch
        self._circle = None
        self._where = position
        try:
            yield lambda pending: pending.wait(max(0.0, deadline - monotonic()))
        except TransportTimeoutError:
            self.failure.check()
            raise CommunicationError(
                f"rank {self.rank} has waited {limit:.0f} s in {position.text}, and nothing came. The other ranks are "
                f"alive: one of them is slower than that, or has taken another path"
            ) from None
        except TransportLostError as error:
            known = self._explain_lost(position.peer)
            if known is not None:
                raise known from None
            peer = f"rank {position.peer}" if position.peer >= 0 else "another rank"
            raise CommunicationError(
                f"rank {self.rank} lost its connection with {peer} in {position.text}; that rank died, or ended before "
                f"the others ({error})"
            ) from None
        finally:
            self._where = None
            self._publish(None)

    def check_stuck(self) -> str | None:
        """For backends, while blocked for a second or more: words where the ranks wait in a circle, else None.

        The same circle must be seen twice, since what other ranks have published may just be going out of date.
        """
        position = self._where
        if position is None:
            return None
        position = self._tally.fill(Position(**{**position.__dict__, "sent": {}, "received": {}}))
        self._publish(position)
        positions = {**self._positions(), self.rank: position}
        circle = find_circle(self.rank, positions)
        seen = (circle, [positions[rank].epoch for rank in circle]) if circle else None
        if seen is not None and seen == self._circle:
            return describe_circle(seen[0], positions)
        self._circle = seen
        return None

    # ---- life -----------------------------------------------------------------------------------------------------

    def let_first_rank_go(self) -> None:
        """See `Communicator.let_first_rank_go`."""

    def random_lock(self) -> AbstractContextManager[Any]:
        """See `Communicator.random_lock`."""
        return nullcontext()

    def give_up(self, reason: str) -> None:
        """See `Communicator.give_up`."""
        self.given_up = True
        if not self.failure.happened.is_set():
            self._spread_divergence(f"rank {self.rank} has given up {self.name!r}: {reason}")

    def abort(self, reason: str) -> None:
        """See `Communicator.abort`."""
        raise NotImplementedError

    def close(self) -> None:
        """See `Communicator.close`."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise CommunicationError(f"the communicator {self.name!r} of rank {self.rank} has been closed")
        self.failure.check()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a communicator belongs to its process; save model.state_dict() instead")

    def __deepcopy__(self, memo: dict[int, Any]) -> RawCommunicator:
        return self

    def __copy__(self) -> RawCommunicator:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, rank={self.rank}, size={self.size}, device={self.device})"
