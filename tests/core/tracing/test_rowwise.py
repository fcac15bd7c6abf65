"""Row-wise or refused: what couples edges or nodes is refused by name; what does not is computed, and is right."""

import pytest
import torch
import torch.nn.functional as F
from looking import plain
from torch import nn

from shardpass.core.aggregation import aggregate
from shardpass.core.ranks import Options
from shardpass.core.tracing import Key, Program, check_row_wise, probe
from shardpass.errors import RefusedError
from shardpass.testing import WholeGraph, assignments, awkward_graph, run, shard_in_memory

GRAPH = awkward_graph(channels=4, edge_channels=3)


def add_up(messages, index, num_dst):
    return messages.new_zeros((num_dst, *messages.shape[1:])).index_add(0, index, messages)


class Edges:
    """What a message function of these tests sees."""

    def __init__(self, x_j, x_i, e, w, index, num_dst):
        self.x_j, self.x_i, self.e, self.w, self.index, self.num_dst = x_j, x_i, e, w, index, num_dst


def whole(message, reduce=None):
    """The computation on the whole graph, with gradients of node and edge inputs."""
    x = GRAPH.node["x"].clone().requires_grad_()
    e = GRAPH.edge["edge_attr"].clone().requires_grad_()
    src, dst = GRAPH.edge_index
    seen = Edges(x[src], x[dst], e, GRAPH.edge["edge_weight"], dst, GRAPH.num_nodes)
    out = (reduce or add_up)(message(seen), dst, GRAPH.num_nodes)
    (out.cos()).sum().backward()
    return out.detach(), x.grad, torch.zeros_like(e) if e.grad is None else e.grad


def sharded(message, reduce=None, ranks=3, mode="sar", kind="random"):
    owners = assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)[kind]

    def work(comm):
        graph = shard_in_memory(GRAPH, owners, comm, Options(mode=mode, chunk_bytes=400))
        x, e = plain(graph).x.clone().requires_grad_(), plain(graph).edge_attr.clone().requires_grad_()

        def of_inputs(i):
            return message(Edges(i.src["x"], i.dst["x"], i.edge["e"], i.edge["w"], i.index, i.num_dst))

        def tail(messages, i):
            return (reduce or add_up)(messages, i.index, i.num_dst)

        program = Program(
            "Layer (convs.0)", {"x": x}, {"x": x}, {"e": e, "w": plain(graph).edge_weight}, of_inputs, tail
        )
        out = aggregate(program, graph.relation.plan, graph.relation.shards)
        out.cos().sum().backward()
        return graph.node_ids, graph.edge_ids, out.detach(), x.grad, e.grad

    results = run(work, ranks)
    nodes = torch.cat([r[0] for r in results])
    edges = torch.cat([r[1] for r in results])
    out, dx = (torch.cat([r[k] for r in results])[nodes.argsort()] for k in (2, 3))
    de = torch.cat([torch.zeros(len(r[1]), 3).double() if r[4] is None else r[4] for r in results])[edges.argsort()]
    return out, dx, de


def assert_exact(message, reduce=None, **options):
    for mine, right in zip(sharded(message, reduce, **options), whole(message, reduce)):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)


torch.manual_seed(0)
LINEAR, NORM = nn.Linear(4, 4).double(), nn.LayerNorm(4).double()
CELL, ATTENTION = nn.GRUCell(4, 4).double(), nn.MultiheadAttention(4, 2, batch_first=True).double()
BATCH_NORM = nn.BatchNorm1d(4).double().eval()
MATRICES = nn.Linear(3, 16).double()
COUNTER = torch.zeros(4, dtype=torch.float64)


def own_relu(m):
    y = m.x_j.clone()
    F.relu(y, inplace=True)
    return y


def own_steps(m):
    y = m.x_j * 1
    y *= m.w.view(-1, 1)
    y[:, 0] = m.e[:, 0]
    y.add_(m.x_i).clamp_(min=-1)
    return y


def own_out(m):
    y = torch.empty_like(m.x_j)
    with torch.no_grad():
        torch.mul(m.x_j.detach(), 2, out=y)
    return y + m.x_j


def softmax_from(base, included):
    """An edge softmax measured from a maximum that counts `base`, as naive code has it."""

    def message(m):
        logit = m.x_j - 5
        start = torch.full((m.num_dst, 4), base, dtype=logit.dtype)
        index = m.index.view(-1, 1).expand_as(logit)
        top = start.scatter_reduce(0, index, logit.detach(), "amax", include_self=included)
        weight = (logit - top.index_select(0, m.index)).exp()
        total = torch.zeros(m.num_dst, 4, dtype=logit.dtype).scatter_add(0, index, weight)
        return weight * total.index_select(0, m.index)

    return message


