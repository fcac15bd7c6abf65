"""``Options(mode="auto")``: a plan for the ranks of a communicator decides the mode before the graph is loaded."""

import pytest
import torch
from torch_geometric.nn import GAT, SAGEConv
from torch_geometric.nn.aggr import MedianAggregation

import shardpass as sp
from shardpass.errors import PeerFailure, RefusedError

RANKS = 3


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 90, (2, 500), generator=generator)
    x, y = torch.rand(90, 5, generator=generator), torch.arange(90) % 3
    path = tmp_path_factory.mktemp("auto") / "store"
    sp.partition({"edge_index": edges, "x": x, "y": y, "train_mask": y > 0}, path, RANKS, "random")
    return path


def auto(budget):
    return sp.Options(mode="auto", memory_budget=budget)


def gat():
    return GAT(5, 8, 2, 3, heads=2, norm="batch_norm")


def decided(store, options, make=gat, **how):
    """What every rank's plan decides."""
    return sp.spawn(lambda comm: sp.plan(make(), store, comm=comm, options=options, **how).options, RANKS)


def losses(store, options):
    def rank(comm):
        with sp.seed(0, comm):
            model = gat()
        chosen = sp.plan(model, store, comm=comm, options=options).options if options.mode == "auto" else options
        graph = sp.load(store, comm, chosen)
        model = sp.pyg.wrap(model, comm, check=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            loss = sp.cross_entropy(model(graph.x, graph), graph.y, graph.train_mask, comm)
            optimizer.zero_grad()
            loss.backward()
            sp.sync_gradients(model, comm)
            optimizer.step()
            found.append(loss.item())
        return found

    return sp.spawn(rank, RANKS)


def test_every_rank_gets_the_fastest_mode_that_fits(store):
    first, *others = decided(store, auto("1GiB"))
    assert first.mode in ("keep", "halo") and first.memory_budget is None  # nothing is fetched twice if there is room
    assert all(options == first for options in others)
    assert losses(store, auto("1GiB")) == losses(store, sp.Options(mode=first.mode))


def test_the_plan_of_a_communicator_is_the_plan_for_its_ranks(store):
    torch.manual_seed(0)
    model = gat()
    found = sp.spawn(lambda comm: sp.plan(model, store, comm=comm, budget="1GiB"), RANKS)
    assert found == [sp.plan(model, store, [RANKS], budget="1GiB")] * RANKS


def test_other_options_stay(store):
    options = sp.Options(mode="auto", memory_budget="1GiB", prefetch=2, wire_dtype=torch.bfloat16)
    assert all((found.prefetch, found.wire_dtype) == (2, torch.bfloat16) for found in decided(store, options))


def test_nothing_fits_is_said(store):
    with pytest.raises(RefusedError, match=r"Nothing fits 1.0 MiB per rank. The smallest is .* on 3 ranks in mode"):
        decided(store, auto("1MiB"))


def test_an_undecided_mode_cannot_be_loaded(store):
    with pytest.raises(ValueError, match=r"mode='auto' must be decided before a graph is loaded: plan = "):
        sp.spawn(lambda comm: sp.load(store, comm, auto("1GiB")), RANKS)


def test_a_model_that_fails_on_rank_0_fails_on_all(store):
    told = {}

    def rank(comm):
        try:
            sp.plan(torch.nn.Linear(2, 2), store, comm=comm)
        except (TypeError, PeerFailure) as error:
            told[comm.rank] = error

    sp.spawn(rank, RANKS)
    assert isinstance(told[0], TypeError)
    assert all("rank 0 could not make the plan: TypeError" in str(told[rank]) for rank in (1, 2))


def test_models_of_whole_neighbourhoods_run_as_halo(store):
    class Median(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = SAGEConv(5, 3, aggr=MedianAggregation())

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    assert {options.mode for options in decided(store, auto("1GiB"), Median)} == {"halo"}


def test_auto_takes_dgl_models(store):
    conv = pytest.importorskip("dgl.nn")

    def make():
        return conv.GraphConv(5, 3, allow_zero_in_degree=True)

    assert len({options.mode for options in decided(store, auto("1GiB"), make, frontend="dgl")}) == 1
