"""Complex numbers and mixed precision: as exact as on the whole graph."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch_geometric.utils import softmax

import shardpass as sp
from shardpass.core.training import mean
from shardpass.errors import RefusedError
from shardpass.testing import assert_exact, assignments, cotangent, run, shard_in_memory

from .how_much import assert_case_exact, in_turn, one_each
from .pyg_cases import GRAPH

MESSAGES = {
    "weighted": lambda p, x_i, x_j, w: w.view(-1, 1) * x_j,
    "by a parameter": lambda p, x_i, x_j, w: p * x_j,
    "conjugated": lambda p, x_i, x_j, w: x_j.conj() * x_i * p,
    "by a phase": lambda p, x_i, x_j, w: torch.polar(w.abs(), w.angle()).view(-1, 1) * x_j,
    "by a score": lambda p, x_i, x_j, w: (x_i * x_j.conj()).sum(-1, keepdim=True) * x_j * p,
    "of real parts": lambda p, x_i, x_j, w: torch.complex(x_j.abs(), x_i.imag),
}


class Complex(gnn.MessagePassing):
    def __init__(self, message):
        super().__init__(aggr="add")
        self.of = MESSAGES[message]
        self.p = nn.Parameter(torch.randn(5, 2))

    def forward(self, x, edge_index, weight):
        rows = torch.complex(x, x.flip(1) - 0.3)
        out = self.propagate(edge_index, x=rows, w=torch.complex(weight, 0.5 - weight))
        return torch.view_as_real(out).flatten(1)

    def message(self, x_i, x_j, w):
        return self.of(torch.view_as_complex(self.p), x_i, x_j, w)


@pytest.mark.parametrize(("message", "ranks", "modes"), in_turn(MESSAGES))
def test_complex_messages(message, ranks, modes):
    def call(model, fields, graph):
        return model(fields["x"], graph, fields["edge_weight"])

    assert_case_exact((lambda: Complex(message), call), GRAPH, sp.pyg.wrap, ranks, modes)


def test_sums_over_all_nodes_and_what_is_refused():
    def work(comm):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % comm.size, comm)
        rows = torch.complex(graph.x, -graph.x)
        summed = gnn.global_add_pool(rows, graph.batch)
        with pytest.raises(RefusedError, match="the max of complex numbers over all nodes"):
            gnn.global_max_pool(rows, graph.batch)
        with pytest.raises(ValueError, match="mean: expected real values, found complex128"):
            mean(rows, None, comm)
        return summed

    whole = torch.complex(GRAPH.node["x"], -GRAPH.node["x"]).sum(0, keepdim=True)
    for found in run(work, 3):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


RUNS = []  # edges of each run of a message function
OWNERS = {ranks: assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)["random"] for ranks in (1, 3)}


class ThroughComplex(nn.Module):
    """Complex numbers are rows as others are."""

    def __init__(self):
        super().__init__()
        self.conv, self.lin = gnn.SimpleConv(), nn.Linear(5, 5)

    def forward(self, x, edge_index):
        h = self.conv(torch.complex(self.lin(x), x), edge_index)
        return h.abs() + torch.view_as_real(h).sum(-1) + torch.fft.fft(x, dim=1).real


def test_complex_rows_are_rows():
    owners = {"random": OWNERS[3]}  # torch has no Fourier transform of no rows
    assert_exact(ThroughComplex().double(), GRAPH, lambda m, i, g: m(i["x"], g), sp.pyg.wrap, ranks=3, owners=owners)


class Dot(gnn.MessagePassing):
    """Dots of rows as weights; `wide`: summed in float32, as autocast does on a GPU."""

    def __init__(self, normalised=True, wide=True):
        super().__init__(aggr="add", node_dim=0)
        self.lin, self.key = torch.nn.Linear(5, 8), torch.nn.Linear(5, 8)
        self.normalised, self.wide = normalised, wide

    def forward(self, x, edge_index):
        return self.propagate(edge_index, h=self.lin(x).view(-1, 2, 4), k=self.key(x).view(-1, 2, 4), q=self.lin(x))

    def message(self, h_j, k_j, q_i, index, ptr, size_i):
        RUNS.append(len(index))
        product = k_j * q_i.view(-1, 2, 4)
        score = product.sum(-1, dtype=torch.float32) if self.wide and h_j.dtype == torch.bfloat16 else product.sum(-1)
        score = softmax(score, index, ptr, size_i) if self.normalised else score
        return score.unsqueeze(-1) * h_j


MAKERS = {
    "GCN": lambda: gnn.GCNConv(5, 8),
    "GAT": lambda: gnn.GATConv(5, 4, heads=2),
    "GATv2": lambda: gnn.GATv2Conv(5, 4, heads=2),
    "GATv2 shared": lambda: gnn.GATv2Conv(5, 4, heads=2, share_weights=True),
    "Transformer": lambda: gnn.TransformerConv(5, 4, heads=2),
    "summed in float32": Dot,
    "scores as weights": lambda: Dot(normalised=False),
    "GAT with edges": lambda: gnn.GATConv(5, 4, heads=2, edge_dim=3),
}


def trained(model, x, edges, weights, dtype, **more):
    """The output, and the gradients of input and parameters, of one step under autocast."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        out = model(x, edges, **more)
    (out.double().flatten(1) * weights).sum().backward()
    return out.detach().double().flatten(1), x.grad.double(), [p.grad for p in model.parameters()]


