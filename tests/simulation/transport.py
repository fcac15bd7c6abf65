"""A communicator over the simulated world.

[Note: what the transport checks] A buffer that is being sent may not be written, and one that is being received into
may be neither read nor written. So the transport compares what it was given with what it finds when the message leaves,
fills a receiving buffer with a pattern, and looks whether the pattern is still there when the message comes.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.backends import Failure, TransportLostError, TransportTimeoutError
from shardpass.backends.identity import HEADER_LANE, MessageKey, SlotTable
from shardpass.backends.news import InformedCommunicator

from .world import Process, World

_PATTERN = 0xA5
_COMBINE = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
_ENDED_SECONDS = 2.0


class _Transfer:
    """One end of a message."""

    def __init__(self, comm: SimulatedCommunicator, flat: Tensor, peer: int, key: MessageKey, is_sending: bool) -> None:
        self._comm, self.flat, self._peer = comm, flat, peer
        self.bytes: Any = flat.numpy()
        self.is_done = False
        self._place = comm.slots.take(peer, is_sending, key)
        self.given = self.bytes.copy() if is_sending else None
        if not is_sending:
            self.bytes.fill(_PATTERN)

    def wait(self, timeout: float) -> None:
        """See `Pending.wait`."""
        self._comm.block(lambda: self.is_done, lambda: self._peer in self._comm.lost, timeout)
        self._comm.slots.release(self._place)


class _Group:
    """Messages of a rank that begin when all groups of the rank before this one have ended."""

    def __init__(self, comm: SimulatedCommunicator, sends: Any, receives: Any) -> None:
        self._comm = comm
        self.sends = {to: flat.numpy() for flat, to in sends}
        self.receives = {source: flat.numpy() for flat, source in receives}
        self.given = {to: content.copy() for to, content in self.sends.items()}
        for content in self.receives.values():
            content.fill(_PATTERN)

    def wait(self, timeout: float) -> None:
        """See `Pending.wait`."""
        comm = self._comm
        comm.block(lambda: not self._peers(), lambda: bool(comm.lost & self._peers()), timeout)

    def _peers(self) -> set[int]:
        return self.sends.keys() | self.receives.keys()


class _Channel:
    """What is under way on one communicator of all ranks."""

    def __init__(self) -> None:
        self.groups: dict[int, deque[_Group]] = {}
        self.arrived: dict[Any, deque[Any]] = {}
        self.expected: dict[Any, deque[_Transfer]] = {}
        self.meetings: dict[int, dict[int, Any]] = {}


class SimulatedCommunicator(InformedCommunicator):
    """One rank's end.

    Attributes:
        lost: the ranks with which this communicator has no connection any more.
    """

    moves_device_memory = True
    serves_threads = False

    def __init__(self, world: World, process: Process, path: str = "world") -> None:
        super().__init__(process.rank, world.size, torch.device("cpu"), Failure(), path)
        self.world, self.process = world, process
        self.clock = world
        self.timeout = world.timeout
        self.is_direct = world.policy.is_direct and path == "world" and world.size > 1
        self.shares_memory = world.policy.shares_memory and not world.policy.is_direct
        if self.shares_memory:
            self.local_ranks = tuple(range(world.size))
        self.slots = SlotTable()
        self.lost = set(process.gone)
        self._num_meetings = 0
        process.comms[path] = self
        self._channel: _Channel = world.channels.setdefault(path, _Channel())
        if world.size > 1:
            self.attend(process.news)

    # ---- waiting

    def block(self, done: Any, lost: Any, timeout: float) -> None:
        """Return when ``done()``."""
        world = self.world
        if world.policy.polls:
            self._poll(done, timeout)
            return
        deadline = world.now + timeout
        while world.now < deadline:
            world.wait(lambda: done() or lost(), deadline - world.now)
            if done():
                return
            if lost():  # it was when the wait ended, but what comes late may have made up for it
                raise TransportLostError("Connection closed by peer")
        self.break_connections()
        raise TransportTimeoutError

    def _poll(self, done: Any, timeout: float) -> None:
        """Return when ``done()``, and look for failures meanwhile, as `MpiCommunicator.block` does."""
        world, seen = self.world, set[int]()
        deadline = world.now + timeout

        def ended() -> list[int]:
            return self._ended(_ENDED_SECONDS, range(self.size))

        while world.now < deadline:
            world.wait(lambda: done() or self.failure.happened or bool(set(ended()) - seen), deadline - world.now)
            if done():
                return
            self.failure.check()
            self.check_ended(ended())
            seen.update(ended())
        raise TransportTimeoutError

    # ---- raw primitives

    def _place(self, source: int, to: int, key: MessageKey) -> Any:
        if self.world.policy.defect == "mixes up tags":
            key = key._replace(tag=0)
        return source, to, key

    def _raw_send(self, flat: Tensor, to: int, key: MessageKey) -> _Transfer:
        world, place = self.world, self._place(self.rank, to, key)
        world.point(self.process, "step")
        self._check_connected(to)
        sent = _Transfer(self, flat, to, key, True)
        is_eager = world.random.random() >= world.policy.rendezvous
        if world.policy.defect == "loses messages" and world.random.random() < 0.02:
            sent.is_done = True
            return sent
        line = (self.path, place)

        def leave() -> None:
            if self.process.state == "killed" or world.is_cut(self.rank, to):
                return
            content = self._taken(sent) if is_eager else None
            when = world.at(line, to, lambda: arrive(content), f"gets {key} from rank {self.rank}")
            data = ("data", self.rank, to)
            world.latest(data, when)

        def arrive(content: Any) -> None:
            if world.is_cut(self.rank, to) or (content is None and self.process.state != "runs"):
                return
            expected = self._channel.expected.get(place)
            if expected:
                is_mixed = world.policy.defect == "mixes up tags"
                self._deliver(expected.pop() if is_mixed else expected.popleft(), sent, content, key)
            else:
                self._channel.arrived.setdefault(place, deque()).append((sent, content, key))

        world.at((*line, "leaves"), self.rank, leave, "")
        return sent

    def _taken(self, sent: _Transfer) -> Any:
        """The content of a message that leaves its sender, which may use the buffer again."""
        if not np.array_equal(sent.bytes, sent.given):
            self.world.problems.append(f"rank {self.rank} writes into a buffer that is being sent")
        content = sent.bytes.copy()
        sent.is_done = True
        return content

    def _deliver(self, to: _Transfer, sent: _Transfer, content: Any, key: MessageKey) -> None:
        world = self.world
        content = sent._comm._taken(sent) if content is None else content
        if content.size != to.bytes.size:
            world.problems.append(f"a message of {content.size} bytes ({key}) meets a buffer of {to.bytes.size}")
            return
        if not (to.bytes == _PATTERN).all():
            world.problems.append(f"rank {to._comm.rank} writes into a buffer that is being received into")
        if world.policy.defect == "damages messages" and key.lane != HEADER_LANE and world.random.random() < 0.05:
            content = content ^ 1
        to.bytes[:] = content
        to.is_done = True

    def _raw_receive(self, flat: Tensor, source: int, key: MessageKey) -> _Transfer:
        world, place = self.world, self._place(source, self.rank, key)
        world.point(self.process, "step")
        arrival = _Transfer(self, flat, source, key, False)
        if world.policy.defect == "does not wait for messages":
            arrival.is_done = True
        letters = self._channel.arrived.get(place)
        if letters:
            sent, content, sent_key = letters.popleft()
            self._deliver(arrival, sent, content, sent_key)
            return arrival
        if source in self.lost and not world.policy.polls:
            raise TransportLostError("Connection closed by peer")
        self._channel.expected.setdefault(place, deque()).append(arrival)
        return arrival

    def _raw_move(self, sends: Any, receives: Any) -> list[_Group]:
        self.world.point(self.process, "step")
        for _, peer in (*sends, *receives):
            self._check_connected(peer)
        group = _Group(self, sends, receives)
        self._channel.groups.setdefault(self.rank, deque()).append(group)
        self._begin_moves(self.rank)
        return [group]

    def _begin_moves(self, rank: int) -> None:
        """Let the messages begin whose both ends are in the first group of their rank, and one of them is `rank`."""
        groups = self._channel.groups
        while groups.get(rank) and not (groups[rank][0].sends or groups[rank][0].receives):
            groups[rank].popleft()
        if not groups.get(rank):
            return
        for other in range(self.size):
            for source, to in ((rank, other), (other, rank)):
                first, last = (groups[end][0] if groups.get(end) else None for end in (source, to))
                if first is not None and last is not None and to in first.given and source in last.receives:
                    given = first.given.pop(to)  # it begins once
                    self.world.at(
                        (self.path, "move", source, to),
                        to,
                        lambda source=source, to=to, given=given: self._move(source, to, given),
                        f"gets rows from rank {source}",
                    )

    def _move(self, source: int, to: int, given: Any) -> None:
        world, groups = self.world, self._channel.groups
        if world.is_cut(source, to) or world.processes[source].state != "runs":
            return
        content, into = groups[source][0].sends.pop(to), groups[to][0].receives.pop(source)
        if not np.array_equal(content, given):
            world.problems.append(f"rank {source} writes into rows that are being sent")
        if content.size != into.size:
            world.problems.append(f"{content.size} bytes meet a buffer of {into.size}")
            return
        if not (into == _PATTERN).all():
            world.problems.append(f"rank {to} writes into a buffer that is being received into")
        into[:] = content
        world.latest(("data", source, to), world.now)
        self._begin_moves(source)
        self._begin_moves(to)

    def _check_connected(self, peer: int) -> None:
        if peer in self.lost and not self.world.policy.polls:
            raise TransportLostError("Connection closed by peer")

    def _meet(self, mine: Any, timeout: float) -> list[Any]:
        """Collective: what the ranks bring, in rank order."""
        world, others = self.world, [rank for rank in range(self.size) if rank != self.rank]
        world.point(self.process, "step")
        self._num_meetings += 1
        brought = self._channel.meetings.setdefault(self._num_meetings, {})
        got: dict[int, Any] = {self.rank: mine}
        brought[self.rank] = (mine, got)
        for rank in others:
            if rank in brought:  # both are there, so each gets what the other one has brought
                theirs, box = brought[rank]
                for source, to, value, into in ((self.rank, rank, mine, box), (rank, self.rank, theirs, got)):
                    self._pass(source, to, value, into)
        self.block(lambda: len(got) == self.size, lambda: bool(self.lost - set(got)), timeout)
        return [got[rank] for rank in range(self.size)]

    def _pass(self, source: int, to: int, value: Any, into: dict[int, Any]) -> None:
        world = self.world
        if world.is_cut(source, to) or world.processes[source].state == "killed":
            return

        def arrive() -> None:
            if not world.is_cut(source, to):
                into[source] = value

        when = world.at((self.path, "meeting", source, to), to, arrive, f"meets rank {source}")
        world.latest(("data", source, to), when)

    def _raw_gather(self, block: bytes, timeout: float) -> list[bytes]:
        return self._meet(block, timeout)

    def _raw_reduce(self, tensor: Tensor, op: str, timeout: float) -> None:
        values: Any = tensor.numpy()
        every = self._meet(values.copy(), timeout)
        result = every[0].copy()
        for other in every[1:]:
            _COMBINE[op](result, other, out=result)
        values[...] = result

    def _raw_broadcast(self, flat: Tensor, root: int, timeout: float) -> None:
        values: Any = flat.numpy()
        values[...] = self._meet(values.copy(), timeout)[root]

    def _raw_duplicate(self, path: str) -> SimulatedCommunicator:
        return SimulatedCommunicator(self.world, self.process, path)

    # ---- failure

    def break_connections(self) -> None:
        """See `InformedCommunicator`."""
        world = self.world
        for other in range(self.size):
            if other != self.rank:
                self.lost.add(other)
                peer = world.processes[other].comms.get(self.path)
                if peer is not None:
                    world.at(None, other, lambda peer=peer: peer.lost.add(self.rank), f"loses rank {self.rank}")
