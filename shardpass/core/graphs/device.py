"""A loaded graph stays on the device of its ranks; scripts for one process ask to move it all the same."""

from __future__ import annotations

from typing import Any

import torch

from shardpass.core.following import user_line
from shardpass.errors import RefusedError


def is_on(device: torch.device, wanted: Any) -> bool:
    """Whether what is on `device` is where a call of ``to(wanted)`` would move it."""
    asked = torch.device(wanted)
    return asked.type == device.type and asked.index in (None, device.index)


def require_device(wanted: Any, device: torch.device) -> None:
    """Raise unless a graph on `device` is where `wanted` says.

    Raises:
        RefusedError: it is on another device.
    """
    if not is_on(device, wanted):
        raise RefusedError(
            f"{user_line()}: a sharded graph is on {device}, the device of its ranks, and cannot be moved to {wanted}. "
            f"Say where before it is loaded: shardpass.connect(device={str(wanted)!r})"
        )
