"""What people write around PyG's layers: more dimensions, own methods, softmax over sources, several graphs in one."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import softmax

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import WholeGraph, assert_exact, hetero_assignments, shard_in_memory

from .hetero_cases import GRAPH as TYPED
from .how_much import ONE_PART_EMPTY, assert_exact_in, one_each
from .on_ranks import on_ranks, share
from .pyg_cases import GRAPH

MANY = WholeGraph(GRAPH.num_nodes, GRAPH.edge_index, dict(GRAPH.node), dict(GRAPH.edge))
MANY.node["batch"] = torch.arange(41) * 7 % 5 // 2 * 2  # three graphs; two numbers that no node has
MANY.node["norm"] = torch.rand(41, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def over_batches(m, i, g):
    """``[B, N, F]``."""
    x = torch.stack([i["x"], i["x"].flip(1), i["x"].square()])
    return m(x, g, i["edge_weight"]).transpose(0, 1)


def over_times(m, i, g):
    """``[B, T, N, F]``."""
    x = torch.stack([i["x"], i["x"].flip(1)]).unsqueeze(1)
    return m(torch.cat([x, x * 1.5, x.tanh()], 1), g, i["edge_weight"]).movedim(2, 0)


class Batched(nn.Module):
    """Two layers with a norm between them, whose channels are brought into dimension 1 and back."""

    def __init__(self, first, last, norm=None, order=(0, 2, 1)):
        super().__init__()
        self.first, self.last, self.norm, self.order = first, last, norm, order

    def forward(self, x, edge_index, edge_weight):
        h = self.first(x, edge_index, edge_weight)
        if self.norm is not None:
            h = self.norm(h.permute(self.order)).permute(self.order)
        return self.last(h.relu(), edge_index)


class Flat(Batched):
    def forward(self, x, edge_index, edge_weight):
        h = self.first(x, edge_index, edge_weight)
        return self.last(self.norm(h.flatten(0, -2)).view_as(h), edge_index)


class OverSources(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.lin, self.conv = nn.Linear(5, heads), gnn.GCNConv(5, 4)

    def forward(self, x, edge_index, edge_weight):
        row, col = edge_index
        score = self.lin(x)
        weight = softmax((score[row] + score[col]).tanh(), edge_index[0], num_nodes=x.size(0))
        return self.conv(x, edge_index, weight.mean(-1) * edge_weight)


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.last = gnn.GCNConv(5, 6), gnn.SAGEConv(6, 4)

    def encode(self, x, edge_index):
        return self.conv(x, edge_index).relu()

    def decode(self, h, edge_index):
        return self.last(h, edge_index)

    def scale(self, h):
        return h * 2

    def forward(self, x, edge_index):
        return self.decode(self.encode(x, edge_index), edge_index)


class Pooled(nn.Module):
    """What a readout gives each graph is handed back to its nodes."""

    def __init__(self, readout, norm=None):
        super().__init__()
        self.conv, self.lin, self.readout, self.norm = gnn.GraphConv(5, 6), nn.Linear(6, 6), readout, norm

    def forward(self, x, edge_index, batch):
        h = self.conv(x, edge_index).round(decimals=1)
        h = h if self.norm is None else self.norm(h, batch)
        return h + self.lin(self.readout(h, batch))[batch] + x.new_zeros(x.size(0), 6)


class Routed(gnn.MessagePassing):
    """Some edges take another way, by their places."""

    def __init__(self):
        super().__init__()
        self.lin, self.other = nn.Linear(5, 6), nn.Linear(6, 6)

    def forward(self, x, edge_index, edge_weight):
        return self.propagate(edge_index, x=self.lin(x), w=edge_weight)

    def message(self, x_j, w):
        out, at = torch.zeros_like(x_j), (w > 0.5).nonzero().view(-1)
        out[at] = self.other(x_j[at])
        return out.index_add(0, at, x_j[at] * w[at, None])


def coded(m, i, g):
    return m.scale(m.decode(edge_index=g, h=m.encode(i["x"], edge_index=g)))


def weighted(m, i, g):
    return m(i["x"], g, i["edge_weight"])


def pooled(m, i, g):
    return m(i["x"], g, g.batch if hasattr(g, "batch") else i["batch"])


def attention(h, batch):
    return gnn.global_add_pool(softmax(h, batch) * h, batch)


def spread(h, batch):
    return gnn.MultiAggregation(["min", "max", "std", "mul"], mode="sum")(h, batch)


GCN, SAGE = gnn.GCNConv, gnn.SAGEConv
PROGRAMS = {
    "batches": (lambda: Batched(GCN(5, 6), SAGE(6, 4, aggr="max")), over_batches),
    "batches of other layers": (lambda: Batched(gnn.GraphConv(5, 6), gnn.TAGConv(6, 4)), over_batches),
    "batches, BatchNorm1d": (lambda: Batched(GCN(5, 6), GCN(6, 4), nn.BatchNorm1d(6)), over_batches),
    "batches, flattened": (lambda: Flat(GCN(5, 6), GCN(6, 4), nn.BatchNorm1d(6)), over_batches),
    "times": (lambda: Batched(gnn.ChebConv(5, 6, 2), SAGE(6, 4)), over_times),
    "times, BatchNorm2d": (lambda: Batched(GCN(5, 6), GCN(6, 4), nn.BatchNorm2d(6), (0, 3, 2, 1)), over_times),
    "places of edges": (Routed, weighted),
    "softmax over sources": (lambda: OverSources(1), weighted),
    "softmax over sources, heads": (lambda: OverSources(3), weighted),
    "own methods": (Coder, coded),
    "several graphs, sum": (lambda: Pooled(gnn.global_add_pool), pooled),
    "several graphs, mean": (lambda: Pooled(gnn.global_mean_pool, gnn.GraphNorm(6)), pooled),
    "several graphs, max": (lambda: Pooled(gnn.global_max_pool, gnn.PairNorm()), pooled),
    "several graphs, softmax": (lambda: Pooled(attention, gnn.InstanceNorm(6)), pooled),
    "several graphs, others": (lambda: Pooled(spread, gnn.LayerNorm(6)), pooled),
}


@pytest.mark.parametrize(("name", "ranks"), one_each(PROGRAMS, (3, 1)))
def test_program_equals_the_whole_graph(name, ranks):
    make, call = PROGRAMS[name]
    torch.manual_seed(0)
    assert_exact_in(ONE_PART_EMPTY, make().double(), MANY, call, sp.pyg.wrap, ranks)


class OfData(nn.Module):
    """It reads of `data` what PyG's Data has, and gives its loss."""

    def __init__(self, comm=None):
        super().__init__()
        self.conv, self.lin, self.comm = gnn.GCNConv(5, 6), nn.Linear(6, 3), comm

    def forward(self, data):
        data = data.to("cpu")
        x, edge_index, edge_weight = data.x, data.edge_index, data.edge_weight
        assert data.pos is None and "edge_attr" in data and "pos" not in data and data.num_features == 5
        h = self.conv(x * data.norm, edge_index, edge_weight) + torch.zeros(data.num_nodes, 6, dtype=x.dtype)
        data.x = self.lin(h.relu() + gnn.global_mean_pool(h, data["batch"])[data.batch])
        data = data.clone()
        return self.loss(data.x, torch.arange(41) % 3 if self.comm is None else data.y)

    def loss(self, logits, y):
        if self.comm is None:
            return nn.functional.cross_entropy(logits, y)
        return sp.cross_entropy(logits, y, None, self.comm)


