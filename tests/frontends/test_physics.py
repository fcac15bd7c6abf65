"""Models of physics, as their users write them, on sharded graphs in memory: one process gives the same numbers."""

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch_geometric.data import Data

import shardpass as sp
from shardpass.core.following.left_behind import tensors_within
from shardpass.errors import RefusedError
from tests.frontends import physics_models as models
from tests.frontends.physics_models import mlp

RANKS = [1, 3, 4]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "meshgraphnets.py"


@pytest.fixture(scope="module")
def mesh_net():
    """The example as a module, whose layers PyG looks up by its name."""
    spec = importlib.util.spec_from_file_location("meshgraphnets", EXAMPLE)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


pytestmark = pytest.mark.usefixtures("doubles")


def atoms() -> Data:
    """23 atoms of two molecules, with self-loops, edges that are there twice, and atoms without any."""
    draws = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 20, (2, 90), generator=draws)
    edges[:, :3] = edges[:, 3:6]
    return Data(
        x=torch.randn(23, 5, generator=draws, dtype=torch.float64),
        pos=torch.randn(23, 3, generator=draws, dtype=torch.float64),
        shifts=torch.randn(90, 3, generator=draws, dtype=torch.float64),
        batch=(torch.arange(23) > 11).long(),
        edge_index=edges,
        num_nodes=23,
    )


def by_name(data, edge_index):
    return {
        "positions": data.pos, "node_attrs": data.x, "edge_index": edge_index, "shifts": data.shifts,
        "batch": data.batch,
    }  # fmt: skip


def with_dict(model, data, edge_index):
    """What the model returns, and what the dict holds then."""
    given = by_name(data, edge_index)
    found = model(given)
    return {**{f"given {name}": given[name] for name in given}, **found}


def with_arguments(model, data, edge_index):
    return {"out": model(data.x, edge_index, data.shifts)}


def stepped(model, data, edge_index, call, calls, comm=None):
    """Tensors of the last of some calls, and the gradients of parameters that it gave."""
    for _ in range(calls):
        model.zero_grad()
        found = call(model, data, edge_index)
        loss = found["node_energy" if "node_energy" in found else "out"].square().sum()
        if "total" in found:
            alike = found["total"].square().sum()
            loss = loss + (alike if comm is None else sp.replicated(alike, comm))
        loss.backward()
    return found, [parameter.grad for parameter in model.parameters()]


NAMES = ("node_energy", "node_feats", "node_attrs", "given node_attrs", "given node_energy", "out")


def check(make, call, ranks, calls=3, options=None):
    """Raise unless what is returned, what is assigned and gradients are those of one process."""
    expected, gradients = stepped(made(make), atoms(), atoms().edge_index, call, calls)
    models_of_ranks = [made(make) for _ in range(ranks)]  # TorchScript compiles in one thread at a time

    def work(comm):
        graph = sp.shard(atoms(), comm, options=options)
        model = sp.pyg.wrap(models_of_ranks[comm.rank], comm)
        found, own = stepped(model, graph, graph, call, calls, comm)
        rows = {name: graph.whole(found[name].detach()) for name in NAMES if name in found}
        return {**rows, **{name: found[name].detach() for name in ("total",) if name in found}}, own

    found, own = sp.spawn(work, ranks)[0]
    assert {*found} == {name for name in (*NAMES, "total") if name in expected}
    pairs = [*((found[name], expected[name].detach()) for name in found), *zip(own, gradients, strict=True)]
    for mine, theirs in pairs:
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def made(make) -> nn.Module:
    torch.manual_seed(0)
    return make()


DICTS = {
    "a dict, and one returned": models.Potential,
    "assigned in the dict": models.Assigning,
    "a readout over its batch": models.Total,
    "a layer given the dict": models.Passing,
}


def refused(model, call, ranks=3) -> str:
    def work(comm):
        graph = sp.shard(atoms(), comm)
        with pytest.raises((RefusedError, ValueError)) as error:
            call(sp.pyg.wrap(copy.deepcopy(model), comm), graph, graph)
        return str(error.value)

    return sp.spawn(work, ranks)[0]


