"""A torch profiler around a step of ranks that are processes: what it saw begin has ended when it stops."""

import gc
from pathlib import Path

import pytest
import torch
from torch_geometric.nn import GraphSAGE

import shardpass as sp
from shardpass.core.exchange import WindowPool
from shardpass.testing import awkward_graph


def steps(comm: sp.Communicator, store: str) -> tuple[int, int, int]:
    """The messages of readers under way after a step and after a profiled one, and how many windows there are."""
    graph = sp.load(store, comm, sp.Options(backward="push"))
    model = sp.pyg.wrap(GraphSAGE(graph.num_features, 16, 2, 3).to(graph.x.dtype), comm)

    def step() -> int:
        sp.mean(model(graph.x, graph).square().sum(1), None, comm).backward()
        return sum(len(window.readers) for window in comm.caches.of(WindowPool).windows)

    plain = step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        profiled = step()
    for _ in range(5):  # memory that was written after it was freed ends the process here
        step()
        gc.collect()
    return plain, profiled, len(comm.caches.of(WindowPool).windows)


@pytest.mark.long
@pytest.mark.processes
def test_no_message_outlives_the_profiler_that_saw_it_begin(tmp_path: Path) -> None:
    whole = awkward_graph()
    sp.partition({"x": whole.node["x"], "edge_index": whole.edge_index}, tmp_path / "parts", parts=2, method="random")
    found = sp.spawn(steps, 2, "processes", args=(str(tmp_path / "parts"),))
    assert all(windows for _, _, windows in found), "rows went through shared memory"
    assert any(plain for plain, _, _ in found), "else the next line shows nothing"
    assert [profiled for _, profiled, _ in found] == [0, 0]
