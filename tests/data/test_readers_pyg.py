"""PyG's Data and HeteroData: every field kept, or refused by name."""

import warnings

import numpy as np
import pytest
import torch
from store_helpers import assert_same, rebuilt

from shardpass.data import EDGE, NODE, open_store, partition, read


def edge_index() -> torch.Tensor:
    return torch.tensor([[0, 1, 2, 2], [1, 0, 2, 3]])


class TestPyG:
    @pytest.fixture(autouse=True)
    def pyg(self):
        self.data = pytest.importorskip("torch_geometric.data")

    def graph(self, **fields):
        return self.data.Data(edge_index=edge_index(), **fields)

    def test_all_fields(self, tmp_path):
        data = self.graph(
            x=torch.rand(5, 2, requires_grad=True),
            y=torch.arange(5),
            train_mask=torch.ones(5, dtype=torch.bool),
            pos=torch.rand(5, 3).double(),
            edge_attr=torch.rand(4, 3),
            edge_weight=torch.rand(4),
            year=np.arange(5, dtype=np.int16),
            name="demo",
            scale=torch.tensor(0.5),
            classes=4,
        )
        graph = read(data)
        assert graph.num_nodes == {NODE: 5}
        assert sorted(graph.node_fields[NODE]) == ["pos", "train_mask", "x", "y", "year"]
        assert sorted(graph.edge_fields[EDGE]) == ["edge_attr", "edge_weight"]
        assert graph.graph_fields == {"name": "demo", "scale": 0.5, "classes": 4}
        assert torch.equal(graph.node_fields[NODE]["x"], data.x)
        partition(data, tmp_path / "store", 2, method="random")
        assert_same(rebuilt(open_store(tmp_path / "store"), 2), graph)

    def test_as_many_nodes_as_edges(self):
        graph = read(self.graph(x=torch.rand(4, 2), edge_attr=torch.rand(4, 1), y=torch.arange(4)))
        assert sorted(graph.node_fields[NODE]) == ["x", "y"]
        assert sorted(graph.edge_fields[EDGE]) == ["edge_attr"]

    @pytest.mark.parametrize("value", [torch.arange(7), ["a", "b"], {"a": 1}, torch.rand(2, 5)])
    def test_unplaced_fields_are_refused_by_name(self, value):
        data = self.graph(x=torch.rand(5, 2), splits=value)
        with pytest.raises(
            ValueError, match=r"field 'splits' .* cannot be kept: correct it, delete it .*drop=\['splits'\]"
        ):
            read(data)
        assert list(read(data, drop=["splits"]).node_fields[NODE]) == ["x"]

    def test_number_of_nodes(self):
        assert read(self.graph(num_nodes=9)).num_nodes == {NODE: 9}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert read(self.graph(y=torch.arange(4))).num_nodes == {NODE: 4}
            with pytest.raises(ValueError, match="the number of nodes of the Data object is unknown"):
                read(self.graph())

    def test_a_batch(self):
        make, batch = self.data.Data, self.data.Batch.from_data_list
        small = make(x=torch.rand(2, 1), edge_index=torch.tensor([[0], [1]]), y=torch.rand(1, 3), weight=torch.rand(1))
        with pytest.raises(ValueError, match=r"'y' has 3 rows, as many as there are graphs, and edges.*drop=\['y'\]"):
            read(batch([small] * 3))
        data = batch([make(**{**small.to_dict(), "edge_index": torch.tensor([[0, 1], [1, 0]])})] * 3)
        graph = read(data)
        assert list(graph.node_fields[NODE]) == ["x", "batch"] and list(graph.graph_fields) == ["y", "weight"]
        data.y = data.y.view(-1)
        with pytest.raises(ValueError, match=r"field 'y' of the shape \[9\] is neither per node .* cannot be kept"):
            read(data)
        with pytest.raises(ValueError, match=r"a Batch of HeteroData has no readout .*to_data_list\(\) one by one"):
            read(batch([self.hetero()] * 2))

    def test_no_edge_index(self):
        with pytest.raises(ValueError, match="the Data object has no edge_index"):
            read(self.data.Data(x=torch.rand(3, 1)))

    def test_edge_index_class(self):
        pyg = pytest.importorskip("torch_geometric")
        data = self.graph(x=torch.rand(4, 1))
        data.edge_index = pyg.EdgeIndex(edge_index(), sparse_size=(4, 4))
        assert type(read(data).edges[EDGE].src) is torch.Tensor

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
    def test_sparse_features(self):
        dense = torch.rand(5, 3).round()
        graph = read(self.graph(x=dense.to_sparse_csr()))
        assert torch.equal(graph.node_fields[NODE]["x"].to_dense(), dense)
        graph = read(self.graph(x=dense.to_sparse_coo()))
        assert torch.equal(graph.node_fields[NODE]["x"].to_dense(), dense)

    def test_features_of_scipy(self):
        dense = torch.rand(5, 3).round()
        matrix = pytest.importorskip("scipy.sparse").coo_matrix(dense.numpy())
        graph = read({"edge_index": edge_index(), "x": matrix})
        assert graph.num_nodes == {NODE: 5} and torch.equal(graph.node_fields[NODE]["x"].to_dense(), dense)
        with pytest.raises(ValueError, match=r"field 'x' .*pass torch\.from_numpy\(x\.toarray\(\)\)"):
            read(self.graph(x=matrix, num_nodes=5))

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"x": torch.rand(6, 2), "y": torch.ones(5), "m": torch.ones(5)}, "the rows of y, m, correct x instead"),
            ({"x": torch.rand(5, 2), "edge_attr": torch.rand(6)}, r"rows of x\), nor per edge \(4\).*'\] of .*read$"),
            ({"adj": torch.rand(5, 5), "edge_index": None}, "dense_to_sparse makes it of a dense matrix"),
            ({"x": torch.rand(5, 2), "edge_index": edge_index().T}, r"shape \[4, 2\]; .*: transpose it"),
        ],
    )  # fmt: skip
    def test_words_that_help(self, fields, words):
        with pytest.raises((ValueError, TypeError), match=words):
            read(self.data.Data(**{"edge_index": edge_index(), **fields}))

    def test_a_type_with_a_row_too_many(self):
        data = self.hetero()
        data["paper"].y = torch.arange(5)
        words = r"'y' of 'paper' .* \(4, the rows of x\).*If there are 5 nodes, the rows of y, correct x instead"
        with pytest.raises(ValueError, match=words):
            read(data)

    def hetero(self):
        data = self.data.HeteroData()
        data["paper"].x = torch.rand(4, 2)
        data["paper"].y = torch.arange(4)
        data["author"].num_nodes = 3
        data["author", "writes", "paper"].edge_index = torch.tensor([[0, 2, 2], [1, 1, 3]])
        data["author", "writes", "paper"].edge_attr = torch.rand(3, 2)
        data["paper", "cites", "paper"].edge_index = torch.tensor([[0, 1], [1, 3]])
        data.title = "demo"
        return data

    def test_hetero(self, tmp_path):
        data = self.hetero()
        graph = read(data)
        assert graph.num_nodes == {"paper": 4, "author": 3}
        assert graph.graph_fields == {"title": "demo"}
        assert list(graph.edge_fields["author", "writes", "paper"]) == ["edge_attr"]
        partition(data, tmp_path / "store", 3, method="random")
        assert_same(rebuilt(open_store(tmp_path / "store"), 2), graph)

    def test_an_edge_field_is_no_id_of_nodes(self):
        data = self.hetero()
        data["author", "writes", "paper"].edge_attr_id = data["author", "writes", "paper"].edge_attr
        data["paper"].edge_attr_id = torch.arange(4)
        graph = read(data, node_id="edge_attr_id")
        assert "edge_attr_id" in graph.edge_fields["author", "writes", "paper"] and "paper" in graph.names

    def test_hetero_refusals(self):
        data = self.hetero()
        data["paper"].words = ["a"] * 2
        with pytest.raises(ValueError, match=r"field 'words' of 'paper' \(list\) is neither per node"):
            read(data)
        read(data, drop=["words"])
        del data["author"].num_nodes
        with pytest.raises(ValueError, match="the number of nodes of node type 'author' is unknown"):
            read(data, drop=["words"])
