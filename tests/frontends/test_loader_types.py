"""Sampled batches of graphs of several types, by weights, and of links: each against the whole graph."""

from functools import partial

import pytest
import torch

import shardpass as sp
from shardpass.testing import (
    awkward_graph,
    awkward_hetero_graph,
    hetero_assignments,
    run,
    shard_hetero_in_memory,
)

from .on_ranks import on_ranks, on_shares, share

pytest.importorskip("torch_geometric")
HETERO = awkward_hetero_graph()
GRAPH = awkward_graph()
FANOUTS = {kind: [2, 3] if kind[2] == "paper" else [-1, 1] for kind in HETERO.edges}
FANOUTS["venue", "prints", "paper"] = [0, 0]


def check_hetero(batch, graph, fanouts):
    for kind, fields in graph.node.items():
        store = batch[kind]
        assert store.n_id.unique().numel() == store.n_id.numel() == store.num_nodes == sum(store.num_sampled_nodes)
        for name, tensor in fields.items():
            assert torch.equal(store[name], tensor[store.n_id])
    for kind, edges in graph.edges.items():
        store, src, dst = batch[kind], batch[kind[0]], batch[kind[2]]
        ends = torch.stack([src.n_id[store.edge_index[0]], dst.n_id[store.edge_index[1]]])
        assert torch.equal(ends, edges[:, store.e_id]) and store.e_id.unique().numel() == store.e_id.numel()
        for name, tensor in graph.edge[kind].items():
            assert torch.equal(store[name], tensor[store.e_id])
        degree = torch.bincount(edges[1], minlength=graph.num_nodes[kind[2]])[dst.n_id]
        drawn = torch.bincount(store.edge_index[1], minlength=dst.num_nodes)
        first = 0
        for hop, fanout in enumerate(fanouts[kind]):
            last = first + dst.num_sampled_nodes[hop]
            limit = degree if fanout == -1 else degree.clamp(max=fanout)
            assert torch.equal(drawn[first:last], limit[first:last]), (kind, hop)
            first = last
        assert drawn[first:].sum() == 0 and sum(store.num_sampled_edges) == store.e_id.numel()


@pytest.mark.parametrize("ranks", [1, 3])
def test_batches_of_several_types(ranks):
    mask = torch.rand(23, generator=torch.Generator().manual_seed(0)) < 0.6
    for kind, owners in hetero_assignments(HETERO, ranks).items():

        def fn(comm, owners=owners):
            own = shard_hetero_in_memory(HETERO, owners, comm)
            seeds = ("paper", mask[own["paper"].node_ids])
            loader = sp.pyg.NeighborLoader(own, FANOUTS, seeds, batch_size=3, shuffle=True)
            return list(loader)

        found = run(fn, ranks)
        assert len({len(rank) for rank in found}) == 1, kind
        for batch in (batch for rank in found for batch in rank):
            check_hetero(batch, HETERO, FANOUTS)
            assert torch.equal(batch["paper"].input_id, batch["paper"].n_id[: batch["paper"].batch_size])
        seeds = torch.cat([batch["paper"].input_id for rank in found for batch in rank])
        assert torch.equal(seeds.sort().values, mask.nonzero().view(-1))


def test_a_model_of_several_types_runs_on_batches_and_on_the_graph():
    from torch_geometric.nn import SAGEConv, to_hetero

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = SAGEConv(5, 4), SAGEConv(4, 2)

        def forward(self, x, edge_index):
            return self.second(self.first(x, edge_index).relu(), edge_index)

    owners = hetero_assignments(HETERO, 2)["random"]

    def fn(comm):
        own = shard_hetero_in_memory(HETERO, owners, comm)
        with sp.seed(0, comm):
            model = to_hetero(Net(), HETERO.metadata).double()
        full = sp.pyg.exact(model, comm)
        losses = []
        for batch in sp.pyg.NeighborLoader(own, [-1, -1], "paper", batch_size=23):
            out = model(batch.x_dict, batch.edge_index_dict)["paper"][: batch["paper"].batch_size]
            losses.append(sp.mean(out, None, comm))
        losses[0].backward()
        sp.sync_gradients(model, comm)
        with torch.no_grad():
            assert torch.allclose(sp.mean(full(own.x_dict, own)["paper"], None, comm), losses[0], atol=1e-12)
        return [p.grad for p in model.parameters()], len(losses)

    with_two, steps = run(fn, 2)[0]
    torch.manual_seed(0)
    whole = to_hetero(Net(), HETERO.metadata).double()
    x = {kind: fields["x"] for kind, fields in HETERO.node.items()}
    whole(x, HETERO.edges)["paper"].mean().backward()
    assert steps == 1
    for mine, theirs in zip(with_two, whole.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine, theirs.grad, rtol=0, atol=1e-10)


