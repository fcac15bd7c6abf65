"""A wrapped model on a small random graph, whole and in pieces: differences show code that mixes nodes."""

from shardpass.core.selfcheck.check import check_model, copy_for_check
from shardpass.core.selfcheck.frontend import Fields, Frontend

__all__ = [
    "Fields",
    "Frontend",
    "check_model",
    "copy_for_check",
]