def half_shifted(m):
    index = m.index.view(-1, 1).expand_as(m.x_j)
    start = torch.zeros(m.num_dst, 4, dtype=m.x_j.dtype)
    top = start.scatter_reduce(0, index, m.x_j.detach(), "amax", include_self=False)
    weight = torch.sub(m.x_j, top.index_select(0, m.index), alpha=0.5).exp()
    total = torch.zeros(m.num_dst, 4, dtype=m.x_j.dtype).scatter_add(0, index, weight)
    return weight / total.index_select(0, m.index)


ALLOWED = {
    "copy": lambda m: m.x_j,
    "scaled": lambda m: m.x_j * m.w.view(-1, 1),
    "scaled by a mask": lambda m: m.x_j * (m.w > 0.5).view(-1, 1),
    "layer norm": lambda m: NORM(m.x_j + m.x_i),
    "dropout, not in training": lambda m: F.dropout(m.x_j, 0.5, training=False),
    "GRU cell": lambda m: CELL(m.x_j, m.x_i),
    "attention, one batch entry per edge": lambda m: ATTENTION(
        *[torch.stack([m.x_j, m.x_i], 1)] * 3, need_weights=False
    )[0].sum(1),
    "a matrix per edge": lambda m: (m.x_j.unsqueeze(1) @ MATRICES(m.e).view(-1, 4, 4)).squeeze(1),
    "einsum": lambda m: torch.einsum("ec,ecd->ed", m.x_j, MATRICES(m.e).view(-1, 4, 4)),
    "normalised rows": lambda m: F.normalize(m.x_j, dim=-1),
    "softmax over channels": lambda m: m.x_j.softmax(-1),
    "sorted channels": lambda m: m.x_j.sort(dim=-1)[0],
    "cumulated channels": lambda m: m.x_j.cumsum(1),
    "batch norm, not in training": lambda m: BATCH_NORM(m.x_j),
    "where": lambda m: torch.where(m.x_j > 0, m.x_j, m.x_i),
    "in place on an own copy": own_relu,
    "in place, step by step": own_steps,
    "out=": own_out,
    "maximum of no less than 0": softmax_from(0.0, True),
    "maximum from -inf": softmax_from(float("-inf"), True),
    "maximum of messages": softmax_from(0.0, False),
    "shifted by half": half_shifted,
}


@pytest.mark.parametrize("what", ALLOWED)
def test_row_wise_messages_are_computed(what):
    assert_exact(ALLOWED[what])


@pytest.mark.parametrize("kind", ["empty part", "no edges"])
@pytest.mark.parametrize("what", ["scaled by a mask", "maximum of messages", "layer norm", "GRU cell"])
def test_row_wise_messages_where_a_rank_has_nothing(what, kind):
    assert_exact(ALLOWED[what], kind=kind, mode="keep")


def counting(m):
    COUNTER.add_(m.x_j.detach().mean(0))
    return m.x_j


REFUSED = {
    "norm of all": lambda m: m.x_j / m.x_j.norm(),
    "softmax over edges": lambda m: m.x_j.softmax(0),
    "centred": lambda m: m.x_j - m.x_j.mean(0),
    "cumulated": lambda m: m.x_j.cumsum(0),
    "sorted": lambda m: m.x_j.sort(0)[0],
    "shuffled": lambda m: m.x_j[torch.randperm(m.x_j.size(0))],
    "batch norm in training": lambda m: F.batch_norm(m.x_j, None, None, training=True),
    "largest of all": lambda m: m.x_j / m.x_j.max(),
    "first edge": lambda m: m.x_j - m.x_j[:1],
    "last edge": lambda m: m.x_j - m.x_j[-1],
    "neighbours in the list": lambda m: m.x_j + m.x_j.roll(1, 0),
    "turned": lambda m: m.x_j.flip(0),
    "position": lambda m: m.x_j * torch.arange(m.x_j.size(0)).view(-1, 1),
    "how many edges": lambda m: m.x_j / m.x_j.size(0),
    "how many nodes": lambda m: m.x_j / m.num_dst,
    "attention over edges": lambda m: ATTENTION(m.x_j.unsqueeze(0), m.x_j.unsqueeze(0), m.x_j.unsqueeze(0))[0][0],
    "product with itself": lambda m: m.x_j @ (m.x_j.t() @ m.x_j),
    "branch on values": lambda m: m.x_j * 2 if (m.x_j > 1.5).any() else m.x_j,
    "number from values": lambda m: m.x_j * float(m.x_j.max() > 2),
    "item": lambda m: m.x_j * (m.x_i.max() > 2).item(),
    "list of values": lambda m: m.x_j * sum(m.w.tolist()),
    "numpy": lambda m: m.x_j + torch.from_numpy(m.x_j.detach().numpy()),
    "state outside": counting,
    "in place on an input": lambda m: m.x_j.mul_(2),
    "relu in place on an input": lambda m: F.relu(m.x_j, inplace=True),
    "sorted by destination": lambda m: m.x_j[torch.argsort(m.index)],
    "counted destinations": lambda m: m.x_j * torch.bincount(m.index, minlength=m.num_dst)[m.index].view(-1, 1),
    "compared destinations": lambda m: m.x_j * (m.index == 0).view(-1, 1),
    "arithmetic on destinations": lambda m: m.x_j * m.index.view(-1, 1),
    "destinations as a list": lambda m: m.x_j * len(set(m.index.tolist())),
}


