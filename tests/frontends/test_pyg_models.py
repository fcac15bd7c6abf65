"""Every class of `torch_geometric.nn.models` is exact on a sharded graph in what it does with a graph, or refused."""

import copy
import importlib
import inspect
import pkgutil

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.nn import models as pyg_models

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.frontends.pyg import methods, models, modules
from shardpass.frontends.pyg.refusals import refuse_unsupported
from shardpass.testing import run, shard_in_memory

from .how_much import assert_case_exact, in_turn, owned_in_turn
from .model_cases import MORE_MODELS, Variational
from .on_ranks import on_ranks, share
from .pyg_cases import GRAPH, MODELS

PACKAGE = "torch_geometric.nn.models."


def walk():
    """The classes of nn.models that are modules, by the name of their file and their own."""
    found = {}
    for info in pkgutil.walk_packages(pyg_models.__path__, PACKAGE):
        for name, kind in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
            if kind.__module__ == info.name and issubclass(kind, nn.Module):
                found[f"{info.name.removeprefix(PACKAGE)}.{name}"] = kind
    return found


WALKED = walk()
GROUPS = [models.EXACT, models.ROW_WISE, frozenset(models.REFUSED)]


def test_every_class_is_in_exactly_one_group():
    assert len(WALKED) > 90
    for path, kind in WALKED.items():
        count = sum(kind.__name__ in group for group in GROUPS)
        assert count == 1, f"{path}: say in frontends/pyg/models.py what becomes of it"
    gone = frozenset().union(*GROUPS) - {kind.__name__ for kind in WALKED.values()}
    assert not gone, f"{gone}: classes that this release of PyG does not have"


def empty(kind):
    instance = kind.__new__(kind)
    nn.Module.__init__(instance)
    return instance


@pytest.mark.parametrize("path", sorted(p for p, kind in WALKED.items() if kind.__name__ in models.REFUSED))
def test_refused_classes_are_refused_by_name_with_what_to_do(path):
    kind = WALKED[path]
    assert ";" in models.REFUSED[kind.__name__]
    with pytest.raises(RefusedError, match=rf"^{kind.__name__} \(at '0'\) cannot be exact on a sharded graph: "):
        refuse_unsupported(nn.Sequential(empty(kind)))


def test_names_of_groups_do_not_clash_with_other_packages():
    others = modules.ROW_WISE | modules.NORMS | modules.ATTENTION | modules.READOUTS | modules.WHOLE_SETS
    assert not set(models.REFUSED) & others and not set(models.REFUSED) & set(gnn.conv.__all__)
    assert not (models.EXACT | models.ROW_WISE) & set(modules.REFUSED)


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(MORE_MODELS))
def test_model_equals_the_whole_graph(name, ranks, modes):
    assert_case_exact(MORE_MODELS[name], GRAPH, sp.pyg.wrap, ranks, modes, chunk_bytes=1200)


def test_every_exact_class_has_a_case():
    made = [make() for make, _ in (*MODELS.values(), *MORE_MODELS.values())]
    covered = {kind.__name__ for model in made for part in model.modules() for kind in type(part).__mro__}
    in_attention_tests = {"SGFormer", "SGModule", "GraphModule", "Polynormer"}
    assert models.EXACT - covered == in_attention_tests


ROW_WISE = {
    "dimenet.Envelope": (lambda k: k(4), 1),
    "dimenet.BesselBasisLayer": (lambda k: k(4), 1),
    "dimenet.ResidualLayer": (lambda k: k(3, torch.tanh), 3),
    "gnnff.GaussianFilter": (lambda k: k(), 1),
    "schnet.GaussianSmearing": (lambda k: k(), 1),
    "schnet.ShiftedSoftplus": (lambda k: k(), 1),
    "visnet.CosineCutoff": (lambda k: k(2.0), 1),
    "visnet.ExpNormalSmearing": (lambda k: k(2.0, 6), 1),
    "visnet.Sphere": (lambda k: k(), 3),
    "tgn.TimeEncoder": (lambda k: k(4), 1),
    "tgn.IdentityMessage": (lambda k: k(1, 1, 1), 4),
    "gpse.Linear": (lambda k: k(3, 2, True), 3),
    "visnet.VecLayerNorm": (lambda k: k(2, False, None), 6, lambda m, r: m(r.view(-1, 3, 2))),
    "visnet.GatedEquivariantBlock": (lambda k: k(2, 2), 8, lambda m, r: torch.cat(_flat(m(*_vectors(r))), 1)),
    "visnet.EquivariantScalar": (lambda k: k(2), 8, lambda m, r: m.pre_reduce(*_vectors(r))),
    "visnet.Atomref": (lambda k: k(None, 5), 1, lambda m, r: m(r.view(-1, 1), (3 * r).long())),
}


