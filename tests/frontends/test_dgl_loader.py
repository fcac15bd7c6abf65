"""Sampled blocks of DGL: each against the whole graph, on several ranks, and the gradients of a step."""

import pytest
import torch

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import assignments, awkward_graph, awkward_hetero_graph, run, shard_in_memory

from .on_ranks import on_ranks, share

dgl = pytest.importorskip("dgl")


def labelled(seed=0):
    graph = awkward_graph(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    graph.node["y"] = torch.randint(0, 3, (graph.num_nodes,), generator=generator)
    graph.node["train_mask"] = torch.rand(graph.num_nodes, generator=generator) < 0.6
    return graph


GRAPH = labelled()


def assert_blocks_hold(batch, graph, fanouts, replace=False):
    """Against the whole graph: what DGL's loader promises."""
    input_nodes, output_nodes, blocks = batch
    degree = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes)
    assert torch.equal(blocks[0].srcdata[dgl.NID], input_nodes) and len(blocks) == len(fanouts)
    assert torch.equal(blocks[-1].dstdata[dgl.NID], output_nodes)
    for above, below in zip(blocks[1:], blocks, strict=False):
        assert torch.equal(below.dstdata[dgl.NID], above.srcdata[dgl.NID])
    for block, fanout in zip(blocks, fanouts, strict=True):
        assert type(block).__name__ == "DGLBlock" and block.is_block
        src_ids, dst_ids, edge_ids = block.srcdata[dgl.NID], block.dstdata[dgl.NID], block.edata[dgl.EID]
        assert torch.equal(src_ids[: block.num_dst_nodes()], dst_ids) and src_ids.unique().numel() == src_ids.numel()
        src, dst = block.edges()
        assert torch.equal(torch.stack([src_ids[src], dst_ids[dst]]), graph.edge_index[:, edge_ids])
        limit = degree[dst_ids] if fanout == -1 else torch.full_like(dst_ids, fanout)
        wanted = limit * (degree[dst_ids] > 0) if replace else torch.minimum(degree[dst_ids], limit)
        assert torch.equal(block.in_degrees(), wanted)
        for name, tensor in graph.edge.items():
            assert torch.equal(block.edata[name], tensor[edge_ids]), name
    for name, tensor in graph.node.items():
        assert torch.equal(blocks[0].srcdata[name], tensor[input_nodes]), name
        assert torch.equal(blocks[-1].dstdata[name], tensor[output_nodes]), name


@pytest.mark.parametrize("ranks", [1, 3])
def test_blocks_are_parts_of_the_graph(ranks):
    for (kind, owners), replace in zip(assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index).items(), [0, 1, 0]):

        def fn(comm, owners=owners, replace=bool(replace)):
            own = shard_in_memory(GRAPH, owners, comm)
            sampler = dgl.dataloading.NeighborSampler([3, -1], replace=replace)
            loader = sp.dgl.DataLoader(own, own.train_mask, sampler, batch_size=4, shuffle=True)
            return [list(loader) for _ in range(2)], len(loader)

        found = run(fn, ranks)
        for epoch in range(2):
            assert {len(rank[epoch]) for rank, _ in found} == {found[0][1]}, kind
            seeds = torch.cat([batch[1] for rank, _ in found for batch in rank[epoch]])
            assert torch.equal(seeds.sort().values, GRAPH.node["train_mask"].nonzero().view(-1))
            for rank, _ in found:
                for batch in rank[epoch]:
                    assert 0 < batch[1].numel() <= 4
                    assert_blocks_hold(batch, GRAPH, [3, -1], bool(replace))


