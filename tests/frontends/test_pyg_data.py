"""What PyG's transforms and loaders make: splits of links, batches of graphs, sparse matrices."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.transforms import RandomLinkSplit, ToSparseTensor
from torch_geometric.utils import coalesce, to_torch_csr_tensor

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import assignments, awkward_graph, awkward_hetero_graph, run, shard_in_memory

from .how_much import ONE_OR_THREE, one_each
from .on_ranks import on_ranks
from .pyg_cases import GRAPH

RATES = ("author", "writes", "paper")


def homogeneous() -> Data:
    whole = awkward_graph()
    return Data(x=whole.node["x"], edge_index=whole.edge_index)


def heterogeneous() -> HeteroData:
    whole, data = awkward_hetero_graph(), HeteroData()
    for kind, fields in whole.node.items():
        data[kind].x = fields["x"]
    for kind, edges in whole.edges.items():
        data[kind].edge_index = edges
    return data


class Links(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = gnn.SAGEConv(5, 4)

    def forward(self, data):
        z = self.conv(data.x, data.edge_index)
        return (z[data.edge_label_index[0]] * z[data.edge_label_index[1]]).sum(-1)


class HeteroLinks(nn.Module):
    def __init__(self, types):
        super().__init__()
        self.conv = gnn.HeteroConv({kind: gnn.SAGEConv(5, 4) for kind in types})

    def forward(self, x_dict, edge_index_dict, edge_label_index):
        z = self.conv(x_dict, edge_index_dict)
        row, col = edge_label_index
        return (z["author"][row] * z["paper"][col]).sum(-1)


def loss_and_gradients(model, scores, labels, comm):
    losses = F.binary_cross_entropy_with_logits(scores, labels.double(), reduction="none")
    loss = losses.mean() if comm is None else sp.mean(losses, None, comm)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def assert_alike(found, expected):
    for loss, gradients in found:
        torch.testing.assert_close(loss, expected[0], rtol=0, atol=1e-10)
        for one, other in zip(gradients, expected[1], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("split", "ranks"), one_each([0, 1], (3, 1)))
def test_a_split_of_links(tmp_path, split, ranks):
    torch.manual_seed(0)
    data = RandomLinkSplit(num_val=0.2, num_test=0.1)(homogeneous())[split]
    model = Links().double()
    sp.partition(data, tmp_path / "store", 3, method="random")
    plain = copy.deepcopy(model)
    expected = loss_and_gradients(plain, plain(data), data.edge_label, None)

    def work(comm):
        graph, own = sp.load(tmp_path / "store", comm), sp.pyg.wrap(copy.deepcopy(model), comm)
        assert sp.total(graph.edge_label.numel(), comm) == data.edge_label.numel()
        return loss_and_gradients(own, own(graph), graph.edge_label, comm)

    assert_alike(run(work, ranks), expected)


@pytest.mark.parametrize("ranks", ONE_OR_THREE)
def test_a_split_of_links_between_types(tmp_path, ranks):
    torch.manual_seed(0)
    split = RandomLinkSplit(num_val=0.2, num_test=0.1, edge_types=[RATES], add_negative_train_samples=True)
    data = split(heterogeneous())[0]
    model = HeteroLinks(data.edge_types).double()
    sp.partition(data, tmp_path / "store", 3, method="random")
    plain = copy.deepcopy(model)
    scores = plain(data.x_dict, data.edge_index_dict, data[RATES].edge_label_index)
    expected = loss_and_gradients(plain, scores, data[RATES].edge_label, None)

    def work(comm):
        graph, own = sp.load(tmp_path / "store", comm), sp.pyg.wrap(copy.deepcopy(model), comm)
        assert list(graph.edge_label_dict) == [RATES]
        scores = own(graph.x_dict, graph.edge_index_dict, graph[RATES].edge_label_index)
        return loss_and_gradients(own, scores, graph[RATES].edge_label, comm)

    assert_alike(run(work, ranks), expected)


@pytest.mark.parametrize("key", ["edge_label", "kind"])
def test_positives_and_negatives_apart(tmp_path, key):
    torch.manual_seed(0)
    data = RandomLinkSplit(num_val=0.2, num_test=0.1, split_labels=True, key=key)(homogeneous())[1]
    sp.partition(data, tmp_path / "store", 2, method="random")

    def work(comm):
        graph = sp.load(tmp_path / "store", comm)
        names = [f"{sign}_{key}{end}" for sign in ("pos", "neg") for end in ("", "_index")]
        return [torch.as_tensor(getattr(graph, name).tolist()) for name in names]

    for name, *parts in zip(["pos_", "pos_i", "neg_", "neg_i"], *run(work, 2), strict=True):
        whole = data[f"{name[:4]}{key}{'_index' if name[4:] else ''}"]
        assert torch.equal(torch.cat(parts, -1).sort(-1).values, whole.sort(-1).values)


def test_links_in_a_loader_and_what_is_wrong_with_some(tmp_path):
    torch.manual_seed(0)
    data = RandomLinkSplit(num_val=0.2, num_test=0.1)(homogeneous())[0]
    sp.partition(data, tmp_path / "store", 2, method="random")

    def work(comm):
        graph = sp.load(tmp_path / "store", comm)
        pairs, labels = graph.edge_label_index, graph.edge_label
        loader = sp.pyg.LinkNeighborLoader(graph, [-1], pairs, labels, batch_size=64)
        return sum(batch.edge_label.numel() for batch in loader)

    assert sum(run(work, 2)) == data.edge_label.numel()
    sp.partition(RandomLinkSplit(edge_types=[RATES])(heterogeneous())[0], tmp_path / "types", 2, method="random")

    def work_on_types(comm):
        graph = sp.load(tmp_path / "types", comm)
        links = graph[RATES]
        pairs = RATES, links.edge_label_index
        loader = sp.pyg.LinkNeighborLoader(graph, [-1], pairs, links.edge_label, batch_size=64)
        return sum(batch[RATES].edge_label.numel() for batch in loader), links.edge_label.numel()

    assert all(seen == own for seen, own in run(work_on_types, 2))
    data.edge_label_index[0, 3] = 41
    with pytest.raises(ValueError, match="41 at position 3 is outside the valid interval"):
        sp.partition(data, tmp_path / "other", 2)
    data.edge_label = data.edge_label[1:]
    with pytest.raises(ValueError, match=r"field 'edge_label' of the shape .* cannot be kept"):
        sp.partition(data, tmp_path / "other", 2)


def test_links_are_joined_with_negatives(tmp_path):
    torch.manual_seed(0)
    sp.partition(RandomLinkSplit()(homogeneous())[0], tmp_path / "store", 2, method="random")

    def work(comm):
        graph = sp.load(tmp_path / "store", comm)
        negatives = sp.negative_sampling(graph, 10, seed=0)
        pairs = torch.cat([graph.edge_label_index, sp.node_ids(graph, negatives)], dim=-1)
        alike = graph.node_ids.double()[:, None]
        return torch.equal(alike[pairs[1]][:, 0].long(), torch.as_tensor(pairs[1].tolist()))

    assert all(run(work, 2))


def molecules(**fields) -> list[Data]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for count in (3, 5, 1, 4, 6):
        edges = torch.randint(0, count, (2, 2 * count), generator=generator)
        x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 2, (1, 3), generator=generator).double()
        y[0, int(torch.randint(0, 3, (1,), generator=generator))] = torch.nan
        found.append(Data(x=x, edge_index=edges, y=y, kind=torch.tensor([count % 3]), **fields))
    return found


class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = gnn.GINConv(nn.Linear(5, 4)), nn.Linear(4, 3)

    def forward(self, x, edge_index, batch):
        return self.head(gnn.global_mean_pool(self.conv(x, edge_index).relu(), batch))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_batch_of_graphs_with_labels_as_ogb_has_them(tmp_path, ranks):
    torch.manual_seed(0)
    data, model = Batch.from_data_list(molecules()), Graphs().double()
    sp.partition(data, tmp_path / "store", 3, method="random")

    def step(model, out, y, kind):
        labelled = y == y
        loss = F.binary_cross_entropy_with_logits(out[labelled], y[labelled]) + F.cross_entropy(out, kind)
        return loss, model

    plain = copy.deepcopy(model)
    loss, _ = step(plain, plain(data.x, data.edge_index, data.batch), data.y, data.kind)
    loss.backward()
    expected = loss.detach(), [parameter.grad for parameter in plain.parameters()]

    def work(comm):
        graph, own = sp.load(tmp_path / "store", comm), sp.pyg.wrap(copy.deepcopy(model), comm)
        assert graph.num_graphs == 5 and graph.y.shape == (5, 3) and graph.kind.shape == (5,)
        loss, _ = step(own, own(graph.x, graph, graph.batch), graph.y, graph.kind)
        sp.replicated(loss, comm).backward()
        return loss.detach(), [parameter.grad for parameter in own.parameters()]

    assert_alike(run(work, ranks), expected)


pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")

EDGES = coalesce(GRAPH.edge_index)
WEIGHTS = torch.rand(EDGES.size(1), dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
X = GRAPH.node["x"]
ADJ = to_torch_csr_tensor(EDGES.flip(0), WEIGHTS, size=41)
LINE = r"test_pyg_data\.py:\d+: "


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A graph that was given as `adj_t`, in four parts."""
    data = ToSparseTensor()(Data(x=X, edge_index=EDGES, edge_weight=WEIGHTS))
    assert "edge_index" not in data and "edge_weight" not in data
    path = tmp_path_factory.mktemp("adjacency") / "parts"
    sp.partition(data, path, parts=4, method="random")
    return path


