"""Tables with ids of the user's own through the command line: partition, train, infer, and back to these ids."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_helpers import passed, refused
from torch_geometric.nn import GraphSAGE

parquet = pytest.importorskip("pyarrow.parquet")
pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")

NAMES = [f"née-{i * 7919 % 1000}" for i in range(60)]


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    ends = rng.integers(0, 60, (2, 400))
    x, y = rng.standard_normal((60, 4), dtype=np.float32), rng.integers(0, 3, 60)
    split = rng.choice(["train", "val", "test"], 60)
    src, dst = (pyarrow.array([NAMES[i] for i in row]).dictionary_encode() for row in ends)
    parquet.write_table(pyarrow.table({"src": src, "dst": dst}), tmp_path / "edges.parquet")
    columns = {"name": NAMES, "x": x.tolist(), "kind": y, "split": split}
    parquet.write_table(pyarrow.table(columns), tmp_path / "nodes.parquet")
    np.savez(tmp_path / "whole.npz", ends=ends, x=x)
    return tmp_path


def test_from_tables_to_a_table(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, weights, out = tables / "store", tables / "model.pt", tables / "logits.parquet"
    options = ("--nodes", tables / "nodes.parquet", "--node-id", "name", "--label", "kind", "--method", "random")
    assert "60 nodes and 400 edges" in passed("partition", tables / "edges.parquet", store, *options, "--parts", 3)
    passed("train", store, "--epochs", 2, "--hidden", 8, "--ranks", 2, "--checkpoint", tables / "run.ckpt")
    torch.manual_seed(0)
    model = GraphSAGE(4, 8, num_layers=2, out_channels=3).double()
    torch.save(model.state_dict(), weights)
    options = ("--weights", weights, "--hidden", 8, "--ranks", 3, "--dtype", "float64")
    assert "logits.parquet" in passed("infer", store, out, *options).replace("\n", "")
    found = parquet.read_table(out)
    assert found.column_names == ["id", "output"] and found["id"].to_pylist() == NAMES
    whole = np.load(tables / "whole.npz")
    expected = model.eval()(torch.from_numpy(whole["x"]).double(), torch.from_numpy(whole["ends"]))
    np.testing.assert_allclose(np.array(found["output"].to_pylist()), expected.detach(), atol=1e-9)
    assert not [path.name for path in tables.iterdir() if path.name.startswith(".")]
    assert "exists" in refused("infer", store, out, *options)
    passed("infer", store, tables / "numbers.npy", *options)
    np.testing.assert_array_equal(np.load(tables / "numbers.npy"), np.array(found["output"].to_pylist()))
    classes = tables / "classes.parquet"
    assert "writes columns of a table" in refused("infer", store, tables / "c.npy", *options, "--classes")
    passed("infer", store, classes, *options, "--classes")
    found = parquet.read_table(classes)
    assert found.column_names == ["id", "class", "probability", "output"] and found["id"].to_pylist() == NAMES
    assert found["class"].to_pylist() == expected.argmax(1).tolist()
    np.testing.assert_allclose(found["probability"].to_numpy(), expected.softmax(1).amax(1).detach(), rtol=1e-5)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    words = refused("infer", store, tables / "again.parquet", *options)
    assert (
        "writing a table of results needs the package 'pyarrow'" in words
        and "or give the name of an .npy file" in words
    )


def test_columns_of_training_are_those_of_inference(tables: Path) -> None:
    def nodes(name: str, order: list[int], **more: object) -> tuple[object, ...]:
        x = np.load(tables / "whole.npz")["x"]
        columns = {f"c{i}": x[:, i] for i in order}
        y = {"label": np.arange(60) % 3, "split": ["train", "val", "test"] * 20}
        parquet.write_table(pyarrow.table({"id": NAMES, **columns, **y, **more}), tables / f"{name}.parquet")
        return tables / "edges.parquet", tables / name, "--nodes", tables / f"{name}.parquet", "--method", "random"

    assert "columns of x: c0, c1, c2, c3" in passed("partition", *nodes("trained", [0, 1, 2, 3]))
    assert "columns of x: c3, c1, c2, c0" in passed("partition", *nodes("turned", [3, 1, 2, 0]))
    assert "columns of x: c0, c1, c2, c3" in passed("inspect", tables / "trained")
    passed("train", tables / "trained", "--epochs", 1, "--checkpoint", tables / "c", "--best", tables / "best")
    for weights in (tables / "c", tables / "best"):
        told = refused("infer", tables / "turned", tables / "out.npy", "--weights", weights)
        assert "c0, c1, c2, c3 (4); those of this graph are c3, c1, c2, c0 (4)" in told
    told = refused("train", tables / "turned", "--epochs", 2, "--checkpoint", tables / "c", "--resume")
    assert "those of this graph are c3, c1, c2, c0 (4)" in told
    assert "not compared" not in passed("infer", tables / "trained", tables / "out.npy", "--weights", tables / "c")
    torch.save(GraphSAGE(4, 64, 2, 3).state_dict(), tables / "plain.pt")
    told = passed("infer", tables / "turned", tables / "o.npy", "--weights", tables / "plain.pt", "--ranks", 2)
    assert told.count("not compared:") == 1 and "those of the store are c3, c1, c2, c0" in " ".join(told.split())
    told = refused("partition", *nodes("other", [0, 1], target=np.arange(60) % 3))
    assert "'target' looks like a label, and would become a feature" in told
    assert "c0, c1, target" in passed(
        "partition", *nodes("other", [0, 1], target=np.arange(60) % 3), "--keep", "target"
    )
    demo = refused("partition", "demo:powerlaw:100", tables / "demo", "--keep", "a")
    assert "--keep names columns of a file of features or of --nodes" in demo


def test_names_alone_and_refusals(tables: Path) -> None:
    edges, out = tables / "edges.parquet", tables / "out"
    named = passed("partition", edges, out, "--names", "--method", "random", "--src", "dst", "--dst", "src")
    assert "60 nodes and 400 edges" in named
    for options, words in {
        (): "expected numbers (shardpass.data.stream_tables, or --names",
        ("--num-nodes", 60, "--names"): "--num-nodes is by number, and these nodes have names: use --nodes",
        ("--label", "kind"): "name columns of tables: pass --nodes, or --names as well",
        ("--node-id", "name"): "name columns of tables: pass --nodes, or --names as well",
        ("--nodes", tables / "nodes.parquet"): "which one holds the ids? Pass node_id= (--node-id)",
        ("--names", "--label", "kind"): "name columns of a table of nodes: pass nodes= (--nodes) as well",
    }.items():
        assert words in refused("partition", edges, tables / "other", *options)
