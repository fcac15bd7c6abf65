"""Logging with the rank in every line."""

from __future__ import annotations

import logging


def logging_setup(level: int | str, _rank: int = -1, _world_size: int = -1) -> None:
    """Show what shardpass logs, each line with the rank, on standard error. A second call replaces the first.

    Args:
        level: as in ``logging``, for example ``logging.INFO`` or ``"INFO"``.
        _rank, _world_size: what each line shows. With -1 it shows neither.
    """
    logger = logging.getLogger("shardpass")
    for handler in list(logger.handlers):
        if isinstance(handler, _Shown):
            logger.removeHandler(handler)
    where = f"rank {_rank} of {_world_size}: " if _rank >= 0 else ""
    handler = _Shown()
    handler.setFormatter(logging.Formatter(f"{where}%(levelname)s: %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


class _Shown(logging.StreamHandler):  # type: ignore[type-arg]
    """The handler that `logging_setup` adds."""
