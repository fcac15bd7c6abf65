"""The stand-in for edge_index: what structural code needs works; whatever would answer for one rank only is refused."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch.overrides import get_overridable_functions

from shardpass.backends import LocalCommunicator
from shardpass.core.graphs import ShardedEdgeIndex
from shardpass.core.graphs.edge_index import SourceRows
from shardpass.core.ranks import Ranks
from shardpass.core.sharding import DerivedShards
from shardpass.errors import RefusedError
from shardpass.testing import assignments, awkward_graph, run, shard_in_memory

GRAPH = awkward_graph()
RANKS = 3


def owners(ranks=RANKS, kind="random"):
    return assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)[kind]


def on_ranks(work, ranks=RANKS, kind="random"):
    return run(lambda comm: work(shard_in_memory(GRAPH, owners(ranks, kind), comm)), ranks)


def by_node(parts, like):
    """Rows of all ranks in the original order, from ``(node_ids, rows)``."""
    out = torch.full_like(like, -77)
    for ids, rows in parts:
        out[ids] = rows.detach().to(out.dtype)
    return out


@pytest.fixture(scope="module")
def sharded():
    """One rank's graph whose collective calls have been made; the stand-in alone is tested on it."""
    return on_ranks(lambda graph: graph)[0]


# What works


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gather_and_scatter_by_both_rows(ranks):
    src, dst = GRAPH.edge_index
    x, w = GRAPH.node["x"], GRAPH.edge["edge_weight"]

    def work(graph):
        row, col = graph.edge_index
        assert isinstance(row, SourceRows) and not isinstance(col, SourceRows)
        x = graph.x.clone().requires_grad_()
        w = graph.edge_weight.clone().requires_grad_()
        zeros = torch.zeros(graph.num_own_nodes, dtype=torch.float64)
        out_degree = zeros.scatter_add(0, row, w)
        in_degree = zeros.scatter_add(0, col, w)
        in_place = zeros.clone().scatter_add_(0, row, torch.ones_like(w))
        wide = torch.zeros(graph.num_own_nodes, 5, dtype=torch.float64)
        pushed = wide.scatter_add(0, row.view(-1, 1).expand_as(x[col]), x[col] * w.view(-1, 1))
        picked = torch.cat([x[row], x.index_select(0, row), x.t().index_select(1, row).t()], 1)
        loss = (picked.sum(1) * w * out_degree.square()[row]).sum() + (pushed**3).sum() + (in_degree**2).sum()
        loss.backward()
        return graph.node_ids, graph.edge_ids, out_degree, in_degree, in_place, pushed, picked, x.grad, w.grad

    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    zeros = torch.zeros(GRAPH.num_nodes, dtype=torch.float64)
    out_degree, in_degree = zeros.scatter_add(0, src, b), zeros.scatter_add(0, dst, b)
    pushed = torch.zeros(GRAPH.num_nodes, 5, dtype=torch.float64).index_add(0, src, a[dst] * b.view(-1, 1))
    picked = torch.cat([a[src]] * 3, 1)
    loss = (picked.sum(1) * b * out_degree.square()[src]).sum() + (pushed**3).sum() + (in_degree**2).sum()
    loss.backward()
    results = on_ranks(work, ranks)
    counts = torch.bincount(src, minlength=GRAPH.num_nodes).double()
    for place, right in ((2, out_degree), (3, in_degree), (4, counts), (5, pushed), (7, a.grad)):
        found = by_node([(r[0], r[place]) for r in results], right.detach())
        torch.testing.assert_close(found, right.detach(), rtol=1e-12, atol=1e-12)
    for result in results:
        assert torch.equal(result[6], picked[result[1]])
        torch.testing.assert_close(result[8], b.grad[result[1]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ask", [
    lambda e: (e[0] == e[1]).any(),
    lambda e: bool((e[0] != e[1]).all()),
    lambda e: int((e[0] == e[1]).sum()),
    lambda e: (~(e[0] == e[1])).sum(),
])  # fmt: skip
def test_whether_there_are_self_loops_is_a_question_to_all_ranks(ask):
    with pytest.raises(RefusedError, match="mask over this rank's edges"):
        on_ranks(lambda graph: ask(graph.edge_index))
    selected = on_ranks(lambda g: g.edge_attr[g.edge_index[0] == g.edge_index[1]].size(0))
    assert sum(selected) == int((GRAPH.edge_index[0] == GRAPH.edge_index[1]).sum())


