"""`shard`: graphs in memory. Every parity test of layers and models runs on such graphs; here is what is theirs."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import dgl
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv

import shardpass as sp
from shardpass.errors import DivergenceError, PeerFailure
from shardpass.testing import awkward_graph, run

WHOLE = awkward_graph()
LAYER = GATConv(5, 4, heads=2, edge_dim=3).double()
N, E = WHOLE.num_nodes, WHOLE.edge_index.size(1)


def graph_of(**changes: Any) -> Data:
    y = torch.arange(N) % 3
    fields = {"x": WHOLE.node["x"], "edge_index": WHOLE.edge_index, "edge_attr": WHOLE.edge["edge_attr"], "y": y}
    return Data(**fields | changes)


def typed() -> HeteroData:
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(7, 2), torch.randn(4, 3)
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1, 6, 3], [3, 3, 0, 1]])
    data["b", "back", "a"].edge_index = torch.tensor([[0, 1, 3, 3], [3, 3, 0, 6]])
    return data


def owners(ranks: int) -> Tensor:
    return torch.randint(0, ranks, (N,), generator=torch.Generator().manual_seed(ranks))


def trained(comm: Any, graph: Any) -> dict[str, Tensor]:
    """Output and gradients of a layer."""
    model = sp.pyg.wrap(copy.deepcopy(LAYER), comm)
    x = graph.x.clone().requires_grad_()
    out = model(x, graph, graph.edge_attr)
    (out**2).sum().backward()
    return {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_store_of_the_same_parts_gives_the_same_bits(tmp_path: Any, ranks: int) -> None:
    sp.partition(graph_of(), tmp_path, ranks, assignment=owners(ranks))

    def work(comm: Any) -> list[float]:
        stored, sharded = sp.load(tmp_path, comm), sp.shard(graph_of(), comm, parts=owners(ranks))
        assert torch.equal(stored.node_ids, sharded.node_ids) and stored.num_classes == sharded.num_classes == 3
        first, second = trained(comm, stored), trained(comm, sharded)
        return [float((first[name] - second[name]).abs().max()) for name in first]

    assert all(set(found) == {0.0} for found in run(work, ranks))


@pytest.mark.parametrize("by", ["range", "space"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_come_back_in_the_order_of_the_user(ranks: int, by: Any) -> None:
    data = graph_of(pos=torch.rand(N, 2, generator=torch.Generator().manual_seed(1)))

    def work(comm: Any) -> None:
        graph = sp.shard(data, comm, by=by)
        assert torch.equal(graph.own(data.x), graph.x) and torch.equal(graph.whole(graph.y), data.y)
        assert torch.equal(graph.own(data.edge_attr, "edges"), graph.edge_attr)
        assert torch.equal(graph.whole(graph.edge_attr, "edges"), data.edge_attr)
        x = graph.x.clone().requires_grad_()
        weights = torch.arange(N, dtype=torch.float64).unsqueeze(1)
        sp.replicated((graph.whole(x) * weights).sum(), comm).backward()
        torch.testing.assert_close(x.grad, weights[graph.node_ids].expand_as(x))
        with pytest.raises(ValueError, match=f"a row for each of its {N} nodes"):
            graph.own(data.edge_attr)
        with pytest.raises(ValueError, match="with a row for each of this rank's"):
            graph.whole(torch.zeros(N + 1, 2))
        sizes = comm.all_gather_object(int(graph.num_own_nodes))
        assert max(sizes) - min(sizes) <= 1

    run(work, ranks)


def test_two_lines_change_a_script_of_one_process() -> None:
    torch.manual_seed(0)
    plain = GATConv(5, 4, heads=2, edge_dim=3).double()
    expected = plain(WHOLE.node["x"], WHOLE.edge_index, WHOLE.edge["edge_attr"])
    graph, model = sp.shard(graph_of()), sp.pyg.wrap(plain)
    assert graph.x.data_ptr() == WHOLE.node["x"].data_ptr()  # nothing is copied
    torch.testing.assert_close(model(graph.x, graph, graph.edge_attr), expected)
    layer = dgl.nn.GraphConv(5, 3).double()
    made = dgl.add_self_loop(dgl.graph((WHOLE.edge_index[0], WHOLE.edge_index[1]), num_nodes=N))
    expected = layer(made, WHOLE.node["x"])
    torch.testing.assert_close(sp.dgl.wrap(layer)(sp.shard(made), WHOLE.node["x"]), expected)


@pytest.mark.parametrize("make", [typed, lambda: {"edge_index": WHOLE.edge_index, "x": WHOLE.node["x"]}])
def test_other_kinds_of_data(make: Callable[[], Any]) -> None:
    data = make()

    def work(comm: Any) -> None:
        graph = sp.shard(data, comm)
        if isinstance(data, dict):
            assert torch.equal(graph.whole(graph.x), data["x"])
            return
        assert graph.metadata() == data.metadata()
        assert torch.equal(graph.whole(graph["b"].x, "b"), data["b"].x)
        for kind in data.edge_types:
            ids = torch.cat(comm.all_gather(graph.relations[kind].edge_ids))
            assert ids.sort()[0].tolist() == [0, 1, 2, 3]

    run(work, 3)


def test_the_same_edges_are_found_again_until_they_change() -> None:
    def work(comm: Any) -> None:
        data = graph_of(edge_index=WHOLE.edge_index.clone())
        first = sp.shard(data, comm)
        data.x = data.x + 1
        second = sp.shard(data, comm)
        assert second.relation.plan is first.relation.plan and torch.equal(second.x, first.x + 1)
        data.edge_index[0, 0] = 5
        assert sp.shard(data, comm).relation.plan is not first.relation.plan
        data.edge_index.data[1, 0] = 7  # which raises no version
        third = sp.shard(data, comm)
        at = (third.edge_ids == 0).nonzero()
        assert sum(comm.all_gather_object(len(at))) == 1
        assert third.node_ids[third.edge_index[1][at]] == 7 if len(at) else True

    run(work, 3)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_graph_of_dgl_is_found_again_until_it_changes(ranks: int) -> None:
    made = [dgl.graph((WHOLE.edge_index[0], WHOLE.edge_index[1]), num_nodes=N) for _ in range(ranks)]
    parts = owners(ranks)

    def work(comm: Any) -> None:
        g = made[comm.rank]
        first = sp.shard(g, comm, parts=parts)
        g.ndata["x"] = WHOLE.node["x"]
        second = sp.shard(g, comm, parts=parts)
        assert second.relation.plan is first.relation.plan and "x" in second.node
        assert sp.shard(g, comm).relation.plan is not first.relation.plan
        g.add_edges(torch.tensor([0]), torch.tensor([N - 1]))
        g.remove_edges(torch.tensor([0]))
        third = sp.shard(g, comm, parts=parts)
        assert third.relation.plan is not first.relation.plan and third.total_edges == E
        at = (third.edge_ids == E - 1).nonzero()
        assert third.node_ids[third.edge_index[1][at]] == N - 1 if len(at) else True
        plan = weakref.ref(third.relation.plan)
        del first, second, third, g
        made[comm.rank] = None
        gc.collect()
        assert plan() is None

    run(work, ranks)


def test_a_graph_that_is_gone_leaves_nothing() -> None:
    def work(comm: Any) -> None:
        plans = []
        for step in range(12):
            data = graph_of(edge_index=(WHOLE.edge_index + step) % N)
            graph = sp.shard(data, comm)
            trained(comm, graph)
            plans.append(weakref.ref(graph.relation.plan))
        del data, graph
        sp.shard(graph_of(), comm)
        gc.collect()
        assert [plan() for plan in plans] == [None] * 12

    run(work, 2)


def test_fields_of_graphs_that_are_gone_are_forgotten() -> None:
    """A script's own rows are followed for as long as it runs, over any number of graphs."""

    def work(comm: Any) -> None:
        counts = []
        for step in range(40):
            graph = sp.shard(
                {"edge_index": WHOLE.edge_index % (N - step % 20), "x": WHOLE.node["x"][: N - step % 20]}, comm
            )
            assert graph.x.size(0) == graph.num_own_nodes
            if step % 20 == 19:
                comm.barrier()
                gc.collect()
                counts.append(sum(type(one).__name__ == "RowSet" for one in gc.get_objects()))
                comm.barrier()
        assert counts[1] < counts[0] + 10, counts

    run(work, 2)


