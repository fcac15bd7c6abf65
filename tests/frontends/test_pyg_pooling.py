"""Readouts over ``graph.batch`` equal those of the whole graph: values, gradients of inputs and of parameters."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch_geometric.utils import degree, scatter, softmax

import shardpass as sp
from shardpass.core.graphs.batch_index import BatchIndex
from shardpass.frontends.pyg import modules
from shardpass.testing import Outcome, assert_same, assignments, cotangent, run, shard_in_memory

from .how_much import ONE_TO_FOUR, some_by_default
from .on_ranks import on_ranks, share
from .pyg_cases import GRAPH

BOUND = 1e-10
N = GRAPH.num_nodes
HISTOGRAM = torch.tensor([0, 3, 4, 5])
EXACT = {
    "SumAggregation": gnn.SumAggregation,
    "MeanAggregation": gnn.MeanAggregation,
    "MaxAggregation": gnn.MaxAggregation,
    "MinAggregation": gnn.MinAggregation,
    "MulAggregation": gnn.MulAggregation,
    "VarAggregation": gnn.VarAggregation,
    "VarAggregation semi": lambda: gnn.VarAggregation(semi_grad=True),
    "StdAggregation": gnn.StdAggregation,
    "SoftmaxAggregation": lambda: gnn.SoftmaxAggregation(learn=True, channels=5),
    "SoftmaxAggregation semi": lambda: gnn.SoftmaxAggregation(t=0.5, semi_grad=True),
    "PowerMeanAggregation": lambda: gnn.PowerMeanAggregation(learn=True),
    "MultiAggregation": lambda: gnn.MultiAggregation(["mean", "max", "std", "softmax"]),
    "MultiAggregation attn": lambda: gnn.MultiAggregation(
        ["mean", "max"], mode="attn", mode_kwargs={"in_channels": 5, "out_channels": 4, "num_heads": 2}
    ),
    "MultiAggregation fused": lambda: gnn.MultiAggregation(["mean", "max", "std", "var", "sum", "mul", "min"]),
    "DegreeScalerAggregation": lambda: gnn.DegreeScalerAggregation(
        ["mean", "max"],
        ["identity", "amplification", "attenuation", "linear", "inverse_linear"],
        HISTOGRAM,
        train_norm=True,
    ),
    "AttentionalAggregation": lambda: gnn.AttentionalAggregation(torch.nn.Linear(5, 1), torch.nn.Linear(5, 3)),
    "AttentionalAggregation channels": lambda: gnn.AttentionalAggregation(gnn.MLP([5, 4, 5], norm="graph_norm")),
    "Set2Set": lambda: gnn.Set2Set(5, processing_steps=3),
    "DeepSetsAggregation": lambda: gnn.DeepSetsAggregation(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)),
    "VariancePreservingAggregation": gnn.VariancePreservingAggregation,
}
POOLS = {
    "global_add_pool": gnn.global_add_pool,
    "global_mean_pool": gnn.global_mean_pool,
    "global_max_pool": gnn.global_max_pool,
    "softmax": lambda h, batch: gnn.global_add_pool(softmax(h, batch) * h, batch),
    "deviation from the mean": lambda h, batch: gnn.global_add_pool(
        (h - gnn.global_mean_pool(h, batch)[batch]) ** 4, batch
    ),
    "some of the nodes": lambda h, batch: gnn.global_mean_pool(h[h[:, 0] > 0], batch[h[:, 0] > 0]),
    "degree": lambda h, batch: gnn.global_add_pool(h, batch) / degree(batch, dtype=h.dtype).view(-1, 1),
    "bincount": lambda h, batch: gnn.global_add_pool(h, batch) / torch.bincount(batch).view(-1, 1),
    "index_add": lambda h, batch: h.new_zeros(1, h.size(1)).index_add(0, batch, h),
    "two tables": lambda h, batch: scatter(h.t(), batch, dim=1, reduce="max").t(),
}


class Readout(torch.nn.Module):
    """A layer, a readout, and a head; what the head gives is also handed back to the nodes."""

    def __init__(self, readout, ties):
        super().__init__()
        self.conv, self.readout, self.ties = gnn.GraphConv(5, 5), readout, ties
        self.head = torch.nn.LazyLinear(5)

    def forward(self, x, graph, batch):
        h = self.conv(x, graph)
        h = h.relu().round(decimals=0) * h if self.ties else h  # zeros, which tie
        pooled = self.head(self.readout(h, batch))
        return pooled, self.conv(x + pooled[batch], graph)


def evaluate(model, x, graph, batch, ids, comm):
    """Values and gradients of a loss that is partly of the graph, partly of the nodes."""
    x = x.clone().requires_grad_()
    pooled, rows = model(x, graph, batch)
    weights = cotangent(torch.empty(N, 5, dtype=torch.float64))[ids]
    loss = sp.replicated((pooled * cotangent(pooled)).sum(), comm)
    (loss + (rows * weights).sum()).backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return Outcome(rows.detach(), {"x": x.grad, "pooled": pooled.detach()}, grads)


def whole_and_model(readout, ties):
    torch.manual_seed(0)
    model = Readout(readout, ties).double()
    batch = torch.zeros(N, dtype=torch.long)
    with torch.no_grad():
        model(GRAPH.node["x"], GRAPH.edge_index, batch)  # gives the head its shape
    comm = sp.connect("local")
    return evaluate(copy.deepcopy(model), GRAPH.node["x"], GRAPH.edge_index, batch, torch.arange(N), comm), model


def assert_readout_exact(readout, ranks, ties=False):
    whole, model = whole_and_model(readout, ties)
    every = assignments(N, ranks, GRAPH.edge_index)
    for where, owners in every.items() if ranks != 3 else [("empty part", every["empty part"])]:

        def work(comm, owners=owners):
            graph = shard_in_memory(GRAPH, owners, comm)
            mine = sp.pyg.wrap(copy.deepcopy(model), comm, check=False)
            return graph.node_ids, evaluate(mine, graph.x, graph, graph.batch, graph.node_ids, comm)

        results = run(work, ranks)
        pooled = results[0][1].inputs["pooled"]
        assert all(torch.equal(own.inputs["pooled"], pooled) for _, own in results), "the same bits on every rank"
        assert_same(whole, put_together(whole, results), where)


def put_together(whole, results):
    """The outcomes of ranks as one: rows in their places, gradients of parameters as each of them has them."""
    found = Outcome(torch.full_like(whole.output, float("nan")))
    found.inputs = {"x": torch.full_like(whole.inputs["x"], float("nan")), "pooled": results[0][1].inputs["pooled"]}
    for ids, own in results:
        found.output[ids], found.inputs["x"][ids] = own.output, own.inputs["x"]
    found.parameters = results[-1][1].parameters
    return found


@pytest.mark.parametrize("ranks", ONE_TO_FOUR)
@pytest.mark.parametrize("name", EXACT)
def test_aggregation_as_readout(name, ranks):
    assert_readout_exact(EXACT[name](), ranks)


class Called(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, h, batch):
        return self.function(h, batch)


@pytest.mark.parametrize("ranks", ONE_TO_FOUR)
@pytest.mark.parametrize("name", POOLS)
def test_pooling_function(name, ranks):
    assert_readout_exact(Called(POOLS[name]), ranks)


@pytest.mark.parametrize("ranks", ONE_TO_FOUR)
@pytest.mark.parametrize("name", ["MaxAggregation", "MinAggregation", "MulAggregation"])
def test_ties_and_zeros_share_the_gradient_as_on_the_whole_graph(name, ranks):
    assert_readout_exact(EXACT[name](), ranks, ties=True)


SELF_CHECKED = ("MeanAggregation", "SoftmaxAggregation", "MultiAggregation attn", "DegreeScalerAggregation", "Set2Set")


@pytest.mark.parametrize("name", some_by_default(EXACT, *SELF_CHECKED))
def test_it_is_followed_without_a_warning(name, recwarn):
    owners = assignments(N, 2, GRAPH.edge_index)["random"]
    _, model = whole_and_model(EXACT[name](), ties=False)

    def work(comm):
        graph = shard_in_memory(GRAPH, owners, comm)
        sp.pyg.wrap(copy.deepcopy(model), comm)(graph.x, graph, graph.batch)

    run(work, 2)
    assert not recwarn.list


def test_every_readout_of_the_table_is_tested():
    tested = {kind.__name__ for make in EXACT.values() for kind in map(type, make().modules())}
    assert tested | {"Aggregation"} >= modules.READOUTS  # the abstract base


@on_ranks(2)
def test_the_batch_looks_like_a_tensor(comm):
    batch = BatchIndex.of(3 * comm.rank, comm)
    assert batch.shape == (3 * comm.rank,) and batch.dtype == torch.long and len(batch) == 3 * comm.rank
    assert int(batch.max()) == 0 and batch.numel() > 0, "also on a rank without nodes"
    several = BatchIndex.wrap(torch.tensor([1, 0, 1]), 3, comm, num_graphs=3)
    for ones in (torch.nn.functional.one_hot(several), torch.nn.functional.one_hot(several, num_classes=3)):
        assert ones.tolist() == [[0, 1, 0], [1, 0, 0], [0, 1, 0]]
    assert "0" in repr(BatchIndex.of(2, comm)) and bool((batch == 0).all()) and copy.deepcopy(batch) is batch
    assert isinstance(batch.clone().long().to("cpu").view(-1, 1), BatchIndex)
    assert torch.bincount(batch, minlength=3).tolist() == [3, 0, 0]
    assert copy.copy(batch) is batch


@on_ranks(2)
def test_counts_do_not_communicate_in_backward(comm):
    total = degree(BatchIndex.of(3, comm), dtype=torch.float32)
    assert (total.requires_grad, total.tolist()) == (False, [6.0])


def test_a_rank_that_does_not_use_the_pooled_value_takes_part_in_backward():
    def work(comm):
        x = torch.ones(2, 5).requires_grad_()
        model = sp.pyg.wrap(Called(lambda h, batch: (h * 2, gnn.global_mean_pool(h, batch))), comm)
        rows, pooled = model(x, BatchIndex.of(2, comm))
        (pooled.sum() if comm.rank else rows.sum()).backward()
        return x.grad

    first, second = run(work, 2)
    assert torch.equal(first, torch.full((2, 5), 2.25)) and torch.equal(second, torch.full((2, 5), 0.25))


@on_ranks(3)
def test_pooling_outside_the_wrapped_model_is_exact_too(comm):
    x = GRAPH.node["x"].clone().requires_grad_()
    (gnn.global_max_pool(x, torch.zeros(N, dtype=torch.long)) ** 2).sum().backward()
    graph = share(GRAPH, comm, "empty part")
    own = graph.x.clone().requires_grad_()
    sp.replicated((gnn.global_max_pool(own, graph.batch) ** 2).sum(), comm).backward()
    torch.testing.assert_close(own.grad, x.grad[graph.node_ids], rtol=0, atol=BOUND)


@on_ranks(2)
def test_half_precision_accumulates_in_float32(comm):
    x = torch.full((4000, 1), 1.0, dtype=torch.bfloat16)
    assert float(gnn.global_add_pool(x, BatchIndex.of(4000, comm))) == 8000.0
