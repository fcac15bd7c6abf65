"""Mistakes that both frontends tell in the same words: about models, transforms of them, and loaders."""

import io
import pickle
import warnings
from functools import partial
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("torch_geometric")
pytest.importorskip("dgl")

import dgl
import torch_geometric.nn as gnn
from torch import nn

import shardpass as sp
from shardpass.errors import RefusedError

from .told import Does, assert_told, rows_of


class Frontend(NamedTuple):
    """`wrap`, a class of layers, and a loader of sampled batches, called with a graph, fanouts and seeds."""

    name: str
    wrap: object
    layer: object
    other: object
    loader: object


def _dgl_loader(graph, fanouts, seeds, **given):
    return sp.dgl.DataLoader(graph, seeds, dgl.dataloading.NeighborSampler(fanouts), **given)


FRONTENDS = [
    Frontend("pyg", sp.pyg.wrap, lambda: gnn.GraphConv(5, 3).double(), dgl.nn.GraphConv, sp.pyg.NeighborLoader),
    Frontend("dgl", sp.dgl.wrap, lambda: dgl.nn.SAGEConv(5, 3, "mean").double(), gnn.GCNConv, _dgl_loader),
]


def in_order(at, x, graph):
    return (x, graph) if at.name == "pyg" else (graph, x)


def leaf(graph):
    return graph.x.clone().requires_grad_()


def mean(at, comm, graph):
    def centred(layer, *given):
        return (h := layer(*given)) - h.mean(0)

    at.wrap(Does(centred, at.layer()), comm)(*in_order(at, graph.x, graph))


def traced(at, comm, graph):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(at.wrap(at.layer(), comm), (graph.x, graph.edge_index))


def wrapped_twice(at, comm, graph):
    at.wrap(at.wrap(at.layer(), sp.connect("local")), comm)


def loader(fanouts=(2,), seeds=None, **given):
    def mistake(at, comm, graph):
        hops = list(fanouts) if isinstance(fanouts, tuple) else fanouts
        at.loader(graph, hops, graph.train_mask if seeds is None else seeds, **given)

    return mistake


SAVE = r"save model.state_dict\(\) \(or shardpass.save_checkpoint\)"
SCRIPTED = "cannot be scripted or traced"
MODELS = {
    "a mean of rows": (RefusedError, r"both\.py:\d+: .*`mean` puts rows together, over the nodes", mean),
    "another checkpoint": (
        ValueError, "checkpoint must be None or 'activations', found 'all'",
        lambda at, comm, graph: at.wrap(at.layer(), comm, checkpoint="all"),
    ),
    "a lazy parameter": (RefusedError, "no shape yet", lambda at, comm, graph: at.wrap(nn.LazyLinear(3), comm)),
    "DataParallel": (
        RefusedError, "averages gradients", lambda at, comm, graph: at.wrap(nn.DataParallel(nn.Linear(2, 2)), comm)
    ),
    "a compiled model": (
        RefusedError, "wrap the model first, then compile it",
        lambda at, comm, graph: at.wrap(torch.compile(at.layer(), backend="aot_eager"), comm),
    ),
    "a scripted model": (RefusedError, SCRIPTED, lambda at, comm, graph: torch.jit.script(at.wrap(at.layer(), comm))),
    "a traced model": (RefusedError, SCRIPTED, traced),
    "a model of other ranks": (RefusedError, "is wrapped already, with another communicator", wrapped_twice),
    "a layer of the other library": (
        RefusedError, r"is a layer of (PyG: wrap the model by shardpass\.pyg|DGL: wrap .* shardpass\.dgl)\.wrap",
        lambda at, comm, graph: at.wrap(at.other(4, 3), comm),
    ),
}  # fmt: skip
ON_ONE = {  # threads belong to their process, too
    "a pickled model": (TypeError, SAVE, lambda at, comm, graph: pickle.dumps(at.wrap(at.layer(), comm))),
    "a saved model": (TypeError, SAVE, lambda at, comm, graph: torch.save(at.wrap(at.layer(), comm), io.BytesIO())),
}
ON_THREE = {
    "tables of other widths": (
        ValueError, r"the models differ: 0.weight: float\d\d, rows of own nodes of shape \[4\]",
        lambda at, comm, graph: at.wrap(nn.ModuleList([sp.NodeEmbedding(graph, 4 + comm.rank)]), comm),
    ),
}  # fmt: skip
FANOUTS, PER_HOP = "(num_neighbors|fanouts of the sampler)", "; expected a list of one number per (hop|layer)"
LOADERS = {
    "num_workers": (
        TypeError, "Loader got num_workers=2, which is not supported on a sharded graph: (batches are|a thread of)",
        loader(num_workers=2),
    ),
    "a batch of nothing": (ValueError, "batch_size is 0; expected an integer, 1 or more", loader(batch_size=0)),
    "a negative prefetch": (ValueError, "prefetch is -1; expected an integer, 0 or more", loader(prefetch=-1)),
    "one fanout": (ValueError, f"{FANOUTS} is 5{PER_HOP}", loader(5)),
    "no fanouts": (ValueError, rf"{FANOUTS} is \[\]{PER_HOP}", loader([])),
    "half a fanout": (ValueError, "(num_neighbors|fanouts) holds 2.5; expected an integer", loader([2.5])),
    "seeds by name": (
        ValueError,
        "'train_mask'; expected a bool mask .* such as graph.train_mask|expected a mask .* got 'train_mask'",
        loader(seeds="train_mask"),
    ),
    "seeds as numbers": (
        ValueError,
        r"is torch.float32 \[3\]; expected a bool mask or own rows|expected a bool mask .*got torch.float32",
        loader(seeds=torch.ones(3)),
    ),
    "another graph": (
        TypeError, r"\(graph.*\): `graph` must be what shardpass.load or shard returned, but got object",
        lambda at, comm, graph: at.loader(object(), [2], [0]),
    ),
}  # fmt: skip


def by_both(table):
    """Each row for each frontend."""
    return {
        f"{name}, {at.name}": (error, words, partial(mistake, at))
        for name, (error, words, mistake) in table.items()
        for at in FRONTENDS
    }


@rows_of(by_both(MODELS | ON_ONE), by_both(MODELS | ON_THREE))
def test_a_mistake_with_a_model_is_told_by_both(row, ranks, kind):
    assert_told(row, ranks, kind)


@rows_of(by_both(LOADERS), by_both(LOADERS), "labelled")
def test_a_mistake_with_a_loader_is_told_by_both(row, ranks, kind):
    assert_told(row, ranks, kind)