shares = partial(on_shares, GRAPH)


@pytest.mark.parametrize("replace", [False, True])
def test_edges_of_weight_zero_are_never_drawn(replace):
    graph = awkward_graph()
    graph.edge["edge_weight"][::2] = 0

    def fn(comm, own):
        loader = sp.pyg.NeighborLoader(own, [3, 3], batch_size=5, replace=replace, weight_attr="edge_weight")
        return [batch.e_id for batch in loader]

    for ranks in (1, 2):
        drawn = torch.cat([e_id for rank in on_shares(graph, fn, ranks) for e_id in rank])
        assert drawn.numel() > 100 and (drawn % 2 == 1).all()


def test_weights_over_ranks_are_those_of_one():
    """The same draws on any number of ranks, and heavier edges more often."""
    graph = awkward_graph()
    graph.edge["edge_weight"] = 1.0 + 19 * (torch.arange(220) % 4 == 0)

    def fn(comm, own):
        loader = sp.pyg.NeighborLoader(own, [2], batch_size=12 // comm.size, weight_attr="edge_weight", shuffle=True)
        return torch.cat([batch.e_id for _ in range(8) for batch in loader])

    alone = torch.cat(on_shares(graph, fn, 1)).sort().values
    assert torch.equal(torch.cat(on_shares(graph, fn, 3)).sort().values, alone)
    heavy = (alone % 4 == 0).double().mean()
    assert heavy > 0.4 > 0.25 + 0.1


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (torch.tensor([-1.0]).repeat(220), r"edge field 'w' holds -1.0; expected finite weights that are not negative"),
        (torch.tensor([float("nan")]).repeat(220), "edge field 'w' holds nan"),
        (torch.ones(220, 2), r"edge field 'w' is torch.float32 \[\d+, 2\]; expected one weight per edge"),
        (None, "there is no edge field 'w' to draw neighbours by; there are: edge_attr, edge_weight"),
    ],
)
def test_bad_weights(weights, words):
    graph = awkward_graph()
    if weights is not None:
        graph.edge["w"] = weights

    def fn(comm, own):
        with pytest.raises(ValueError, match=words):
            sp.pyg.NeighborLoader(own, [2], weight_attr="w")

    on_shares(graph, fn)


# ---- links


def check_links(batch, edge_index, num_pos):
    ends = batch.n_id[batch.edge_label_index[:, :num_pos]]
    assert torch.equal(ends, edge_index[:, batch.input_id]) and batch.input_id.numel() == num_pos


