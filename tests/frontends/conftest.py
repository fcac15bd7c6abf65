"""Partitions for the tests of SAR's names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A directory with the graphs of ``sar_cases.py`` in so many parts."""
    made: dict[int, Path] = {}

    def of(count: int) -> Path:
        if count not in made:
            from frontends.sar_cases import write  # DGL may be absent

            made[count] = write(tmp_path_factory.mktemp(f"parts{count}"), count)
        return made[count]

    return of
