"""Layers, norms, readouts and batches of PyG that a sharded graph has no exact result for, or not so."""

import copy
import functools
import io
import pickle

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn.attention import QFormer, SGFormerAttention
from torch_geometric.utils import scatter, to_dense_batch

import shardpass as sp
from shardpass.core.graphs.batch_index import BatchIndex
from shardpass.errors import NeedsHaloError, RefusedError
from shardpass.frontends.pyg import models
from shardpass.frontends.pyg.refusals import refuse_unsupported
from tests.frontends.on_ranks import share

from .told import GRAPH, N, assert_told, of, rows_of


def wrapped(model, comm):
    return sp.pyg.wrap(copy.deepcopy(model).double(), comm)


class Messages(gnn.MessagePassing):
    """A layer whose message is `made` of a module and both ends."""

    def __init__(self, made, part):
        super().__init__()
        self.made, self.part = made, part

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.made(self.part, x_i, x_j)


def _batch(use, comm, graph):
    use(torch.randn(4, 5), BatchIndex.of(4, comm))


def _wrap(make, comm, graph):
    sp.pyg.wrap(make(), comm)


def _refused(make, comm, graph):
    refuse_unsupported(make())


BATCHES = {
    "a dense batch": (lambda x, b: to_dense_batch(x, b), "indexed by the batch|`.*` on the batch"),
    "arithmetic of a batch": (lambda x, b: b + 1, "`.*add.*` on the batch of a sharded graph"),
    "cat of a batch": (lambda x, b: torch.cat([b, torch.zeros(2, dtype=torch.long)]), "`cat` on the batch"),
    "unique of a batch": (lambda x, b: b.unique(), "on the batch"),
    "some of a batch": (lambda x, b: b[:-1], "`__getitem__` on the batch"),
    "a list of a batch": (lambda x, b: b.tolist(), "`tolist` on the batch"),
    "argsort of a batch": (lambda x, b: b.argsort(), "`argsort` on the batch"),
    "rows by a batch": (lambda x, b: x[b], r"a tensor of shape \[4, 5\] is indexed by the batch"),
    "more graphs": (lambda x, b: gnn.global_add_pool(x, b, size=3), "onto 3 graphs: this sharded graph has 1"),
    "any of a batch": (lambda x, b: scatter(x, b, reduce="any"), r"`scatter_` on the batch"),
    "too few rows": (lambda x, b: x.new_zeros(1, 5).index_add(0, b, x[:2]), "one row for each of the 4 own nodes"),
    "a maximum of integers": (
        lambda x, b: scatter((x > 0).long(), b, reduce="max"), "the max of integers over all nodes"
    ),
    "along channels": (
        lambda x, b: x.new_zeros(4, 1).scatter_add_(1, b.view(-1, 1).expand(4, 5), x), "along dimension 1"
    ),
}  # fmt: skip
WHOLE_SETS = {
    "LSTMAggregation": lambda: gnn.LSTMAggregation(5, 5),
    "GRUAggregation": lambda: gnn.GRUAggregation(5, 5),
    "SortAggregation": lambda: gnn.SortAggregation(3),
    "MedianAggregation": gnn.MedianAggregation,
    "QuantileAggregation": lambda: gnn.QuantileAggregation(0.3),
    "MLPAggregation": lambda: gnn.MLPAggregation(5, 5, 41, num_layers=1),
    "LCMAggregation": lambda: gnn.LCMAggregation(5, 5),
    "SetTransformerAggregation": lambda: gnn.SetTransformerAggregation(5),
    "GraphMultisetTransformer": lambda: gnn.GraphMultisetTransformer(5, k=2),
    "PatchTransformerAggregation": lambda: gnn.PatchTransformerAggregation(5, 5, 4, 8),
}


class OwnGraphNorm(gnn.GraphNorm):
    """A norm of the user's own."""


class OwnBatchNorm(nn.BatchNorm1d):
    """A batch norm of the user's own."""


class OwnPooling(gnn.TopKPooling):
    """A pooling of the user's own."""


class OwnGPS(gnn.GPSConv):
    """A layer of the user's own."""


