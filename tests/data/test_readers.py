"""Readers keep every field, or refuse it by name."""

import numpy as np
import pytest
import torch
from store_helpers import assert_same, awkward, rebuilt, shared_data

from shardpass.data import EDGE, NODE, open_store, partition, read, read_edge_list
from shardpass.data.rows import csr_rows, take_rows


def edge_index() -> torch.Tensor:
    return torch.tensor([[0, 1, 2, 2], [1, 0, 2, 3]])


def sparse_arrays(dense: np.ndarray, kind: str = "") -> dict[str, np.ndarray]:
    rows, columns = dense.nonzero()
    starts = np.concatenate([[0], np.bincount(rows, minlength=len(dense)).cumsum()]).astype(np.int32)
    values = {"data": dense[rows, columns], "indices": columns.astype(np.int32), "indptr": starts}
    return {f"x_{name}{kind}": array for name, array in {**values, "shape": np.array(dense.shape)}.items()}


def test_npz(tmp_path):
    dense = np.random.default_rng(0).random((6, 4), dtype=np.float32).round()
    arrays = {
        **sparse_arrays(dense),
        "edge_index": edge_index().numpy().astype(np.int32),
        "y": np.array([0, 1, -1, 2, 0, 1], dtype=np.int16),
        "made_train_mask": np.ones(6, dtype=bool),
        "train_masks": np.ones((10, 6), dtype=bool),
        "edge_weight": np.arange(4, dtype=np.float64),
        "classes": np.array(3),
    }
    np.savez(tmp_path / "graph.npz", **arrays)
    graph = read(tmp_path / "graph.npz")
    assert graph.num_nodes == {NODE: 6} and graph.graph_fields == {"classes": 3}
    fields = graph.node_fields[NODE]
    assert sorted(fields) == ["made_train_mask", "train_masks", "x", "y"]
    assert fields["train_masks"].shape == (6, 10)
    assert torch.equal(fields["x"].to_dense(), torch.from_numpy(dense))
    partition(str(tmp_path / "graph.npz"), tmp_path / "store", 2, method="random")
    assert_same(rebuilt(open_store(tmp_path / "store"), 2), graph)
    assert open_store(tmp_path / "store").manifest.source == "graph.npz (npz)"


def test_hetero_npz(tmp_path):
    dense = np.eye(4, dtype=np.float32)
    arrays = {
        **sparse_arrays(dense, "/paper"),
        "edge_index/paper__by__author": np.array([[0, 3], [1, 2]], dtype=np.int32),
        "edge_index/paper__in__venue": np.array([[0, 3], [1, 4]], dtype=np.int32),
        "edge_weight/paper__in__venue": np.ones(2, dtype=np.float32),
        "x/author": np.ones((3, 2), dtype=np.float32),
        "y/paper": np.arange(4),
    }
    np.savez(tmp_path / "graph.npz", **arrays)
    graph = read(tmp_path / "graph.npz")
    assert graph.num_nodes == {"paper": 4, "author": 3, "venue": 5}
    assert graph.source == "graph.npz (npz); nodes of type 'venue' counted from its edges"
    assert list(graph.edge_fields["paper", "in", "venue"]) == ["edge_weight"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones((2, 2))}, "has no array 'edge_index', with the edges; it has x"),
        ({"edge_index": np.zeros((2, 1), dtype=int)}, "the number of nodes is unknown"),
        (
            {"edge_index": np.zeros((3, 1), dtype=int), "x": np.ones(2)},
            r"has the shape \[3, 1\]; expected \[2, num_edges\]",
        ),
        ({"edge_index/a__b": np.zeros((2, 1), dtype=int)}, "edge type 'a__b'; expected <source>__<relation>__<target>"),
        (
            {"edge_index": np.zeros((2, 1), dtype=int), "x": np.ones(2), "z": np.ones(3)},
            r"field 'z' .* expected 2 rows",
        ),
        (
            {"edge_index": np.array([[0], [1]], dtype=object), "x": np.ones(2)},
            "cannot be read as an .npz of plain arrays",
        ),
    ],
)
def test_wrong_npz(tmp_path, arrays, message):
    np.savez(tmp_path / "graph.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "graph.npz")


@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_broken_npz(tmp_path, content):
    (tmp_path / "graph.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be read as an .npz of plain arrays"):
        read(tmp_path / "graph.npz")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["array", "npy"])
