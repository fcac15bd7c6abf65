"""Whole models by way of Triton's kernels, interpreted: the path that tensors of a GPU take, proven without one."""

import copy
import itertools

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn

import shardpass as sp
from shardpass.testing import WholeGraph, assert_exact, assignments, shard_in_memory

NUM_NODES = 13


def small_graph():
    """Self-loops, edges twice, a hub, an isolated node; few rows, since the interpreter takes milliseconds for each."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(0, NUM_NODES - 1, (2, 50), generator=generator)
    ends[1, :15], ends[:, 15:18], ends[:, 18:20] = 2, torch.arange(3), ends[:, 20:22]
    x = torch.randn(NUM_NODES, 4, generator=generator, dtype=torch.float64)
    weights = torch.rand(50, generator=generator, dtype=torch.float64)
    return WholeGraph(NUM_NODES, ends, {"x": x}, {"edge_weight": weights})


class GAT(nn.Module):
    """Three layers of attention in closed form."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.second = gnn.GATConv(4, 3, heads=2, dropout=dropout), gnn.GATv2Conv(6, 5)
        self.third = gnn.TransformerConv(5, 2, heads=2)

    def forward(self, x, edge_index, edge_weight):
        return self.third(self.second(self.first(x, edge_index).relu(), edge_index), edge_index)


class Others(nn.Module):
    """Sums of plain and weighted copies, max, the gradients of weights, and scores that the body computes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = gnn.SAGEConv(4, 6, aggr=["sum", "max"]), gnn.GCNConv(6, 4)
        self.third = gnn.TransformerConv(4, 3, heads=2, edge_dim=1)

    def forward(self, x, edge_index, edge_weight):
        x = self.second(self.first(x, edge_index).relu(), edge_index, edge_weight)
        return self.third(x, edge_index, edge_weight.view(-1, 1))


OPTIONS = {
    "push": sp.Options(backward="push"),
    "pull": sp.Options(backward="pull"),
    "keep": sp.Options(mode="keep", block_rows=3),
}


@pytest.mark.long
@pytest.mark.parametrize(("options", "made"), [*itertools.product(OPTIONS, [GAT, Others])])
def test_models_equal_the_whole_graph(triton_device, made, options):
    if triton_device.type == "cuda":
        pytest.skip("ranks that are threads have tensors on the CPU")
    torch.manual_seed(0)
    model, graph = made().double(), small_graph()

    def call(model, inputs, graph):
        where = graph if isinstance(graph, torch.Tensor) else graph.edge_index
        return model(inputs["x"], where, inputs["edge_weight"])

    owners = {"random": assignments(NUM_NODES, 2, graph.edge_index)["random"]}
    chosen = OPTIONS[options]
    assert_exact(model, graph, call, sp.pyg.wrap, ranks=2, modes=(chosen.mode,), owners=owners, options=chosen)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "options", "dropout"), [
    (1, "push", 0.5), (2, "pull", 0.0), (2, "push", 0.0),
])  # fmt: skip
def test_the_order_of_programs_changes_no_bit(any_order, ranks, options, dropout, monkeypatch):
    """Nor is anything lost: the kernels of the CPU, whose factors of dropout are the same, find the same gradients."""
    if any_order.device.type == "cuda":
        pytest.skip("ranks that are threads have tensors on the CPU")
    torch.manual_seed(0)
    whole, owners, alone = small_graph(), torch.arange(NUM_NODES) % ranks, GAT(dropout).double()

    def work(comm):
        model = sp.pyg.wrap(copy.deepcopy(alone), comm)
        graph = shard_in_memory(whole, owners, comm, OPTIONS[options])
        x = graph.x.clone().requires_grad_()
        out = model(x, graph.edge_index, None)
        out.square().sum().backward()
        return out.detach(), x.grad, *(parameter.grad for parameter in model.parameters())

    def run():
        torch.manual_seed(1)
        return sp.spawn(work, ranks)

    found = []
    for turn in range(2):
        with any_order.turned(turn):
            found.append(run())
    monkeypatch.setenv("SHARDPASS_TRITON", "0")
    for mine, turned, other in zip(*found, run()):
        assert all(map(torch.equal, mine, turned))
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


@pytest.mark.long
def test_a_profiler_compile_and_gradcheck_see_the_kernels(triton_device):
    """Kernels are no operators of torch: only functions of autograd call them, which `torch.compile` leaves alone."""
    if triton_device.type == "cuda":
        pytest.skip("the graph is on the CPU")
    torch.manual_seed(0)
    comm, plain = sp.connect("local"), gnn.GATv2Conv(4, 2, heads=2).double()
    graph = shard_in_memory(small_graph(), torch.zeros(NUM_NODES, dtype=torch.int64), comm)
    model = sp.pyg.wrap(copy.deepcopy(plain), comm)
    x = graph.x.clone().requires_grad_()
    whole = plain(small_graph().node["x"], small_graph().edge_index)[graph.node_ids]
    with torch.profiler.profile() as profiler:
        found = torch.compile(model, backend="aot_eager")(x, graph)
        found.sum().backward()
    torch.testing.assert_close(found, whole)
    names = {event.key for event in profiler.key_averages()}
    assert {f"shardpass::{name}" for name in ("attend_rows", "source_adjoint", "destination_adjoint")} <= names
    torch.autograd.gradcheck(lambda x: model(x, graph.edge_index), (x,), fast_mode=True)
