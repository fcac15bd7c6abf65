"""What `shard` must not mistake for what it was given before, and what a graph and a model must have in common."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv, GCNConv

import shardpass as sp
from shardpass.errors import DivergenceError, RefusedError
from shardpass.testing import awkward_graph, run

EDGES = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])
OTHERS = EDGES.flip(0).contiguous()


def typed(*kinds: tuple[str, str, str], adj: Tensor | None = None) -> HeteroData:
    data = HeteroData()
    data["a"].x, data["b"].x = torch.ones(5, 4), torch.ones(5, 4)
    for kind in kinds:
        data[kind].edge_index = EDGES
    if adj is not None:
        data["b", "by", "a"].adj_t = torch.sparse_coo_tensor(adj, torch.ones(5), (5, 5)).to_sparse_csr()
    return data


def edges_of(graph: Any) -> dict[Any, Any]:
    return {
        kind: [(shard.src_rows.tolist(), shard.indptr.tolist()) for shard in relation.shards.shards]
        for kind, relation in graph.relations.items()
    }


ROW = torch.zeros(5).long()
AGAIN: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "another matrix beside it": (lambda: typed(("a", "x", "b"), adj=EDGES), lambda: typed(("a", "x", "b"), adj=OTHERS)),
    "a matrix that is gone": (lambda: typed(("a", "x", "b"), adj=EDGES), lambda: typed(("a", "x", "b"))),
    "the other direction": (lambda: typed(("a", "x", "b")), lambda: typed(("b", "x", "a"))),
    "another name": (lambda: typed(("a", "x", "a")), lambda: typed(("a", "y", "a"))),
    "another kind of graph": (lambda: {("node", "z", "node"): {"edge_index": EDGES}, "node": {"x": torch.ones(5, 4)}},
                              lambda: Data(edge_index=EDGES, x=torch.ones(5, 4))),
}  # fmt: skip


@pytest.mark.parametrize("case", AGAIN)
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_same_tensor_in_another_graph(case: str, ranks: int) -> None:
    first, second = AGAIN[case]

    def work(comm: Any) -> None:
        fresh = sp.shard(second(), comm)
        sp.shard(first(), comm)
        again = sp.shard(second(), comm)
        assert type(again) is type(fresh) and again.edge_types == fresh.edge_types
        assert edges_of(again) == edges_of(fresh)

    run(work, ranks)


def test_parts_of_another_type() -> None:
    def work(comm: Any) -> None:
        data = typed(("a", "x", "b"))
        first, second = sp.shard(data, comm, parts={"a": ROW}), sp.shard(data, comm, parts={"b": ROW})
        owned = [[g.ownership[kind].num_own(0) for kind in ("a", "b")] for g in (first, second)]
        assert owned == [[5, 1], [1, 5]]
        with pytest.raises(DivergenceError, match="edge types"):
            sp.shard(typed(("a", "y" if comm.rank == 1 else "x", "b")), comm)

    run(work, 3)


def small(**changes: Any) -> Data:
    return Data(**({"x": torch.randn(5, 4).double(), "edge_index": EDGES} | changes))


def with_gradient() -> HeteroData:
    data = typed(("a", "x", "b"))
    data["a"].x.requires_grad_()
    return data


def weighted() -> Data:
    values = torch.rand(5, dtype=torch.float64) + 0.1
    matrix = torch.sparse_coo_tensor(EDGES.flip(0), values, (5, 5)).to_sparse_csr()
    return Data(x=torch.randn(5, 4).double(), adj_t=matrix)


def test_values_of_a_matrix_are_not_left_out_unasked() -> None:
    """PyG's layers read them of ``adj_t``; here they are a field, which has to be passed."""
    data, layer = weighted(), GCNConv(4, 3).double()
    expected = layer(data.x, data.adj_t)

    def work(comm: Any) -> None:
        graph, model = sp.shard(data, comm), sp.pyg.wrap(copy.deepcopy(layer), comm)
        with pytest.raises(
            RefusedError, match=r"without the values of the adj_t .* pass edge_weight=graph.edge_weight"
        ):
            model(graph.x, graph)
        torch.testing.assert_close(graph.whole(model(graph.x, graph, graph.edge_weight)), expected)
        with pytest.raises(AttributeError, match="Pass the graph where adj_t went"):
            _ = graph.adj_t
        without = sp.shard(data, comm, drop=["edge_weight"])
        model(without.x, without)

    run(work, 2)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a gradient": (lambda: sp.shard(small(x=torch.ones(5, 4, requires_grad=True))), ValueError, "graph.own"),
    "a gradient of one type of two": (lambda: sp.shard(with_gradient()), ValueError, "field 'x' requires a gradient"),
    "a name that is none": (lambda: sp.shard(small(), drop=["pos"]), ValueError, "no field \\['pos'\\]"),
    "a string of names": (lambda: sp.shard(small(), drop="x"), TypeError, "expected names"),
    "graphs by fractions": (lambda: sp.shard(small(batch=torch.zeros(5))), ValueError, "the field batch"),
    "a graph below 0": (lambda: sp.shard(small(batch=torch.full((5,), -1))), ValueError, "the field batch"),
    "no positions on one rank": (lambda: sp.shard(small(), by="space"), ValueError, "the field pos"),
    "parts by words": (lambda: sp.shard(small(), parts="metis"), TypeError, "are a str; expected integers"),
    "parts of None": (lambda: sp.shard(small(), parts=[None] * 5), TypeError, "are a list; expected integers"),
    "options by name": (lambda: sp.shard(small(), options="sar"), TypeError, "must be shardpass.Options"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_on_one_rank_too(case: str) -> None:
    mistake, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words):
        mistake()


def test_a_graph_and_a_model_of_other_ranks() -> None:
    def work(comm: Any) -> None:
        layer = GATConv(4, 3).double()
        data = awkward_graph(channels=4)
        data = Data(x=data.node["x"], edge_index=data.edge_index)
        for graph, model in (
            (sp.shard(data, comm), sp.pyg.wrap(copy.deepcopy(layer))),
            (sp.shard(data), sp.pyg.wrap(copy.deepcopy(layer), comm)),
        ):
            with pytest.raises(RefusedError, match="pass one communicator to both"):
                model(graph.x, graph)

    run(work, 3)


@pytest.mark.parametrize("ranks", [1, 3])
def test_whole_rows_inside_a_model(ranks: int) -> None:
    data = small()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = GATConv(4, 3).double()
            self.share: Any = None

        def forward(self, rows: Tensor, graph: Any) -> Tensor:
            out = self.layer(rows, graph)
            return out if self.share is None else self.share.whole(out)

    plain = Model()
    expected = plain(data.x, data.edge_index)

    def work(comm: Any) -> None:
        graph, model = sp.shard(data, comm), sp.pyg.wrap(copy.deepcopy(plain), comm)
        vars(model)["share"] = graph
        for _ in range(3):
            torch.testing.assert_close(model(graph.own(data.x), graph), expected)

    run(work, ranks)


def test_threads_of_one_process_are_alone() -> None:
    problems: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(3):
                graph, model = sp.shard(small()), sp.pyg.wrap(GATConv(4, 3).double())
                sp.sum(model(graph.x, graph).square().sum(1), None, graph.comm).backward()
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