@pytest.mark.parametrize(("ranks", "kind"), [(1, "random"), (4, "empty part"), (4, "no edges")])
def test_links_and_negatives(ranks, kind):
    def fn(comm, own):
        plain = sp.pyg.LinkNeighborLoader(own, [2, 2], batch_size=16, shuffle=True)
        mask = own.edge_weight > 0.5
        ratio = sp.pyg.LinkNeighborLoader(own, [2], mask, neg_sampling_ratio=1.5, batch_size=8, seed=1)
        return list(plain), list(ratio)

    found = shares(fn, ranks, kind)
    plain = [batch for rank in found for batch in rank[0]]
    for batch in plain:
        check_links(batch, GRAPH.edge_index, batch.edge_label_index.size(1))
        assert "edge_label" not in batch
    assert torch.equal(torch.cat([b.input_id for b in plain]).sort().values, torch.arange(220))
    wanted = (GRAPH.edge["edge_weight"] > 0.5).nonzero().view(-1)
    ratio = [batch for rank in found for batch in rank[1]]
    assert torch.equal(torch.cat([b.input_id for b in ratio]).sort().values, wanted)
    for batch in ratio:
        num_pos = batch.input_id.numel()
        check_links(batch, GRAPH.edge_index, num_pos)
        assert batch.edge_label.tolist() == [1.0] * num_pos + [0.0] * -(-num_pos * 3 // 2)
        assert batch.edge_label_index.size(1) == batch.edge_label.numel()
    negatives = torch.cat([b.n_id[b.edge_label_index[:, b.input_id.numel() :]] for b in ratio], 1)
    assert negatives.size(1) > 100 and negatives[0].unique().numel() > 30 and negatives[1].unique().numel() > 30


def test_triplets_labels_and_links_of_original_ids():
    def fn(comm, own):
        links = torch.tensor([[40, 0, 3], [1, 2, 40 - comm.rank]])
        label = torch.tensor([0, 2, 1])
        by_ids = sp.pyg.LinkNeighborLoader(own, [1], links, label, neg_sampling="binary", batch_size=2)
        triplet = sp.pyg.LinkNeighborLoader(own, [1], neg_sampling=sp_negatives(2), batch_size=50)
        return list(by_ids), list(triplet)

    found = shares(fn)
    pairs = []
    for batch in found[0][0] + found[1][0]:
        positive = batch.edge_label > 0
        ends = batch.n_id[batch.edge_label_index[:, positive]]
        pairs += [(*pair, label) for pair, label in zip(ends.t().tolist(), batch.edge_label[positive].tolist())]
        assert batch.edge_label.dtype == torch.int64 and (~positive).sum() == positive.sum()
    assert sorted((a, b, label) for a, b, label in pairs) == sorted(
        [(40, 1, 1), (0, 2, 3), (3, 40, 2), (40, 1, 1), (0, 2, 3), (3, 39, 2)]
    )
    for batch in found[0][1] + found[1][1]:
        num = batch.input_id.numel()
        ends = torch.stack([batch.n_id[batch.src_index], batch.n_id[batch.dst_pos_index]])
        assert torch.equal(ends, GRAPH.edge_index[:, batch.input_id])
        assert batch.dst_neg_index.shape == (num, 2) and "edge_label_index" not in batch


@on_ranks(2)
def test_links_given_by_every_rank_or_of_no_node_are_refused(comm):
    own = share(GRAPH, comm)
    whole = torch.tensor([[40, 0, 3], [1, 2, 5]])
    with pytest.raises(ValueError, match=r"every rank was given the same 3 links.*links.:, rank::2"):
        sp.pyg.LinkNeighborLoader(own, [1], whole)
    with pytest.raises(ValueError, match="float32; expected a bool mask, own edges or original ids"):
        sp.pyg.LinkNeighborLoader(own, [1], whole + 0.7)
    mine = whole[:, comm.rank :: comm.size]
    assert len(sp.pyg.LinkNeighborLoader(own, [1], mine, batch_size=2)) == 1


def sp_negatives(amount):
    from torch_geometric.sampler import NegativeSampling

    return NegativeSampling("triplet", amount)


def test_links_of_one_type():
    owners = hetero_assignments(HETERO, 2)["random"]
    kind = ("author", "writes", "paper")

    def fn(comm):
        own = shard_hetero_in_memory(HETERO, owners, comm)
        loader = sp.pyg.LinkNeighborLoader(own, FANOUTS, kind, neg_sampling_ratio=1, batch_size=7)
        return list(loader)

    batches = [batch for rank in run(fn, 2) for batch in rank]
    for batch in batches:
        check_hetero(batch, HETERO, FANOUTS)
        num_pos = batch[kind].input_id.numel()
        src, dst = batch[kind].edge_label_index
        ends = torch.stack([batch["author"].n_id[src], batch["paper"].n_id[dst]])
        assert torch.equal(ends[:, :num_pos], HETERO.edges[kind][:, batch[kind].input_id])
        assert batch[kind].edge_label.sum() == num_pos == ends.size(1) / 2
    assert torch.equal(torch.cat([b[kind].input_id for b in batches]).sort().values, torch.arange(50))
