"""`infer`: the logits of one process, in one file in original order, on any number of ranks; a killed run goes on."""

import copy
import errno
import os
import re
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")
pytest.importorskip("safetensors")

import torch_geometric.nn as gnn
from torch_geometric.data import Data

import shardpass as sp
from shardpass.errors import DivergenceError, RefusedError
from shardpass.testing import (
    awkward_graph,
    awkward_hetero_graph,
    hetero_assignments,
    shard_hetero_in_memory,
    shard_in_memory,
)

from .on_ranks import on_ranks, share
from .tuple_models import OverTargets, PaiNN

GRAPH = awkward_graph(channels=5)


class Net(nn.Module):
    """Layers of several kinds."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = gnn.SAGEConv(5, 8), gnn.BatchNorm(8)
        self.second, self.last = gnn.GATv2Conv(8, 4, heads=2), gnn.GCNConv(8, 3)

    def forward(self, x, edge_index):
        x = self.norm(self.first(x, edge_index)).relu()
        x = torch.dropout(self.second(x, edge_index), 0.5, self.training)
        return self.last(x, edge_index)


def trained():
    """The model with statistics and weights of a run elsewhere, and its logits on the whole graph."""
    torch.manual_seed(1)
    model = Net().double()
    model(GRAPH.node["x"], GRAPH.edge_index)
    model.eval()
    with torch.no_grad():
        return model.state_dict(), model(GRAPH.node["x"], GRAPH.edge_index)


def stopped(*_):
    raise RuntimeError("stopped by the test")


def rank(comm, state, path, mode="sar", stop=None, change=None, **options):
    """`stop` runs before the last layer."""
    graph = share(GRAPH, comm, mode=mode)
    model = Net().double()
    model.load_state_dict(state)
    if change is not None:
        change(model)
    sp.pyg.wrap(model, comm, check=False).train()
    if stop is not None:
        model.last.register_forward_pre_hook(stop)
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
        sp.spawn(lambda comm: rank(comm, state, path, stop=stopped), 2)
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
        sp.spawn(lambda comm: rank(comm, state, path, stop=stopped, change=change), 2)
    sp.spawn(lambda comm: rank(comm, state, path), 2)
    assert np.abs(np.load(path) - logits.numpy()).max() < 1e-10


class Scaled(nn.Module):
    """Between its layers stands what neither weights nor the printed model show."""

    def __init__(self, slope=0.1):
        super().__init__()
        self.first, self.second, self.last = gnn.SAGEConv(5, 4), gnn.SAGEConv(4, 4), gnn.SAGEConv(4, 3)
        self.slope = slope

    def forward(self, inputs, edge_index):
        x = nn.functional.leaky_relu(self.first(inputs[0], edge_index), self.slope)
        return self.last(self.second(x, edge_index), edge_index)


def changed_code(self, inputs, edge_index):
    return self.last(self.second(self.first(inputs[0], edge_index).relu(), edge_index), edge_index)


@pytest.mark.parametrize("change", ["a setting", "the code and the tag", "an input"])
def test_another_computation_does_not_go_on_from_it(change, tmp_path, monkeypatch):
    torch.manual_seed(2)
    state, path = Scaled().double().state_dict(), tmp_path / "logits.npy"

    def work(comm, stop, slope=0.1, factor=1.0, tag=""):
        graph = share(GRAPH, comm)
        model = Scaled(slope).double()
        model.load_state_dict(state)
        sp.pyg.wrap(model, comm, check=False)
        if stop:
            model.last.register_forward_pre_hook(stopped)
        graph.fields_of("node")["x"][-1] *= factor
        sp.infer(model, graph, path, [graph.x], graph, tag=tag)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="stopped by the test"):
        if change == "the code and the tag":
            patch.setattr(Scaled, "forward", changed_code)
        other = {"a setting": {"slope": 0.2}, "an input": {"factor": 2.0}}.get(change, {"tag": "other code"})
        sp.spawn(lambda comm: work(comm, True, **other), 2)
    model = Scaled().double()
    model.load_state_dict(state)
    sp.spawn(lambda comm: work(comm, False), 2)
    whole = model([GRAPH.node["x"]], GRAPH.edge_index)
    assert np.abs(np.load(path) - whole.detach().numpy()).max() < 1e-10


@on_ranks(2)
def test_weights_on_one_rank_only_are_refused(comm, tmp_path):
    state, _ = trained()
    graph = share(GRAPH, comm)
    model = sp.pyg.wrap(Net().double(), comm, check=False)
    if comm.rank == 0:
        model.load_state_dict(state)
    with pytest.raises(DivergenceError, match=r"'first.lin_l.weight' is not the same on rank 0 and rank 1"):
        sp.infer(model, graph, tmp_path / "logits.npy")


def test_what_an_ended_run_on_more_ranks_left_is_removed(tmp_path):
    state, _ = trained()
    path = tmp_path / "logits.npy"
    with pytest.raises(RuntimeError, match="stopped by the test"):
        sp.spawn(lambda comm: rank(comm, state, path, stop=stopped), 3)
    sp.spawn(lambda comm: rank(comm, state, path), 2)
    assert os.listdir(tmp_path) == ["logits.npy"]


def test_a_file_is_not_overwritten_unasked(tmp_path):
    state, logits = trained()
    path = tmp_path / "logits.npy"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        sp.spawn(lambda comm: rank(comm, state, path), 2)
    assert path.read_text() == "mine"
    sp.spawn(lambda comm: rank(comm, state, path, overwrite=True), 2)
    assert np.abs(np.load(path) - logits.numpy()).max() < 1e-10


def test_nothing_but_a_regular_file_is_written_or_replaced(tmp_path):
    state, _ = trained()
    precious, path = tmp_path / "precious", tmp_path / "logits.npy"
    precious.write_text("mine")
    (tmp_path / ".logits.npy.writing").symlink_to(precious)
    sp.spawn(lambda comm: rank(comm, state, path), 2)
    assert precious.read_text() == "mine" and np.load(path).shape == (GRAPH.num_nodes, 3)
    os.mkfifo(tmp_path / "pipe.npy")
    with pytest.raises(OSError, match="no regular file"):
        sp.spawn(lambda comm: rank(comm, state, tmp_path / "pipe.npy", overwrite=True), 2)


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    state, _ = trained()

    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"logits.npy cannot be written: it needs \d+ bytes \(No space left on device\)"):
        sp.spawn(lambda comm: rank(comm, state, tmp_path / "logits.npy", mode="keep"), 2)
    assert not [name for name in os.listdir(tmp_path) if name.endswith((".npy", ".writing"))]


def test_a_dict_by_type_gives_a_file_per_type(tmp_path):
    state, logits = trained()

    class Typed(Net):
        def forward(self, x, edge_index):
            return {"node": super().forward(x, edge_index)}

    def work(comm, **options):
        graph = share(GRAPH, comm)
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


def test_rows_of_one_of_several_types(tmp_path):
    whole, path = awkward_hetero_graph(), tmp_path / "papers.npy"
    kind = ("author", "writes", "paper")

    class Papers(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = gnn.SAGEConv((5, 5), 3)

        def forward(self, x_dict, edge_index_dict):
            return self.conv((x_dict["author"], x_dict["paper"]), edge_index_dict[kind])

    model = Papers().double()
    expected = model({name: fields["x"] for name, fields in whole.node.items()}, whole.edges).detach()

    def work(comm, **options):
        graph = shard_hetero_in_memory(whole, hetero_assignments(whole, comm.size)["random"], comm)
        return sp.infer(sp.pyg.wrap(copy.deepcopy(model), comm, check=False), graph, path, **options)

    with pytest.raises(ValueError, match="several node types: pass the type of its rows"):
        sp.spawn(work, 2)
    with pytest.raises(ValueError, match="node_type='book'; expected one of"):
        sp.spawn(lambda comm: work(comm, node_type="book"), 2)
    sp.spawn(lambda comm: work(comm, node_type="paper"), 2)
    assert np.abs(np.load(path) - expected.numpy()).max() < 1e-10


def test_progress_names_the_layers(tmp_path):
    state, _ = trained()
    told = []
    sp.spawn(lambda comm: rank(comm, state, tmp_path / "a.npy", progress=told.append if comm.rank == 0 else None), 2)
    assert told == ["SAGEConv (first)", "GATv2Conv (second)", "GCNConv (last)"]


@on_ranks(1)
def test_what_is_refused(comm, tmp_path):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = gnn.SAGEConv(5, 2)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)[:1]

    graph = shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.long), comm, sp.Options())
    with pytest.raises(ValueError, match="wrap"):
        sp.infer(Net(), graph, tmp_path / "a.npy")
    pooled = sp.pyg.wrap(Pooled().double(), comm, check=False)
    with pytest.raises(ValueError, match="one per own node"):
        sp.infer(pooled, graph, tmp_path / "a.npy")
    with pytest.raises(OSError, match="is a folder"):
        sp.infer(pooled, graph, tmp_path, overwrite=True)


@on_ranks(1)
def test_rows_in_the_original_order_are_refused(comm, tmp_path):
    data = {"edge_index": GRAPH.edge_index, "x": GRAPH.node["x"]}
    sp.partition(data, tmp_path / "store", 2, assignment=torch.arange(GRAPH.num_nodes) % 2)
    graph, model = sp.load(tmp_path / "store", comm), sp.pyg.wrap(Net().double(), comm)
    with pytest.raises(RefusedError, match="field 'x' in the order of the original graph"):
        sp.infer(model, graph, tmp_path / "a.npy", GRAPH.node["x"], graph)
    assert [file.name for file in tmp_path.iterdir()] == ["store"]


@on_ranks(1)
def test_random_numbers_are_told(comm, tmp_path):
    class Dropped(Net):
        def forward(self, x, edge_index):
            return nn.functional.dropout(super().forward(x, edge_index), 0.5)

    graph = share(GRAPH, comm)
    for model, is_told in ((Net(), False), (Dropped(), True)):
        wrapped = sp.pyg.wrap(model.double(), comm)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sp.infer(wrapped, graph, tmp_path / "a.npy", overwrite=True)
        told = [one.filename for one in caught if "drew random numbers" in str(one.message)]
        assert told == [__file__] * is_told


@on_ranks(1)
def test_arguments_that_the_model_does_not_take(comm, tmp_path):
    class OfDGL(nn.Module):
        def forward(self, g, x):
            return g.local_scope()

    graph = shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.long), comm, sp.Options())
    with pytest.raises(TypeError, match=r"called OfDGL\(graph.x, graph\), which failed: .*local_scope.*for one of DGL"):
        sp.infer(sp.pyg.wrap(OfDGL(), comm, check=False), graph, tmp_path / "a.npy")


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

        def kill(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        def work(comm, path, killed):
            return rank(comm, trained()[0], path, stop=kill if killed else None)[1]

        if __name__ == "__main__":
            print(sp.spawn(work, 2, "processes", args=(sys.argv[1], sys.argv[2] == "kill")))
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}

    def run(name, kill):
        command = [sys.executable, str(script), str(tmp_path / name), "kill" if kill else "run"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480, check=False)

    assert run("logits.npy", True).returncode != 0
    assert not (tmp_path / "logits.npy").exists()
    assert (tmp_path / ".logits.npy.partial").exists()
    sent = []
    for name in ("logits.npy", "whole.npy"):
        done = run(name, False)
        assert done.returncode == 0, done.stderr
        sent.append(sum(map(int, re.findall(r"\d+", done.stdout))))
    assert 0 < sent[0] < sent[1]  # the first two layers were not fetched again
    assert (tmp_path / "logits.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()


def test_layers_that_return_tuples_go_on_too(tmp_path):
    class Mesh(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = PaiNN(), OverTargets(), OverTargets()

        def forward(self, data):
            x = self.first(data.x, data.edge_index, data.edge_attr)
            x, edge_attr = self.second(x, data.edge_index, data.edge_attr)
            return self.last(x, data.edge_index, edge_attr)[0]

    torch.manual_seed(0)
    plain = Mesh().double()
    expected = plain(Data(GRAPH.node["x"], GRAPH.edge_index, GRAPH.edge["edge_attr"])).detach()
    path = tmp_path / "rows.npy"

    def work(comm, stop):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm)
        model = sp.pyg.wrap(copy.deepcopy(plain), comm)
        if stop:
            model.last.register_forward_pre_hook(stopped)
        sp.infer(model, graph, path, graph)

    with pytest.raises(RuntimeError, match="stopped by the test"):
        sp.spawn(work, 2, args=(True,))
    sp.spawn(work, 2, args=(False,))
    assert np.abs(np.load(path) - expected.numpy()).max() < 1e-10
