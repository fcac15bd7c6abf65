"""Partitions and results for the tests of SAR's names; float64 for the programs inside a model."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock  # a dependency of torch

SAR_CASES = [
    "training-sage", "training-gat", "mfgs", "mfgs_gat", "structure", "modes", "functions", "hetero", "rgcn",
    "branches", "absent", "dtypes", "extremes", "unready", "fails_in_forward", "misuse", "again", "collectives",
    "norms", "loader", "graphs", "patched",
]  # fmt: skip


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


@pytest.fixture(scope="session", params=[2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3, 4))])
def results(
    request: pytest.FixtureRequest, parts: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    """What every case of SAR's scripts gave on each of some ranks.

    Workers of pytest-xdist share one run, the longest of all tests.
    """
    from frontends.sar_cases import read_results, start

    worker = tmp_path_factory.getbasetemp()
    shared = worker.parent if "PYTEST_XDIST_WORKER" in os.environ else worker
    out = shared / f"sar on {request.param} ranks"
    with FileLock(f"{out}.lock"):
        if not out.exists():
            out.mkdir()
            env = {"PROGRAM_IP_FILE": str(out / "ip"), "SAR_SOCKET_NAME": "lo"}
            found, text = start(parts(request.param), out / "found", request.param, SAR_CASES, **env)
            assert None not in found, text
            assert not (out / "ip").exists(), "the file of the address is left"
    return read_results(out / "found", request.param)


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Python's collector looks at what the test makes alone, which is quick."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def doubles() -> Iterator[None]:
    """Constants of a program are in float64, as its graph."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
