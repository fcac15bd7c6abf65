"""What PyG's transforms and loaders make: splits of links and batches of graphs, against plain PyG on the whole."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.transforms import RandomLinkSplit

import shardpass as sp
from shardpass.testing import awkward_graph, awkward_hetero_graph, run

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


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("split", [0, 1])
def test_a_split_of_links(tmp_path, ranks, split):
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


@pytest.mark.parametrize("ranks", [1, 3])
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
