"""The one place where this frontend keeps state of the process, since SAR's functions take no communicator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from shardpass.core.ranks import Ranks
from shardpass.errors import ShardpassError


class State:
    """What `initialize_comms` and `nfs_ip_init` leave for later calls, and which synchronised models are running.

    Attributes:
        comm: `None` before `initialize_comms`.
        config: the `Config` that all ranks have agreed on, in words.
        forwards: the models whose forward is running, outermost first, and how to leave each; see `ordered.py`.
        on_connected: what to do once all ranks have joined.
    """

    comm: Ranks | None = None
    comm_device: torch.device = torch.device("cpu")
    master_ip: str = ""
    master_port: int = 0
    backend: str = ""
    config: str = ""

    def __init__(self) -> None:
        self.forwards: list[tuple[Any, bool, ExitStack]] = []
        self.on_connected: list[Callable[[], None]] = []


STATE = State()


def communicator() -> Ranks:
    """The communicator of this process. Raises `ShardpassError` if `initialize_comms` was not called."""
    if STATE.comm is None:
        raise ShardpassError(
            "this process has not joined the others yet: call sar.initialize_comms(rank, world_size, "
            "master_ip_address, backend) first"
        )
    return STATE.comm