def _vectors(rows):
    return rows[:, :2], rows[:, 2:].view(-1, 3, 2)


def _flat(parts):
    return [part.flatten(1) for part in parts]


@pytest.mark.parametrize("path", ROW_WISE)
def test_row_wise_parts_give_each_row_what_it_gets_in_the_whole(path):
    make, width, *own = ROW_WISE[path]
    torch.manual_seed(0)
    module = sp.pyg.wrap(make(WALKED[path]).double(), sp.connect("local"))
    x = torch.rand(9, width).double() + 0.1
    x = x[:, 0] if width == 1 else x

    def call(rows):
        if own:
            return own[0](module, rows)
        return module(*rows.split(1, dim=1)) if width == 4 else module(rows)

    parts = torch.cat([call(part) for part in x.split([4, 5])])
    torch.testing.assert_close(parts, call(x), rtol=0, atol=1e-12)
    assert {WALKED[p].__name__ for p in ROW_WISE} == models.ROW_WISE


LOSSES = {
    "kl_loss": (lambda: gnn.VGAE(Variational()), lambda m, z: m.kl_loss()),
    "kl_loss of ARGVA": (lambda: gnn.ARGVA(Variational(), nn.Linear(4, 1)), lambda m, z: m.kl_loss() + z.sum() * 0),
    "kl_loss given": (lambda: gnn.VGAE(Variational()), lambda m, z: m.kl_loss(z, z * 0.3)),
    "reg_loss": (lambda: gnn.ARGA(gnn.GCNConv(5, 4), gnn.MLP([4, 6, 1])), lambda m, z: m.reg_loss(z)),
    "discriminator_loss": (
        lambda: gnn.ARGA(gnn.GCNConv(5, 4), gnn.MLP([4, 6, 1], norm=None)),
        lambda m, z: m.discriminator_loss(z) + z.sum() * 0,
    ),
}


@pytest.mark.parametrize(("name", "ranks", "owned"), owned_in_turn(LOSSES, (3,)))
def test_losses_that_average_over_nodes_take_in_all_nodes(name, ranks, owned, monkeypatch):
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)  # noise is each rank's own
    make, loss_of = LOSSES[name]
    torch.manual_seed(0)
    plain = make().double()
    whole = copy.deepcopy(plain)
    expected = loss_of(whole, whole.encode(GRAPH.node["x"], GRAPH.edge_index))
    expected.backward()

    def work(comm):
        graph = share(GRAPH, comm, owned)
        model = sp.pyg.wrap(copy.deepcopy(plain), comm)
        loss = loss_of(model, model.encode(graph.x, graph))
        loss.backward()
        sp.sync_gradients(model, comm)
        return loss.detach(), [p.grad for p in model.parameters()]

    for loss, grads in run(work, ranks):
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
        for grad, parameter in zip(grads, whole.parameters()):
            torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-10)


REFUSED_CALLS = {
    "GAE.recon_loss": (
        lambda: gnn.GAE(gnn.GCNConv(5, 4)),
        lambda m, g: m.recon_loss(m.encode(g.x, g), sp.node_ids(g, torch.tensor([[0], [1]]))),
    ),
    "DeepGraphInfomax.test": (
        lambda: gnn.DeepGraphInfomax(4, gnn.GCNConv(5, 4), None, None),
        lambda m, g: m.test(g.x, g.x, g.x, g.x),
    ),
    "InnerProductDecoder.forward_all": (gnn.InnerProductDecoder, lambda m, g: m.forward_all(g.x)),
    "InnerProductDecoder.forward": (gnn.InnerProductDecoder, lambda m, g: m(g.x, torch.tensor([[0], [1]]))),
    "GAE.decode": (lambda: gnn.GAE(gnn.GCNConv(5, 4)), lambda m, g: m.decode(g.x, torch.tensor([[0], [1]]))),
    "BasicGNN.inference": (lambda: gnn.GCN(5, 8, 2), lambda m, g: m.inference([])),
    "BasicGNN.inference_per_layer": (lambda: gnn.GCN(5, 8, 2), lambda m, g: m.inference_per_layer(0, g.x, g, 2)),
    "BasicGNN.forward": (
        lambda: gnn.GraphSAGE(5, 8, 2),
        lambda m, g: m(g.x, g, num_sampled_nodes_per_hop=[3, 2], num_sampled_edges_per_hop=[3]),
    ),
    "LightGCN.recommend": (lambda: gnn.LightGCN(41, 5, 2), lambda m, g: m.recommend(g)),
    "LightGCN.forward": (lambda: gnn.LightGCN(99, 5, 2), lambda m, g: m(g, torch.tensor([[0], [1]]))),
    "LightGCN.link_pred_loss": (lambda: gnn.LightGCN(41, 5, 2), lambda m, g: m.link_pred_loss(g.x, g.x)),
    "LightGCN.recommendation_loss": (lambda: gnn.LightGCN(41, 5, 2), lambda m, g: m.recommendation_loss(g.x, g.x)),
    "RECT_L.get_semantic_labels": (lambda: gnn.RECT_L(5, 8), lambda m, g: m.get_semantic_labels(g.x, g.x, g.x)),
    "NeuralFingerprint.forward": (lambda: gnn.models.NeuralFingerprint(5, 6, 4, 2), lambda m, g: m(g.x, g)),
    "AttentiveFP.forward": (
        lambda: gnn.AttentiveFP(5, 6, 4, 3, 2, 2),
        lambda m, g: m(g.x, g, g.edge_attr, torch.zeros(g.num_own_nodes, dtype=torch.int64)),
    ),
    "ARLinkPredictor.calculate_r_fraction": (
        lambda: gnn.models.ARLinkPredictor(5, 6),
        lambda m, g: m.calculate_r_fraction(g.x, g.x),
    ),
    **{
        f"SignedGCN.{name}": (lambda: gnn.SignedGCN(5, 8, 2), lambda m, g, name=name: getattr(m, name)(g.x, g, g))
        for name in methods.REFUSED_METHODS["SignedGCN"]
    },
}


