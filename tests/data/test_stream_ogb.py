"""OGB's node datasets, from directories written as OGB writes them: nothing is downloaded here."""

import gzip
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from store_helpers import rebuilt

from shardpass.data import EDGE, NODE, RawGraph, open_store, partition, stream_ogb

EDGES = np.array([[0, 1, 1, 3, 2, 4], [1, 0, 2, 3, 1, 0]])
X = np.arange(15, dtype=np.float32).reshape(5, 3) / 8
SPLIT = {"train": [0, 3], "valid": [1], "test": [2, 4]}


def write_csv(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join(str(value) for value in np.atleast_1d(row).tolist()) for row in rows]
    with gzip.open(path, "wt") as file:
        file.write("".join(f"{line}\n" for line in lines))


def write_ogb(folder: Path, **more: Any) -> Path:
    """A dataset in OGB's text layout; `more`: further files of raw/, None to leave one out."""
    files = {
        "edge": EDGES.T, "num-node-list": [5], "num-edge-list": [6], "node-feat": X, "node-label": [0, 2, 1, 0, 1],
        "node_year": [2010, 2011, 2012, 2013, 2014], **more,
    }  # fmt: skip
    for name, rows in files.items():
        if rows is not None:
            write_csv(folder / "raw" / f"{name}.csv.gz", rows)
    for name, ids in SPLIT.items():
        write_csv(folder / "split" / "time" / f"{name}.csv.gz", ids)
    (folder / "RELEASE_v1.txt").write_text("")
    return folder


def write_binary(folder: Path, save: Any) -> Path:
    """A dataset in the layout of ogbn-papers100M."""
    (folder / "raw").mkdir(parents=True)
    save(
        folder / "raw" / "data.npz", edge_index=EDGES, num_nodes_list=np.array([5]), num_edges_list=np.array([6]),
        node_feat=X, node_year=np.arange(5)[:, None],
    )  # fmt: skip
    save(folder / "raw" / "node-label.npz", node_label=np.array([[0.0], [np.nan], [2.0], [np.nan], [1.0]]))
    for name, ids in SPLIT.items():
        write_csv(folder / "split" / "time" / f"{name}.csv.gz", ids)
    return folder


AUTHOR, PAPER = "author", "paper"
WRITES, CITES = (AUTHOR, "writes", PAPER), (PAPER, "cites", PAPER)


def write_typed(folder: Path) -> Path:
    """A dataset in the layout of ogbn-mag."""
    raw = folder / "raw"
    write_csv(raw / "num-node-dict.csv.gz", [[PAPER, AUTHOR], [5, 3]])
    write_csv(raw / "triplet-type-list.csv.gz", [CITES, WRITES])
    write_csv(raw / "nodetype-has-label.csv.gz", [[PAPER, AUTHOR], [True, False]])
    for triplet, edges in {CITES: EDGES.T, WRITES: [[0, 4], [2, 1]]}.items():
        write_csv(raw / "relations" / "___".join(triplet) / "edge.csv.gz", edges)
        write_csv(raw / "relations" / "___".join(triplet) / "num-edge-list.csv.gz", [len(edges)])
        write_csv(raw / "relations" / "___".join(triplet) / "edge_reltype.csv.gz", [[3]] * len(edges))
    write_csv(raw / "node-feat" / PAPER / "node-feat.csv.gz", X)
    write_csv(raw / "node-feat" / PAPER / "node_year.csv.gz", range(2010, 2015))
    write_csv(raw / "node-label" / PAPER / "node-label.csv.gz", [4, 3, 2, 1, 0])
    write_csv(folder / "split" / "time" / "nodetype-has-split.csv.gz", [[PAPER, AUTHOR], [True, False]])
    for name, ids in SPLIT.items():
        write_csv(folder / "split" / "time" / PAPER / f"{name}.csv.gz", ids)
    return folder


def stored(data: Any, folder: Path) -> RawGraph:
    partition(data, folder / "store", 2, "random", overwrite=True, memory_bytes=1000)
    return rebuilt(open_store(folder / "store"), 2)


def ends(graph: RawGraph) -> list[list[int]]:
    return [graph.edges[EDGE].src.tolist(), graph.edges[EDGE].dst.tolist()]


