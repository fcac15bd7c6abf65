"""PyG's norms with the statistics of all ranks' nodes equal the unmodified norm on the whole graph."""

import copy
import pickle
from functools import partial

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.core.graphs.batch_index import BatchIndex
from shardpass.errors import RefusedError, ShardpassError
from shardpass.frontends.pyg.norms import DISTRIBUTED
from shardpass.testing import assignments, run, shard_in_memory

from .how_much import ONE_PART_EMPTY, ONE_TO_FOUR, ONE_TWO_FOUR, assert_exact_in
from .on_ranks import on_ranks, share
from .pyg_cases import GRAPH

N = GRAPH.num_nodes
KINDS = torch.arange(N) % 3  # of four types: one has no rows anywhere
KINDS[:7] = 2
WITH_BATCH = {
    "GraphNorm": lambda: gnn.GraphNorm(5),
    "InstanceNorm": lambda: gnn.InstanceNorm(5),
    "InstanceNorm affine, tracked": lambda: gnn.InstanceNorm(5, affine=True, track_running_stats=True, momentum=0.3),
    "LayerNorm": lambda: gnn.LayerNorm(5),
    "LayerNorm eps": lambda: gnn.LayerNorm(5, eps=0.1, affine=False),
    "LayerNorm node": lambda: gnn.LayerNorm(5, mode="node"),
    "PairNorm": lambda: gnn.PairNorm(scale=2.0),
    "PairNorm individually": lambda: gnn.PairNorm(scale_individually=True, eps=0.01),
    "MeanSubtractionNorm": gnn.MeanSubtractionNorm,
    "GraphSizeNorm": gnn.GraphSizeNorm,
}
PLAIN = {
    "BatchNorm": lambda: gnn.BatchNorm(5),
    "BatchNorm cumulative": lambda: gnn.BatchNorm(5, momentum=None, affine=False),
    "BatchNorm untracked": lambda: gnn.BatchNorm(5, track_running_stats=False),
    "BatchNorm single": lambda: gnn.BatchNorm(5, allow_single_element=True),
    "DiffGroupNorm": lambda: gnn.DiffGroupNorm(5, groups=3, lamda=0.5),
    "DiffGroupNorm untracked": lambda: gnn.DiffGroupNorm(5, 2, affine=False, track_running_stats=False),
    "HeteroBatchNorm": lambda: gnn.HeteroBatchNorm(5, 4),
    "HeteroBatchNorm cumulative": lambda: gnn.HeteroBatchNorm(5, 4, momentum=None, affine=False),
    "HeteroBatchNorm untracked": lambda: gnn.HeteroBatchNorm(5, 4, track_running_stats=False),
    "HeteroLayerNorm": lambda: gnn.HeteroLayerNorm(5, 4),
    "MessageNorm": lambda: gnn.MessageNorm(learn_scale=True),
}


class Around(torch.nn.Module):
    """A layer before, the norm, a layer after: gradients pass through the statistics from both sides."""

    def __init__(self, norm, batch=None):
        super().__init__()
        self.before, self.norm, self.after = torch.nn.Linear(5, 5), norm, torch.nn.Linear(5, 3)
        self.batch = batch

    def forward(self, x, graph, kinds):
        h = self.before(x)
        if isinstance(self.norm, gnn.MessageNorm):
            h = self.norm(x, h)
        elif isinstance(self.norm, (gnn.HeteroBatchNorm, gnn.HeteroLayerNorm)):
            h = self.norm(h, kinds)
        else:
            h = self.norm(h, self.batch) if self.batch is not None else self.norm(h)
        return self.after(h.relu())