@pytest.mark.parametrize("name", REFUSED_CALLS)
@on_ranks(2)
def test_calls_that_would_be_wrong_are_refused_by_name(comm, name):
    make, call = REFUSED_CALLS[name]
    graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm)
    with pytest.raises(RefusedError, match=rf"\.{name.split('.')[1] if name != 'GAE.decode' else 'forward'}\(\)"):
        call(sp.pyg.wrap(make().double(), comm), graph)


RIGHT_AS_THEY_ARE = set(
    "reset_parameters init_conv message message_and_aggregate edge_update reparametrize "
    "ratio_mask num_groups vector_rejection ARGVA.kl_loss BasicGNN.forward ARLinkPredictor.encode "
    "DeepGraphInfomax.discriminate ViS_MP.aggregate".split()
)
"""Methods that set up a model, are called by it, or compute with single rows."""


CONVS = (gnn.ChebConv, gnn.HypergraphConv)
TEMPLATES = {"propagate", "collect", "edge_updater", "edge_collect"}  # PyG makes these for every layer


def test_every_method_of_an_exact_class_has_been_looked_at():
    tables = (methods.REFUSED_METHODS, methods.REPLACED_METHODS, methods.GUARDED, methods.CALLED_WITH_A_GRAPH)
    known = {(kind, name) for table in tables for kind, names in table.items() for name in names}
    for kind, name in known:
        assert any(hasattr(k, name) for k in (*WALKED.values(), *CONVS, gnn.HeteroLinear) if k.__name__ == kind), (
            f"PyG has no {kind}.{name} any more"
        )
    for kind in WALKED.values():
        if kind.__name__ not in models.EXACT:
            continue
        for name in vars(kind):
            inherited = {(base.__name__, name) for base in kind.__mro__} & known
            written = getattr(getattr(kind, name), "__module__", None) == kind.__module__ and name not in TEMPLATES
            public = written and callable(getattr(kind, name)) and not name.startswith("_") and name != "forward"
            right = {name, f"{kind.__name__}.{name}"} & RIGHT_AS_THEY_ARE
            assert not public or inherited or right, (
                f"{kind.__name__}.{name}: say in frontends/pyg/methods.py what it is"
            )


def test_a_method_that_a_subclass_overrides_is_its_own():
    class Own(gnn.LightGCN):
        def link_pred_loss(self, pred, edge_label, **kwargs):
            return "own"

    assert sp.pyg.wrap(Own(41, 5, 2), sp.connect("local")).link_pred_loss(None, None) == "own"


CALLED_FIRST = ["GAE", "Sequential", "AttentiveFP", "LightGCN", "CorrectAndSmooth", "SignedGCN"]


@pytest.mark.parametrize("name", CALLED_FIRST)
@on_ranks(2)
def test_any_method_may_be_called_first_and_copies_have_their_own(comm, name):
    make, call = MORE_MODELS[name]
    graph = shard_in_memory(GRAPH, torch.arange(GRAPH.num_nodes) % 2, comm)
    model = sp.pyg.wrap(make().double(), comm)
    out = call(model, {**dict(graph.node), **dict(graph.edge)}, graph)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(call(twin, {**dict(graph.node), **dict(graph.edge)}, graph), out)
