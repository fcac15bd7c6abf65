"""Following rows through a wrapped PyG model: exact models pass it, others are refused at the line that mixes rows."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import run, shard_in_memory

from .conv_cases import CONVS, ONE_SHOT, SORTED, _plain
from .how_much import one_each
from .on_ranks import on_ranks, share
from .pyg_cases import GRAPH, MODELS


def called(make, call, graph=GRAPH, mode="sar", ranks=2, check=True, times=1):
    """What the model gives on each rank, or the refusal."""

    def work(comm):
        sharded = share(graph, comm, mode=mode)
        model = sp.pyg.wrap(make().double(), comm, check=check)
        for _ in range(times):
            out = call(model, {**dict(sharded.node), **dict(sharded.edge)}, sharded)
        return out

    return run(work, ranks)


@pytest.mark.long
@pytest.mark.parametrize("name", [*CONVS, *MODELS])
def test_every_exact_layer_and_model_passes(name):
    called(*{**CONVS, **MODELS}[name])


@pytest.mark.parametrize("name", ["SAGEConv median", "SAGEConv lstm"])
def test_whole_neighbourhoods_pass(name):
    called(*ONE_SHOT[name], graph=SORTED, mode="halo")


class Net(nn.Module):
    """A model whose `between` is a program between two layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = gnn.GCNConv(5, 6), gnn.SAGEConv(6, 6)

    def forward(self, x, edge_index):
        return self.last(self.between(self.conv(x, edge_index), x, edge_index), edge_index)

    def between(self, h, x, edge_index):
        return h


class Centred(Net):
    def between(self, h, x, edge_index):
        return h - h.mean(0)  # here


class Later(Net):
    calls = 0

    def between(self, h, x, edge_index):
        self.calls += 1
        return h if self.calls < 2 else h - h.mean(0)  # here


class Kept(Net):
    """It uses the mean of the call before."""

    mean = None

    def between(self, h, x, edge_index):
        shift = 0 if self.mean is None else self.mean
        self.mean = h.detach().mean(0)  # here
        return h - shift


def line_of(kind):
    lines = Path(__file__).read_text().splitlines()
    start = lines.index(next(line for line in lines if line.startswith(f"class {kind.__name__}(")))
    return 1 + next(n for n in range(start, len(lines)) if lines[n].endswith("# here"))


@pytest.mark.parametrize(("kind", "ranks"), [(Centred, 1), (Later, 3), (Kept, 1), (Kept, 3)])
def test_what_mixes_rows_is_refused_at_its_line(kind, ranks):
    with pytest.raises(RefusedError, match=re.escape(f"{Path(__file__).name}:{line_of(kind)}: ")):
        called(kind, _plain, ranks=ranks, times=2)


@pytest.mark.parametrize(
    ("shape", "ranks"), one_each([(GRAPH.num_nodes,), (6, GRAPH.num_nodes), (GRAPH.num_nodes, 1)], (3, 1))
)
def test_a_parameter_with_an_entry_per_node_is_refused(shape, ranks):
    class PerNode(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.rand(shape))

        def between(self, h, x, edge_index):
            own = self.scale.view(-1, GRAPH.num_nodes)[:, : h.size(0)]
            return h * own.T

    with pytest.raises(RefusedError, match=r"NodeEmbedding|field"):
        called(PerNode, _plain, ranks=ranks)


def test_the_check_can_be_left_out():
    assert [out.size(1) for out in called(Centred, _plain, check=False)] == [6, 6]


class Noisy(Net):
    def between(self, h, x, edge_index):
        h = h + torch.normal(0.0, 1.0, h.shape) + torch.randint(0, 3, (h.size(0), 1))
        return nn.functional.gumbel_softmax(nn.functional.rrelu(h, training=self.training))


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.drop = gnn.GATConv(5, 6, dropout=0.5), nn.Dropout(0.5)

    def forward(self, x, edge_index):
        return self.drop(torch.nn.functional.dropout(self.conv(x, edge_index), 0.3, self.training))


class PerRow(Net):
    def between(self, h, x, edge_index):
        return h * (torch.rand(len(h), 1) > 0.5) + torch.randn_like(h) + h * torch.arange(6)


@pytest.mark.parametrize("kind", [Noisy, Dropping, PerRow])
def test_what_does_not_mix_rows_passes(kind):
    called(kind, _plain, ranks=3, times=2)


def test_the_random_numbers_of_training_stay_as_they_are():
    def drawn(check):
        torch.manual_seed(3)
        called(Dropping, _plain, ranks=1, check=check, times=2)
        return torch.rand(3)

    assert torch.equal(drawn(True), drawn(False))


class Data:
    pass


class FromObject(Centred):
    def forward(self, data):
        return super().forward(data.x, data.edge_index)


class Holding(Centred):
    def forward(self, x):
        return super().forward(x, self.graph.edge_index)


@on_ranks(2)
def test_a_graph_that_is_no_argument_is_followed_too(comm):
    graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm)
    data = Data()
    data.x, data.edge_index = graph.x, graph.edge_index
    with pytest.raises(RefusedError, match="puts rows together"):
        sp.pyg.wrap(FromObject().double(), comm)(data)
    model = Holding().double()
    model.graph = graph
    with pytest.raises(RefusedError, match="puts rows together"):
        sp.pyg.wrap(model, comm)(graph.x)
    data.edge_index = graph.layers(graph.x[:, 0] > 0, 1)[0]
    with pytest.raises(RefusedError, match=r"pass what graph\.layers returned as an argument"):
        sp.pyg.wrap(FromObject().double(), comm)(data)


def test_widths_equal_to_the_number_of_nodes_are_no_rows():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lin, self.shift = gnn.GCNConv(5, 21), nn.Linear(21, 21), nn.Parameter(torch.ones(21))

        def forward(self, x, edge_index):
            return self.lin(self.conv(x, edge_index)) * self.shift + torch.zeros(21)

    def work(comm):
        graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm)
        sp.pyg.wrap(Wide().double(), comm)(graph.x, graph)
        return graph.num_own_nodes

    assert 21 in run(work, 2)


class Both(Net):
    def forward(self, x, edge_index, label_edges=None):
        h = self.conv(x, edge_index)
        return h if label_edges is None else h[label_edges[1]]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two sets of edges over the same nodes, each partitioned on its own."""
    folder = tmp_path_factory.mktemp("stores")
    for seed, name in enumerate(("first", "second")):
        edges = torch.randint(41, (2, 200), generator=torch.Generator().manual_seed(seed))
        sp.partition({"x": GRAPH.node["x"], "edge_index": edges}, folder / name, parts=2, method="random", seed=seed)
    return folder / "first", folder / "second"


@on_ranks(1, 2)
def test_two_stores_that_number_nodes_differently_are_refused(comm, stores):
    first, second = (sp.load(path, comm) for path in stores)
    model = sp.pyg.wrap(Both().double(), comm)
    with pytest.raises(RefusedError, match="is given two graphs, which were partitioned on their own"):
        model(first.x, first, second)
    with pytest.raises(RefusedError, match="is given a graph and a field of another graph"):
        model(second.x, first)


def test_a_graph_moves_to_the_device_where_it_is():
    graph = share(GRAPH, sp.connect("local"))
    assert graph.to("cpu") is graph and graph.to(torch.device("cpu"), non_blocking=True) is graph
