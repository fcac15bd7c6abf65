"""Ordinary tooling of torch and PyG on wrapped models: it works as on the whole graph, or is refused in words."""

import copy
import io
import re
import subprocess
import sys
from functools import partial

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import (
    assert_exact,
    assert_same,
    assignments,
    cotangent,
    evaluate_sharded,
    evaluate_whole,
    shard_in_memory,
)

from .how_much import MODES, one_each
from .on_ranks import on_ranks, on_shares, share
from .pyg_cases import GRAPH, GatedConv, _attr, _plain, mlp

RANKS = 3
OWNERS = assignments(GRAPH.num_nodes, RANKS, GRAPH.edge_index)["random"]
OWN = {"random": OWNERS}
OPTIONS = sp.Options(chunk_bytes=1200)


class Model(nn.Module):
    """A layer, BatchNorm, dense parts, and a message with an MLP."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.mlp = gnn.GATConv(5, 8, heads=2, concat=False), nn.BatchNorm1d(8), mlp(8, 6)
        self.last = gnn.EdgeConv(mlp(12, 3))

    def forward(self, x, edge_index):
        return self.last(self.mlp(self.norm(self.conv(x, edge_index)).relu()), edge_index)


def made(make=Model):
    torch.manual_seed(0)
    return make().double()


of_ranks = partial(on_shares, GRAPH, ranks=RANKS, chunk_bytes=1200)


def loss_of(out, ids=slice(None)):
    """The share of one rank in the same linear objective."""
    weights = cotangent(torch.empty(GRAPH.num_nodes, out.size(1), dtype=torch.float64))
    return (out * weights[ids].to(out.dtype)).sum()


def assert_exact_on_ranks(plain, call=_plain, bound=1e-10):
    assert_exact(plain, GRAPH, call, sp.pyg.wrap, ranks=RANKS, modes=("sar",), owners=OWN, options=OPTIONS, bound=bound)


# copies, state and files


def test_copies_give_the_same_as_the_model():
    plain = made()

    def work(comm, graph):
        model = sp.pyg.wrap(copy.deepcopy(plain), comm)
        early = copy.deepcopy(model)
        outputs = [model(graph.x, graph), model(graph.x, graph)]
        late = copy.deepcopy(model)
        outputs += [late(graph.x, graph), early(graph.x, graph), copy.deepcopy(late)(graph.x, graph)]
        assert all(torch.equal(out, outputs[0]) for out in outputs[1:])

    of_ranks(work)


def test_a_copy_of_a_sequential_runs():
    layers = [(gnn.GCNConv(5, 8), "x, e -> x"), nn.ReLU(), (gnn.GCNConv(8, 3), "x, e -> x")]
    plain = made(lambda: gnn.Sequential("x, e", layers))

    def work(comm, graph):
        model = sp.pyg.wrap(copy.deepcopy(plain), comm)
        out = model(graph.x, graph)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            next(twin.parameters()).zero_()
        assert torch.equal(model(graph.x, graph), out)
        assert twin(graph.x, graph).shape == out.shape

    of_ranks(work)


SCRIPT = """
import torch, torch_geometric.nn as gnn, shardpass as sp
from shardpass.testing import awkward_graph, shard_in_memory
comm, whole = sp.connect("local"), awkward_graph()
graph = shard_in_memory(whole, torch.zeros(whole.num_nodes, dtype=torch.int64), comm)
model = gnn.Sequential("x, e", [(gnn.GCNConv(5, 8), "x, e -> x")]).double()
print(tuple(sp.pyg.wrap(model, comm)(graph.x, graph).shape))
if __name__ == "__main__":
    model = sp.pyg.wrap(gnn.GATConv(5, 8).double(), comm)
    torch.compile(lambda: model(graph.x, graph.edge_index), backend="aot_eager")()