class GCN2(nn.Module):
    """PyG's example of GCN2Conv on Cora, which is called with `adj_t`, and reads the weights in it unasked."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 6)
        self.convs = nn.ModuleList(gnn.GCN2Conv(6, 0.1, 0.5, layer, normalize=False) for layer in (1, 2))

    def forward(self, x, adj_t, edge_weight=None):
        x = x_0 = self.lin(x).relu()
        for conv in self.convs:
            x = conv(x, x_0, adj_t, edge_weight) if edge_weight is not None else conv(x, x_0, adj_t)
        return x


@on_ranks(1, 3, 4)
def test_the_weights_of_a_matrix_are_stored_and_not_lost(comm, parts):
    torch.manual_seed(0)
    model = GCN2().double()
    right = model(X, ADJ)
    right.square().sum().backward()
    state = model.state_dict()
    graph, mine = sp.load(parts, comm), GCN2().double()
    mine.load_state_dict(state)
    sp.pyg.wrap(mine, comm)
    words = r"conv\(x, x_0, adj_t\): GCN2Conv \(convs\.0\) is called without.*pass edge_weight=graph\.edge_weight"
    with pytest.raises(RefusedError, match=words):
        mine(graph.x, graph)
    out = mine(graph.x, graph, graph.edge_weight)
    out.square().sum().backward()
    sp.sync_gradients(mine, comm)
    torch.testing.assert_close(out, right[graph.node_ids], rtol=0, atol=1e-10)
    torch.testing.assert_close(mine.lin.weight.grad, model.lin.weight.grad, rtol=0, atol=1e-10)


WITHOUT = {
    "GCN": (lambda: gnn.GCN(5, 8, 2, 3), "GCNConv .*pass edge_weight=graph.edge_weight"),
    "GraphConv": (lambda: gnn.GraphConv(5, 3), "pass edge_weight=graph.edge_weight"),
    "GraphSAGE": (lambda: gnn.GraphSAGE(5, 8, 2, 3), "takes no weights, so use a layer that does"),
    "GIN": (lambda: gnn.GINConv(nn.Linear(5, 3)), "takes no weights, so use a layer that does"),
    "GAT": (lambda: gnn.GAT(5, 8, 2, 3), None),  # reads no weights of a matrix
}


@pytest.mark.parametrize("name", WITHOUT)
@on_ranks(2)
def test_layers_that_would_read_the_weights_of_a_matrix_are_told_how(comm, parts, name):
    make, words = WITHOUT[name]
    graph, model = sp.load(parts, comm), sp.pyg.wrap(make().double(), comm)
    if words is None:
        return model(graph.x, graph)
    with pytest.raises(RefusedError, match=words):
        model(graph.x, graph)
    with pytest.raises(AttributeError, match=r"Pass the graph where adj_t went, .*edge_weight=graph\.edge_weight"):
        _ = graph.adj_t


def test_a_graph_without_the_values_takes_any_layer(tmp_path):
    data = sp.data.read(Data(x=X, adj_t=ADJ), drop=["edge_weight"])
    sp.partition(data, tmp_path / "parts", parts=2, method="random")
    whole = gnn.GraphSAGE(5, 8, 2, 3).double()

    def work(comm):
        graph, model = sp.load(tmp_path / "parts", comm), gnn.GraphSAGE(5, 8, 2, 3).double()
        model.load_state_dict(whole.state_dict())
        out = sp.pyg.wrap(model, comm)(graph.x, graph)
        torch.testing.assert_close(out, whole(X, EDGES)[graph.node_ids], rtol=0, atol=1e-10)

    run(work, 2)


class Multiplies(nn.Module):
    """Multiplies by a matrix that it keeps, or is given."""

    def __init__(self, adj=None, buffer=False):
        super().__init__()
        self.lin = nn.Linear(5, 3)
        if buffer:
            self.register_buffer("adj", adj)
        else:
            self.adj = adj

    def forward(self, x, adj):
        return torch.sparse.mm(self.adj if self.adj is not None else adj, self.lin(x))


SPARSE = {
    "CSR in place of the graph": (Multiplies, lambda m, g: m(g.x, ADJ), r"`adj` is a sparse matrix \(sparse_csr\)"),
    "COO in place of the graph": (
        lambda: gnn.GCN(5, 8, 2, 3),
        lambda m, g: m(g.x, ADJ.to_sparse_coo()),
        r"`edge_index` is a sparse matrix \(sparse_coo\), .*data\.adj_t: it becomes the edges, .*SimpleConv\('sum'\)",
    ),
    "by name": (lambda: gnn.GCN(5, 8, 2, 3), lambda m, g: m(g.x, edge_index=ADJ), "`edge_index` is a sparse matrix"),
    "kept": (lambda: Multiplies(ADJ), lambda m, g: m(g.x, g), r"keeps 'adj', a sparse matrix .*SimpleConv\('sum'\)"),
    "kept as a buffer": (lambda: Multiplies(ADJ, True), lambda m, g: m(g.x, g), "keeps 'adj', a sparse matrix"),
    "features, COO": (
        lambda: gnn.GCN(5, 8, 2, 3),
        lambda m, g: m(g.x.to_sparse(), g),
        r"`x` is sparse \(sparse_coo\), .*pass x\.to_dense\(\)",
    ),
    "features, CSR": (lambda: gnn.GCN(5, 8, 2, 3), lambda m, g: m(g.x.to_sparse_csr(), g), r"`x` is sparse"),
    "weights": (
        lambda: gnn.GCN(5, 8, 2, 3),
        lambda m, g: m(g.x, g, g.edge_weight.to_sparse()),
        "`edge_weight` is sparse",
    ),
}


@pytest.mark.parametrize(("name", "ranks"), one_each(SPARSE, (3, 1)))
def test_a_model_that_is_called_with_a_sparse_tensor_is_told_what_to_pass(name, ranks):
    make, call, words = SPARSE[name]
    owners = assignments(41, ranks, GRAPH.edge_index)["random"]

    def work(comm):
        call(sp.pyg.wrap(make().double(), comm), shard_in_memory(GRAPH, owners, comm))

    with pytest.raises(RefusedError) as caught:
        run(work, ranks)
    assert re.search(words, str(caught.value)), caught.value
    assert "kept" in name or re.match(r".*" + LINE, str(caught.value)), caught.value
