"""Logging with the rank in every line."""

from __future__ import annotations

import logging
from typing import Any


def logging_setup(log_level: int | str, _rank: int = -1, _world_size: int = -1, log_file: str | None = None) -> None:
    """Show what shardpass logs, each line with the rank. A second call replaces the first.

    Args:
        log_level: as in ``logging``, for example ``logging.INFO`` or ``"INFO"``.
        _rank, _world_size: what each line shows. With -1 it shows neither.
        log_file: a file to append the lines to. Without one they go to standard error.
    """
    logger = logging.getLogger("shardpass")
    for handler in list(logger.handlers):
        if handler.get_name() == __name__:
            logger.removeHandler(handler)
            handler.close()
    where = f"rank {_rank} of {_world_size}: " if _rank >= 0 else ""
    handler = logging.FileHandler(log_file) if log_file else logging.StreamHandler()
    handler.set_name(__name__)
    handler.setFormatter(logging.Formatter(f"{where}%(levelname)s: %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(log_level)
    logger.propagate = False


def __getattr__(name: str) -> Any:
    """``logger``: where SAR's names log."""
    if name == "logger":
        return logging.getLogger("shardpass.sar")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
