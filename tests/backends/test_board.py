"""A backend to learn from, for `docs/writing-a-backend.md`: its ranks are threads of one process that share a board."""

import threading
from collections import defaultdict, deque
from time import monotonic

import pytest
import torch

from shardpass.backends import BaseCommunicator, Failure, TransportTimeoutError, first_failure
from shardpass.errors import PeerFailure

from .contract import run_all


class Board:
    """What the ranks of one communicator share."""

    def __init__(self, size):
        self.size, self.failure, self.changed = size, Failure(), threading.Condition()
        self.mail = defaultdict(deque)  # (source, to, key) -> copies of what was sent
        self.meetings = defaultdict(dict)  # number of the meeting -> {rank: what it brought}
        self.published, self.duplicates = {}, {}


class Sent:
    def wait(self, timeout):  # sending copies, so it is done at once
        pass


class Arrival:
    def __init__(self, comm, flat, place):
        self.comm, self.flat, self.place = comm, flat, place

    def wait(self, timeout):
        box = self.comm.board.mail[self.place]
        self.comm.block(lambda: box, timeout)
        self.flat.copy_(box.popleft())


class BoardCommunicator(BaseCommunicator):
    def __init__(self, board, rank, path="world"):
        super().__init__(rank, board.size, torch.device("cpu"), board.failure, path)
        self.board, self.met = board, 0
        self.local_ranks = tuple(range(board.size))

    def block(self, ready, timeout):
        """Return when ready() is true; look for a failure and for a circle of waits meanwhile."""
        start = monotonic()
        while True:
            with self.board.changed:
                if ready():
                    return
                self.board.changed.wait(0.05)
            self.failure.check()
            if monotonic() - start > timeout:
                raise TransportTimeoutError
            self.look_for_circle()

    def meet(self, mine, timeout):
        """What every rank brought to this meeting, in rank order."""
        self.met += 1
        meeting = self.board.meetings[self.met]
        with self.board.changed:
            meeting[self.rank] = mine
            self.board.changed.notify_all()
        self.block(lambda: len(meeting) == self.size, timeout)
        return [meeting[rank] for rank in range(self.size)]

    def _raw_send(self, flat, to, key):
        with self.board.changed:
            self.board.mail[self.rank, to, key].append(flat.clone())
            self.board.changed.notify_all()
        return Sent()

    def _raw_receive(self, flat, source, key):
        return Arrival(self, flat, (source, self.rank, key))

    def _raw_gather(self, block, timeout):
        return self.meet(block, timeout)

    def _raw_reduce(self, tensor, op, timeout):
        stacked = torch.stack(self.meet(tensor.clone(), timeout))  # in rank order: the same bits everywhere
        reduced = {"sum": stacked.sum, "prod": stacked.prod, "max": stacked.amax, "min": stacked.amin}[op](0)
        tensor.copy_(reduced)

    def _raw_broadcast(self, flat, root, timeout):
        flat.copy_(self.meet(flat.clone(), timeout)[root])

    def _raw_duplicate(self, path):
        with self.board.changed:
            board = self.board.duplicates.setdefault(path, Board(self.size))
        return BoardCommunicator(board, self.rank, path)

    def _publish(self, text):
        self.board.published[self.rank] = text

    def _published(self):
        return dict(self.board.published)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_contract(ranks: int) -> None:
    board, failed = Board(ranks), []

    def rank(comm: BoardCommunicator) -> None:
        try:
            run_all(comm)
        except BaseException as error:
            failed.append(error)
            comm.failure.set(PeerFailure, first_failure(comm.rank, repr(error)))

    threads = [threading.Thread(target=rank, args=(BoardCommunicator(board, r),), daemon=True) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    if failed:
        raise failed[0]
    assert not any(thread.is_alive() for thread in threads)