@pytest.mark.parametrize("what", REFUSED)
def test_messages_that_couple_edges_are_refused(what):
    ranks, mode = ((1, "sar"), (3, "halo"), (1, "halo"), (3, "sar"))[[*REFUSED].index(what) % 4]
    COUNTER.zero_()
    with pytest.raises(RefusedError, match=r"^Layer \(convs\.0\): "):
        sharded(REFUSED[what], ranks=ranks, mode=mode)


TAILS = {
    "mean of all messages": lambda m, i, n: add_up(m, i, n) + m.mean(0),
    "number of messages": lambda m, i, n: add_up(m, i, n) / m.size(0),
    "number of nodes": lambda m, i, n: add_up(m, i, n) / n,
    "centred over nodes": lambda m, i, n: (lambda out: out - out.mean(0))(add_up(m, i, n)),
    "softmax over nodes": lambda m, i, n: add_up(m, i, n).softmax(0),
    "index taken apart": lambda m, i, n: m.new_zeros(n, 4).index_add(0, i.data, m),
    "last node": lambda m, i, n: add_up(m, i, n) - add_up(m, i, n)[-1],
    "first node": lambda m, i, n: add_up(m, i, n) - add_up(m, i, n)[0],
}


@pytest.mark.parametrize("what", TAILS)
def test_node_parts_that_see_more_than_their_node_are_refused(what):
    with pytest.raises(RefusedError, match=r"^Layer \(convs\.0\): "):
        sharded(lambda m: m.x_j * 2, TAILS[what], ranks=1)


def test_node_parts_that_do_not():
    def reduce(messages, index, num_dst):
        total, count = add_up(messages, index, num_dst), add_up(torch.ones_like(messages[:, :1]), index, num_dst)
        return NORM(total / count.clamp(min=1)) * (count + 1).log()

    assert_exact(lambda m: m.x_j * m.w.view(-1, 1), reduce)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 7])
def test_tables_of_own_nodes_are_indexed_by_destination(num_nodes):
    """Also where a rank has fewer nodes than the made-up edges of the checks could end in."""
    generator = torch.Generator().manual_seed(num_nodes)
    edge_index = torch.randint(0, num_nodes, (2, 30), generator=generator)
    x = torch.randn(num_nodes, 2, generator=generator, dtype=torch.float64)
    table = torch.rand(num_nodes, 1, generator=generator, dtype=torch.float64)
    owners = torch.arange(num_nodes) % 2

    def work(comm):
        graph = shard_in_memory(WholeGraph(num_nodes, edge_index, {"x": x, "t": table}), owners, comm)
        mine = plain(graph).t
        program = Program("T", {"x": plain(graph).x}, {}, {}, lambda i: i.src["x"] * mine[i.index],
                          lambda m, i: add_up(m, i.index, i.num_dst))  # fmt: skip
        return graph.node_ids, aggregate(program, graph.relation.plan, graph.relation.shards)

    found = torch.zeros_like(x)
    for ids, rows in run(work, 1 if num_nodes == 1 else 2):
        found[ids] = rows
    right = add_up(x[edge_index[0]] * table[edge_index[1]], edge_index[1], num_nodes)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


def test_every_rank_is_told():
    owners = assignments(GRAPH.num_nodes, 3, GRAPH.edge_index)["no edges"]

    def work(comm):
        graph = shard_in_memory(GRAPH, owners, comm)
        program = Program("Layer", {"x": plain(graph).x}, {}, {}, lambda i: i.src["x"].softmax(0),
                          lambda m, i: add_up(m, i.index, i.num_dst))  # fmt: skip
        try:
            aggregate(program, graph.relation.plan, graph.relation.shards)
        except RefusedError as error:
            return str(error)

    texts = run(work, 3)
    assert len(set(texts)) == 1
    assert "messages are computed in pieces" in texts[0] and "test_rowwise.py" in texts[0]


def test_the_generator_is_left_as_it_was():
    torch.manual_seed(3)
    graph = run(lambda comm: shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.int64), comm), 1)[0]
    program = Program("T", {"x": plain(graph).x}, {}, {}, lambda i: i.src["x"] * torch.rand_like(i.src["x"]),
                      lambda m, i: add_up(m, i.index, i.num_dst))  # fmt: skip
    structure = probe(program, graph.relation.shards, graph.num_own_nodes, {Key("src", "x")})
    before = torch.random.get_rng_state()
    check_row_wise(program, structure, graph.num_own_nodes)
    assert torch.equal(torch.random.get_rng_state(), before)