def test_edge_list(tmp_path, kind, turned):
    edges = edge_index().numpy().T if turned else edge_index().numpy()
    features = np.arange(10, dtype=np.float32).reshape(5, 2)
    if kind == "npy":
        np.save(tmp_path / "edges.npy", edges)
        np.save(tmp_path / "x.npy", features)
        edges, features = tmp_path / "edges.npy", tmp_path / "x.npy"
    labels, mask, weights = np.arange(5), np.ones(5, dtype=bool), np.ones(4, dtype=np.float32)
    graph = read_edge_list(edges, features=features, labels=labels, masks={"train_mask": mask}, weights=weights)
    assert torch.equal(graph.edges[EDGE].src, edge_index()[0])
    assert torch.equal(graph.edges[EDGE].dst, edge_index()[1])
    assert list(graph.node_fields[NODE]) == ["x", "y", "train_mask"]
    assert list(graph.edge_fields[EDGE]) == ["edge_weight"]
    partition(graph, tmp_path / "store", 2, method="range")
    assert_same(rebuilt(open_store(tmp_path / "store"), 2), graph)


@pytest.mark.parametrize(
    ("name", "text", "weights"),
    [
        ("edges.csv", "source,target\n0,1\n1,0\n", None),
        ("edges.csv", "0,1\n1,0\n", None),
        ("edges.csv", "src,dst,weight\n0, 1, 0.5\n1, 0, 2\n", [0.5, 2.0]),
        ("edges.txt", "# a comment\n0 1\n1\t0  # another\n", None),
        ("edges.txt", "0 1 0.5\n1 0 2\n", [0.5, 2.0]),
    ],
)
def test_text_edges(tmp_path, name, text, weights):
    (tmp_path / name).write_text(text)
    graph = read_edge_list(tmp_path / name, num_nodes=3)
    assert graph.edges[EDGE].src.tolist() == [0, 1] and graph.edges[EDGE].dst.tolist() == [1, 0]
    found = graph.edge_fields[EDGE].get("edge_weight")
    assert (found is None and weights is None) or found.tolist() == weights


def test_empty_text(tmp_path):
    (tmp_path / "edges.csv").write_text("source,target\n")
    assert read_edge_list(tmp_path / "edges.csv", num_nodes=3).num_edges == {EDGE: 0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"edges": np.zeros((3, 4), dtype=int)},
            r"have the shape \[3, 4\]; expected \[2, num_edges\] or \[num_edges, 2\]",
        ),
        ({"edges": [[0, 1], [1, 0]]}, r"of the shape \[2, 2\] can be read both ways"),
        ({"num_nodes": None}, "the number of nodes of type 'node' is unknown"),
        ({"features": "x.csv"}, r"x: x.csv is not an .npy file; save the array with numpy.save"),
        ({"edges": "edges.txt", "weights": [1.0]}, "edge weights are given twice"),
        ({"num_nodes": None, "features": np.ones((5, 1)), "labels": np.ones(3)}, "of rows: x has 5, y has 3"),
    ],
)
def test_wrong_edge_lists(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "edges.txt").write_text("0 1 2.0\n")
    with pytest.raises(ValueError, match=message):
        read_edge_list(**{"edges": edge_index(), "num_nodes": 3, **given})