def test_derived_edge_lists_stay_what_they_are(sharded):
    index = sharded.edge_index
    data, keep = index.plain, torch.arange(index.size(1)) % 2 == 0
    assert torch.equal(index[:, keep].plain, data[:, keep]) and index[:, keep].shards is None
    assert torch.equal(index.index_select(1, keep.nonzero().view(-1)).plain, data[:, keep])
    assert torch.equal(torch.index_select(index, dim=-1, index=keep.nonzero().view(-1)).plain, data[:, keep])
    assert torch.equal(torch.cat([index, index[:, keep]], dim=-1).plain, torch.cat([data, data[:, keep]], 1))
    loops = torch.arange(sharded.num_own_nodes).repeat(2, 1)
    assert torch.equal(torch.cat([index, loops], dim=1).plain, torch.cat([data, loops], 1))
    row, col = index[0], index[1]
    again = torch.stack([row, col], dim=0)
    assert torch.equal(again.plain, data) and not again.is_reversed and again.plan is index.plan
    for copied in (index.clone(), index.contiguous(), index.to("cpu"), index.long(), index.detach()):
        assert copied.shards is index.shards and torch.equal(copied.plain, data)
    assert torch.equal(row != col, data[0] != data[1]) and torch.equal(row == row, data[0] == data[0])
    assert int(index.max()) + 1 == int(row.max()) + 1 == sharded.num_own_nodes
    assert copy.deepcopy(index) is index and index.shape == (2, sharded.num_own_edges)


@pytest.mark.parametrize("turn", [lambda e: e.flip(0), lambda e: e.flip([0]), lambda e: torch.stack([e[1], e[0]])])
def test_reversed_lists_know_which_row_holds_the_sources(sharded, turn):
    turned = turn(sharded.edge_index)
    assert turned.is_reversed and torch.equal(turned.plain, sharded.edge_index.plain.flip(0))
    assert not isinstance(turned[0], SourceRows)
    assert isinstance(turned[1], SourceRows) and isinstance(turned[-1], SourceRows)
    assert turned[:, torch.arange(3)].is_reversed and not turned.flip(0).is_reversed
    first, second = turned
    assert not isinstance(first, SourceRows) and isinstance(second, SourceRows)


# What is refused


def refused_on_edge_index():
    """Besides the functions of torch, which are tried one by one below."""
    keep = torch.tensor([True, False])
    return {
        "arithmetic": lambda e, g: e + 1,
        "in place": lambda e, g: e.add_(1),
        "multiplied": lambda e, g: e * g.num_own_nodes,
        "linear index": lambda e, g: e[0] * g.num_own_nodes + e[1],
        "coalesced": lambda e, g: e.unique(dim=1),
        "compared with a number": lambda e, g: e == 3,
        "row compared with a 0-dim tensor": lambda e, g: e[0] == torch.tensor(3),
        "row compared with all": lambda e, g: e[0].view(-1, 1) == e[1].view(1, -1),
        "row written": lambda e, g: e[0].fill_(0),
        "item written": lambda e, g: e.__setitem__((0, 0), 1),
        "row item written": lambda e, g: e[0].__setitem__(0, 1),
        "a run of edges": lambda e, g: e[:, :4],
        "into another tensor": lambda e, g: torch.zeros(3, dtype=torch.int64).__setitem__(slice(0, 2), e[0][:2]),
        "tolist": lambda e, g: e.tolist(),
        "numpy": lambda e, g: e.numpy(),
        "np.asarray": lambda e, g: np.asarray(e[0]),
        "item": lambda e, g: e[0][0].item(),
        "data": lambda e, g: e.data,
        "transposed": lambda e, g: e.t(),
        "one edge": lambda e, g: e[:, 0],
        "row and mask": lambda e, g: e[0, torch.arange(2)],
        "a row twice": lambda e, g: e[[1, 1]],
        "list of indices": lambda e, g: g.x[[e[0]]],
        "index_put": lambda e, g: torch.zeros(g.num_own_nodes).index_put_((e[0],), torch.ones(1)),
        "scatter max": lambda e, g: g.x.scatter_reduce(0, e[0], torch.ones(g.num_own_edges), "amax"),
        "scatter": lambda e, g: torch.zeros(g.num_own_nodes).scatter_(0, e[0], 1.0),
        "scatter of ids": lambda e, g: torch.zeros(g.num_own_nodes, dtype=torch.int64).scatter_add(0, e[1], e[0]),
        "flipped order": lambda e, g: e.flip(1),
        "both flipped": lambda e, g: e.flip(0, 1),
        "cat with the reverse": lambda e, g: torch.cat([e, e.flip(0)], dim=1),
        "cat of the reverse": lambda e, g: torch.cat([e.flip(0), e], dim=1),
        "cat with plain ids": lambda e, g: torch.cat([e, torch.tensor([[0], [1]])], dim=1),
        "cat, loops of others": lambda e, g: torch.cat([torch.full((2, 1), g.num_own_nodes), e], dim=1),
        "cat along rows": lambda e, g: torch.cat([e, e], dim=0),
        "stack of sources": lambda e, g: torch.stack([e[0], e[0]]),
        "stack the other way": lambda e, g: torch.stack([e[0], e[1]], dim=1),
        "three rows": lambda e, g: torch.stack([e[0], e[1], e[1]]),
        "where": lambda e, g: torch.where(keep, e[0][:2], 0),
        "wrong rows": lambda e, g: torch.zeros(g.num_own_nodes + 1)[e[0]],
        "onto wrong rows": lambda e, g: torch.zeros(g.num_own_nodes + 1).scatter_add_(
            0, e[0], torch.ones(g.num_own_edges)
        ),
    }


