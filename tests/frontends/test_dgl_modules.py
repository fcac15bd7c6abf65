"""Every module class of `dgl.nn` has a parity case, takes each row alone, or is refused by name; what `wrap` does."""

import copy
import importlib
import inspect
import pkgutil

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.frontends.dgl.refusals import REFUSED, refuse_unsupported
from shardpass.testing import assignments, cotangent, run, shard_in_memory

from .dgl_cases import CONVS, ZERO
from .dgl_parity import GRAPH, assert_dgl_exact, float64, whole_graph  # noqa: F401
from .how_much import in_turn
from .on_ranks import on_ranks, share

PARTS = {
    "Attention": "TWIRLSUnfoldingAndAttention",
    "DGNConvTower": "DGNConv",
    "PNAConvTower": "PNAConv",
    "Propagate": "TWIRLSUnfoldingAndAttention",
    "PropagateNoPrecond": "TWIRLSUnfoldingAndAttention",
    "RadialPooling": "AtomicConv",
    "ShiftedSoftplus": "CFConv",
    "WeightBasis": "GraphConv",
}
"""Parts of layers, tested with these."""
ROW_WISE = {"Identity", "MLP", "TypedLinear"}
TYPED = {"HeteroEmbedding", "HeteroGraphConv", "HeteroLinear"}
"""See test_dgl_hetero.py."""


def _readout(m, g, i):
    return m(g, i["x"])


def _two_readouts(m, g, i):
    out, attention = m(g, i["x"], get_attention=True)
    return torch.cat([out.expand(g.num_nodes(), -1), attention], 1)


def _tied(m, g, i):
    return m(g, i["x"].round())


READOUTS = {
    "SumPooling": (dnn.SumPooling, _readout),
    "AvgPooling": (dnn.AvgPooling, _readout),
    "MaxPooling": (dnn.MaxPooling, _readout),
    "MaxPooling of ties": (dnn.MaxPooling, _tied),
    "GlobalAttentionPooling": (lambda: dnn.GlobalAttentionPooling(nn.Linear(5, 1), nn.Linear(5, 4)), _readout),
    "GlobalAttentionPooling attention": (lambda: dnn.GlobalAttentionPooling(nn.Linear(5, 1)), _two_readouts),
    "Set2Set": (lambda: dnn.Set2Set(5, 2, 2), _readout),
    "WeightAndSum": (lambda: dnn.WeightAndSum(5), _readout),
}


class Pooled(nn.Module):
    """A layer and a readout."""

    def __init__(self, readout):
        super().__init__()
        self.conv, self.readout = dnn.SAGEConv(5, 5, "mean"), readout


def readout_case(name):
    """Rows that know the readout of all: its gradient comes back to the nodes of all ranks."""
    make, call = READOUTS[name]

    def pooled(m, g, i):
        h = m.conv(g, i["x"])
        out = call(m.readout, g, {**i, "x": i["x"] if "ties" in name else h})
        return h.sum(1, keepdim=True) * out.expand(g.num_nodes(), out.size(1)) if out.size(0) == 1 else out * h[:, :1]

    return (lambda: Pooled(make())), pooled


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(READOUTS, later=(1, 4)))
def test_readouts_take_in_the_nodes_of_all_ranks(name, ranks, modes):
    assert_dgl_exact(readout_case(name), ranks=ranks, modes=modes)