def error(found, exact):
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize(("name", "where"), one_each(MAKERS, [(3, "push"), (3, "pull"), (1, "push")]))
def test_autocast_is_as_exact_as_on_the_whole_graph(name, where):
    ranks, backward = where  # one rank pulls nothing
    torch.manual_seed(0)
    plain, x, edge_attr = MAKERS[name](), GRAPH.node["x"], GRAPH.edge["edge_attr"]
    weights = cotangent(torch.empty(GRAPH.num_nodes, 8, dtype=torch.float64))

    def whole(wide, dtype):
        more = {"edge_attr": edge_attr.to(wide)} if "edges" in name else {}
        return trained(copy.deepcopy(plain).to(wide), x.to(wide), GRAPH.edge_index, weights, dtype, **more)

    def work(comm):
        graph = shard_in_memory(GRAPH, OWNERS[ranks], comm, sp.Options(chunk_bytes=1200, backward=backward))
        model = sp.pyg.wrap(copy.deepcopy(plain), comm)
        more = {"edge_attr": graph.edge_attr.float()} if "edges" in name else {}
        found = trained(model, graph.x.float(), graph, weights[graph.node_ids], torch.bfloat16, **more)
        sp.sync_gradients(model, comm)
        return found, graph.node_ids

    out, grad = torch.empty(GRAPH.num_nodes, 8).double(), torch.empty(x.shape).double()
    results = run(work, ranks)
    for (own_out, own_grad, _), ids in results:
        out[ids], grad[ids] = own_out, own_grad
    exact, low = whole(torch.float64, torch.float64), whole(torch.float32, torch.bfloat16)
    found = (out, grad, *results[0][0][2])
    for ours, theirs, right in zip(found, (*low[:2], *low[2]), (*exact[:2], *exact[2])):
        assert error(ours, right) <= 1.5 * error(theirs, right) + 1e-3


@pytest.mark.parametrize(
    ("normalised", "wide", "is_fused"), [(True, True, True), (True, False, True), (False, True, False)]
)
def test_the_message_function_of_an_attention_is_not_run_again(normalised, wide, is_fused):
    comm = sp.connect("local")
    graph = shard_in_memory(GRAPH, OWNERS[1], comm, sp.Options(chunk_bytes=1200))
    model = sp.pyg.wrap(Dot(normalised, wide), comm)
    weights = cotangent(torch.empty(GRAPH.num_nodes, 8, dtype=torch.float64))
    counts = []
    for _ in range(3):
        trained(model, graph.x.float(), graph, weights, torch.bfloat16)
        counts.append(len(RUNS))
    assert (counts[2] - counts[1] <= 1) is is_fused