ORDINARY = torch.zeros(2, 4, dtype=torch.int64)
REFUSED_DICTS = {
    "a mean of own rows": (models.Centred, by_name, "`mean` puts rows together"),
    "a batch of own rows": (
        models.Total, lambda g, e: by_name(g, e) | {"batch": g.own(torch.zeros(23, dtype=torch.long))}, "graph.batch"),
    "an ordinary relation beside": (
        models.Potential, lambda g, e: {"cites": e, "writes": ORDINARY}, "edges of writes are Tensor"),
    "an ordinary edge_index": (models.Passing, lambda g, e: by_name(g, ORDINARY), "ordinary|sharded"),
    "an ordinary one for the graph, which is there": (
        models.Passing, lambda g, e: by_name(g, ORDINARY) | {"graph": e}, "sharded graph"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_DICTS)
def test_refused_with_one_dict(name):
    make, given, words = REFUSED_DICTS[name]
    text = refused(made(make), lambda model, graph, edges: model(given(graph, graph)))
    assert any(word in text for word in words.split("|")), text


def scripted(make):
    return lambda: torch.jit.script(make())


def traced(make, channels):
    return lambda: torch.jit.trace(make(), torch.randn(4, channels))


COMPILED = {
    "scripted nodes": lambda: models.Parts(scripted(lambda: mlp(8))(), mlp(11)),
    "scripted edges": lambda: models.Parts(mlp(8), scripted(lambda: mlp(11))()),
    "both": lambda: models.Parts(scripted(lambda: mlp(8))(), scripted(lambda: mlp(11))()),
    "traced": lambda: models.Parts(traced(lambda: mlp(8), 8)(), traced(lambda: mlp(11), 11)()),
    "scripted norms": lambda: models.Parts(
        torch.jit.script(nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.Softmax(-1))), mlp(11)
    ),
    "sizes as sizes": lambda: models.Parts(scripted(models.Sizes)(), mlp(11)),
    "sizes of edges": lambda: models.Parts(mlp(8), nn.Sequential(nn.Linear(11, 8), scripted(models.Sizes)())),
    "sizes traced": lambda: models.Parts(traced(models.Sizes, 8)(), mlp(11)),
    "functions of nodes": lambda: models.Parts(models.AFunction(), mlp(11)),
    "functions of edges": lambda: models.Parts(mlp(8), nn.Sequential(nn.Linear(11, 8), models.AFunction())),
    "functions in a message": models.Scripted,
    "einops of nodes": lambda: models.Parts(models.Rearranged(), mlp(11)),
    "einops of edges": lambda: models.Parts(mlp(8), nn.Sequential(nn.Linear(11, 8), models.Rearranged())),
    "no rows": lambda: models.Parts(scripted(models.NoRows)(), mlp(11)),
    "torch.compile": lambda: models.Parts(
        torch.compile(mlp(8), backend="eager"), torch.compile(mlp(11), backend="eager")
    ),
}


CALLS = {**dict.fromkeys(DICTS, with_dict), **dict.fromkeys(COMPILED, with_arguments)}
IN_OTHER_MODES = [(name, 3, mode) for name in ("a dict, and one returned", "both") for mode in ("halo", "keep")]


SLOW = ("torch.compile",)


@pytest.mark.parametrize(
    ("name", "ranks", "mode"),
    [
        *(
            pytest.param(name, ranks, "sar", marks=[pytest.mark.long] * (name in SLOW))
            for name in CALLS
            for ranks in RANKS
        ),
        *IN_OTHER_MODES,
    ],
)
def test_as_one_process(name, ranks, mode):
    check({**DICTS, **COMPILED}[name], CALLS[name], ranks, options=sp.Options(mode=mode))


COUNTS = "computes with"
REFUSED_PARTS = {
    models.ByNumber: COUNTS,
    models.ByLength: COUNTS,
    models.Looped: COUNTS,
    models.ByEntries: COUNTS,
    models.IfMany: COUNTS,
    models.AtLeast: COUNTS,
    models.Halves: COUNTS,
    models.OfFirst: "`select` takes some rows by their position",
    models.OfAll: "`mean` puts rows together",
    models.ByValue: "`gt`|`__bool__`",
    models.InPython: "runs `prim::PythonOp` in code that TorchScript has compiled",
    models.SharedOut: COUNTS,
    models.CachesShapes: COUNTS,
    models.InHalves: COUNTS,
    models.ByAHelper: "torch.jit.script has compiled",
    models.Counting: "torch.jit.script has compiled",
}
NOT_COMPILED = [models.CachesShapes, models.InHalves, models.SharedOut, models.ByAHelper, models.Counting]