def test_readout_functions_have_dgls_names_and_arguments():
    whole = whole_graph()
    whole.ndata["w"] = GRAPH.node["x"][:, :1]
    calls = {
        "sum_nodes": ("x", "w"),
        "mean_nodes": ("x",),
        "max_nodes": ("x",),
        "softmax_nodes": ("x",),
        "broadcast_nodes": (torch.tensor([[1.0, 2.0]]),),
    }

    whole_results = {name: getattr(dgl, name)(whole, *arguments) for name, arguments in calls.items()}

    def work(comm, owners):
        g = sp.dgl.graph(shard_in_memory(GRAPH, owners, comm))
        g.ndata["w"] = g.ndata["x"][:, :1]
        for name, arguments in calls.items():
            expected, found = whole_results[name], getattr(sp.dgl, name)(g, *arguments)
            rows = g.ndata[dgl.NID] if expected.size(0) == 41 else slice(None)
            torch.testing.assert_close(found, expected[rows], rtol=0, atol=1e-12)
        torch.testing.assert_close(sp.dgl.sum_nodes(whole, "x"), dgl.sum_nodes(whole, "x"))
        with pytest.raises(RefusedError, match="which has the fields set in forward"):
            sp.dgl.mean_nodes(g.core, "x")

    for owners in assignments(41, 3, GRAPH.edge_index).values():
        run(work, 3, args=(owners,))


def module_classes():
    """Every module class defined under dgl.nn.pytorch."""
    found = {}
    for info in pkgutil.walk_packages(dnn.__path__, "dgl.nn.pytorch."):
        for name, kind in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
            if kind.__module__ == info.name and issubclass(kind, nn.Module):
                found[name] = kind
    return found


CLASSES = module_classes()
TESTED = {name.split()[0] for name in (*CONVS, *READOUTS)}


@pytest.mark.parametrize("name", CLASSES)
def test_no_third_case(name):
    groups = [TESTED, PARTS.keys() - TESTED, ROW_WISE, TYPED, REFUSED]
    assert sum(name in group for group in groups) == 1, f"{name}: give it a case, or refuse it by name"


def test_the_walk_finds_what_dgl_offers():
    offered = {n for n, kind in inspect.getmembers(dnn, inspect.isclass) if issubclass(kind, nn.Module)}
    assert offered - {"Module"} <= set(CLASSES) and len(CLASSES) > 75
    assert set(PARTS) | ROW_WISE | TYPED <= set(CLASSES) and set(PARTS.values()) <= TESTED


def _missing():
    return sorted(set(REFUSED) - set(CLASSES))


@pytest.mark.parametrize("name", sorted(set(REFUSED) & set(CLASSES)))
def test_refused_classes_are_refused_by_name(name):
    kind = CLASSES[name]
    for made in (kind, type("Own", (kind,), {})):
        instance = made.__new__(made)
        nn.Module.__init__(instance)
        with pytest.raises(
            RefusedError, match=rf"^{made.__name__} \(at 'sub.0'\) cannot be exact on a sharded graph: "
        ):
            refuse_unsupported(nn.ModuleDict({"sub": nn.Sequential(instance)}))


def test_classes_refused_that_this_release_does_not_have():
    assert set(_missing()) <= {"PGExplainer", "HeteroPGExplainer"}


@pytest.mark.parametrize("name", sorted(ROW_WISE))
def test_row_wise_classes_give_each_row_what_it_gets_in_the_whole(name):
    makes = {
        "Identity": lambda: CLASSES["Identity"](),
        "MLP": lambda: CLASSES["MLP"](5, 4, 3, 2, 0.0, "layer", False),
        "TypedLinear": lambda: dnn.TypedLinear(5, 4, 3),
    }
    torch.manual_seed(0)
    module = sp.dgl.wrap(makes[name]().double(), sp.connect("local"))
    x, kinds = torch.randn(9, 5), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])

    def call(rows, types):
        return module(rows, types, sorted_by_type=True) if name == "TypedLinear" else module(rows)

    parts = [call(*part) for part in zip(x.split([4, 5]), kinds.split([4, 5]))]
    torch.testing.assert_close(torch.cat(parts), call(x, kinds), rtol=0, atol=1e-12)


# ---- wrap

OWNERS = assignments(GRAPH.num_nodes, 3, GRAPH.edge_index)["random"]


def sharded(work, ranks=3):
    return run(lambda comm: work(comm, shard_in_memory(GRAPH, OWNERS % ranks, comm)), ranks)


