"""Sampled batches of PyG: each against the whole graph, on several ranks, and the gradients of a step."""

from __future__ import annotations

import pytest
import torch

import shardpass as sp
from shardpass.testing import WholeGraph, assignments, awkward_graph, run, shard_in_memory

pytest.importorskip("torch_geometric")


def labelled(seed=0):
    graph = awkward_graph(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    graph.node["y"] = torch.randint(0, 3, (graph.num_nodes,), generator=generator)
    graph.node["train_mask"] = torch.rand(graph.num_nodes, generator=generator) < 0.6
    return graph


GRAPH = labelled()


def epochs(graph: WholeGraph, ranks: int, kind: str = "random", num_epochs: int = 1, mask: bool = True, **kwargs):
    """The batches of each rank."""
    owners = assignments(graph.num_nodes, ranks, graph.edge_index)[kind]

    def fn(comm):
        share = shard_in_memory(graph, owners, comm)
        seeds = share.train_mask if mask else None
        loader = sp.pyg.NeighborLoader(share, input_nodes=seeds, **kwargs)
        found = []
        for _ in range(num_epochs):
            batches = list(loader)
            assert len(batches) == len(loader)
            found.append(batches)
        return found

    return run(fn, ranks)


def assert_batch_holds(batch, graph: WholeGraph, fanouts, replace=False):
    """Against the whole graph: what PyG's loader promises."""
    n_id, e_id = batch.n_id, batch.e_id
    assert n_id.unique().numel() == n_id.numel() == batch.num_nodes
    assert torch.equal(n_id[batch.edge_index], graph.edge_index[:, e_id])
    for name, tensor in graph.node.items():
        assert torch.equal(batch[name], tensor[n_id]), name
    for name, tensor in graph.edge.items():
        assert torch.equal(batch[name], tensor[e_id]), name
    assert torch.equal(batch.input_id, n_id[: batch.batch_size])
    assert sum(batch.num_sampled_nodes) == n_id.numel() and sum(batch.num_sampled_edges) == e_id.numel()
    assert len(batch.num_sampled_nodes) == len(fanouts) + 1 and len(batch.num_sampled_edges) == len(fanouts)
    degree = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes)[n_id]
    node = edge = 0
    for hop, fanout in enumerate(fanouts):
        dst = batch.edge_index[1, edge : edge + batch.num_sampled_edges[hop]]
        first, node = node, node + batch.num_sampled_nodes[hop]
        assert torch.equal(dst, dst.sort().values)
        drawn = torch.bincount(dst, minlength=n_id.numel())
        limit = degree if fanout == -1 else torch.full_like(degree, fanout)
        wanted = limit * (degree > 0) if replace else torch.minimum(degree, limit)
        assert torch.equal(drawn[first:node], wanted[first:node])
        assert drawn[:first].sum() == drawn[node:].sum() == 0
        edge += batch.num_sampled_edges[hop]
    if not replace:
        assert e_id.unique().numel() == e_id.numel()


@pytest.mark.parametrize(
    ("ranks", "kind", "prefetch"), [(1, "random", 2), (3, "random", 2), (3, "empty part", 0), (3, "no edges", 2)]
)
def test_batches_are_parts_of_the_graph(ranks, kind, prefetch):
    found = epochs(
        GRAPH, ranks, kind, num_neighbors=[3, 2], batch_size=4, shuffle=True, prefetch=prefetch, num_epochs=2
    )
    for epoch in range(2):
        assert len({len(rank[epoch]) for rank in found}) == 1
        seeds = torch.cat([batch.input_id for rank in found for batch in rank[epoch]])
        assert torch.equal(seeds.sort().values, GRAPH.node["train_mask"].nonzero().view(-1))
        for step in zip(*(rank[epoch] for rank in found)):
            sizes = [batch.batch_size for batch in step]
            assert max(sizes) - min(sizes) <= 1 and max(sizes) <= 4
            for batch in step:
                assert_batch_holds(batch, GRAPH, [3, 2])


class SAGE(torch.nn.Module):
    def __init__(self):
        super().__init__()
        from torch_geometric.nn import SAGEConv

        self.first, self.second = SAGEConv(5, 8), SAGEConv(8, 3)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def gradients(graph, ranks, batch_size, fanouts, kind="random"):
    """Of each step of an epoch, summed over ranks; and the exact outputs of the same model afterwards."""
    owners = assignments(graph.num_nodes, ranks, graph.edge_index)[kind]

    def fn(comm):
        share = shard_in_memory(graph, owners, comm)
        loader = sp.pyg.NeighborLoader(share, fanouts, share.train_mask, batch_size=batch_size, shuffle=True, seed=5)
        with sp.seed(0, comm):
            model = SAGE().double()
        full = sp.pyg.exact(model, comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = []
        for batch in loader:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = sp.cross_entropy(out, batch.y[: batch.batch_size], None, comm)
            optimizer.zero_grad()
            loss.backward()
            sp.sync_gradients(model, comm)
            steps.append([loss.item(), *(p.grad.clone() for p in model.parameters())])
            optimizer.step()
        with torch.no_grad():
            out = sp.gather(share, full(share.x, share))
        whole = SAGE().double()
        whole.load_state_dict(full.state_dict())
        return steps, out, whole(graph.node["x"], graph.edge_index)

    return run(fn, ranks)[0]


@pytest.mark.parametrize(
    ("fanouts", "owned"), [([2, 2], [(2, "random"), (4, "no edges")]), ([-1, -1], [(4, "random"), (2, "empty part")])]
)
def test_training_does_not_depend_on_the_ranks(fanouts, owned):
    """The gradient of a step is that of the mean loss over the seeds of all ranks, whoever owns what."""
    alone, out, whole = gradients(GRAPH, 1, 4, fanouts)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-10)
    assert len(alone) == 6 and GRAPH.node["train_mask"].sum() == 23  # three seeds for four ranks in the last step
    for ranks, kind in owned:
        steps, out, _ = gradients(GRAPH, ranks, 4 // ranks, fanouts, kind)
        for mine, theirs in zip(steps, alone, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
        torch.testing.assert_close(out, whole, rtol=0, atol=1e-10)