@pytest.mark.parametrize("place", ["nodes", "edges"])
@pytest.mark.parametrize("kind", REFUSED_PARTS, ids=lambda kind: kind.__name__)
def test_refused_parts(kind, place):
    part = kind() if kind in NOT_COMPILED else torch.jit.script(kind())
    parts = (part, mlp(11)) if place == "nodes" else (mlp(8), nn.Sequential(nn.Linear(11, 8), part))
    text = refused(models.Parts(*parts), with_arguments)
    assert any(word in text for word in REFUSED_PARTS[kind].split("|")), text


def test_batch_norm_in_a_script_is_refused():
    model = models.Parts(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))), mlp(11))
    assert COUNTS in refused(model, with_arguments)  # it asks whether there is one row only


@pytest.mark.parametrize("name", ["both", "functions in a message"])
def test_a_copy_of_a_wrapped_model_follows_its_scripts(name):
    def work(comm):
        graph = sp.shard(atoms(), comm)
        model = sp.pyg.wrap(made(COMPILED[name]), comm)
        copied = copy.deepcopy(model)
        return [graph.whole(one(graph.x, graph, graph.shifts).detach()) for one in (model, copied)]

    first, second = sp.spawn(work, 2)[0]
    assert torch.equal(first, second)


class Representation(tuple):
    """One of a group, as e3nn has them: it is no sequence of anything."""

    def __len__(self):
        raise NotImplementedError


def test_what_a_model_leaves_behind_is_found_in_tuples_without_a_length():
    left = torch.zeros(2)
    assert [*tensors_within({"kind": Representation([1, [left]])})] == [left]


RECOMPUTED = {"a message of an MLP": lambda: models.Parts(mlp(8), mlp(11)), "edges beside sums": lambda: models.Mesh(1)}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", RECOMPUTED)
def test_checkpoints_around_layers(name, ranks):
    """The first call of a layer tries what backward does not try again."""
    check(lambda: models.Checkpointed(RECOMPUTED[name]()), with_arguments, ranks)


class Many(nn.Module):
    def forward(self, x, edge_index):
        return x * 2 if x.size(0) > 10 else x


def test_a_branch_that_a_rank_would_take_otherwise_is_refused():
    """In a call that nobody follows, each rank would decide by its own number."""
    assert COUNTS in refused(Many(), lambda model, graph, edges: model(graph.x, graph))


def trained(net, mesh, comm):
    """Losses of four steps of training through three steps of the mesh, gradients of the last, and a rollout."""
    torch.manual_seed(0)
    model = net.MeshGraphNet(2, 3, 1)
    run = model if comm is None else sp.pyg.wrap(model, comm)
    called = (lambda *given: run(given[0], mesh.edge_index, given[2])) if comm is None else run
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for time in range(4):
        heat = mesh.heat[:, time]
        for _ in range(3):
            heat = net.step(called, heat, mesh)
        error = (heat - mesh.heat[:, time + 3]).square()
        loss = error.mean() if comm is None else sp.mean(error, None, comm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    with torch.no_grad():
        heat = net.rollout(called, mesh, 20)
    return torch.tensor(losses), gradients, heat if comm is None else mesh.whole(heat)


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(4, marks=pytest.mark.long)])
def test_mesh_graph_nets(ranks, mesh_net):
    data = mesh_net.heat_on_a_mesh(6, 20)
    expected = trained(mesh_net, data, None)

    def work(comm):
        return trained(mesh_net, sp.shard(data, comm), comm)

    for mine, theirs in zip(sp.spawn(work, ranks)[0], expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("end", [0, 1], ids=["sources", "destinations"])
def test_layers_that_return_edges_beside_sums(end, ranks):
    check(lambda: models.Mesh(end), with_arguments, ranks)
