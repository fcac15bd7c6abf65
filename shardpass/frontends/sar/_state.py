"""The one place where this frontend keeps state of the process.

SAR's interface is global: ``sar.rank()`` and ``sar.gather_grads(model)`` take no communicator, so `STATE` keeps one
between calls. `Config` has attributes that scripts assign. The rest of the package passes such things as arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from shardpass.core.ranks import Options, Ranks
from shardpass.errors import ShardpassError


class Config:
    """How graphs communicate. Assign to its attributes before you construct a graph, alike on all ranks.

    A graph keeps the options with which it was constructed. The largest message is that of the latest graph, for all.

    Attributes:
        disable_sr: keep fetched rows for backward instead of fetching them again (``Options(mode="keep")``).
        max_collective_size: the most float32 elements of one message. Longer messages are split. With 0, messages of
            more than 1 GiB are split.
        pipeline_depth: how many rounds are fetched ahead of the one being computed, at least 1
            (``Options(prefetch=...)``).
    """

    disable_sr: bool = False
    max_collective_size: int = 0
    pipeline_depth: int = 1


class State:
    """What `initialize_comms` and `nfs_ip_init` leave for later calls, and which synchronised models are running.

    Attributes:
        comm: the communicator of this process; `None` before `initialize_comms`.
        comm_device: what `sar.comm_device` answers.
        forwards: the models whose forward is running, outermost first, and how to leave each; see `ordered.py`.
        on_connected: what to do once all ranks have joined.
    """

    comm: Ranks | None = None
    comm_device: torch.device = torch.device("cpu")

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
        ValueError: an attribute of `Config` is not allowed.
    """
    depth, largest = Config.pipeline_depth, Config.max_collective_size
    for name, value, least in (("pipeline_depth", depth, 1), ("max_collective_size", largest, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"sar.Config.{name} is {value!r}; expected an integer that is at least {least}")
    return Options(mode="keep" if Config.disable_sr else "sar", prefetch=depth)
