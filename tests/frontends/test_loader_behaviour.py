"""Loaders: arguments, reproducibility, ranks that part; and models trained on batches that run on the whole graph."""

import copy
import importlib.util
import subprocess
import sys
from functools import partial

import pytest
import torch

import shardpass as sp
from shardpass.core.sampling.source import source_of
from shardpass.errors import DivergenceError, RefusedError
from shardpass.testing import assignments, awkward_graph, shard_in_memory

from .on_ranks import on_ranks, on_shares, share

gnn = pytest.importorskip("torch_geometric.nn")
GRAPH = awkward_graph()


shares = partial(on_shares, GRAPH)


def drawn(loader, epochs=1):
    return [(b.n_id.tolist(), b.e_id.tolist()) for _ in range(epochs) for b in loader]


@on_ranks(2)
def test_batches_are_reproducible(comm):
    own = share(GRAPH, comm)
    make = partial(sp.pyg.NeighborLoader, own, [2, 2], batch_size=6, shuffle=True, node_attrs=["x"])
    first, other = make(seed=1), make(seed=2)
    epochs = drawn(first, 3)
    assert drawn(make(seed=1, prefetch=0), 3) == epochs and drawn(other) != epochs[: len(first)]
    resumed = make(seed=1)
    resumed.set_epoch(2)
    assert drawn(resumed) == epochs[-len(first) :]
    assert epochs[: len(first)] != epochs[len(first) : 2 * len(first)]
    assert len(first) == 4


def test_without_shuffle_seeds_come_in_the_order_of_their_ids():
    def fn(comm, own):
        loader = sp.pyg.NeighborLoader(own, [1], batch_size=5)
        epochs = [[b.input_id for b in loader] for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*epochs))
        return epochs[0]

    (alone,) = shares(fn, 1)
    assert torch.equal(torch.cat(alone), torch.arange(41))
    steps = list(zip(*shares(fn, 2)))
    assert [sorted(torch.cat(step).tolist()) for step in steps[:-2]] == [list(range(i, i + 10)) for i in (0, 10, 20)]


def test_fields_that_come_with_a_batch():
    def fn(comm, own):
        (batch, *_) = sp.pyg.NeighborLoader(own, [0], batch_size=41, node_attrs=[], edge_attrs=["edge_weight"])
        assert "x" not in batch and batch.edge_weight.shape == (0,) and batch.edge_index.shape == (2, 0)
        assert "edge_attr" not in batch and batch.num_sampled_edges == [0]
        with pytest.raises(ValueError, match="node_attrs names 'feat', which is not stored"):
            sp.pyg.NeighborLoader(own, [1], node_attrs=["feat"])
        transformed = sp.pyg.NeighborLoader(own, [1], batch_size=41, transform=lambda batch: batch.num_nodes)
        return next(iter(transformed))

    assert all(count >= 20 for count in shares(fn))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            {"num_workers": 2},
            TypeError,
            "num_workers=2, which is not supported on a sharded graph: batches are",
        ),
        ({"disjoint": True}, TypeError, "NeighborLoader got disjoint=True"),
        ({"subgraph_type": "induced"}, TypeError, "a batch holds only the edges that were drawn"),
        ({"time_attr": "t"}, TypeError, "there is no temporal sampling"),
        ({"colour": 1}, TypeError, r"colour=1, which is not supported on a sharded graph; see help"),
        ({"node_attrs": "x"}, ValueError, r"node_attrs is 'x'; expected a list of names, such as \['x'\]"),
        (
            {"graph": object()},
            TypeError,
            "NeighborLoader takes the graph that shardpass.load or shard returned, found a object",
        ),
        ({"batch_size": 0}, ValueError, "batch_size is 0; expected an integer, 1 or more"),
        ({"prefetch": -1}, ValueError, "prefetch is -1; expected an integer, 0 or more"),
        ({"num_neighbors": 5}, ValueError, r"num_neighbors is 5; expected a list of one number per hop"),
        ({"num_neighbors": []}, ValueError, r"num_neighbors is \[\]; expected a list of one number per hop"),
        ({"num_neighbors": [2.5]}, ValueError, "num_neighbors holds 2.5; expected an integer"),
        ({"num_neighbors": [2, -2]}, ValueError, "num_neighbors holds -2; expected an integer, -1 for all"),
        ({"num_neighbors": {("a", "b", "c"): [1]}}, ValueError, r"has unknown \('a', 'b', 'c'\)"),
        ({"input_nodes": torch.tensor([0, 0])}, ValueError, "rank 0: input_nodes holds a row twice"),
        (
            {"input_nodes": torch.tensor([41])},
            ValueError,
            r"rank 0: input_nodes holds 41; expected own rows in \[0, 41\)",
        ),
        (
            {"input_nodes": torch.ones(40, dtype=torch.bool)},
            ValueError,
            r"is a mask \[40\]; expected one entry per",
        ),
        ({"input_nodes": "train_mask"}, ValueError, "'train_mask'; expected a bool mask .* such as graph.train_mask"),
        ({"input_nodes": torch.ones(3)}, ValueError, r"is torch.float32 \[3\]; expected a bool mask or own rows"),
    ],
)
def test_bad_arguments(arguments, error, words):
    def fn(comm, own):
        with pytest.raises(error, match=words):
            sp.pyg.NeighborLoader(**{"graph": own, "num_neighbors": [2], **arguments})

    shares(fn, 1)


