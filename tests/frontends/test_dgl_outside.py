"""DGL code outside of a model's forward: losses, readouts, messages, pairs of nodes; and activations computed again."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("dgl")

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import LiveBytes, awkward_graph, run, shard_in_memory

from .dgl_parity import float64  # noqa: F401
from .on_ranks import on_ranks
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
@on_ranks(3)
def test_what_does_not_is_refused(comm, name):
    with pytest.raises(RefusedError, match=r"test_dgl_outside\.py:\d+: "):
        gradients(Task(comm), REFUSED[name])


PAIRED = awkward_graph()
PAIRS = torch.randint(0, PAIRED.num_nodes, (2, 30), generator=torch.Generator().manual_seed(0))


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = dnn.SAGEConv(5, 4, "mean")

    def forward(self, g, x, pairs):
        h = self.conv(g, x)
        return (h[pairs[0]] * h[pairs[1]]).sum(1)


def test_pairs_by_ids_of_the_whole_graph():
    torch.manual_seed(0)
    plain = Predictor().double()
    whole = copy.deepcopy(plain)
    expected = whole(dgl.graph(tuple(PAIRED.edge_index), num_nodes=PAIRED.num_nodes), PAIRED.node["x"], PAIRS)
    expected.tanh().mean().backward()

    def work(comm):
        graph = shard_in_memory(PAIRED, torch.arange(PAIRED.num_nodes) % 3, comm)
        model, own = sp.dgl.wrap(copy.deepcopy(plain), comm), PAIRS[:, comm.rank :: 3]
        scores = model(graph, graph.x, sp.node_ids(graph, own))
        sp.mean(scores.tanh(), None, comm).backward()
        sp.sync_gradients(model, comm)
        grads = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(RefusedError, match=r"test_dgl_outside.py:\d+: return .* do not come from the graph"):
            model.train(False)(graph, graph.x, own)
        return scores.detach(), grads

    for rank, (scores, grads) in enumerate(run(work, 3)):
        torch.testing.assert_close(scores, expected[rank::3].detach(), rtol=0, atol=1e-10)
        for grad, parameter in zip(grads, whole.parameters()):
            torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-10)


dgl_nn = pytest.importorskip("dgl.nn")
SIX = awkward_graph(channels=6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = dgl_nn.SAGEConv(6, 64, "mean"), dgl_nn.SAGEConv(64, 64, "mean")
        self.last = dgl_nn.GraphConv(64, 3, allow_zero_in_degree=True)
        self.norms = nn.ModuleList([nn.BatchNorm1d(64), nn.BatchNorm1d(64)])

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        x = F.relu(self.norms[0](self.first(graph, x)))
        x = x + F.elu(self.norms[1](self.second(graph, x)))
        return self.last(graph, x)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_same_bits_with_fewer_bytes(ranks: int) -> None:
    torch.manual_seed(0)
    net = Net().double()

    def train(comm: sp.Communicator, checkpoint: Any) -> tuple[list[Tensor], int]:
        model = sp.dgl.wrap(copy.deepcopy(net), comm, check=False, checkpoint=checkpoint)
        graph = shard_in_memory(SIX, torch.arange(SIX.num_nodes) % ranks, comm, sp.Options())
        x = graph.x.clone().requires_grad_()
        with LiveBytes() as live:
            out = model(graph, x)
        held = live.count()
        out.square().sum().backward()
        assert x.grad is not None
        return [out.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)], held

    for (kept, bytes_kept), (again, bytes_again) in run(lambda c: (train(c, None), train(c, "activations")), ranks):
        assert len(kept) == len(again) and all(torch.equal(a, b) for a, b in zip(kept, again))
        assert bytes_again < bytes_kept
