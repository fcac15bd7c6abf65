"""The communicator of a single rank: every collective is the identity."""

from __future__ import annotations

import torch
from torch import Tensor

from shardpass.backends.base import BaseCommunicator
from shardpass.backends.failure import Failure, first_failure
from shardpass.errors import PeerFailure


class LocalCommunicator(BaseCommunicator):
    """One rank and no peer.

    Args:
        device: on which the tensors are.
    """

    moves_device_memory = True

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(0, 1, torch.device(device), Failure())

    def _raw_gather(self, block: bytes, timeout: float) -> list[bytes]:
        return [block]

    def _raw_reduce(self, tensor: Tensor, op: str, timeout: float) -> None:
        pass

    def _raw_broadcast(self, flat: Tensor, root: int, timeout: float) -> None:
        pass

    def _raw_duplicate(self, name: str) -> BaseCommunicator:
        return LocalCommunicator(self.device)

    def abort(self, reason: str) -> None:
        """Raise, since there is no other rank to end."""
        self.failure.set(PeerFailure, first_failure(0, reason))
        self.failure.check()
