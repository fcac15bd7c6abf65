"""`rows` and `node_ids`: rows of any nodes by their ids, with exact gradients, in models too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardpass as sp
from shardpass.core.ranks import Options
from shardpass.errors import RefusedError
from shardpass.testing import (
    assignments,
    awkward_graph,
    awkward_hetero_graph,
    hetero_assignments,
    run,
    shard_hetero_in_memory,
    shard_in_memory,
)

GRAPH = awkward_graph()
N = GRAPH.num_nodes


def asked(rank, num_nodes=N):
    """Ids of one rank: other numbers of them on each, none on rank 1, repetitions."""
    generator = torch.Generator().manual_seed(rank)
    count = 0 if rank == 1 else 30 + 7 * rank
    return torch.randint(0, num_nodes, (count,), generator=generator)


def weights(rank, width=5):
    count = asked(rank).numel()
    return torch.randn(count, width, generator=torch.Generator().manual_seed(100 + rank)).double()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("how", ["rows", "node_ids", "pairs"])
def test_rows_and_gradients_are_those_of_the_whole_graph(ranks, how):
    x = GRAPH.node["x"].clone().requires_grad_()
    expected = [x[asked(rank)] for rank in range(ranks)]
    sum((rows.tanh() * weights(rank)).sum() for rank, rows in enumerate(expected)).backward()
    for owners in assignments(N, ranks, GRAPH.edge_index).values():

        def work(comm, owners=owners):
            graph = shard_in_memory(GRAPH, owners, comm)
            h, ids = graph.x.clone().requires_grad_(), asked(comm.rank)
            if how == "rows":
                found = sp.rows(graph, h, ids)
            elif how == "node_ids":
                found = h[sp.node_ids(graph, ids)]
            else:
                both = h[sp.node_ids(graph, torch.stack([ids, ids]))]
                found = (both[0] + both[1]) / 2
            (found.tanh() * weights(comm.rank)).sum().backward()
            return found.detach(), h.grad, graph.node_ids

        for rank, (found, grad, ids) in enumerate(run(work, ranks)):
            torch.testing.assert_close(found, expected[rank].detach(), rtol=0, atol=1e-15)
            torch.testing.assert_close(grad, x.grad[ids], rtol=0, atol=1e-13)


@pytest.mark.ranks(3)
def test_types_dtypes_and_shapes(comm):
    whole = awkward_hetero_graph()
    graph = shard_hetero_in_memory(whole, hetero_assignments(whole, 3)["types apart"], comm)
    for kind, count in whole.num_nodes.items():
        ids, own = asked(comm.rank, count).to(torch.int32), graph.node_ids_dict[kind]
        for rows in (torch.arange(count), torch.rand(count, 2, 3).bfloat16(), torch.arange(count) % 2 == 0):
            rows = comm.all_gather(rows)[0]
            assert torch.equal(sp.rows(graph, rows[own], ids, kind), rows[ids.long()])
        pair = sp.node_ids(graph, ids, kind), sp.node_ids(graph, ids, kind)
        assert torch.equal(graph[kind].x[pair[1]], whole.node[kind]["x"][ids.long()])
    with pytest.raises(ValueError, match="node_type=None; expected one of"):
        sp.rows(graph, graph["paper"].x, asked(comm.rank, 2))


@pytest.mark.ranks(2)
def test_float32_rows_travel_in_the_dtype_of_the_options(comm):
    graph = shard_in_memory(GRAPH, torch.arange(N) % 2, comm, Options(wire_dtype=torch.bfloat16))
    found = sp.rows(graph, graph.x.float(), torch.arange(N))
    expected = GRAPH.node["x"].float()
    assert not torch.equal(found, expected) and torch.allclose(found, expected, rtol=1e-2)


WRONG = {
    "there is no node 41": lambda g: (g.x, torch.tensor([3, 41])),
    "there is no node -1": lambda g: (g.x, torch.tensor([-1])),
    r"vector of integers, \[n\], found float32": lambda g: (g.x, torch.tensor([1.0])),
    r"found int64 \[2, 2\]": lambda g: (g.x, torch.zeros(2, 2, dtype=torch.int64)),
    "ids is a mask": lambda g: (g.x, torch.ones(3, dtype=torch.bool)),
    "found a SourceRows": lambda g: (g.x, g.edge_index[0]),
    r"one row per own node, \[\d+, ...\], found float64": lambda g: (
        torch.rand(g.num_own_nodes - 1, 5).double(),
        torch.tensor([1]),
    ),
}


@pytest.mark.parametrize("words", WRONG)
@pytest.mark.ranks(2)
def test_what_one_rank_does_wrong_is_raised_on_all(comm, words):
    graph = shard_in_memory(GRAPH, torch.arange(N) % 2, comm)
    given = WRONG[words](graph) if comm.rank == 1 else (graph.x, torch.tensor([0]))
    with pytest.raises(ValueError, match=rf"{words}.*\(found on rank 1\)"):
        sp.rows(graph, *given)


def test_what_node_ids_refuses():
    graph = shard_in_memory(GRAPH, torch.zeros(N, dtype=torch.int64), sp.connect("local"))
    ids = sp.node_ids(graph, torch.tensor([[1, 2, 3], [0, 1, 0]]))
    assert ids.size(1) == 3 and ids[:, ids[0] != 2].tolist() == [[1, 3], [0, 0]]
    first, second = ids
    assert torch.cat([first, second]).tolist() == [1, 2, 3, 0, 1, 0] and ids.T.shape == (3, 2)
    assert torch.equal(graph.x[ids.to("cpu")[0, 2]], GRAPH.node["x"][3]) and type(ids.to(torch.float)) is torch.Tensor
    for wrong, words in [
        (lambda: ids + 1, "`add` on ids of the whole graph"),
        (lambda: torch.cat([first, torch.tensor([1])]), "`cat` on ids"),
        (lambda: graph.x[0, ids[0]], "dimension 0 of a tensor of own rows, alone"),
        (lambda: graph.x.index_select(1, ids[0]), "dimension 0 of a tensor of own rows, alone"),
        (lambda: torch.rand(7, 2)[ids[0]], "one row per own node"),
    ]:
        with pytest.raises((RefusedError, ValueError), match=words):
            wrong()
    with pytest.raises(ValueError, match="expected integer ids"):
        sp.node_ids(graph, graph.x)


class Links(nn.Module):
    """Scores of pairs; `what` is what a model does with them."""

    def __init__(self, what, graph=None, comm=None):
        super().__init__()
        self.lin, self.what, self.graph, self.comm = nn.Linear(5, 4).double(), what, [graph], comm

    def forward(self, x, edge_index, pairs, labels):
        z = self.lin(x)
        self.data = edge_index  # what stands for the graph
        return self.what(self, z, pairs, labels)


def scores(z, pairs):
    return (z[pairs[0]] * z[pairs[1]]).sum(-1)


def by_rows(m, z, pairs):
    src, dst = (sp.rows(m.graph[0], z, end) for end in pairs)
    return (src * dst).sum(-1)


def losses(s, y):
    return F.binary_cross_entropy_with_logits(s, y, reduction="none")


RIGHT = {
    "scores": lambda m, z, p, y: scores(z, p),
    "scores by rows": lambda m, z, p, y: by_rows(m, z, p.plain),
    "both ends": lambda m, z, p, y: torch.cat([*z[p]], dim=1).relu().sum(-1, keepdim=True),
    "loss over all ranks": lambda m, z, p, y: sp.mean(losses(scores(z, p), y), None, m.comm),
    "some pairs": lambda m, z, p, y: scores(z, p[:, p[0] != p[1]]),
    "of the argument": lambda m, z, p, y: z - sp.rows(m.data, z, sp.permuted_ids(m.data)),
    "own ids": lambda m, z, p, y: z - sp.rows(m.graph[0], z, (m.graph[0].node_ids + 1) % N),
}
MIXES = {
    "own mean": (lambda m, z, p, y: losses(scores(z, p), y).mean(), "`mean` puts rows together, over the fetched rows"),
    "softmax": (lambda m, z, p, y: scores(z, p).softmax(0), "`softmax` puts rows together, over the fetched rows"),
    "numbers": (lambda m, z, p, y: z[p.plain[0]], "takes rows by numbers that do not come from the graph"),
    "rows of h": (lambda m, z, p, y: sp.rows(m.graph[0], z - z.mean(0), p.plain[0]), "`mean` puts rows together"),
    "own numbers": (
        lambda m, z, p, y: sp.rows(m.graph[0], z, m.graph[0].edge_index[1]),
        "expected node ids of the whole graph, found numbers of rows",
    ),
    "chosen by values": (lambda m, z, p, y: sp.rows(m.graph[0], z, z.argmax(0)), "`argmax` puts rows together"),
}


def called(what, comm):
    graph = shard_in_memory(GRAPH, torch.arange(N) % 3, comm)
    model = sp.pyg.wrap(Links(what, graph, comm), comm)
    pairs = torch.stack([asked(2 * comm.rank), asked(2 * comm.rank).roll(1)])
    return model(graph.x, graph, sp.node_ids(graph, pairs), (pairs[0] > pairs[1]).double())


@pytest.mark.parametrize("name", RIGHT)
def test_what_models_do_with_fetched_rows_passes(name):
    run(lambda comm: called(RIGHT[name], comm), 3)


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.ranks(3)
def test_what_mixes_fetched_rows_is_refused(comm, name):
    what, words = MIXES[name]
    with pytest.raises(RefusedError, match=rf"test_any_rows.py:\d+: .*{words}"):
        called(what, comm)