def test_harmless_arguments_of_pyg():
    def fn(comm, own):
        same = {"num_workers": 0, "subgraph_type": "directional", "disjoint": False, "persistent_workers": False}
        return len(sp.pyg.NeighborLoader(own, [2], batch_size=41, **same, is_sorted=True, filter_per_worker=None))

    assert shares(fn, 1) == [1]


@on_ranks(2)
def test_different_loaders_are_told(comm):
    own = share(GRAPH, comm)
    with pytest.raises(DivergenceError, match=r"must make the same loader: rank 0 has .*batch_size=2.* rank 1 has"):
        sp.pyg.NeighborLoader(own, [2], batch_size=2 + comm.rank)


@on_ranks(2)
def test_ranks_that_part_are_told_without_a_thread(comm):
    own = share(GRAPH, comm)
    loader = sp.pyg.NeighborLoader(own, [2], batch_size=4, prefetch=0)
    batches = iter(loader)
    next(batches)
    if comm.rank == 1:
        batches = iter(loader)
    words = r"asks for batch \d of epoch \d of its loader, but rank \d asks for batch \d of epoch \d: batches are"
    with pytest.raises(DivergenceError, match=words):
        next(batches)


@on_ranks(2)
def test_an_iterator_that_another_one_followed_is_over(comm):
    own = share(GRAPH, comm)
    loader = sp.pyg.NeighborLoader(own, [2], batch_size=5)
    first = iter(loader)
    next(first)
    with pytest.raises(RuntimeError, match=r"ended after 1 of 5 batches, when the loader was iterated over again"):
        [next(first) for _ in loader]
    assert len(drawn(loader)) == 5


LEFT_HALF_WAY = """
import torch, shardpass as sp
from shardpass.testing import assignments, awkward_graph, shard_in_memory

whole, kept = awkward_graph(), []

def busy(batch):
    for _ in range(20_000):
        torch.ones(5_000).sum()
    return batch

def work(comm):
    graph = shard_in_memory(whole, assignments(whole.num_nodes, 2, whole.edge_index)["random"], comm)
    kept.append(iter(sp.pyg.NeighborLoader(graph, [2, 2], batch_size=2, transform=busy)))
    next(kept[-1])

sp.spawn(work, 2)
print("left")
"""


@pytest.mark.long
@pytest.mark.processes
def test_a_program_that_ends_half_way_ends_well():
    """A thread that is inside a kernel when the interpreter goes would abort the process: most times, so two tries."""
    command, pipe = [sys.executable, "-c", LEFT_HALF_WAY], subprocess.PIPE
    for process in [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]:
        said, error = process.communicate(timeout=120)
        assert (said, process.returncode) == ("left\n", 0), error


