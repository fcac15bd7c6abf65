"""`shardpass partition` of graphs in files: edge lists of every kind, folders, OGB's layout."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import passed, refused

from shardpass.cli.graphs import powerlaw
from shardpass.data import open_store, partition, stream_edge_list


@pytest.fixture
def files(tmp_path: Path) -> Path:
    arrays = powerlaw(300, 6, channels=3)
    for name, array in {"edges": arrays["edge_index"], "x": arrays["x"], "y": arrays["y"]}.items():
        np.save(tmp_path / f"{name}.npy", array)
    return tmp_path


@pytest.mark.parametrize("method", ["metis", "random"])
def test_options_are_those_of_python(files: Path, method: str) -> None:
    text = passed(
        "partition", files / "edges.npy", files / "out", "--parts", 3, "--method", method, "--seed", 2,
        "--memory", 0.0001, "--features", files / "x.npy", "--labels", files / "y.npy", "--drop", "y",
    )  # fmt: skip
    source = stream_edge_list(files / "edges.npy", features=files / "x.npy")
    expected = partition(source, files / "expected", 3, method, seed=2)
    found = open_store(files / "out").manifest
    assert found == expected and found.method == method and list(found.node_fields["node"]) == ["x"]
    edges, cut = sum(found.num_edges.values()), sum(found.cut_edges.values())
    assert f"300 nodes and {edges:,} edges in 3 parts, {cut / edges:.1%} of the edges cut" in text


def test_ranks_write_the_same_bytes(files: Path) -> None:
    words = ("partition", files / "edges.npy", "--features", files / "x.npy", "--method", "random")
    passed(*words, files / "one")
    assert "300 nodes" in passed(*words, files / "two", "--ranks", 2)
    stores = [{file.name: file.read_bytes() for file in (files / name).iterdir()} for name in ("one", "two")]
    assert stores[0] == stores[1]
    words = ("partition", "demo:digits", files / "three", "--ranks", 2)
    assert "a graph in memory is partitioned by one process, and here are 2" in refused(*words)


def test_folders(files: Path) -> None:
    text = passed("partition", files, files.parent / "folder-out", "--parts", 2)
    assert "300 nodes" in text
    raw = files / "ogbn_small" / "raw"
    raw.mkdir(parents=True)
    for name, lines in {"edge": "0,1\n1,2\n2,0\n", "num-node-list": "3\n", "num-edge-list": "3\n"}.items():
        (raw / f"{name}.csv.gz").write_bytes(gzip.compress(lines.encode()))
    assert "3 nodes and 3 edges in 4 parts" in passed("partition", raw.parent, files / "ogb")


def test_refusals(files: Path) -> None:
    (files / "bad.csv").write_text("0,1\n1,x\n")
    words = refused("partition", files / "bad.csv", files / "out", "--num-nodes", 3)
    assert "bad.csv cannot be read as numbers" in words and "could not convert string 'x' to int64 at row 1" in words
    (files / "empty").mkdir()
    assert "holds no edges" in refused("partition", files / "empty", files / "out", "--parts", 2)
    assert "belong to edge lists" in refused("partition", files / "empty", files / "out", "--num-nodes", 3)
    words = refused("partition", files / "edges.npy", files / "out", "--num-nodes", 300, "--threads", 0)
    assert "0 threads; expected at least 1" in words
