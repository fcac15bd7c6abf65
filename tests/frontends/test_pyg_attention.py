"""Attention over all nodes of the graph equals that on the whole graph."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch_geometric.nn.attention import PerformerAttention, PolynormerAttention, SGFormerAttention
from torch_geometric.nn.models import Polynormer, SGFormer

import shardpass as sp
from shardpass.frontends.pyg import modules
from shardpass.testing import assignments, run, shard_in_memory

from .how_much import ONE_PART_EMPTY, ONE_TO_FOUR, assert_exact_in, some_by_default
from .pyg_cases import GRAPH

N = GRAPH.num_nodes


@pytest.fixture(autouse=True)
def _float64_by_default():
    """SGFormerAttention makes ones of the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Dense(torch.nn.Module):
    """Attention alone, as a user calls it: own rows as a batch of one graph."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x, edge_index, batch=None):
        return self.attention(x.unsqueeze(0)).squeeze(0)


def gps(**kwargs):
    return gnn.GPSConv(6, gnn.GCNConv(6, 6), heads=2, **kwargs)


class AroundGPS(torch.nn.Module):
    """Two layers of it."""

    def __init__(self, **kwargs):
        super().__init__()
        self.lin, self.first, self.second = torch.nn.Linear(5, 6), gps(**kwargs), gps(**kwargs)

    def forward(self, x, edge_index, batch=None):
        return self.second(self.first(self.lin(x), edge_index, batch), edge_index, batch)


CASES = {
    "GPSConv performer": lambda: AroundGPS(attn_type="performer"),
    "GPSConv performer, graph norm": lambda: AroundGPS(attn_type="performer", norm="graph_norm"),
    "GPSConv performer, layer norm": lambda: AroundGPS(attn_type="performer", norm="layer_norm"),
    "GPSConv multihead": lambda: sp.pyg.gather_attention(AroundGPS()),
    "GPSConv multihead, no norm": lambda: sp.pyg.gather_attention(AroundGPS(norm=None)),
    "SGFormer": lambda: SGFormer(5, 6, 4, trans_num_heads=2, trans_dropout=0.0, gnn_dropout=0.0),
    "Polynormer local": lambda: Polynormer(5, 6, 4, 2, 2, in_dropout=0.0, dropout=0.0, global_dropout=0.0, heads=2),
    "Polynormer global": lambda: globally(
        Polynormer(5, 6, 4, 2, 2, in_dropout=0.0, dropout=0.0, global_dropout=0.0, qk_shared=False)
    ),
    "PerformerAttention": lambda: Dense(PerformerAttention(5, 1, head_channels=8, qkv_bias=True)),
    "SGFormerAttention": lambda: Dense(SGFormerAttention(5, 1, 8)),
    "PolynormerAttention": lambda: Dense(PolynormerAttention(5, 2, 4, qk_shared=True)),
}
NO_BATCH = [name for name in CASES if name not in ("SGFormer", "Polynormer local", "Polynormer global")]
SOME_NO_BATCH = ("GPSConv performer", "GPSConv multihead", "SGFormerAttention")


def globally(model):
    model._global = True
    return model


def without_batch(m, inputs, graph):
    return m(inputs["x"], graph)


def with_batch(m, inputs, graph):
    return m(inputs["x"], graph, torch.zeros(N, dtype=torch.long) if isinstance(graph, torch.Tensor) else graph.batch)


def assert_attention_exact(name, ranks, call, training=True):
    torch.manual_seed(0)
    model = CASES[name]().double().train(training)
    assert_exact_in(ONE_PART_EMPTY, model, GRAPH, call, sp.pyg.wrap, ranks)


@pytest.mark.parametrize("ranks", ONE_TO_FOUR)
@pytest.mark.parametrize("name", CASES)
def test_attention_with_the_batch_of_the_graph(name, ranks):
    assert_attention_exact(name, ranks, with_batch)


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", some_by_default(NO_BATCH, *SOME_NO_BATCH))
def test_attention_without_batch(name, ranks):
    assert_attention_exact(name, ranks, without_batch)


@pytest.mark.parametrize("name", some_by_default(CASES, "GPSConv performer", "SGFormer", "Polynormer global"))
def test_evaluation(name):
    assert_attention_exact(name, 3, with_batch, training=False)


@pytest.mark.parametrize("name", some_by_default(CASES, "GPSConv performer", "SGFormer", "Polynormer global"))
def test_it_is_followed_without_a_warning(name, recwarn):
    owners = assignments(N, 2, GRAPH.edge_index)["random"]
    make = CASES[name]

    def work(comm):
        graph = shard_in_memory(GRAPH, owners, comm)
        sp.pyg.wrap(make().double(), comm)(graph.x, graph, graph.batch)

    run(work, 2)
    assert not recwarn.list


def test_every_attention_of_the_table_is_tested():
    tested = {type(module).__name__ for make in CASES.values() for module in make().modules()}
    assert tested >= modules.ATTENTION


def test_attention_over_all_pairs_is_exact_if_asked_for():
    wrapped = sp.pyg.wrap(sp.pyg.gather_attention(gps()), sp.connect("local"))
    assert isinstance(wrapped, gnn.GPSConv) and list(wrapped.state_dict()) == list(gps().state_dict())


def test_a_new_projection_is_the_same_on_every_rank():
    def work(comm):
        attention = sp.pyg.wrap(PerformerAttention(6, 2), comm)
        before = attention.fast_attn.projection_matrix.clone()
        attention.redraw_projection_matrix()
        assert not torch.equal(before, attention.fast_attn.projection_matrix)
        return copy.deepcopy(attention).fast_attn.projection_matrix

    first, *others = run(work, 3)
    assert all(torch.equal(first, other) for other in others)