@pytest.mark.parametrize("given", ["directory", "files", "name"])
def test_text_layout(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    folder = write_ogb(tmp_path / "dataset" / "ogbn_arxiv")
    data = {"directory": folder, "files": stream_ogb(folder), "name": "ogbn-arxiv"}[given]
    graph = stored(data, tmp_path)
    assert graph.num_nodes == {NODE: 5} and ends(graph) == EDGES.tolist() and graph.source == "ogbn_arxiv (OGB)"
    fields = graph.node_fields[NODE]
    assert torch.equal(fields["x"], torch.from_numpy(X))
    assert fields["y"].tolist() == [0, 2, 1, 0, 1] and fields["y"].dtype == torch.int64
    assert fields["node_year"].tolist() == [2010, 2011, 2012, 2013, 2014]
    assert fields["train_mask"].tolist() == [True, False, False, True, False]
    assert fields["val_mask"].tolist() == [False, True, False, False, False]
    assert fields["test_mask"].tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("compressed", [True, False])
def test_binary_layout(tmp_path, compressed):
    folder = write_binary(tmp_path / "ogbn_papers100M", np.savez_compressed if compressed else np.savez)
    graph = stored(folder, tmp_path)
    assert ends(graph) == EDGES.tolist() and torch.equal(graph.node_fields[NODE]["x"], torch.from_numpy(X))
    assert graph.node_fields[NODE]["y"].tolist() == [0, -1, 2, -1, 1]
    assert "x" not in stored(stream_ogb(folder, drop=("x",)), tmp_path).node_fields[NODE]
    assert graph.node_fields[NODE]["node_year"].tolist() == [[0], [1], [2], [3], [4]]
    assert graph.node_fields[NODE]["train_mask"].tolist() == [True, False, False, True, False]


def test_inverse_edges_and_several_tasks(tmp_path):
    more = {"edge-feat": np.arange(12).reshape(6, 2) / 8, "node-label": np.eye(5, 2), "node_year": None}
    folder = write_ogb(tmp_path / "ogbn_proteins", **more, species=[7, 7, 8, 8, 9])
    graph = stored(folder, tmp_path)
    twice = np.stack([EDGES, EDGES[::-1]], axis=2).reshape(2, -1)
    assert ends(graph) == twice.tolist() and "with inverse edges" in graph.source
    assert graph.edge_fields[EDGE]["edge_attr"].tolist() == np.repeat(more["edge-feat"], 2, axis=0).tolist()
    assert graph.node_fields[NODE]["y"].tolist() == np.eye(5, 2).tolist()
    assert graph.node_fields[NODE]["y"].dtype == torch.float32
    assert graph.node_fields[NODE]["node_species"].tolist() == [7, 7, 8, 8, 9]
    plain = stored(stream_ogb(folder, add_inverse_edge=False, drop=("x", "edge_attr")), tmp_path)
    assert ends(plain) == EDGES.tolist() and "x" not in plain.node_fields[NODE] and not plain.edge_fields[EDGE]


def test_several_types(tmp_path):
    folder = write_typed(tmp_path / "ogbn_mag")
    graph = stored(folder, tmp_path)
    assert graph.num_nodes == {AUTHOR: 3, PAPER: 5} and list(graph.edges) == [WRITES, CITES]
    assert graph.edges[CITES].src.tolist() == EDGES[0].tolist() and graph.edges[CITES].dst.tolist() == EDGES[1].tolist()
    assert graph.edges[WRITES].src.tolist() == [0, 2] and graph.edges[WRITES].dst.tolist() == [4, 1]
    assert graph.edge_fields[WRITES]["edge_reltype"].tolist() == [3, 3]
    fields = graph.node_fields[PAPER]
    assert list(graph.node_fields[AUTHOR]) == [] and set(fields) == {
        "x", "y", "node_year", "train_mask", "val_mask", "test_mask"
    }  # fmt: skip
    assert torch.equal(fields["x"], torch.from_numpy(X)) and fields["y"].tolist() == [4, 3, 2, 1, 0]
    assert fields["train_mask"].tolist() == [True, False, False, True, False]
    with pytest.raises(ValueError, match="has several types: reverse edges would be of other types"):
        stream_ogb(folder, add_inverse_edge=True)
    (folder / "raw" / "relations" / "___".join(CITES) / "edge.csv.gz").unlink()
    with pytest.raises(ValueError, match=r"paper___cites___paper/edge\.csv\.gz is missing"):
        stored(folder, tmp_path)


def test_several_types_same_as_ogb(tmp_path):
    io = pytest.importorskip("ogb.io.read_graph_raw")
    folder = write_typed(tmp_path / "ogbn_mag")
    theirs = io.read_csv_heterograph_raw(
        str(folder / "raw"), additional_node_files=["node_year"], additional_edge_files=["edge_reltype"]
    )[0]
    graph = stored(folder, tmp_path)
    assert graph.num_nodes == theirs["num_nodes_dict"]
    for kind, edges in theirs["edge_index_dict"].items():
        assert [graph.edges[kind].src.tolist(), graph.edges[kind].dst.tolist()] == edges.tolist()
        assert graph.edge_fields[kind]["edge_reltype"][:, None].tolist() == theirs["edge_reltype"][kind].tolist()
    assert graph.node_fields[PAPER]["x"].tolist() == theirs["node_feat_dict"][PAPER].tolist()
    assert graph.node_fields[PAPER]["node_year"][:, None].tolist() == theirs["node_year"][PAPER].tolist()
    split = io.read_nodesplitidx_split_hetero(str(folder / "split" / "time"))
    for ids, mask in zip(split, ("train_mask", "val_mask", "test_mask")):
        assert graph.node_fields[PAPER][mask].nonzero().flatten().tolist() == ids[PAPER].tolist()


@pytest.mark.parametrize("inverse", [True, False])
def test_same_as_ogb(tmp_path, inverse):
    io = pytest.importorskip("ogb.io.read_graph_raw")
    folder = write_ogb(tmp_path / "ogbn_x", **{"edge-feat": np.arange(6) / 8})
    theirs = io.read_csv_graph_raw(folder / "raw", add_inverse_edge=inverse, additional_node_files=["node_year"])[0]
    graph = stored(stream_ogb(folder, add_inverse_edge=inverse), tmp_path)
    assert ends(graph) == theirs["edge_index"].tolist() and graph.num_nodes[NODE] == theirs["num_nodes"]
    for name, found in [
        ("node_feat", graph.node_fields[NODE]["x"]),
        ("node_year", graph.node_fields[NODE]["node_year"][:, None]),
        ("edge_feat", graph.edge_fields[EDGE]["edge_attr"][:, None]),
    ]:
        assert found.numpy().dtype == theirs[name].dtype and np.array_equal(found.numpy(), theirs[name])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"edge": None}, r"has neither raw/edge\.csv\.gz nor raw/data\.npz"),
        ({"num-node-list": None}, r"num-node-list\.csv\.gz is missing"),
        (
            {"num-node-list": [2, 3], "num-edge-list": [6]},
            r"num-node-list\.csv\.gz tells of 2 graphs; expected",
        ),
        ({"edge": [[0, 1, 2]]}, r"edge\.csv\.gz has 3 columns; expected source and destination"),
        ({"edge": [[0, 5]] * 6}, r"edge\.csv\.gz: destination ids .*: 5 at position 0 is outside .* \[0, 5\)"),
        ({"node-label": [0, 0.5, 1, 0, 1]}, r"node-label\.csv\.gz, row 1: label 0\.5; expected a class"),
        ({"node-feat": X[:4]}, r"node-feat\.csv\.gz: field 'x' .* expected 5 rows"),
    ],
)
def test_wrong_directories(tmp_path, more, message):
    folder = write_ogb(tmp_path / "ogbn_arxiv", **more)
    with pytest.raises(ValueError, match=message):
        stored(folder, tmp_path)