@on_ranks(1, 3)
def test_a_model_of_data_with_its_loss(comm):
    torch.manual_seed(0)
    plain = OfData().double()
    fields = {**MANY.node, **MANY.edge}
    expected = plain(Data(edge_index=MANY.edge_index, **fields))
    expected.backward()
    graph = WholeGraph(41, MANY.edge_index, {**MANY.node, "y": torch.arange(41) % 3}, MANY.edge)
    mine = share(graph, comm)
    model = OfData(comm).double()
    model.load_state_dict(plain.state_dict())
    model = sp.pyg.wrap(model, comm)
    loss = model(mine)
    loss.backward()
    sp.sync_gradients(model, comm)
    assert mine.x.size(1) == 5 and mine["norm"].size(1) == 1
    loss, grads = loss.detach(), [p.grad for p in model.parameters()]
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    for grad, parameter in zip(grads, plain.parameters()):
        torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-10)


class OfCopies(nn.Module):
    """It writes into copies of `data`, which must not reach what the caller has."""

    def __init__(self):
        super().__init__()
        self.conv, self.lin = gnn.GCNConv(5, 6), nn.Linear(10, 6)

    def forward(self, data):
        assert data.num_node_features == 5 and data.num_edge_features == 3
        shallow, deep, cloned = copy.copy(data), copy.deepcopy(data), data.clone()
        shallow.x = data.x.tanh()
        deep.x[:, 0] = 0
        cloned.x[:, 1] = 1
        h = self.conv(shallow.x, shallow.edge_index) + self.conv(data.x, cloned.edge_index)
        return h + self.lin(torch.cat([deep.x, cloned.x], 1)) * data.norm