BAD: dict[str, tuple[Callable[[int], dict[str, Any]], type[Exception], str]] = {
    "a part that is no rank": (lambda _: {"parts": torch.full((N,), 3)}, ValueError, "3 at position 0 is no rank"),
    "parts of other nodes": (lambda _: {"parts": torch.zeros(3).long()}, ValueError, "one for each node"),
    "fractions for parts": (lambda _: {"parts": torch.rand(N)}, TypeError, "expected integers"),
    "parts of unknown types": (lambda _: {"parts": {"user": torch.zeros(N)}}, ValueError, "no node types"),
    "no such way": (lambda _: {"by": "metis"}, ValueError, "expected one of"),
    "no positions": (lambda _: {"by": "space"}, ValueError, "the field pos"),
    "NaN in positions": (
        lambda _: {"data": graph_of(pos=torch.full((N, 3), float("nan"))), "by": "space"}, ValueError, "node 0 is",
    ),
    "an edge out of range": (
        lambda _: {"data": graph_of(edge_index=torch.tensor([[0, N], [1, 2]]), edge_attr=None)}, ValueError,
        "outside the valid interval",
    ),
    "a list of graphs": (lambda _: {"data": [graph_of(), graph_of()]}, TypeError, "joins several"),
    "other edges on a rank": (
        lambda rank: {"data": graph_of(edge_index=(WHOLE.edge_index + (rank == 1)) % N)}, DivergenceError,
        "must shard the same edges of .*: rank 0 has .* rank 1 has",
    ),
    "other features on a rank": (
        lambda rank: {"data": graph_of(x=WHOLE.node["x"] + (rank == 2))}, DivergenceError,
        "the same field 'x' of .* rank 2 has",
    ),
    "other parts on a rank": (
        lambda rank: {"parts": torch.full((N,), int(rank == 1))}, DivergenceError, "the same parts of 'node'",
    ),
    "other options on a rank": (
        lambda rank: {"options": sp.Options(mode="sar" if rank else "keep")}, DivergenceError,
        "the same options: rank 0 has .*keep.* rank 1 has .*sar",
    ),
    "unsound data on one rank": (
        lambda rank: {"data": graph_of(x=WHOLE.node["x"][: N - (rank == 1)])}, (PeerFailure, ValueError),
        "field 'y' of the shape .* neither per node",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_told_on_every_rank(case: str) -> None:
    given, kind, words = BAD[case]

    def work(comm: Any) -> None:
        arguments = given(comm.rank)
        with pytest.raises(kind, match=words):
            sp.shard(arguments.pop("data", graph_of()), comm, **arguments)
        sp.shard(graph_of(), comm)  # the ranks go on together

    run(work, 3)


def test_graphs_without_nodes_or_edges() -> None:
    def work(comm: Any) -> None:
        without = sp.shard({"edge_index": torch.zeros(2, 0, dtype=torch.long), "x": torch.ones(2, 3)}, comm)
        model = sp.pyg.wrap(GATConv(3, 2), comm)
        assert model(without.x, without).shape == (without.x.size(0), 2)
        empty = sp.shard({"edge_index": torch.zeros(2, 0, dtype=torch.long), "x": torch.ones(0, 3)}, comm)
        assert empty.total_nodes == empty.total_edges == 0

    run(work, 3)
