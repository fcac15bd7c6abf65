"""`shardpass infer`: one file in original order, from a checkpoint or from weights trained elsewhere."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cli_helpers import epochs, misused, passed, refused

import shardpass as sp
from shardpass.cli.graphs import powerlaw
from shardpass.data import partition

MODEL = """
from torch import nn
from torch_geometric.nn import SAGEConv


class Mine(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.conv = SAGEConv(channels, classes)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


def make(graph):
    return Mine(graph.num_features, graph.num_classes)


def number(graph):
    return 3
"""


def test_from_a_checkpoint(store: Path, tmp_path: Path) -> None:
    log, checkpoint, out = tmp_path / "log", tmp_path / "run.ckpt", tmp_path / "logits.npy"
    options = ("--hidden", 8, "--dtype", "float64", "--batch-norm")
    passed("train", store, *options, "--epochs", 3, "--checkpoint", checkpoint, "--log", log)
    assert "wrote" in passed("infer", store, out, "--weights", checkpoint, *options, "--ranks", 3)
    graph = sp.load(store, sp.connect("local"))
    logits = torch.from_numpy(np.load(out))[graph.node_ids]
    right = (logits.argmax(1) == graph.y)[graph.test_mask].double().mean()
    assert float(right) == pytest.approx(epochs(log)[-1]["test"])

    other, again = tmp_path / "other", tmp_path / "again.npy"
    partition(powerlaw(600, 8, channels=12, classes=4), other, 2, "range")
    passed("infer", other, again, "--weights", checkpoint, *options)
    np.testing.assert_allclose(np.load(again), np.load(out), atol=1e-10)


LATER = [pytest.param(model, marks=pytest.mark.long) for model in ("gcn", "gat", "gin", "pna", "edgecnn")]


@pytest.mark.parametrize("model", ["sage", *LATER])
def test_a_graph_without_labels_is_given_as_many_outputs_as_the_checkpoint_has(model: str, tmp_path: Path) -> None:
    arrays = powerlaw(60, 4, channels=3, classes=4)
    partition(arrays, tmp_path / "labelled", 2, "random")
    partition({name: arrays[name] for name in ("edge_index", "x")}, tmp_path / "new", 2, "random")
    options = ("--weights", tmp_path / "c", "--model", model, "--hidden", 8, "--batch-norm")
    passed("train", tmp_path / "labelled", *options[2:], "--epochs", 1, "--checkpoint", tmp_path / "c")
    for store in ("labelled", "new"):
        passed("infer", tmp_path / store, tmp_path / f"{store}.npy", *options)
    np.testing.assert_array_equal(np.load(tmp_path / "new.npy"), np.load(tmp_path / "labelled.npy"))
    told = refused("infer", tmp_path / "new", tmp_path / "other.npy", *options, "--layers", 3)
    assert "does not fit the model: 'convs." in told and "--layers, --hidden" in told


def test_a_model_of_ones_own(store: Path, tmp_path: Path) -> None:
    file, weights = tmp_path / "mine.py", tmp_path / "mine.pt"
    file.write_text(MODEL)
    graph = sp.load(store, sp.connect("local"))
    scope: dict = {}
    exec(MODEL, scope)
    model = scope["make"](graph)
    torch.save(model.state_dict(), weights)
    found = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.npy"
        passed("infer", store, out, "--weights", weights, "--model", f"{file}:make", "--ranks", ranks)
        found.append(np.load(out))
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    assert "has no function" in refused("infer", store, out, "--weights", weights, "--model", f"{file}:nothing")
    assert "returned a int" in refused("infer", store, out, "--weights", weights, "--model", f"{file}:number")
    assert "does not fit the model" in refused(
        "infer", store, out, "--weights", weights, "--model", "gcn", "--overwrite"
    )
    assert "overwrite" in refused("infer", store, out, "--weights", weights, "--model", f"{file}:make")


def test_what_does_not_exist(store: Path, tmp_path: Path) -> None:
    assert "does not exist" in misused("infer", store, tmp_path / "a.npy", "--weights", tmp_path / "none.pt")
    (tmp_path / "w.pt").write_bytes(b"")
    assert "--model is one of" in refused(
        "infer", store, tmp_path / "a.npy", "--weights", tmp_path / "w.pt", "--model", "mlp"
    )


def test_weights_that_cannot_be_read(store: Path, tmp_path: Path) -> None:
    for name in ("w.pt", "w.safetensors"):
        (tmp_path / name).write_text("neither")
        told = refused("infer", store, tmp_path / "a.npy", "--weights", tmp_path / name)
        assert "cannot be read" in told and "torch.save(model.state_dict(), path)" in told
    torch.save({"model": {}, "epoch": 3}, tmp_path / "both.pt")
    told = refused("infer", store, tmp_path / "a.npy", "--weights", tmp_path / "both.pt")
    assert "holds a dict with model, epoch; expected a state_dict" in told