"""


@pytest.mark.long
@pytest.mark.processes
def test_a_script_that_sequential_imports_again_and_that_compiles_what_calls_a_model(tmp_path):
    """It does not wait for itself; edges are refused in words, in a process in which torch has not given up before."""
    path = tmp_path / "train_me.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=480)
    assert done.stdout.splitlines()[-1] == "(41, 8)" and done.returncode == 1
    assert done.stderr.startswith("The lines of your own files"), "something is warned of"
    assert re.search(r"torch\.compile cannot read .* Compile the model, and not what calls it", done.stderr)


@on_ranks(3)
def test_state_travels_between_wrapped_and_unwrapped_models(comm):
    plain = made()
    torch.manual_seed(5)
    other = Model().double()
    expected = other(GRAPH.node["x"], GRAPH.edge_index)
    graph = share(GRAPH, comm, chunk_bytes=1200)
    model = sp.pyg.wrap(copy.deepcopy(plain), comm)
    assert list(model.state_dict()) == list(plain.state_dict())
    buffer = io.BytesIO()
    torch.save(other.state_dict(), buffer)
    buffer.seek(0)
    model.load_state_dict(torch.load(buffer, weights_only=True))
    back = Model().double()
    back.load_state_dict(model.state_dict())
    torch.testing.assert_close(back.last.nn[0].weight, other.last.nn[0].weight)
    out, ids = model(graph.x, graph), graph.node_ids
    torch.testing.assert_close(out, expected[ids])


# precision and modes of autograd


HOOKS_OF_SAVED = [save_on_cpu, lambda: saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy)]


@pytest.mark.parametrize(("mode", "hooks"), one_each(MODES, HOOKS_OF_SAVED))
def test_saved_tensor_hooks(mode, hooks):
    def call(m, i, g):
        with hooks():
            return m(i["x"], g)

    plain = made(lambda: gnn.TransformerConv(5, 4, heads=2))
    assert_exact(plain, GRAPH, call, sp.pyg.wrap, ranks=RANKS, modes=(mode,), owners=OWN, options=OPTIONS)


# compilers


def compiled(module):
    return torch.compile(module, backend="aot_eager")


def test_compiled_dense_parts_before_and_after_wrap():
    def before(m):
        m.mlp, m.last.nn = compiled(m.mlp), compiled(m.last.nn)
        return m

    plain = made()
    whole = plain(GRAPH.node["x"], GRAPH.edge_index)
    graph = shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.int64), sp.connect("local"), OPTIONS)
    for prepare in (
        lambda m: sp.pyg.wrap(before(m), graph.comm),
        lambda m: before(sp.pyg.wrap(m, graph.comm)),
        lambda m: compiled(sp.pyg.wrap(m, graph.comm)),  # its layers run as they are
    ):
        model = prepare(copy.deepcopy(plain))
        out = model(graph.x, graph)
        out.sum().backward()
        torch.testing.assert_close(out, whole[graph.node_ids])
        assert all(p.grad is not None for p in model.parameters())


# hooks


def test_module_hooks_are_called_once_per_forward():
    plain = made()

    def work(comm, graph):
        model, seen = sp.pyg.wrap(copy.deepcopy(plain), comm), []
        model.register_forward_pre_hook(lambda m, args: seen.append("before"))
        model.register_forward_hook(lambda m, args, out: seen.append("after") or out * 2)
        for name in ("conv", "last"):
            part = getattr(model, name)
            part.register_forward_pre_hook(lambda m, args, name=name: seen.append(name))
            part.register_full_backward_hook(lambda m, gi, go, name=name: seen.append(f"{name} backward"))
        model.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
        x = graph.x.clone().requires_grad_()
        out = model(x, graph)
        loss_of(out, graph.node_ids).backward()
        assert seen[:4] == ["before", "conv", "last", "after"]
        assert sorted(seen[4:]) == ["backward", "conv backward", "last backward"]
        return out.detach(), x.grad, graph.node_ids

    x = GRAPH.node["x"].clone().requires_grad_()
    whole = plain(x, GRAPH.edge_index) * 2
    loss_of(whole).backward()
    for out, grad, ids in of_ranks(work):
        torch.testing.assert_close(out, whole[ids].detach())
        torch.testing.assert_close(grad, x.grad[ids])


HOOKS = {
    "message": lambda c: c.register_message_forward_hook(lambda c, i, out: out * 2 + out.tanh()),
    "message pre": lambda c: c.register_message_forward_pre_hook(lambda c, i: {**i[0], "x_j": i[0]["x_j"] * 3}),
    "aggregate": lambda c: c.register_aggregate_forward_hook(lambda c, i, out: out * 2 + out.tanh()),
    "aggregate pre": lambda c: c.register_aggregate_forward_pre_hook(lambda c, i: None),
    "propagate": lambda c: c.register_propagate_forward_hook(lambda c, i, out: out * 2 + out.tanh()),
    "propagate pre": lambda c: c.register_propagate_forward_pre_hook(
        lambda c, i: (i[0], i[1], {**i[2], "edge_attr": i[2]["edge_attr"] * 3})
    ),
    "edge update": lambda c: c.register_edge_update_forward_hook(lambda c, i, out: out * 2),
    "edge update pre": lambda c: c.register_edge_update_forward_pre_hook(
        lambda c, i: (i[0], i[1], {**i[2], "edge_attr": i[2]["edge_attr"] * 3})
    ),
}


@pytest.mark.parametrize(("name", "when"), one_each(HOOKS, ["before wrap", "after wrap"]))
def test_message_passing_hooks_are_honoured(name, when):
    update = name.startswith("edge update")
    make = (lambda: gnn.GATConv(5, 4, edge_dim=3)) if update else (lambda: GatedConv(5, 3))
    plain = made(make)
    hooked = copy.deepcopy(plain)
    HOOKS[name](hooked)
    unhooked = evaluate_whole(plain, GRAPH, _attr).output
    whole = evaluate_whole(hooked, GRAPH, _attr)
    assert name == "aggregate pre" or not torch.allclose(whole.output, unhooked)

    def wrap(model, comm):
        model = sp.pyg.wrap(model, comm)
        if when == "after wrap":
            HOOKS[name](model)
        return model

    start = plain if when == "after wrap" else hooked
    sharded = evaluate_sharded(start, GRAPH, _attr, OWNERS, RANKS, wrap, OPTIONS, whole)
    assert_same(whole, sharded)


@on_ranks(3)
def test_a_hook_added_later_is_checked_anew(comm):
    graph = share(GRAPH, comm, chunk_bytes=1200)
    conv = sp.pyg.wrap(made(lambda: gnn.EdgeConv(mlp(10, 3))), comm)
    conv(graph.x, graph)
    conv.register_message_forward_hook(lambda c, i, out: out / out.norm())
    with pytest.raises(RefusedError, match="messages are computed in pieces"):
        conv(graph.x, graph)


# explanations


@on_ranks(3)
def test_explanations_are_refused_and_leave_the_model_as_it_was(comm):
    graph = share(GRAPH, comm, chunk_bytes=1200)
    model = sp.pyg.wrap(made(), comm)
    before = model(graph.x, graph)
    model.last.explain = True
    with pytest.raises(RefusedError, match=r"EdgeConv \(last\): explanations are not supported"):
        model(graph.x, graph)
    model.last.explain = False  # PyG puts its own propagate back
    assert torch.equal(model(graph.x, graph), before)
