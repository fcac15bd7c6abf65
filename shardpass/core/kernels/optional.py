"""Modules that need a package which may be absent: the loops of numba and the kernels of Triton."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def optional_module(name: str) -> ModuleType | None:
    """The module `name`, or `None` if it cannot be imported here. What is installed is looked up once."""
    try:
        module = import_module(name)
    except ImportError:
        return None
    # Python hands a thread the half-made module of another one whose import fails at that moment.
    return module if sys.modules.get(name) is module else None