class OwnAttention(nn.MultiheadAttention):
    """An attention of the user's own."""


def gps():
    return gnn.GPSConv(6, gnn.GCNConv(6, 6), heads=2)


def with_own_attention():
    layer = sp.pyg.gather_attention(gps())
    layer.attn = OwnAttention(6, 2)
    return layer


def that_remembers():
    layer = gnn.GCNConv(5, 6, cached=True).double()
    layer(GRAPH.node["x"], GRAPH.edge_index)
    return layer


def made_in(package, name):
    return type(name, (nn.Module,), {"__module__": package})


DERIVED, OVER_NODES = "not classes derived from them", "its statistics run over all nodes"
WRAP = {
    "a layer that remembers another graph": (that_remembers, "keeps the graph of a call before wrap"),
    "a norm derived from PyG's": (lambda: nn.Sequential(OwnGraphNorm(5)), OVER_NODES),
    "a norm derived from torch's": (lambda: nn.Sequential(OwnBatchNorm(5)), OVER_NODES),
    "an instance norm": (lambda: nn.Sequential(nn.InstanceNorm1d(5, track_running_stats=True)), OVER_NODES),
    "all pairs in a GPSConv": (gps, r"GPSConv cannot be exact .* shardpass\.pyg\.gather_attention\(model\)"),
    "a class derived from GPSConv": (lambda: sp.pyg.gather_attention(OwnGPS(6, None, heads=2)), DERIVED),
    "a class derived from attention": (with_own_attention, DERIVED),
    "QFormer": (lambda: QFormer(8, 8, 8, 1, 1), "QFormer"),
    "GroupAddRev": (lambda: gnn.GroupAddRev(gnn.GCNConv(3, 3), num_groups=2), "disable=True"),
    "DeepGCNLayer": (lambda: gnn.DeepGCNLayer(gnn.GCNConv(3, 3), gnn.LayerNorm(3), ckpt_grad=True), "ckpt_grad=False"),
    "LINKX": (lambda: gnn.LINKX(41, 5, 8, 3, 2), "NodeEmbedding"),
    **{
        f"{type(layer).__name__} in a model": (
            lambda layer=layer: nn.Sequential(nn.Linear(5, 5), copy.deepcopy(layer)),
            rf"{type(layer).__name__} \(at '1'\) cannot be exact",
        )
        for layer in (gnn.TopKPooling(5), gnn.GPSConv(5, None, heads=1))
    },
}  # fmt: skip
UNKNOWN = {
    "a class derived from pooling": (
        lambda: OwnPooling(4), "^OwnPooling cannot be exact on a sharded graph: it drops or merges nodes"
    ),
    **{
        f"a new class of {package}": (
            made_in(f"torch_geometric.nn.{package}.new", "New"),
            "^New cannot be exact .* does not know it",
        )
        for package in ("models", "norm")
    },
    **{
        f"a class of {package}": (made_in(f"{package}models.some", "Some"), "^Some cannot be exact")
        for package in models.ELSEWHERE
    },
}  # fmt: skip


def _ordinary(layer, rows, is_named, comm, graph):
    """It would speak of other nodes: `partition` numbers them anew, on one rank too."""
    edges = {"edge_index": GRAPH.edge_index} if is_named else GRAPH.edge_index
    call = wrapped(layer, comm)
    call(GRAPH.node["x"][:rows], **edges) if is_named else call(GRAPH.node["x"][:rows], edges)


def streamed(comm):
    return share(GRAPH, comm, stream_structure=True)