class SAGE(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = dgl.nn.SAGEConv(5, 8, "mean"), dgl.nn.SAGEConv(8, 3, "mean")

    def forward(self, blocks, x):
        return self.second(blocks[1], self.first(blocks[0], x).relu())


def gradients(ranks, batch_size, kind="random"):
    """Of each step of an epoch, summed over ranks; and the exact outputs of the same model afterwards."""
    owners = assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)[kind]

    def fn(comm):
        own = shard_in_memory(GRAPH, owners, comm)
        sampler = dgl.dataloading.NeighborSampler([2, 3])
        loader = sp.dgl.DataLoader(own, own.train_mask, sampler, batch_size, shuffle=True, seed=5)
        with sp.seed(0, comm):
            model = SAGE().double()
        full = sp.dgl.exact(model, comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = []
        for _, _, blocks in loader:
            out = model(blocks, blocks[0].srcdata["x"])
            loss = sp.cross_entropy(out, blocks[-1].dstdata["y"], None, comm)
            optimizer.zero_grad()
            loss.backward()
            sp.sync_gradients(model, comm)
            steps.append([loss.item(), *(p.grad.clone() for p in model.parameters())])
            optimizer.step()
        with torch.no_grad():
            out = sp.gather(own, full([own, own], own.x))
        whole = SAGE().double()
        whole.load_state_dict(full.state_dict())
        g = dgl.graph(tuple(GRAPH.edge_index), num_nodes=GRAPH.num_nodes)
        return steps, out, whole([g, g], GRAPH.node["x"])

    return run(fn, ranks)[0]


class Normed(torch.nn.Module):
    """Its message function and what `forward` does are methods."""

    def __init__(self):
        super().__init__()
        self.lin, self.norm = torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(5)

    def message(self, edges):
        return {"m": self.lin(edges.src["h"])}

    def embed(self, g, x):
        g.ndata["h"] = self.norm(x)
        g.update_all(self.message, dgl.function.sum("m", "out"))
        return g.ndata["out"]

    def forward(self, g, x):
        return self.embed(g, x) * 2


@on_ranks(3)
def test_methods_of_an_exact_copy_use_the_mean_of_the_statistics(comm):
    own = share(GRAPH, comm, "empty part", chunk_bytes=64)
    with sp.seed(0, comm):
        model = Normed().double()
    full = sp.dgl.exact(model, comm)
    model.norm.running_mean.fill_(3.0 * comm.rank)
    found = full.embed(own, own.x)
    assert torch.equal(model.norm.running_mean, torch.full((5,), 3.0, dtype=torch.float64))
    torch.testing.assert_close(full(own, own.x), found * 2)
    g = dgl.graph(tuple(GRAPH.edge_index), num_nodes=GRAPH.num_nodes)
    torch.testing.assert_close(found, model.eval().embed(g, GRAPH.node["x"])[own.node_ids])


def test_training_does_not_depend_on_the_ranks():
    """The gradient of a step is that of the mean loss over the seeds of all ranks, whoever owns what."""
    alone, out, whole = gradients(1, 8)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-10)
    assert len(alone) == 3
    for ranks, kind in ((2, "random"), (4, "random"), (2, "empty part"), (4, "no edges")):
        steps, out, _ = gradients(ranks, 8 // ranks, kind)
        for mine, theirs in zip(steps, alone, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
        torch.testing.assert_close(out, whole, rtol=0, atol=1e-10)


@on_ranks(2)
def test_what_is_refused(comm):
    own = share(GRAPH, comm)
    sampler = dgl.dataloading.NeighborSampler([2])
    for other in (dgl.dataloading.ShaDowKHopSampler([2]), dgl.dataloading.as_edge_prediction_sampler(sampler)):
        with pytest.raises(RefusedError, match="Sampler is not supported on a sharded graph: the ranks that own"):
            sp.dgl.DataLoader(own, own.train_mask, other)
    with pytest.raises(RefusedError, match="edge_dir='out'"):
        sp.dgl.DataLoader(own, own.train_mask, dgl.dataloading.NeighborSampler([2], edge_dir="out"))
    with pytest.raises(TypeError, match="DataLoader got device='cuda:7'"):
        sp.dgl.DataLoader(own, own.train_mask, sampler, device="cuda:7")
    with pytest.raises(TypeError, match=r"`graph` must be what shardpass.load or shard returned, but got DGLGraph"):
        sp.dgl.DataLoader(dgl.graph(([0], [1])), own.train_mask, sampler)
    with pytest.raises(ValueError, match=r"expected a .*mask or own rows.*got None"):
        sp.dgl.DataLoader(own, None, sampler)
    with pytest.raises(ValueError, match="23 seeds in batches of 1 on 2 ranks leave some ranks without a seed"):
        sp.dgl.DataLoader(own, own.train_mask, sampler)
    assert len(sp.dgl.DataLoader(own, own.train_mask, sampler, drop_last=True, device="cpu", num_workers=0)) == 11


def test_blocks_of_several_types():
    graph = awkward_hetero_graph()
    fanouts = [2, {kind: 3 if kind[2] == "paper" else 0 for kind in graph.edges}]

    def fn(comm):
        own = share(graph, comm)
        seeds = {kind: torch.arange(own[kind].num_own_nodes) for kind in ("paper", "author")}
        sampler = dgl.dataloading.NeighborSampler(fanouts)
        return list(sp.dgl.DataLoader(own, seeds, sampler, batch_size=6, shuffle=True))

    found = [batch for rank in run(fn, 2) for batch in rank]
    for inputs, outputs, blocks in found:
        assert len(blocks) == 2 and outputs["venue"].numel() == 0
        for kind in graph.num_nodes:
            assert torch.equal(blocks[0].srcnodes[kind].data["x"], graph.node[kind]["x"][inputs[kind]])
            assert torch.equal(blocks[1].dstnodes[kind].data[dgl.NID], outputs[kind])
        for block, fanout in zip(blocks, (dict.fromkeys(graph.edges, 2), fanouts[1]), strict=True):
            for kind, edges in graph.edges.items():
                src, dst = block.edges(etype=kind)
                ids = torch.stack(
                    [block.srcnodes[kind[0]].data[dgl.NID][src], block.dstnodes[kind[2]].data[dgl.NID][dst]]
                )
                edge_ids = block.edges[kind].data[dgl.EID]
                assert torch.equal(ids, edges[:, edge_ids])
                assert torch.equal(block.edges[kind].data["edge_attr"], graph.edge[kind]["edge_attr"][edge_ids])
                degree = torch.bincount(edges[1], minlength=graph.num_nodes[kind[2]])
                wanted = degree[block.dstnodes[kind[2]].data[dgl.NID]].clamp(max=fanout[kind])
                assert torch.equal(block.in_degrees(etype=kind), wanted)
    for kind in ("paper", "author"):
        seeds = torch.cat([outputs[kind] for _, outputs, _ in found])
        assert torch.equal(seeds.sort().values, torch.arange(graph.num_nodes[kind]))
