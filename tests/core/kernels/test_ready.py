"""Getting numba ready pauses Python's collector, and leaves it as it was."""

import gc

import pytest
import torch

pytest.importorskip("numba")

from shardpass.core.kernels import cpu_loops


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(enabled, monkeypatch):
    cpu_loops._loops.cache_clear()
    seen = []
    loops = cpu_loops.optional_module("shardpass.core.kernels.numba_loops")
    monkeypatch.setattr(loops, "get_ready", lambda: seen.append(gc.isenabled()))
    try:
        (gc.enable if enabled else gc.disable)()
        assert cpu_loops.numba_loops_for(torch.zeros(1, 1)) is loops
        assert seen == [False] and gc.isenabled() == enabled
        cpu_loops.numba_loops_for(torch.zeros(1, 1))
        assert seen == [False], "once"
    finally:
        gc.enable()
