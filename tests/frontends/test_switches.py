"""Every option and optimisation, on and off: the numbers of the whole graph, and the same bits in two runs.

A row says how everything is switched. The rows hold every pair of settings; a third runs by default.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import random
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn

import shardpass as sp
from shardpass.core.kernels import cpu_loops
from shardpass.core.sampling import drawing
from shardpass.testing import (
    WholeGraph,
    assert_same,
    assignments,
    evaluate_sharded,
    evaluate_whole,
    run,
    shard_in_memory,
)

from .how_much import one_each, some_by_default
from .pyg_cases import GRAPH, GatedConv, mlp

OPTIONS = {
    "mode": ("sar", "keep", "halo"),
    "backward": ("auto", "push", "pull"),
    "prefetch": (1, 0, 3),
    "block_rows": (None, 3),
    "chunk_bytes": (1 << 20, 2000),
    "wire_dtype": (None, torch.bfloat16),  # of float32 rows: float64 stays as it is
    "cache_constant_inputs": (True, False),
    "fuse_attention": (True, False),
    "share_memory": (True, False),
    "stream_structure": (False, True),
    "partial_sums": (False, True),
}
WRAP = {"check": (True, False), "checkpoint": (None, "activations")}
AROUND = {
    "offload": (False, True),
    "numba": (True, False),
    "hosts": (None, (0, 0, 0), (0, 1, 0)),  # which ranks share memory, as processes do; `None`: threads, which do not
    "threads": (1, 2),
    "owners": ("random", "empty part", "no edges"),
    "ranks": (3, 1),
}
ELSEWHERE = {"memory_budget"}  # with mode="auto", a plan makes one of the other modes of it: tests/planning


class Sums(nn.Module):
    """Weighted sums, means and maxima of copies, with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = gnn.GCNConv(5, 6), nn.BatchNorm1d(6)
        self.second, self.third = gnn.SAGEConv(6, 6, aggr=["mean", "max"]), gnn.GINConv(mlp(6, 4))

    def forward(self, x: Tensor, graph: object, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.norm(self.first(x, graph, edge_weight)).relu()
        return self.third(self.second(x, graph), graph)


class Attention(nn.Module):
    """Scores of several closed forms, with features of edges and without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = gnn.GATConv(5, 3, heads=2, edge_dim=3), gnn.GATv2Conv(6, 3, heads=2)
        self.third = gnn.TransformerConv(6, 4, edge_dim=3)

    def forward(self, x: Tensor, graph: object, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.second(self.first(x, graph, edge_attr).relu(), graph)
        return self.third(x, graph, edge_attr)


class Users(nn.Module):
    """A message function of a user, and the sums before it that do not change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = gnn.GraphConv(5, 5), GatedConv(5, 3)

    def forward(self, x: Tensor, graph: object, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
        return self.second(self.first(x, graph, edge_weight).tanh(), graph, edge_attr)


MODELS = {"sums": Sums, "attention": Attention, "user's": Users}
SWITCHES = {**OPTIONS, **WRAP, **AROUND, "model": tuple(MODELS)}


def allowed(row):
    """Whether these settings go together, as far as they are there."""
    return not row.get("stream_structure") or (row.get("mode") != "halo" and row.get("backward") != "pull")


def covering_pairs(switches, tries=40):
    """Rows that hold every pair of settings that go together, few by greed and the same in every run."""
    draw, rows = random.Random(0), []
    pairs = [
        dict(zip(names, settings))
        for names in itertools.combinations(switches, 2)
        for settings in itertools.product(*(switches[name] for name in names))
    ]
    missing = [pair for pair in pairs if allowed(pair)]
    while missing:
        drawn = [{name: draw.choice(switches[name]) for name in switches} | missing[0] for _ in range(tries)]
        best = max(filter(allowed, drawn), key=lambda row: sum(pair.items() <= row.items() for pair in missing))
        missing = [pair for pair in missing if not pair.items() <= best.items()]
        rows.append(best)
    return rows


ROWS = covering_pairs(SWITCHES)
FIRST = {name: settings[0] for name, settings in SWITCHES.items()}


def one_in(count):
    """All rows, of which one in `count` runs by default."""
    return [pytest.param(row, marks=pytest.mark.long if i % count else []) for i, row in enumerate(ROWS)]


def named(row):
    """What differs from the defaults."""
    return f"{row['model']}: " + " ".join(
        f"{name}={row[name]}" for name in row if row[name] != FIRST[name] and name != "model"
    )


def call(model, given, edges):
    """Three calls on the same graph: the first two on inputs that do not change, of which sums may be kept."""
    constant = {name: tensor.detach() for name, tensor in given.items()}
    every = [
        model(inputs["x"], edges, inputs["edge_weight"], inputs["edge_attr"]) for inputs in (constant, constant, given)
    ]
    return every[0] + 2 * every[1] + every[2]


@pytest.fixture
def evaluated(monkeypatch, tmp_path):
    """``evaluated(row)``: what the whole graph gives, and what the ranks of the row do."""

    def offloading(model, given, edges):
        with sp.offload(tmp_path, min_bytes=1):
            return call(model, given, edges)

    def of(row):
        torch.manual_seed(0)
        model = MODELS[row["model"]]().double()
        whole = evaluate_whole(model, GRAPH, call)
        ranks = row["ranks"]

        def wrap(copied, comm):
            if row["hosts"] is not None:
                hosts = row["hosts"][:ranks]
                comm.inner.shares_memory = True
                comm.inner.local_ranks = tuple(r for r in range(ranks) if hosts[r] == hosts[comm.rank])
            return sp.pyg.wrap(copied, comm, **{name: row[name] for name in WRAP})

        owners = assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index).get(row["owners"])
        owners = torch.zeros(GRAPH.num_nodes, dtype=torch.int64) if owners is None else owners
        with monkeypatch.context() as patch:
            patch.setattr(cpu_loops, "_SMALL", 20)  # so that a small graph is shared among threads too
            if not row["numba"]:
                patch.setattr(cpu_loops, "optional_module", lambda name: None)
            torch.set_num_threads(row["threads"])
            try:
                options = sp.Options(**{name: row[name] for name in OPTIONS})
                caller = offloading if row["offload"] else call
                return whole, evaluate_sharded(model, GRAPH, caller, owners, ranks, wrap, options, whole)
            finally:
                torch.set_num_threads(1)

    return of


@pytest.mark.parametrize("row", one_in(6), ids=named)
def test_every_pair_of_settings_gives_the_numbers_of_the_whole_graph(row, evaluated):
    assert_same(*evaluated(row), named(row))


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_every_pair_of_settings_on_every_model(row, model, evaluated):
    row = {**row, "model": model}
    assert_same(*evaluated(row), named(row))


def test_there_is_a_row_for_every_option():
    assert {field.name for field in fields(sp.Options)} == {*OPTIONS, *ELSEWHERE}
    assert set(inspect.signature(sp.pyg.wrap).parameters) == {"model", "comm", *WRAP}


SAME_BITS = [
    {"prefetch": 0},
    {"prefetch": 3},
    {"wire_dtype": torch.bfloat16},
    {"hosts": (0, 0, 0)},
    {"hosts": (0, 1, 0), "share_memory": False},
    {"hosts": (0, 1, 0)},
    {"check": False},
    {"checkpoint": "activations"},
    {"offload": True},
]


@pytest.mark.parametrize("mode", some_by_default(OPTIONS["mode"], "sar"))
@pytest.mark.parametrize(("model", "switched"), one_each(MODELS, SAME_BITS))
def test_what_promises_the_same_bits_gives_them(model, switched, mode, evaluated):
    expected = evaluated({**FIRST, "model": model, "mode": mode})[1].tensors()
    found = evaluated({**FIRST, "model": model, "mode": mode, **switched})[1].tensors()
    differ = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not differ, f"other bits in {differ}"


LOADERS = {
    "nodes": lambda graph, **given: sp.pyg.NeighborLoader(graph, [3, 2], graph.train_mask, **given),
    "links": lambda graph, **given: sp.pyg.LinkNeighborLoader(graph, [3, 2], neg_sampling="binary", **given),
    "replaced": lambda graph, **given: sp.pyg.NeighborLoader(graph, [3, 2], replace=True, **given),
    "weighted": lambda graph, **given: sp.pyg.NeighborLoader(graph, [3, 2], weight_attr="edge_weight", **given),
}


@pytest.mark.parametrize(("name", "ranks"), one_each(LOADERS, (3, 1)))
def test_batches_do_not_depend_on_how_they_are_made(name, ranks, monkeypatch):
    """Ahead by a thread or not, with the loops of numba or of numpy, and however the graph travels."""
    owners = assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index)["random"]
    graph = WholeGraph(GRAPH.num_nodes, GRAPH.edge_index, {**GRAPH.node}, GRAPH.edge)
    graph.node["train_mask"] = torch.arange(GRAPH.num_nodes) % 3 > 0

    def epochs(comm, prefetch, **options):
        share = shard_in_memory(graph, owners, comm, sp.Options(**options))
        loader = LOADERS[name](share, batch_size=4, shuffle=True, seed=3, prefetch=prefetch)
        return [batch.to_dict() for _ in range(2) for batch in loader]

    expected = run(lambda comm: epochs(comm, 2), ranks)
    found = [run(lambda comm: epochs(comm, 0, mode="halo", block_rows=2), ranks)]
    monkeypatch.setattr(drawing, "optional_module", lambda name: None)
    found.append(run(lambda comm: epochs(comm, 5, stream_structure=True), ranks))
    for other in found:
        for mine, theirs in zip(itertools.chain(*expected), itertools.chain(*other), strict=True):
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():
                assert torch.equal(value, theirs[key]) if isinstance(value, Tensor) else value == theirs[key], key