def perturbed(norm):
    """Parameters and running statistics that are not the neutral ones."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in [*norm.parameters(), *norm.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(torch.rand(tensor.shape, generator=generator) * 0.5)
    return norm


def call_without_batch(model, inputs, graph):
    whole = isinstance(graph, torch.Tensor)
    kinds = KINDS if whole else KINDS[graph.node_ids]
    return model(inputs["x"] + 3, graph, kinds)


def call_with_batch(model, inputs, graph):
    model.batch = torch.zeros(N, dtype=torch.long) if isinstance(graph, torch.Tensor) else graph.batch
    return call_without_batch(model, inputs, graph)


def assert_norm_exact(norm, call, ranks, training):
    torch.manual_seed(0)
    model = Around(perturbed(norm)).double().train(training)
    assert_exact_in(ONE_PART_EMPTY, model, GRAPH, call, sp.pyg.wrap, ranks)


def trains_or_not(norms):
    """Names, and whether it trains. By default only those that track statistics are evaluated."""
    return [
        pytest.param(name, training, marks=[] if training or any(True for _ in make().buffers()) else pytest.mark.long)
        for name, make in norms.items()
        for training in (True, False)
    ]


@pytest.mark.parametrize("ranks", ONE_TO_FOUR)
@pytest.mark.parametrize(("name", "training"), trains_or_not(WITH_BATCH | PLAIN))
def test_norm_without_batch(name, ranks, training):
    assert_norm_exact({**WITH_BATCH, **PLAIN}[name](), call_without_batch, ranks, training)


@pytest.mark.parametrize("ranks", ONE_TO_FOUR)
@pytest.mark.parametrize(("name", "training"), trains_or_not(WITH_BATCH))
def test_norm_with_the_batch_of_the_graph(name, ranks, training):
    assert_norm_exact(WITH_BATCH[name](), call_with_batch, ranks, training)


def test_every_norm_that_is_swapped_is_tested_here():
    tested = {type(make()) for make in {**WITH_BATCH, **PLAIN}.values()}
    assert set(DISTRIBUTED) <= tested


def test_state_and_class_look_as_before():
    for make in {**WITH_BATCH, **PLAIN}.values():
        plain = make()
        comm = sp.connect("local")
        wrapped = sp.pyg.wrap(copy.deepcopy(plain), comm)
        assert isinstance(wrapped, type(plain))
        assert list(wrapped.state_dict()) == list(plain.state_dict())
        wrapped.load_state_dict(plain.state_dict())
        twin = copy.deepcopy(wrapped)
        assert getattr(twin, "comm", comm) is comm


def test_a_pickled_norm_says_what_it_lacks():
    model = Around(gnn.GraphNorm(5))
    sp.pyg.wrap(torch.nn.Sequential(model), sp.connect("local"))
    norm = pickle.loads(pickle.dumps(model.norm))
    with pytest.raises(ShardpassError, match="has no communicator"):
        norm(torch.randn(3, 5))


@on_ranks(2)
def test_evaluation_with_running_statistics_does_not_communicate(comm):
    model = sp.pyg.wrap(gnn.InstanceNorm(5, track_running_stats=True).eval(), comm)
    calls = comm.calls
    model(torch.randn(3, 5), BatchIndex.of(3, comm))
    assert comm.calls == calls


class Normed(torch.nn.Module):
    """BatchNorm over messages, or over nodes."""

    def __init__(self, over):
        super().__init__()
        mlp = torch.nn.Sequential(torch.nn.Linear(10, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU())
        self.conv = gnn.EdgeConv(mlp, aggr="mean") if over == "messages" else gnn.GCNConv(5, 6)
        self.norm = torch.nn.Identity() if over == "messages" else torch.nn.BatchNorm1d(6)

    def forward(self, x, graph):
        return self.norm(self.conv(x, graph)).relu()


def trained_then_evaluated(model, x, graph, is_mixed=False, sync=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(2):
        optimizer.zero_grad()
        outs = [model.eval()(x, graph)] if is_mixed else []
        outs.append(model.train()(x, graph))  # changes the statistics that backward of the first reads, as in torch
        sum(out.tanh().square().sum() for out in outs).backward()
        sync()
        optimizer.step()
    assert all(buffer.grad_fn is None for buffer in model.buffers())
    return model.eval()(x, graph).detach()


@pytest.mark.parametrize(("over", "is_mixed"), [("messages", False), ("nodes", True)])
@on_ranks(1, 3)
def test_evaluation_before_and_after_training(comm, over, is_mixed):
    torch.manual_seed(0)
    plain = Normed(over).double()
    expected = trained_then_evaluated(copy.deepcopy(plain), GRAPH.node["x"], GRAPH.edge_index, is_mixed)
    graph = share(GRAPH, comm)
    model = sp.pyg.wrap(copy.deepcopy(plain), comm)
    sync = partial(sp.sync_gradients, model, comm)
    ids, found = graph.node_ids, trained_then_evaluated(model, graph.x, graph, is_mixed, sync)
    torch.testing.assert_close(found, expected[ids], rtol=1e-9, atol=1e-9)


@on_ranks(1)
def test_backward_through_messages_whose_norm_has_changed_is_refused(comm):
    graph = shard_in_memory(GRAPH, torch.zeros(N, dtype=torch.long), comm)
    model = sp.pyg.wrap(Normed("messages").double(), comm)
    with pytest.raises(RefusedError, match=r"sum\(out.*: a BatchNorm of EdgeConv was in evaluation"):
        trained_then_evaluated(model, graph.x, graph, is_mixed=True)


def test_float32_statistics_are_stable():
    torch.manual_seed(0)
    x = torch.randn(4000, 5) + 3e4
    x = (x * 64).round() / 64  # so that the sum is all that rounds
    ids = torch.arange(4000)
    split = [0, 1000, 2900, 100]
    for make in (lambda: gnn.GraphNorm(5), lambda: gnn.InstanceNorm(5), lambda: gnn.LayerNorm(5), gnn.PairNorm):
        expected = make().double()(x.double()).detach()

        def work(comm, make=make):
            rows = ids.split(split)[comm.rank]
            return sp.pyg.wrap(make(), comm)(x[rows])

        found = torch.cat(run(work, 4)).detach()
        assert found.dtype == torch.float32
        assert float((found - expected).abs().max()) < 1e-5, make


@pytest.mark.parametrize("name", ["BatchNorm", "GraphNorm", "InstanceNorm", "MeanSubtractionNorm"])
@on_ranks(3)
def test_a_constant_column_becomes_exactly_zero(comm, name):
    """So a ReLU behind the norm stays shut, as it does where plain PyG computes the mean without rounding."""
    norm = {**PLAIN, **WITH_BATCH}[name]
    graph = shard_in_memory(GRAPH, assignments(N, 3, GRAPH.edge_index)["random"], comm)
    x = graph.x.clone()
    x[:, :3] = torch.tensor([0.1, 1 / 3, 7e5], dtype=torch.float64)
    x.requires_grad_()
    out = sp.pyg.wrap(norm().double(), comm)(x)
    assert not out[:, :3].any() and out[:, 3:].all()
    out.relu().sum().backward()
    assert not x.grad[:, :3].any()


def test_a_mixture_of_dtypes_gives_what_pyg_gives():
    def work(comm):
        return sp.pyg.wrap(gnn.GraphNorm(5), comm)(torch.randn(6, 5).to(torch.bfloat16)).dtype

    assert run(work, 2) == [torch.float32] * 2
    assert gnn.GraphNorm(5)(torch.randn(6, 5).to(torch.bfloat16)).dtype == torch.float32


@on_ranks(2)
def test_zeros_are_the_batch_of_one_graph(comm):
    norm = sp.pyg.wrap(gnn.LayerNorm(5), comm)
    x = torch.randn(4, 5)
    ordinary, stand_in = norm(x, torch.zeros(4, dtype=torch.long)), norm(x, BatchIndex.of(4, comm))
    assert torch.equal(ordinary, stand_in)


def test_a_single_node_on_all_ranks():
    torch.manual_seed(0)
    single = perturbed(gnn.BatchNorm(5, allow_single_element=True))
    row = torch.randn(1, 5)
    expected = single(row)

    def work(comm):
        norm = sp.pyg.wrap(copy.deepcopy(single), comm)
        out = norm(row[: comm.rank])  # on the second rank
        with pytest.raises(ValueError, match="more than 1 spatial element"):
            sp.pyg.wrap(gnn.InstanceNorm(5), comm)(row[: comm.rank])
        with pytest.raises(RefusedError, match="one graph-level row and one node per rank look alike"):
            norm(row)
        return out

    torch.testing.assert_close(torch.cat(run(work, 2)), expected)


class InMessage(gnn.MessagePassing):
    """A norm over all edges of the graph."""

    def __init__(self):
        super().__init__(aggr="sum")
        self.norm = gnn.GraphNorm(5)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return self.norm(x_j)


@pytest.mark.parametrize("ranks", ONE_TO_FOUR)
def test_a_norm_inside_a_message_is_over_all_edges_in_halo_mode(ranks):
    model = InMessage().double()

    def call(m, inputs, graph):
        return m(inputs["x"], graph)

    assert_exact_in(((), ("halo",)), model, GRAPH, call, sp.pyg.wrap, ranks)


@pytest.mark.parametrize("ranks", ONE_TWO_FOUR)
@pytest.mark.parametrize("norm", ["graph_norm", "pair_norm", "layer_norm", "instance_norm", "diff_group_norm"])
def test_models_with_norms(norm, ranks):
    torch.manual_seed(0)
    norm_kwargs = {"groups": 2} if norm == "diff_group_norm" else None
    model = gnn.GIN(5, 8, 2, 4, norm=norm, norm_kwargs=norm_kwargs).double()

    def call(m, inputs, graph):
        batch = torch.zeros(N, dtype=torch.long) if isinstance(graph, torch.Tensor) else graph.batch
        return m(inputs["x"], graph, batch=batch) if m.supports_norm_batch else m(inputs["x"], graph)

    assert_exact_in(ONE_PART_EMPTY, model, GRAPH, call, sp.pyg.wrap, ranks)
