"""Losses of what a wrapped DGL model returned, readouts and messages outside of it: exact, or refused at their line."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import run

from .dgl_parity import float64  # noqa: F401
from .test_dgl_silent import GRAPH, share


class Task:
    """A layer on the graph, with its output as the field `h`, in one process or in several."""

    def __init__(self, comm=None):
        self.comm = comm
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = dnn.SAGEConv(5, 4, "mean").double()
        if comm is None:
            self.g = dgl.graph((*GRAPH.edge_index,), num_nodes=GRAPH.num_nodes)
            x = GRAPH.node["x"]
        else:
            self.g, self.model = sp.dgl.graph(share(comm)), sp.dgl.wrap(self.model, comm)
            x = self.g.ndata["x"]
        self.g.ndata["h"] = self.model(self.g, x)

    def scores(self):
        self.g.apply_edges(fn.u_dot_v("h", "h", "score"))
        return self.g.edata["score"]

    def mean_nodes(self):
        return (dgl.mean_nodes if self.comm is None else sp.dgl.mean_nodes)(self.g, "h")


EXACT = {
    "a sum of scores": lambda t: t.scores().square().sum(),
    "a readout": lambda t: (
        t.mean_nodes().square().sum() if t.comm is None else sp.replicated(t.mean_nodes().square().sum(), t.comm)
    ),
}
REFUSED = {
    "a mean of scores": lambda t: t.scores().mean(),
    "a readout that counts for each rank": lambda t: t.mean_nodes().square().sum(),
}


def gradients(task, loss):
    loss(task).backward()
    return [parameter.grad for parameter in task.model.parameters()]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", EXACT)
def test_what_takes_in_all_rows_is_exact(name, ranks):
    expected = gradients(Task(), EXACT[name])
    for found in run(lambda comm: gradients(Task(comm), EXACT[name]), ranks):
        for mine, want in zip(found, expected):
            torch.testing.assert_close(mine, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_is_refused(name):
    def work(comm):
        with pytest.raises(RefusedError, match=r"test_dgl_around\.py:\d+: "):
            gradients(Task(comm), REFUSED[name])

    run(work, 3)


def test_a_graph_of_its_own_is_refused():
    def work(comm):
        task = Task(comm)
        pairs = dgl.graph(([0, 1], [2, 3]), num_nodes=task.g.num_nodes())
        pairs.ndata["h"] = task.g.ndata["h"]
        with pytest.raises(RefusedError, match="DGL reads rows by the numbers"):
            pairs.apply_edges(fn.u_dot_v("h", "h", "score"))

    run(work, 3)