def test_dict():
    graph = read({"edge_index": [[0, 1], [1, 0]], "x": np.ones((3, 2)), "edge_attr": np.ones(2), "classes": 2})
    assert graph.num_nodes == {NODE: 3} and list(graph.edge_fields[EDGE]) == ["edge_attr"]
    assert graph.graph_fields == {"classes": 2}
    typed = read(
        {"a": {"num_nodes": 2}, "b": {"x": np.ones((3, 1))}, ("a", "to", "b"): {"edge_index": [[0], [2]], "w": [1.0]}}
    )
    assert typed.num_nodes == {"a": 2, "b": 3} and list(typed.edge_fields["a", "to", "b"]) == ["w"]
    assert read(awkward(), drop=["x", "edge_attr"]).node_fields[NODE].keys() == {"y", "train_mask"}
    with pytest.raises(ValueError, match="edge_index is missing"):
        read({"x": np.ones(3)})
    with pytest.raises(ValueError, match="key 'a': expected a dict of arrays of a node type"):
        read({"a": [1, 2], ("a", "to", "a"): {"edge_index": [[0], [0]]}})


def test_unknown_inputs(tmp_path):
    with pytest.raises(TypeError, match="cannot read a graph from a int; expected a PyG Data or HeteroData"):
        read(3)
    with pytest.raises(ValueError, match="there is no file"):
        read(tmp_path / "graph.npz")
    for name, message in [
        ("graph.pt", "is a pickle, which can run code: load it yourself"),
        ("graph.xyz", "cannot read a graph from .*; expected a PyG Data"),
        ("graph.csv", r"does not tell the number of nodes; pass shardpass.data.read_edge_list\('graph.csv', num_nodes"),
    ]:
        (tmp_path / name).write_text("")
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name)


def test_csr_rows():
    dense = torch.rand(7, 4).round()
    rows, columns = dense.nonzero().unbind(1)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(rows, minlength=7).cumsum(0)])
    matrix = csr_rows(dense[rows, columns].numpy(), columns.int().numpy(), starts.int().numpy(), (7, 4))
    assert torch.equal(matrix.to_dense(), dense)
    for ids in (torch.tensor([6, 0, 0, 3]), torch.empty(0, dtype=torch.long), torch.arange(7)):
        assert torch.equal(take_rows(matrix, ids), dense[ids])


def test_csr_rows_of_scipy():
    """Entries of a row may come in any order, and those for the same place are added up."""
    matrix = csr_rows(torch.ones(3), torch.tensor([1, 0, 1]), torch.tensor([0, 3]), (1, 3))
    assert take_rows(matrix, torch.tensor([0, 0])).tolist() == [[1, 2, 0]] * 2


@pytest.mark.parametrize(
    ("starts", "columns", "rows", "message"),
    [
        ([0, 2], [0, 3], 1, r"no CSR matrix of the shape \[1, 3\]: .*found index 3"),
        ([0, 2], [0, -1], 1, "negative index -1"),
        ([0, 1], [0, 2], 1, "no CSR matrix"),
        ([1, 3], [0, 2], 1, "the row starts do not begin with 0"),
        ([0, 3, 2], [0, 2], 2, "no CSR matrix"),
        ([0, 2], [0, 2], 2, "no CSR matrix"),
        ([], [0, 2], 0, "the row starts do not begin with 0"),
        ([0, 2], [0], 1, "no CSR matrix"),
    ],
)
def test_wrong_csr_rows(starts, columns, rows, message):
    with pytest.raises(ValueError, match=f"sparse features.*{message}"):
        csr_rows(torch.ones(2), torch.tensor(columns), torch.tensor(starts, dtype=torch.long), (rows, 3))


@pytest.mark.parametrize("name", ["tolokers", "acm_hetero", "dblp_hetero"])
def test_real_graphs(tmp_path, name):
    path = shared_data(name)
    if path is None:
        pytest.skip("the real graphs are not beside this checkout")
    graph = read(path)
    partition(graph, tmp_path / "store", 3, method="random")
    assert_same(rebuilt(open_store(tmp_path / "store"), 2), graph)