def test_a_loader_without_seeds_is_told():
    def fn(comm, own):
        loader = sp.pyg.NeighborLoader(own, [2], torch.zeros(own.num_own_nodes, dtype=torch.bool))
        return len(loader), list(loader)

    with pytest.warns(UserWarning, match="no seeds on any rank"):
        assert shares(fn) == [(0, [])] * 2


@on_ranks(2)
def test_no_thread_where_one_rank_has_none(comm):
    own = share(GRAPH, comm)
    comm.inner.serves_threads = comm.rank == 0
    loader = sp.pyg.NeighborLoader(own, [2], batch_size=4)
    found = drawn(loader)
    assert loader._sampler.settings.prefetch == 0 and loader._sampler.source.comm is comm
    comm.inner.serves_threads = True
    assert drawn(sp.pyg.NeighborLoader(own, [2], batch_size=4)) == found


@on_ranks(2)
def test_layers_may_leave_out_what_they_do_not_need(comm):
    own = share(GRAPH, comm)
    model = gnn.GraphSAGE(5, 4, 2).double().eval()
    for batch in sp.pyg.NeighborLoader(own, [3, 2], batch_size=4):
        trimmed = model(
            batch.x,
            batch.edge_index,
            num_sampled_nodes_per_hop=batch.num_sampled_nodes,
            num_sampled_edges_per_hop=batch.num_sampled_edges,
        )
        whole = model(batch.x, batch.edge_index)[: batch.batch_size]
        torch.testing.assert_close(trimmed[: batch.batch_size], whole)


@on_ranks(2)
def test_an_error_in_the_transform_is_raised_where_the_batch_is_taken(comm):
    def broken(batch):
        raise KeyError("no such field")

    own = share(GRAPH, comm)
    loader = sp.pyg.NeighborLoader(own, [2], batch_size=4, transform=broken)
    with pytest.raises(KeyError, match="no such field"):
        next(iter(loader))


def half_way(comm):
    """Dropped after two batches, taken up again, and all of an epoch; on processes."""
    own = share(GRAPH, comm)
    loader = sp.pyg.NeighborLoader(own, [3, 3], batch_size=2, shuffle=True)
    for step, _ in enumerate(loader):
        if step == 1:
            break
    sums = [float(comm.all_reduce(batch.x.sum().view(1))) for batch in loader]
    return len(sums) == len(loader)


def batches_with_and_without_shared_memory(comm):
    """Of both frontends, with all fields; and whether the structure was shared."""
    import dgl

    owners = assignments(GRAPH.num_nodes, comm.size, GRAPH.edge_index)["random"]
    found = []
    for share_memory in (True, False):
        own = shard_in_memory(GRAPH, owners, comm, sp.Options(share_memory=share_memory))
        pyg = sp.pyg.NeighborLoader(own, [3, 3], batch_size=4, shuffle=True)
        sampler = dgl.dataloading.NeighborSampler([2, 2])
        blocks = sp.dgl.DataLoader(own, torch.arange(own.num_own_nodes), sampler, batch_size=4, prefetch=0)
        assert [source_of(own).parts is None, blocks._sampler.source.parts is None] == [not share_memory] * 2
        batches = [[b.n_id, b.e_id, b.x, b.edge_weight, b.edge_index] for b in pyg]
        for inputs, _, (first, _) in blocks:
            batches.append([inputs, first.edata[dgl.EID], first.srcdata["x"], first.edata["edge_weight"]])
        found.append(batches)
    return all(torch.equal(*pair) for told, read in zip(*found, strict=True) for pair in zip(told, read, strict=True))


def on_processes(comm):
    has_dgl = importlib.util.find_spec("dgl") is not None
    return half_way(comm), not has_dgl or batches_with_and_without_shared_memory(comm)