@pytest.mark.parametrize("name", CONVS)
def test_names_of_parameters_stay(name):
    model = CONVS[name][0]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    comm = sp.connect("local")
    wrapped = sp.dgl.wrap(model, comm, check=False)
    assert wrapped is model and list(wrapped.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in wrapped.state_dict().items())
    CONVS[name][0]().load_state_dict(wrapped.state_dict())
    assert sp.dgl.wrap(wrapped, comm) is wrapped


@on_ranks(3)
def test_a_copy_of_a_wrapped_model_is_one_of_its_own(comm):
    graph = share(GRAPH, comm)
    model = sp.dgl.wrap(dnn.GraphConv(5, 3, **ZERO), comm)
    out, other = model(graph, graph.node["x"]), copy.deepcopy(model)
    with torch.no_grad():
        other.weight.mul_(2)
        other.bias.mul_(2)
    torch.testing.assert_close(other(graph, graph.node["x"]), out * 2)
    assert torch.equal(model(graph, graph.node["x"]), out)


@on_ranks(3)
def test_without_gradients(comm):
    graph = share(GRAPH, comm)
    model = sp.dgl.wrap(dnn.Sequential(dnn.GraphConv(5, 3, **ZERO), dnn.SAGEConv(3, 2, "lstm")), comm).double()
    out = model(graph, graph.node["x"])
    for scope in (torch.no_grad, torch.inference_mode):
        with scope():
            found = model(graph, graph.node["x"])
        assert not found.requires_grad
        torch.testing.assert_close(found, out.detach(), rtol=0, atol=1e-12)


@on_ranks(3)
def test_lower_precision_runs_and_comes_close(comm):
    graph = share(GRAPH, comm)
    model = sp.dgl.wrap(dnn.GATv2Conv(5, 4, 2, **ZERO), comm).float()
    x = graph.node["x"].float()
    expected = model(graph, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(graph, x)
        found.float().square().sum().backward()
    torch.testing.assert_close(found.float(), expected.detach(), rtol=0.1, atol=0.1)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("make", [lambda: dnn.GATConv(5, 5, 1, **ZERO), lambda: dnn.SAGEConv(5, 5, "lstm")])
@on_ranks(3)
def test_checkpoint_around_a_layer(comm, make):
    class Model(nn.Module):
        def __init__(self, saves):
            super().__init__()
            self.first, self.second, self.saves = make(), make(), saves

        def forward(self, g, x):
            for layer in (self.first, self.second):
                x = checkpoint(layer, g, x, use_reentrant=False) if self.saves else layer(g, x)
                x = x.flatten(1)
            return x

    given = Model(False).double()
    graph = share(GRAPH, comm)
    grads = []
    for saves in (False, True):
        model, x = sp.dgl.wrap(copy.deepcopy(given), comm), graph.node["x"].clone().requires_grad_()
        model.saves = saves
        out = model(graph, x)
        (out * cotangent(out)).sum().backward()
        grads.append([x.grad, *(p.grad for p in model.parameters())])
    for plain, saved in zip(*grads):
        torch.testing.assert_close(saved, plain, rtol=0, atol=1e-12)


def test_a_layer_of_the_users_own():
    """Training with an optimizer on three ranks is training on one."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)

        def forward(self, g, x):
            with g.local_scope():
                g.ndata["h"] = self.norm(self.lin(x))
                g.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
                return g.ndata["h"].relu()

    def work(comm, graph):
        with sp.seed(0, comm):
            model = Own()
        model = sp.dgl.wrap(model.double(), comm)
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.05), []
        for _ in range(5):
            loss = sp.mean((model(graph, graph.node["x"]) - 1).square().mean(1), None, comm)
            optimizer.zero_grad()
            loss.backward()
            sp.sync_gradients(model, comm)
            optimizer.step()
            losses.append(loss.item())
        return losses

    alone, three = sharded(work, 1)[0], sharded(work, 3)
    assert alone[-1] < alone[0] and three[0] == three[1] == three[2]
    torch.testing.assert_close(torch.tensor(three[0]), torch.tensor(alone), rtol=0, atol=1e-10)
