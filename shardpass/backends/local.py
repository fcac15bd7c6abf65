"""The communicator of a single rank: every collective is the identity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardpass.backends.base import BaseCommunicator
from shardpass.backends.failure import Failure
from shardpass.backends.identity import Header, header_of


class LocalCommunicator(BaseCommunicator):
    """One rank without peers."""

    moves_device_memory = True

    def __init__(self, device: torch.device | str = "cpu", path: str = "world") -> None:
        super().__init__(0, 1, torch.device(device), Failure(), path)

    @contextmanager
    def _agreed(
        self, kind: str, tensor: Tensor | None, op: str = "", root: int = 0, label: str = "", free_rows: bool = False,
        gives: Tensor | None = None,
    ) -> Iterator[tuple[list[Header], list[bytes]]]:  # fmt: skip
        self._check_open()
        self.collectives += 1  # nobody else could be in another call, or be waited for
        yield [header_of(kind, self.collectives, tensor, op, root, label)], [b""]

    def _gathered(self, mine: Tensor, shapes: list[tuple[int, ...]], rooms: list[bytes], own: Header) -> list[Tensor]:
        return [mine.clone()]

    def _raw_reduce(self, tensor: Tensor, op: str, timeout: float) -> None:
        pass

    def _raw_broadcast(self, flat: Tensor, root: int, timeout: float) -> None:
        pass

    def _raw_duplicate(self, path: str) -> LocalCommunicator:
        return LocalCommunicator(self.device, path)