@pytest.mark.long
@pytest.mark.processes
def test_dropped_half_way_and_shared_memory_on_processes():
    """One start of the processes for both: each imports torch, PyG and DGL."""
    assert sp.spawn(on_processes, 2, "processes", timeout=60) == [(True, True)] * 2


# ---- one model for batches and for the graph


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = gnn.SAGEConv(5, 6), torch.nn.BatchNorm1d(6), gnn.SAGEConv(6, 3)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x, edge_index):
        return self.second(self.dropout(self.norm(self.first(x, edge_index))), edge_index)


def test_the_copy_follows_the_model():
    def fn(comm, own):
        with sp.seed(0, comm):
            model = Net().double()
        exact = sp.pyg.exact(model, comm)
        assert all(a is b for a, b in zip(model.parameters(), exact.parameters()))
        for batch in sp.pyg.NeighborLoader(own, [2, 2], batch_size=10, shuffle=True):
            model(batch.x, batch.edge_index)
        mean = model.norm.running_mean.clone()
        every = torch.stack(comm.all_gather(mean)).mean(0)
        assert (every - mean).abs().max() > 1e-4  # statistics of batches are local
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
            out = sp.gather(own, exact(own.x, own))
        torch.testing.assert_close(model.norm.running_mean, every)
        assert model.training and not exact.training
        state = copy.deepcopy(model.state_dict())
        model.to(torch.float32).to(torch.float64)  # new buffers
        model.load_state_dict({name: tensor * 2 for name, tensor in state.items()})
        with torch.no_grad():
            doubled = sp.gather(own, exact(own.x, own))
        return out, state, doubled

    out, state, doubled = shares(fn)[0]
    whole = Net().double().eval()
    for found, factor in ((out, 1), (doubled, 2)):
        whole.load_state_dict({name: tensor * factor for name, tensor in state.items()})
        torch.testing.assert_close(found, whole(GRAPH.node["x"], GRAPH.edge_index), rtol=0, atol=1e-10)


def test_other_methods_follow_too():
    def fn(comm, own):
        with sp.seed(0, comm):
            model = gnn.GAE(gnn.SAGEConv(5, 3).double())
        exact = sp.pyg.exact(model, comm)
        with torch.no_grad():
            model.encoder.lin_l.weight.mul_(2)
            out = sp.gather(own, exact.encode(own.x, own))
        return out, copy.deepcopy(model.state_dict())

    out, state = shares(fn)[0]
    whole = gnn.GAE(gnn.SAGEConv(5, 3).double())
    whole.load_state_dict(state)
    torch.testing.assert_close(out, whole.encode(GRAPH.node["x"], GRAPH.edge_index), rtol=0, atol=1e-10)


@on_ranks(2)
def test_a_wrapped_model_is_refused(comm):
    own = share(GRAPH, comm)
    model = sp.pyg.wrap(gnn.SAGEConv(5, 3), comm)
    with pytest.raises(RefusedError, match="exact takes the ordinary model that is trained on batches"):
        sp.pyg.exact(model, comm)
    batch = next(iter(sp.pyg.NeighborLoader(own, [2], batch_size=4)))
    with pytest.raises(RefusedError, match="edge_index is an ordinary Tensor"):
        model(batch.x.float(), batch.edge_index)
    with pytest.raises(RefusedError, match="TopKPooling"):
        sp.pyg.exact(torch.nn.ModuleList([gnn.TopKPooling(5)]), comm)


def test_half_the_bytes():
    """Rows of other ranks travel as the graph's options say; ids do not change."""

    def fn(comm, own):
        fields = own.fields_of("node")
        fields._read["x"] = fields["x"].float()
        return [(b.n_id, b.x) for b in sp.pyg.NeighborLoader(own, [3], batch_size=8)]

    x = GRAPH.node["x"].float()
    found = [pair for rank in shares(fn, wire_dtype=torch.bfloat16) for pair in rank]
    exact = torch.cat([(rows == x[ids]).all(1) for ids, rows in found])
    assert exact.any() and not exact.all()
    assert all(torch.allclose(rows, x[ids], rtol=1e-2) for ids, rows in found)