def test_wrong_splits(tmp_path):
    folder = write_ogb(tmp_path / "ogbn_arxiv")
    write_csv(folder / "split" / "time" / "valid.csv.gz", [1, 5])
    with pytest.raises(ValueError, match=r"valid\.csv\.gz, row 1: node 5; expected an integer in \[0, 5\)"):
        stored(folder, tmp_path)
    (folder / "split" / "time" / "valid.csv.gz").unlink()
    with pytest.raises(ValueError, match=r"valid\.csv\.gz is missing; expected train, valid and test"):
        stored(folder, tmp_path)
    write_csv(folder / "split" / "other" / "train.csv.gz", [1])
    with pytest.raises(ValueError, match="holds 2 splits; expected one"):
        stored(folder, tmp_path)


def fake_ogb(folder: Path, url_tools: Any) -> ModuleType:
    """What of the ogb package the reader uses."""
    (folder / "nodeproppred").mkdir(parents=True)
    master = ",ogbn-products,ogbn-arxiv\ndownload_name,products,arxiv\nurl,http://a/products.zip,http://a/arxiv.zip\n"
    (folder / "nodeproppred" / "master.csv").write_text(master)
    url_tools.__file__ = str(folder / "utils" / "url.py")
    return url_tools


def test_download(tmp_path, monkeypatch):
    """With ogb's functions, into the directory that ogb uses; without a network or without ogb one sentence."""
    monkeypatch.chdir(tmp_path)
    modules = __import__("sys").modules
    monkeypatch.setitem(modules, "ogb.utils.url", None)
    monkeypatch.setitem(modules, "ogb", None)
    with pytest.raises(ImportError, match=r"downloading ogbn-arxiv needs the package 'ogb'.*pip install ogb"):
        partition("ogbn-arxiv", tmp_path / "store", 2, "random")

    def offline(url: str, folder: str) -> str:
        raise OSError(f"no route to {url}")

    def extract(archive: str, folder: str) -> None:
        write_ogb(Path(folder) / "arxiv")

    def online(url: str, folder: str) -> str:
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "arxiv.zip").write_bytes(b"")
        return str(Path(folder) / "arxiv.zip")

    tools = fake_ogb(tmp_path / "site", SimpleNamespace(download_url=offline, extract_zip=extract))
    monkeypatch.setitem(modules, "ogb", SimpleNamespace())
    monkeypatch.setitem(modules, "ogb.utils", SimpleNamespace(url=tools))
    monkeypatch.setitem(modules, "ogb.utils.url", tools)
    with pytest.raises(ValueError, match=r"could not be downloaded from http://a/arxiv\.zip \(no route .*network"):
        partition("ogbn-arxiv", tmp_path / "store", 2, "random")
    with pytest.raises(ValueError, match="OGB has no node dataset 'ogbn-cats'; it has ogbn-products, ogbn-arxiv"):
        partition("ogbn-cats", tmp_path / "store", 2, "random")
    tools.download_url = online
    assert ends(stored("ogbn-arxiv", tmp_path)) == EDGES.tolist()
    assert sorted(path.name for path in (tmp_path / "dataset").iterdir()) == ["ogbn_arxiv"]
