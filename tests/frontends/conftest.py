"""Partitions for the tests of SAR's names; float64 for the programs inside a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch


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


@pytest.fixture(scope="module")
def doubles() -> Iterator[None]:
    """Constants of a program are in float64, as its graph."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