NOT_STREAMED = "stream_structure=True"
ONE = {
    **of(_wrap, WRAP),
    **of(_refused, UNKNOWN),
    **{
        f"an ordinary edge_index, {type(layer).__name__}, {rows} rows{', by name' * is_named}": (
            RefusedError, "Pass the graph that shardpass", functools.partial(_ordinary, layer, rows, is_named),
        )  # fewer rows than nodes, as a rank has
        for layer in (gnn.GCNConv(5, 6), gnn.GATConv(5, 6)) for rows in (N, 20) for is_named in (False, True)
    },
}  # fmt: skip
THREE = {
    **of(_batch, BATCHES),
    **{
        name: (
            RefusedError, "on the batch of a sharded graph|double backward",
            lambda comm, graph, make=make: sp.pyg.wrap(make(), comm)(torch.randn(4, 5), BatchIndex.of(4, comm)),
        )
        for name, make in WHOLE_SETS.items()
    },
    **{
        f"{aggr} in the mode sar": (
            RefusedError, "SAGEConv: .*mode='halo'",
            lambda comm, graph, aggr=aggr, given=given: wrapped(
                gnn.SAGEConv(5, 5, aggr=aggr, aggr_kwargs=given), comm
            )(graph.x, graph),
        )
        for aggr, given in (("lstm", {}), ("sort", {"k": 2}))
    },
    **{
        f"GraphNorm, {len(given)} arguments": (
            RefusedError, "^GraphNorm: .*is not graph.batch",
            lambda comm, graph, given=given: sp.pyg.wrap(gnn.GraphNorm(5), comm)(torch.randn(4, 5), *given),
        )
        for given in ((torch.arange(4) // 2,), (torch.zeros(4, dtype=torch.long), 3))
    },
    "reentrant checkpointing": (
        RefusedError, "use_reentrant=False",
        lambda comm, graph: checkpoint(
            wrapped(gnn.GCNConv(5, 3), comm), graph.x.clone().requires_grad_(), graph.edge_index, use_reentrant=True
        ).sum().backward(),
    ),
    "PairNorm of three dimensions": (
        RefusedError, "flatten first", lambda comm, graph: sp.pyg.wrap(gnn.PairNorm(), comm)(torch.randn(4, 2, 5))
    ),
    "attention over several graphs": (
        RefusedError, r"takes own rows as \[1, num_own, channels\]",
        lambda comm, graph: sp.pyg.wrap(SGFormerAttention(5, 1, 8), comm)(torch.randn(2, 3, 5)),
    ),
    "PyG's default layer norm in a message": (
        NeedsHaloError, r"LayerNorm over the graph \(PyG's default; mode='node' takes .*halo",
        lambda comm, graph: wrapped(Messages(
            lambda mlp, x_i, x_j: mlp(torch.cat([x_i, x_j], dim=1)), gnn.MLP([10, 5, 5], norm="layer_norm")
        ), comm)(graph.x, graph),
    ),
    "a pickled batch": (
        TypeError, "belongs to its process", lambda comm, graph: pickle.dump(BatchIndex.of(2, comm), io.BytesIO())
    ),
    "layers of a streamed graph": (
        (ValueError, RefusedError), NOT_STREAMED,
        lambda comm, graph: streamed(comm).layers(torch.ones(graph.num_own_nodes, dtype=torch.bool), 2),
    ),
    "reversed edges of a streamed graph": (
        (ValueError, RefusedError), NOT_STREAMED,
        lambda comm, graph: sp.pyg.wrap(gnn.SAGEConv(5, 8, flow="target_to_source").double(), comm, check=False)(
            graph.x, streamed(comm)
        ),
    ),
}  # fmt: skip
ROWS_IN_MESSAGE = {
    f"rows of nodes after messages, {mode}": (
        RefusedError, r"message\(\) of Messages returns \d+ rows for \d+ edges.*added to what propagate",
        lambda comm, graph, mode=mode: wrapped(
            Messages(lambda own, x_i, x_j: torch.cat([x_j, own]), graph.x), comm
        )(graph.x, share(GRAPH, comm, mode=mode)),
    )
    for mode in ("sar", "halo")
}  # fmt: skip
NORM_IN_MESSAGE = {
    "GraphNorm in a message": (
        RefusedError, "mode='halo'",
        lambda comm, graph: wrapped(Messages(lambda norm, x_i, x_j: norm(x_j), gnn.GraphNorm(5)), comm)(
            graph.x, graph
        ),
    ),
}  # fmt: skip


ALWAYS = {**NORM_IN_MESSAGE, **ROWS_IN_MESSAGE}


@rows_of({**ONE, **ALWAYS}, {**THREE, **ALWAYS})
def test_a_mistake_with_a_layer_is_told(row, ranks, kind):
    assert_told(row, ranks, kind)
