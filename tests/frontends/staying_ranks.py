"""`Team`: ranks as threads that share one sharded graph and run one job after another."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

import shardpass as sp
from shardpass.testing import WholeGraph, WholeHeteroGraph

from .on_ranks import share

Job = Callable[[Any, Any], Any]


class Team:
    """Ranks as threads that keep their sharded graph from job to job.

    A job that leaves ranks in different calls ends the team; the next job has a new one.
    """

    def __init__(self, graph: WholeGraph | WholeHeteroGraph, owners: Tensor | dict[str, Tensor], ranks: int) -> None:
        self.graph, self.owners, self.ranks = graph, owners, ranks
        self._jobs: list[queue.Queue[Job | None]] = []
        self._done: queue.Queue[tuple[int, Any, bool]] = queue.Queue()

    def run(self, job: Job) -> list[Any]:
        """What the job returned or raised on each rank."""
        if not self._jobs:
            self._jobs = [queue.Queue() for _ in range(self.ranks)]
            threading.Thread(target=self._start, args=(self._jobs,), daemon=True).start()
        for jobs in self._jobs:
            jobs.put(job)
        found = sorted((self._done.get(timeout=120) for _ in self._jobs), key=lambda one: one[0])
        if not all(is_intact for *_, is_intact in found):
            self._jobs = []
        return [result for _, result, _ in found]

    def close(self) -> None:
        for jobs in self._jobs:
            jobs.put(None)
        self._jobs = []

    def _start(self, jobs: list[queue.Queue[Job | None]]) -> None:
        with contextlib.suppress(Exception):  # each rank has told it
            sp.spawn(self._serve, self.ranks, args=(jobs,), timeout=60)

    def _serve(self, comm: sp.Communicator, jobs: list[queue.Queue[Job | None]]) -> None:
        graph = share(self.graph, comm, self.owners)
        while (job := self._next(comm, jobs)) is not None:
            result, is_intact = None, True
            try:
                result = job(comm, graph)
            except Exception as error:
                result = error
            try:
                sp.total(0, comm)
            except Exception:
                is_intact = False
            self._done.put((comm.rank, result, is_intact))
            if not is_intact:
                return

    @staticmethod
    def _next(comm: sp.Communicator, jobs: list[queue.Queue[Job | None]]) -> Job | None:
        with comm.out_of_turn():
            return jobs[comm.rank].get()
