"""A model, its graph and its losses, in one process or in several, for what scripts do around a model."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import nn

import shardpass as sp
from shardpass.testing import shard_in_memory

from .inside_model import GRAPH, OWNERS


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.head = gnn.SAGEConv(6, 8), gnn.GCNConv(8, 8), nn.Linear(8, 8)
        self.rate = nn.Parameter(torch.ones(()))

    def forward(self, x, edges):
        self.hidden = self.first(x, edges)
        self.layers = [self.hidden.tanh()]
        return self.last(self.layers[0], edges)

    def decode(self, z):
        return z.sigmoid()

    def penalised(self, x, edges):
        return self(x, edges), self.head.weight.square().sum()

    def weighed(self, loss):
        return self.rate * loss


def _model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().double()


MODEL = _model()
OTHER = nn.Linear(8, 3).double()
MASKED = int(GRAPH.node["m"].sum())
COUNTS = sorted({int(count) for owner in OWNERS.values() for count in owner.bincount() if count > 1})
"""As many rows or columns as some rank has nodes."""


class Task:
    """The model, its graph, and losses over all nodes, in one process or in several."""

    def __init__(self, comm=None):
        self.comm, self.model = comm, copy.deepcopy(MODEL)
        if comm is None:
            self.graph, fields = GRAPH.edge_index, GRAPH.node
        else:
            self.graph = shard_in_memory(GRAPH, OWNERS[comm.size], comm)
            fields = {name: getattr(self.graph, name) for name in ("x", "y", "m")}
            self.model = sp.pyg.wrap(self.model, comm)
        self.x, self.y, self.m = (fields[name] for name in ("x", "y", "m"))
        self.labels = self.y[self.m]
        self.z = self.model(self.x, self.graph)

    def loss(self, out):
        if self.comm is None:
            return F.cross_entropy(out[self.m], self.y[self.m])
        return sp.cross_entropy(out, self.y, self.m, self.comm)

    def alike(self, term):
        return term if self.comm is None else sp.replicated(term, self.comm)

    def added(self, term):
        return term if self.comm is None else sp.all_reduce_sum(term, self.comm)

    def mean(self, rows):
        return rows.mean() if self.comm is None else sp.mean(rows, None, self.comm)


class Held(Net):
    def forward(self, x, edge_index):
        return super().forward(x - self.mean, edge_index)


def holding(t, mean):
    model = Held().double()
    model.load_state_dict(t.model.state_dict())
    model.mean = mean
    return model if t.comm is None else sp.pyg.wrap(model, t.comm)


def scale_gradient(t):
    scale = torch.tensor(1.0).double().requires_grad_()
    return torch.autograd.grad((t.z * scale).square().sum(), scale, retain_graph=True)[0]


def dummy_scale(t):
    own = scale_gradient(t)
    return t.mean(t.z) * (own if t.comm is None else t.comm.all_reduce(own))
