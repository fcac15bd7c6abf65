"""Ranks that are threads take turns while they build models, each with random numbers of its own.

Torch, NumPy and Python have one generator each for the whole process, and a script seeds and uses them in every rank.
So one rank at a time runs, and takes the states of its generators along when its turn ends and begins.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from shardpass.backends.failure import Failure, TransportTimeoutError
from shardpass.errors import CommunicationError

_PATIENCE = 60.0  # seconds that a rank waits for its turn in silence


class Turn:
    """Which of the ranks may run, until all have given up to take turns.

    Args:
        changed: what the ranks wait on. It is told when a rank fails.
        failure: after which nobody waits for a turn.
    """

    def __init__(self, changed: threading.Condition, failure: Failure) -> None:
        self._changed, self._failure = changed, failure
        self._holder: threading.Thread | None = None

    @property
    def is_mine(self) -> bool:
        """Whether it is the turn of this thread."""
        return self._holder is threading.current_thread()

    def take(self, states: tuple[Any, ...], timeout: float) -> None:
        """Return when it is the turn of this thread, whose generators have these `states`.

        Raises:
            CommunicationError: another thread has kept its turn for `timeout` seconds.
        """
        with self._changed:
            if not self._comes(min(timeout, _PATIENCE)):
                assert self._holder is not None
                text = (
                    f"{threading.current_thread().name} waits for its turn, which {self._holder.name} has: ranks that "
                    f"are threads run one at a time until they call a wrapped model. If the latter waits for a lock or "
                    f"a queue of yours, let it wait within `with comm.out_of_turn():`"
                )
                logging.getLogger("shardpass").warning(text)
                if not self._comes(timeout - _PATIENCE):
                    raise CommunicationError(text)
            self._holder = self._holder or threading.current_thread()
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002 (scripts draw from it)
        random.setstate(states[2])

    def _comes(self, timeout: float) -> bool:
        return self._changed.wait_for(lambda: self._holder is None or self._failure.happened, timeout)

    def leave(self) -> None:
        """End the turn of this thread, if it is its turn."""
        if self.is_mine:
            with self._changed:
                self._holder = None
                self._changed.notify_all()

    @contextmanager
    def left(self, timeout: float) -> Iterator[None]:
        """A block outside of the turn of this thread, if it is its turn. It may not draw random numbers."""
        if not self.is_mine:
            yield
            return
        states = random_states()
        self.leave()
        try:
            yield
        except TransportTimeoutError:
            raise  # without waiting as long again
        except BaseException:
            self.take(states, timeout)
            raise
        self.take(states, timeout)


def random_states() -> tuple[Any, ...]:
    """The states of the generators of torch, NumPy and Python."""
    return torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