@pytest.mark.parametrize("row", one_in(16), ids=named)
def test_an_inference_is_the_whole_graph_in_every_row(row, tmp_path):
    torch.manual_seed(0)
    model = MODELS[row["model"]]().double().eval()
    given = {**GRAPH.node, **GRAPH.edge}
    with torch.no_grad():
        expected = model(given["x"], GRAPH.edge_index, given["edge_weight"], given["edge_attr"])
    owners = assignments(GRAPH.num_nodes, row["ranks"], GRAPH.edge_index)["random"]

    def work(comm):
        options = sp.Options(**{name: row[name] for name in OPTIONS})
        graph = shard_in_memory(GRAPH, owners, comm, options)
        wrapped = sp.pyg.wrap(copy.deepcopy(model), comm, **{name: row[name] for name in WRAP})
        sp.infer(wrapped, graph, tmp_path / "out.npy", graph.x, graph, graph.edge_weight, graph.edge_attr)

    run(work, row["ranks"])
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "out.npy")), expected, rtol=0, atol=1e-10)


def large():
    """A graph of which torch and the loops share the work among threads."""
    draw = torch.Generator().manual_seed(0)
    ends = (torch.rand(2, 40_000, generator=draw) ** 2 * 2_000).long()
    x, attr = torch.randn(2_000, 5, generator=draw), torch.randn(40_000, 3, generator=draw)
    return WholeGraph(2_000, ends, {"x": x}, {"edge_attr": attr, "edge_weight": attr[:, 0].abs()})