@pytest.mark.parametrize("what", refused_on_edge_index())
def test_refused_by_name(sharded, what):
    before = sharded.edge_index.plain.clone()
    with pytest.raises(RefusedError, match=r"sharded graph|source node"):
        refused_on_edge_index()[what](sharded.edge_index, sharded)
    assert torch.equal(sharded.edge_index.plain, before)


# No function of torch may read ids in silence.

ANSWERS = (  # descriptions of the tensor, copies and views that stay stand-ins, and questions with whole answers
    """size dim numel stride __len__ is_floating_point is_complex is_signed ndimension nelement element_size get_device
    is_contiguous data_ptr __repr__ __hash__ storage_offset is_inference new_ones new_zeros new_full new_empty ones_like
    zeros_like full_like empty_like rand_like requires_grad_ is_same_size clone contiguous detach to long cpu cuda view
    expand expand_as unsqueeze reshape flatten squeeze eq ne __eq__ __ne__ max unbind __iter__ __getitem__ stack cat
    flip __get__ index_select __torch_function__ alias select narrow chunk split tensor_split hsplit vsplit flipud roll
    permute movedim moveaxis swapaxes swapdims transpose ravel vstack row_stack"""
).split()
EXEMPT = (  # describe or convert the Python object only; reference counts and the like
    """_use_count _fix_weakref _is_view _has_torch_function _view_func _view_func_unsafe _rev_view_func_unsafe
    _reduce_ex_internal __deepcopy__ __reduce_ex__ __dir__ __format__ typename is_tensor is_storage _none_or_dtype new
    new_tensor module_load set_""".split()
)


def test_every_function_of_torch_answers_about_the_shape_or_refuses(sharded):
    index = ShardedEdgeIndex.wrap(sharded.edge_index.plain.clone(), sharded.edge_index.plan)
    row, col = index[0], index[1]
    numbers, before = col.double(), index.plain.clone()
    arguments = [(index,), (index, 0), (index, 1), (index, col), (index, index), (row,), (row, 0), (row, 1), (row, 1.5)]
    arguments += [(row, col), (row, row), (col, row), (numbers, 0, row), (numbers, row), (row, 0, row), ([row, row],)]
    functions = {f for group in get_overridable_functions().values() for f in group}
    loud = 0
    silent = set()
    for function in functions:
        name = getattr(function, "__name__", "")
        if name in ANSWERS or name in EXEMPT:
            continue
        for args in arguments:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    out = function(*args)
            except RefusedError:
                loud += 1
                continue
            except Exception:  # arguments of the wrong kind: no answer either
                continue
            if isinstance(out, (torch.Tensor, tuple, list, bool, int, float)) and out is not NotImplemented:
                silent.add((name, tuple(type(a).__name__ for a in args)))
            assert torch.equal(index.plain, before), name
    assert loud > 1000
    # these never looked at ids: the stand-in stood in the place of another argument, or was taken for true
    allowed = {"view_as", "softmax", "log_softmax", "softmin", "__contains__", "is_vulkan_available", "sym_not"}
    assert {name for name, _ in silent} <= allowed, sorted(silent)


def test_results_stay_stand_ins(sharded):
    row = sharded.edge_index[0]
    for view in (row.view(1, -1), row.unsqueeze(1), row[row != sharded.edge_index[1]], row[:3], row.clone(), row[None]):
        assert isinstance(view, SourceRows) and view.plan is row.plan
    assert isinstance(sharded.edge_index[:, torch.arange(4)], ShardedEdgeIndex)
    assert type(torch.zeros_like(row)) is torch.Tensor


def test_a_derived_list_holds_no_numbers_until_they_are_read():
    comm = Ranks(LocalCommunicator())
    graph = shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.int64), comm)
    index = graph.edge_index
    mask = index[0] != index[1]
    loops = torch.arange(graph.num_own_nodes).repeat(2, 1)
    derived = torch.cat([index[:, mask], loops], dim=1)
    expected = torch.cat([index.plain[:, mask], loops], dim=1)
    assert derived.as_subclass(torch.Tensor).untyped_storage().nbytes() <= 64
    assert derived.shape == expected.shape and torch.equal(derived.plain, expected)
    assert torch.equal(derived[1], expected[1]) and torch.equal(derived[0].as_subclass(torch.Tensor), expected[0])
    mask.fill_(True)  # what the caller does with its mask later does not matter
    assert torch.equal(derived.plain, expected)
    plan = index.plan
    shards = plan.comm.caches.of(DerivedShards, plan).find(derived.derivation, plan.blocks, plan.num_dst)
    again = torch.cat([index[:, index[0] != index[1]], loops], dim=1)
    assert plan.comm.caches.of(DerivedShards, plan).find(again.derivation, plan.blocks, plan.num_dst) is shards
    other = torch.cat([index[:, index[0] == index[1]], loops], dim=1)
    assert plan.comm.caches.of(DerivedShards, plan).find(other.derivation, plan.blocks, plan.num_dst) is not shards
