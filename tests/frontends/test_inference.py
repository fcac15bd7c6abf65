"""`infer`: the logits of one process, in one file in original order, on any number of ranks; a killed run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")
pytest.importorskip("safetensors")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.testing.graphs import assignments, awkward_graph, shard_in_memory

GRAPH = awkward_graph(channels=5)


class Net(nn.Module):
    """Layers of several kinds; `fail_after` calls of the second, it stops."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = gnn.SAGEConv(5, 8), gnn.BatchNorm(8)
        self.second, self.last = gnn.GATv2Conv(8, 4, heads=2), gnn.GCNConv(8, 3)
        self.stop = False

    def forward(self, x, edge_index):
        x = self.norm(self.first(x, edge_index)).relu()
        x = torch.dropout(self.second(x, edge_index), 0.5, self.training)
        if self.stop:
            raise RuntimeError("stopped by the test")
        return self.last(x, edge_index)


def trained():
    """The model with statistics and weights of a run elsewhere, and its logits on the whole graph."""
    torch.manual_seed(1)
    model = Net().double()
    model(GRAPH.node["x"], GRAPH.edge_index)
    model.eval()
    with torch.no_grad():
        return model.state_dict(), model(GRAPH.node["x"], GRAPH.edge_index)


def rank(comm, state, path, mode="sar", stop=False, change=None, **options):
    owners = assignments(GRAPH.num_nodes, comm.size, GRAPH.edge_index)["random"]
    graph = shard_in_memory(GRAPH, owners, comm, sp.Options(mode=mode))
    model = Net().double()
    model.load_state_dict(state)
    if change is not None:
        change(model)
    sp.pyg.wrap(model, comm, check=False).train()
    model.stop = stop
    before = comm.bytes_sent
    written = sp.infer(model, graph, path, **options)
    assert model.training and all(module.training for module in model.modules())
    return written, comm.bytes_sent - before


@pytest.mark.parametrize(("ranks", "mode"), [(1, "sar"), (2, "keep"), (4, "sar"), (4, "halo")])
def test_equals_one_process(ranks, mode, tmp_path):
    state, logits = trained()
    path = tmp_path / "there" / "logits.npy"
    for written, _ in sp.spawn(lambda comm: rank(comm, state, path, mode), ranks):
        assert written == [path]
    found = np.load(path, mmap_mode="r")
    assert found.dtype == np.float64 and found.shape == (GRAPH.num_nodes, 3)
    assert np.abs(found - logits.numpy()).max() < 1e-10
    assert os.listdir(path.parent) == ["logits.npy"]


def test_an_ended_run_goes_on_and_gives_the_same_file(tmp_path):
    state, _ = trained()
    whole, path = tmp_path / "whole.npy", tmp_path / "logits.npy"
    (_, all_bytes), *_ = sp.spawn(lambda comm: rank(comm, state, whole), 2)
    with pytest.raises(RuntimeError, match="stopped by the test"):
        sp.spawn(lambda comm: rank(comm, state, path, stop=True), 2)
    assert not path.exists()
    (_, rest), *_ = sp.spawn(lambda comm: rank(comm, state, path), 2)
    assert 0 < rest < all_bytes  # the first two layers were not fetched again
    assert path.read_bytes() == whole.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["logits.npy", "whole.npy"]


def test_another_model_does_not_go_on_from_it(tmp_path):
    state, logits = trained()
    path = tmp_path / "logits.npy"

    def change(model):
        with torch.no_grad():
            model.first.lin_l.weight.add_(1)

    with pytest.raises(RuntimeError, match="stopped by the test"):
        sp.spawn(lambda comm: rank(comm, state, path, stop=True, change=change), 2)
    sp.spawn(lambda comm: rank(comm, state, path), 2)
    assert np.abs(np.load(path) - logits.numpy()).max() < 1e-10


def test_a_file_is_not_overwritten_unasked(tmp_path):
    state, logits = trained()
    path = tmp_path / "logits.npy"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        sp.spawn(lambda comm: rank(comm, state, path), 2)
    assert path.read_text() == "mine"
    sp.spawn(lambda comm: rank(comm, state, path, overwrite=True), 2)
    assert np.abs(np.load(path) - logits.numpy()).max() < 1e-10


def test_a_dict_by_type_gives_a_file_per_type(tmp_path):
    state, logits = trained()

    class Typed(Net):
        def forward(self, x, edge_index):
            return {"node": super().forward(x, edge_index)}

    def work(comm, **options):
        owners = assignments(GRAPH.num_nodes, comm.size, GRAPH.edge_index)["random"]
        graph = shard_in_memory(GRAPH, owners, comm, sp.Options())
        model = Typed().double()
        model.load_state_dict(state)
        return sp.infer(sp.pyg.wrap(model, comm, check=False), graph, tmp_path / "logits.npy", **options)

    (tmp_path / "logits.node.npy").write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        sp.spawn(work, 2)
    assert (tmp_path / "logits.node.npy").read_text() == "mine"
    sp.spawn(lambda comm: work(comm, overwrite=True), 2)
    assert os.listdir(tmp_path) == ["logits.node.npy"]
    assert np.abs(np.load(tmp_path / "logits.node.npy") - logits.numpy()).max() < 1e-10


def test_progress_names_the_layers(tmp_path):
    state, _ = trained()
    told = []
    sp.spawn(lambda comm: rank(comm, state, tmp_path / "a.npy", progress=told.append if comm.rank == 0 else None), 2)
    assert told == ["SAGEConv (first)", "GATv2Conv (second)", "GCNConv (last)"]


def test_what_is_refused(tmp_path):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = gnn.SAGEConv(5, 2)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)[:1]

    def alone(comm):
        graph = shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.long), comm, sp.Options())
        with pytest.raises(ValueError, match="wrap"):
            sp.infer(Net(), graph, tmp_path / "a.npy")
        pooled = sp.pyg.wrap(Pooled().double(), comm, check=False)
        with pytest.raises(ValueError, match="one per own node"):
            sp.infer(pooled, graph, tmp_path / "a.npy")

    sp.spawn(alone, 1)


@pytest.mark.long
def test_a_killed_run_goes_on(tmp_path):
    """SIGKILL before the last layer, in processes."""
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys
        import torch
        import shardpass as sp
        from tests.frontends.test_inference import rank, trained

        def work(comm, path, kill):
            if kill:
                from tests.frontends import test_inference
                test_inference.Net.forward = killed(test_inference.Net.forward)
            return rank(comm, trained()[0], path)[1]

        def killed(forward):
            def run(self, x, edge_index):
                if not self.training and hasattr(edge_index, "plan"):
                    self.last.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                return forward(self, x, edge_index)
            return run

        if __name__ == "__main__":
            print(sp.spawn(work, 2, "processes", args=(sys.argv[1], sys.argv[2] == "kill")))
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}

    def run(name, kill):
        command = [sys.executable, str(script), str(tmp_path / name), "kill" if kill else "run"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)

    assert run("logits.npy", True).returncode != 0
    assert not (tmp_path / "logits.npy").exists()
    assert (tmp_path / ".logits.npy.partial").exists()
    for name in ("logits.npy", "whole.npy"):
        done = run(name, False)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "logits.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