def trained(comm, model, threads):
    """Every loss and gradient of two epochs in float32."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    whole = large()
    graph = shard_in_memory(whole, torch.arange(whole.num_nodes) % 7 % comm.size, comm)
    with sp.seed(0, comm):
        net = MODELS[model]()
    sp.pyg.wrap(net, comm)
    optimizer, found = torch.optim.Adam(net.parameters(), lr=0.01), []
    for _ in range(2):
        optimizer.zero_grad()
        out = net(graph.x, graph, graph.edge["edge_weight"], graph.edge["edge_attr"])
        loss = sp.mean(out.square().mean(1), None, comm)
        loss.backward()
        sp.sync_gradients(net, comm)
        optimizer.step()
        found += [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
    torch.set_num_threads(before)
    return found


def same_bits(first, second):
    return all(
        torch.equal(a, b) for mine, theirs in zip(first, second, strict=True) for a, b in zip(mine, theirs, strict=True)
    )


BY_DEFAULT = {("attention", 1, "threads"), ("sums", 3, "threads")}
RUNS = [
    pytest.param(*each, marks=[] if each in BY_DEFAULT else [pytest.mark.long, pytest.mark.processes])
    for each in itertools.product(MODELS, (1, 3), ("threads", "processes"))
]


@pytest.mark.parametrize("threads", [2, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("model", "ranks", "backend"), RUNS)
def test_two_runs_of_one_command_have_the_same_bits(model, ranks, backend, threads):
    first, second = (run(trained, ranks, backend, args=(model, threads)) for _ in range(2))
    assert same_bits(first, second)
    assert all(torch.isfinite(tensor).all() for tensor in first[0])
