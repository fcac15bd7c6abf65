"""The one place where this frontend keeps state of the process.

SAR's interface is global by nature: ``sar.rank()`` and ``sar.gather_grads(model)`` take no communicator, so one must be
kept between calls. What is kept is in `STATE`; `Config` has attributes that scripts assign. The rest of the package
passes such things as arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from shardpass.core.ranks import Options, Ranks
from shardpass.errors import ShardpassError


class Config:
    """How graphs constructed from now on communicate; assign to its attributes before constructing, alike on all ranks.

    A graph keeps the options it was constructed with; the size of messages is that of the latest graph for all.

    Attributes:
        disable_sr: keep fetched rows for backward instead of fetching them again (``Options(mode="keep")``).
        max_collective_size: the most float32 elements of one message; longer ones are split. 0: those over 1 GiB are.
        pipeline_depth: rounds fetched ahead of the one being computed, at least 1 (``Options(prefetch=...)``).
    """

    disable_sr: bool = False
    max_collective_size: int = 0
    pipeline_depth: int = 1


class State:
    """What `initialize_comms` and `nfs_ip_init` leave for later calls, and which synchronised models are running.

    Attributes:
        comm: of this process; None before `initialize_comms`.
        comm_device: what the user asked for, for `sar.comm_device`.
        backend, master_ip, master_port: as passed to `initialize_comms`.
        forwards: models whose forward is running, outermost first, and how to leave it; see `ordered.py`.
        on_connected: what to do once all ranks have come.
    """

    comm: Ranks | None = None
    comm_device: torch.device = torch.device("cpu")
    backend: str = ""
    master_ip: str = ""
    master_port: int = 0

    def __init__(self) -> None:
        self.forwards: list[tuple[Any, bool, ExitStack]] = []
        self.on_connected: list[Callable[[], None]] = []


STATE = State()


def communicator() -> Ranks:
    """The communicator of this process.

    Raises:
        ShardpassError: `initialize_comms` was not called.
    """
    if STATE.comm is None:
        raise ShardpassError(
            "this process has not joined the others yet: call sar.initialize_comms(rank, world_size, "
            "master_ip_address, backend) first"
        )
    return STATE.comm


def options() -> Options:
    """The options that `Config` stands for now.

    Raises:
        ValueError: an attribute of `Config` has no meaning.
    """
    depth, largest = Config.pipeline_depth, Config.max_collective_size
    for name, value, least in (("pipeline_depth", depth, 1), ("max_collective_size", largest, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"sar.Config.{name} is {value!r}; expected an integer that is at least {least}")
    return Options(mode="keep" if Config.disable_sr else "sar", prefetch=depth)
