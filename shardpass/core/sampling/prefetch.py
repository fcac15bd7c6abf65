"""Makes batches in the background, in lock step: every rank makes the same batches and stops after the same one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from shardpass.core.ranks import Ranks
from shardpass.errors import DivergenceError

_GO, _STOP = 1, 0
_PATIENCE = 2.0  # seconds for one thread; if ranks are threads, their sampling threads are stopped one by one


class BatchIterator:
    """Yields the batches of `work` in order. Every rank must take the same number of them."""

    def __init__(self, work: Work) -> None:
        self._work, self._taken = work, 0

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Any:
        work = self._work
        if self._taken >= work.num_steps:
            self.close()
            raise StopIteration
        step, self._taken = self._taken, self._taken + 1
        try:
            with work.comm.out_of_turn():  # the other ranks take part
                return work.take(step)
        except BaseException:
            self._taken = work.num_steps
            raise

    def close(self) -> None:
        """Make no more batches. Dropping the iterator does the same."""
        self._taken = self._work.num_steps
        self._work.stop()

    def __del__(self) -> None:
        if hasattr(self, "_work"):
            self._work.stop()


def _end(tokens: SimpleQueue[int], thread: threading.Thread) -> None:
    """Stop a thread and wait for it. A thread inside a kernel at the interpreter's end would abort the process."""
    tokens.put(_STOP)
    if thread is not threading.current_thread():
        thread.join(_PATIENCE)


class Work:
    """Makes the batches of an epoch in step with the other ranks, in the background if `ahead` > 0.

    A thread then makes at most `ahead` batches before they are asked for. Every step begins with the ranks' agreement
    to make it.

    [Note: dropped half-way]
    Ranks may drop their iterators after the same batch at different times: they finish the batches under way, agree to
    stop, and end their threads. If one rank has stopped and another asks for more, the other gets a `DivergenceError`.
    The thread holds this object and not the iterator, which could otherwise never be dropped.

    Args:
        comm: the ranks. If `ahead` > 0, nothing else may use them while batches are made.
        make: makes the batch of a step. Collective over `comm`.
        ahead: the same on every rank.
        epoch: the number of the epoch, on which ranks must agree.
    """

    def __init__(self, comm: Ranks, make: Callable[[int], Any], num_steps: int, ahead: int, epoch: int) -> None:
        self.comm, self.make, self.num_steps, self.ahead, self.epoch = comm, make, num_steps, ahead, epoch
        self._tokens: SimpleQueue[int] = SimpleQueue()
        self._batches: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        if ahead and num_steps:
            self._thread = threading.Thread(target=self._run, name="shardpass sampling", daemon=True)
            self._thread.start()
            weakref.finalize(self, _end, self._tokens, self._thread)  # at the end of the program at the latest
            for _ in range(min(ahead, num_steps)):
                self._tokens.put(_GO)

    def take(self, step: int) -> Any:
        """The batch of the next step.

        Raises:
            RuntimeError: if a new iteration over the loader has begun.
            BaseException: what making the batch raised.
        """
        if self._thread is None:
            self._agree(step, _GO)
            with torch.no_grad():
                return self.make(step)
        if self._is_stopped:  # its thread makes no more batches, so waiting for one would never end
            raise RuntimeError(
                f"this iterator of epoch {self.epoch} ended after {step} of {self.num_steps} batches, when the loader "
                f"was iterated over again: one iterator of a loader is in use at a time. Make a second loader"
            )
        if step + self.ahead < self.num_steps:
            self._tokens.put(_GO)
        batch, error = self._batches.get()
        if error is not None:
            raise error
        return batch

    def stop(self, wait: bool = False) -> None:
        """Make no more batches than were asked for. This is collective only with `wait`.

        Args:
            wait: wait until the thread has ended, for which the other ranks must stop theirs.
        """
        self._is_stopped = True
        if self._thread is not None:
            self._tokens.put(_STOP)
            if wait:
                with self.comm.out_of_turn():
                    self._thread.join()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                for step in range(self.num_steps):
                    token = self._tokens.get()
                    self._agree(step, token)
                    if token == _STOP:
                        return
                    self._batches.put((self.make(step), None))
        except BaseException as error:  # raised where the batch is taken
            self._batches.put((None, error))

    def _agree(self, step: int, token: int) -> None:
        """Return only if every rank makes this batch of this epoch.

        Raises:
            DivergenceError: if this rank asks for a batch that another rank does not make.
        """
        own = torch.tensor([self.epoch, step, token], dtype=torch.int64, device=self.comm.device)
        answers = [answer.tolist() for answer in self.comm.all_gather(own, "sampling: next batch")]
        mine = answers[self.comm.rank]
        other = next((rank for rank, answer in enumerate(answers) if answer != mine), None)
        if other is None or token == _STOP:
            return
        epoch, at, theirs = answers[other]
        found = f"has stopped after {at} batches" if theirs == _STOP else f"asks for batch {at} of epoch {epoch}"
        raise DivergenceError(
            f"rank {self.comm.rank} asks for batch {step} of epoch {self.epoch} of its loader, but rank {other} "
            f"{found}: batches are sampled by all ranks together, so every rank must take the same number of them"
        )