def of_copies(m, fields, graph):
    if isinstance(graph, torch.Tensor):
        graph = Data(edge_index=graph, **{name: rows.clone() for name, rows in (MANY.node | MANY.edge).items()})
    out, kept = m(graph), graph.x.clone()
    m(graph)
    assert torch.equal(graph.x, kept)
    return out


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_model_that_copies_data(ranks):
    torch.manual_seed(0)
    assert_exact_in(ONE_PART_EMPTY, OfCopies().double(), MANY, of_copies, sp.pyg.wrap, ranks)


@on_ranks(1)
def test_fields_with_names_of_methods_are_no_methods_of_an_edge_index(comm):
    class Turned(GCN):
        def forward(self, x, edge_index):
            assert edge_index.size(1) == edge_index.shape[1]
            return super().forward(x, edge_index), x[edge_index.t()]

    fields = {**GRAPH.node, "t": GRAPH.node["x"][:, 0], "size": GRAPH.node["x"][:, 0]}
    graph = WholeGraph(GRAPH.num_nodes, GRAPH.edge_index, fields, GRAPH.edge)
    graph = shard_in_memory(graph, torch.zeros(GRAPH.num_nodes, dtype=torch.long), comm)
    with pytest.raises(RefusedError, match=r"x\[edge_index\.t\(\)\].*`t` on the edge_index"):
        sp.pyg.wrap(Turned(5, 6).double(), comm)(graph.x, graph)


@on_ranks(2)
def test_own_methods_are_followed_and_copied(comm):
    class Centred(Coder):
        def encode(self, x, edge_index):
            h = self.conv(x, edge_index)
            return h - h.mean(0)

    graph = shard_in_memory(GRAPH, torch.arange(41) % comm.size, comm)
    model = sp.pyg.wrap(Coder().double(), comm)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin.encode(graph.x, graph), model.encode(graph.x, graph))
    with pytest.raises(RefusedError, match=r"return h - h\.mean\(0\): `mean` puts rows together"):
        sp.pyg.wrap(Centred().double(), comm).encode(graph.x, graph)


@pytest.mark.parametrize(("norm", "call"), [(nn.BatchNorm1d, over_batches), (nn.BatchNorm2d, over_times)])
@on_ranks(1, 3)
def test_a_norm_with_a_weight_per_node_is_refused(comm, norm, call):
    class PerNode(Batched):
        def forward(self, x, edge_index, edge_weight):
            h = self.first(x, edge_index, edge_weight)
            h = h if h.dim() == 3 else h.transpose(1, 2)
            return self.norm(h)  # nodes are in dimension 1

    graph = shard_in_memory(GRAPH, torch.arange(41) % comm.size, comm)
    model = sp.pyg.wrap(PerNode(GCN(5, 6), None, norm(41)).double(), comm)
    with pytest.raises(RefusedError, match=r"return self\.norm\(h\).*: BatchNorm takes dimension 1"):
        call(model, {**dict(graph.node), **dict(graph.edge)}, graph)


@on_ranks(2)
def test_a_maximum_over_sources_has_no_gradient(comm):
    class Maximum(OverSources):
        def forward(self, x, edge_index, edge_weight):
            values = self.lin(x)[edge_index[1]]
            index = edge_index[0].unsqueeze(-1).expand_as(values)
            return torch.zeros_like(x[:, :1]).scatter_reduce_(0, index, values, "amax", include_self=False)

    graph = shard_in_memory(GRAPH, torch.arange(41) % comm.size, comm)
    with pytest.raises(RefusedError, match="only their sums are differentiable"):
        sp.pyg.wrap(Maximum(1).double(), comm)(graph.x, graph, None)


class OfHeteroData(nn.Module):
    def __init__(self):
        super().__init__()
        self.lins = nn.ModuleDict({kind: nn.Linear(5, 6) for kind in TYPED.num_nodes})
        self.conv = gnn.HeteroConv({kind: gnn.SAGEConv((6, 6), 4) for kind in TYPED.edges})

    def forward(self, data):
        rows = {kind: self.lins[kind](x).relu() for kind, x in data.x_dict.items()}
        found = self.conv(rows, data.edge_index_dict)
        return {kind: rows + data[kind].x[:, :4] for kind, rows in found.items()}


def of_hetero_data(m, fields, graph):
    if isinstance(graph, dict):
        data = HeteroData()
        for kind in TYPED.num_nodes:
            data[kind].x = fields[kind]["x"]
        for kind, edges in graph.items():
            data[kind].edge_index = edges
        return m(data)
    for kind in TYPED.num_nodes:
        graph.fields_of(kind)._read.update(fields[kind])
    return m(graph)


def test_a_model_of_data_of_several_types():
    owners = {"random": hetero_assignments(TYPED, 3)["random"]}
    model = OfHeteroData().double()
    assert_exact(model, TYPED, of_hetero_data, sp.pyg.wrap, ranks=3, modes=("sar",), owners=owners)
