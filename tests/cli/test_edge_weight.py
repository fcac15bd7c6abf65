"""`--edge-weight`: weights of edges reach the model of the command, and what is not used is said."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import epochs, passed, refused

import shardpass as sp
from shardpass.cli.graphs import powerlaw
from shardpass.data import partition

gnn = pytest.importorskip("torch_geometric.nn")
MINE = """
from torch_geometric.nn import GCN, GraphSAGE, SAGEConv

def make(graph):
    return GCN(5, 8, 2, 3)

def unweighted(graph):
    return GraphSAGE(5, 8, 2, 3)

def of_two(graph):
    conv = SAGEConv(5, 3)
    conv.forward = lambda x, edge_index: x
    return conv
"""
OPTIONS = ("--model", "gcn", "--hidden", 8, "--dtype", "float64")


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    arrays = powerlaw(200, 6, channels=5, classes=3)
    edges = arrays["edge_index"].shape[1]
    arrays["edge_weight"] = np.random.default_rng(3).uniform(0.1, 2.0, edges)
    arrays["edge_attr"] = np.ones((edges, 2), np.float32)
    return arrays


@pytest.fixture(scope="module")
def weighted(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weighted") / "parts"
    partition(data, path, 3, "random")
    return path


def test_training_and_inference_take_the_weights_as_plain_pyg(
    data: dict[str, Any], weighted: Path, tmp_path: Path
) -> None:
    log, checkpoint, out = tmp_path / "log", tmp_path / "run.ckpt", tmp_path / "out.npy"
    passed("train", weighted, *OPTIONS, "--edge-weight", "edge_weight", "--epochs", 3, "--ranks", 3, "--log", log,
           "--checkpoint", checkpoint)  # fmt: skip
    passed("infer", weighted, out, "--weights", checkpoint, *OPTIONS, "--edge-weight", "edge_weight", "--ranks", 2)
    told = refused("infer", weighted, tmp_path / "plain.npy", "--weights", checkpoint, *OPTIONS)
    assert "was trained with --edge-weight 'edge_weight', not ''" in told
    file, again = tmp_path / "mine.py", tmp_path / "again.npy"
    file.write_text(MINE)
    own = ("--weights", checkpoint, "--dtype", "float64", "--model", f"{file}:make")
    told = refused("infer", weighted, again, *own)
    assert "was trained with --edge-weight 'edge_weight', not ''" in told
    passed("infer", weighted, again, *own, "--edge-weight", "edge_weight", "--ranks", 2)
    np.testing.assert_array_equal(np.load(again), np.load(out))

    with sp.seed(0, sp.connect("local")):
        model = gnn.GCN(5, 8, 2, 3).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    given = [torch.from_numpy(data[name]) for name in ("x", "edge_index", "edge_weight")]
    call = (given[0].double(), given[1], given[2])
    mask, y = torch.from_numpy(data["train_mask"]), torch.from_numpy(data["y"])
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(*call)[mask], y[mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [record["loss"] for record in epochs(log)] == pytest.approx(losses, rel=1e-9)
    np.testing.assert_allclose(np.load(out), model(*call).detach().numpy(), rtol=1e-7)


def test_the_planner_is_given_the_weights_too(weighted: Path) -> None:
    passed("train", weighted, *OPTIONS, "--edge-weight", "edge_weight", "--epochs", 1, "--ranks", 2, "--mode", "auto",
           "--memory-budget", "1GiB")  # fmt: skip


def test_fields_that_nothing_reads_are_named(weighted: Path) -> None:
    told = " ".join(passed("train", weighted, *OPTIONS, "--epochs", 1, "--ranks", 2).split())
    assert "not used: the edge fields edge_attr, edge_weight; --model gcn takes one by --edge-weight NAME" in told
    told = passed("train", weighted, *OPTIONS, "--edge-weight", "edge_weight", "--epochs", 1, "--ranks", 2)
    assert "not used: the edge field edge_attr\n" in told


def test_refusals(weighted: Path, tmp_path: Path) -> None:
    told = refused("train", weighted, *OPTIONS, "--edge-weight", "w", "--ranks", 2)
    assert "--edge-weight w: the store has no edge field 'w' (edge fields: edge_attr, edge_weight)" in told
    told = refused("train", weighted, *OPTIONS, "--edge-weight", "edge_attr")
    assert "a weight is one number per edge, but rows of 'edge_attr' have the shape [2]" in told
    assert "sage takes no weights of edges; gcn does" in refused("train", weighted, "--edge-weight", "edge_weight")
    weights = tmp_path / "w.pt"
    torch.save({}, weights)
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    options = ("infer", weighted, tmp_path / "o.npy", "--weights", weights, "--edge-weight", "edge_weight")
    assert "call shardpass.infer in a script" in refused(*options, "--model", f"{file}:make", "--frontend", "dgl")
    for function, kind in (("unweighted", "GraphSAGE"), ("of_two", "SAGEConv")):
        told = refused(*options, "--model", f"{file}:{function}")
        assert f"called as model(x, graph, weights), but {kind} takes no weights" in told
