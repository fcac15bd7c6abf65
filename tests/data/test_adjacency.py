"""Sparse matrices in the place of an edge list: every entry an edge, and no value lost."""

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric")

from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import ToSparseTensor

from shardpass.data import EDGE, NODE, read

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")

EDGES = torch.tensor([[2, 0, 1, 2, 3], [3, 1, 0, 2, 1]])
WEIGHTS = torch.tensor([0.5, 2.0, 3.0, 0.25, 7.0])
DENSE = torch.zeros(4, 4).index_put((EDGES[1], EDGES[0]), WEIGHTS)  # row target, column source


class SparseTensor:
    """What of torch_sparse's class is read."""

    def __init__(self, weighted):
        self.weighted, self.shape = weighted, (4, 4)

    def sizes(self):
        return [4, 4]

    def coo(self):
        return EDGES[1], EDGES[0], WEIGHTS if self.weighted else None


def scipy(kind, weighted):
    sparse = pytest.importorskip("scipy.sparse")
    return getattr(sparse, f"{kind}_matrix")(DENSE.numpy() if weighted else (DENSE.numpy() != 0).astype(np.float32))


def by_transform(layout):
    def made(weighted):
        data = Data(x=torch.rand(4, 1), edge_index=EDGES, **({"edge_weight": WEIGHTS} if weighted else {}))
        return ToSparseTensor(layout=layout)(data).adj_t

    return made


MATRICES = {
    "ToSparseTensor": by_transform(None),
    "ToSparseTensor, CSR": by_transform(torch.sparse_csr),
    "ToSparseTensor, COO": by_transform(torch.sparse_coo),
    "COO that is not coalesced": lambda w: torch.sparse_coo_tensor(EDGES.flip(0), WEIGHTS if w else WEIGHTS / WEIGHTS),
    "CSC": lambda w: (DENSE if w else (DENSE != 0).float()).to_sparse_csc(),
    "torch_sparse": SparseTensor,
    "SciPy CSR": lambda w: scipy("csr", w),
    "SciPy COO": lambda w: scipy("coo", w),
    "SciPy LIL": lambda w: scipy("lil", w),
}


def edges_of(graph, kind=EDGE):
    """The weight of each edge."""
    ends, fields = graph.edges[kind], graph.edge_fields[kind]
    weights = fields["edge_weight"].tolist() if "edge_weight" in fields else [None] * len(ends.src)
    return dict(zip(zip(ends.src.tolist(), ends.dst.tolist()), weights, strict=True))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_is_edges_and_their_weights(name, weighted):
    right = dict(zip(map(tuple, EDGES.T.tolist()), WEIGHTS.tolist() if weighted else [None] * 5, strict=True))
    for given in (
        Data(adj_t=MATRICES[name](weighted), y=torch.arange(4)),
        {"adj_t": MATRICES[name](weighted), "y": torch.arange(4)},
    ):
        graph = read(given)
        assert edges_of(graph) == right and graph.num_nodes == {NODE: 4}
        assert [*graph.node_fields[NODE]] == ["y"] and [*graph.edge_fields[EDGE]] == ["edge_weight"] * weighted
        assert graph.graph_fields == ({"adj_t": "edge_weight"} if weighted else {})
        assert "adj_t" in given  # the object of the user is as it was


def test_fields_of_the_edges_stay_with_their_edges():
    data = Data(x=torch.rand(4, 2), edge_index=EDGES, edge_weight=WEIGHTS, edge_time=WEIGHTS * 2)
    graph = read(ToSparseTensor()(data))
    assert torch.equal(graph.edge_fields[EDGE]["edge_time"], graph.edge_fields[EDGE]["edge_weight"] * 2)


def test_values_of_several_numbers_are_edge_attr():
    data = ToSparseTensor("edge_attr")(Data(x=torch.rand(4, 2), edge_index=EDGES, edge_attr=torch.rand(5, 3)))
    graph = read(data)
    assert graph.edge_fields[EDGE]["edge_attr"].shape == (5, 3) and graph.graph_fields == {"adj_t": "edge_attr"}


def test_several_types():
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.rand(4, 2), torch.rand(3, 2)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 2, 2], [1, 1, 3]])
    data["author", "writes", "paper"].edge_weight = torch.tensor([0.5, 2.0, 3.0])
    data["paper", "cites", "paper"].edge_index = EDGES
    arrays = {kind: dict(data[kind].items()) for kind in data.node_types}
    found = ToSparseTensor()(data)
    arrays |= {kind: dict(found[kind].items()) for kind in found.edge_types}
    for graph in (read(found), read(arrays)):
        writes = edges_of(graph, ("author", "writes", "paper"))
        assert writes == {(0, 1): 0.5, (2, 1): 2.0, (2, 3): 3.0}
        assert set(edges_of(graph, ("paper", "cites", "paper"))) == set(map(tuple, EDGES.T.tolist()))
        assert graph.graph_fields == {"adj_t": "edge_weight"}
    found["author", "writes", "paper"].adj_t.values().fill_(1)
    assert read(found).graph_fields == {} and "edge_weight" not in read(found).edge_fields["author", "writes", "paper"]


@pytest.mark.parametrize("given", [DENSE.to_sparse_coo(), scipy("csr", True)], ids=["torch", "SciPy"])
def test_a_matrix_alone_is_told_where_it_goes(given):
    with pytest.raises(TypeError, match=r"pass a dict, \{'adj_t': matrix, 'x': features\}"):
        read(given)
    with pytest.raises(ValueError, match="edge_index is a sparse matrix"):
        read(Data(x=torch.rand(4, 1), edge_index=given))
    with pytest.raises(TypeError, match=r"pass a dict, \{'edge_index': edges"):
        read(EDGES)


def test_what_cannot_be_told_is_refused():
    coo = DENSE.to_sparse_coo()
    twice = Data(edge_index=EDGES, adj_t=coo, num_nodes=4)
    doubled = torch.sparse_coo_tensor(torch.zeros(2, 2).long(), torch.tensor([1.0, 2.0]), (4, 4))
    cases = {
        "holds both edge_index and adj_t": twice,
        "values of edges twice, in adj_t and as 'edge_weight'": Data(adj_t=coo, edge_weight=WEIGHTS, num_nodes=4),
        r"adj_t of the Data object has the shape \[4, 3\]; expected": Data(adj_t=DENSE[:, :3].to_sparse_coo()),
        r"several entries for one place: call coalesce\(\)": Data(adj_t=doubled),
        "edge_index is a sparse matrix .*pass its transpose as adj_t": Data(edge_index=coo, num_nodes=4),
        r"sparse matrix \(Tensor\)": {"edge_index": DENSE.to_sparse_csr(), "num_nodes": 4},
        r"sparse matrix \(csr_matrix\)": {"edge_index": scipy("csr", True), "num_nodes": 4},
        r"edge_index of \('n', 'to', 'n'\) is a sparse": {"n": {"num_nodes": 4}, ("n", "to", "n"): {"edge_index": coo}},
    }
    for words, data in cases.items():
        with pytest.raises(ValueError, match=words):
            read(data)
