"""`Options(stream_structure=True)`: the same numbers, and nothing computes on tensors of two places.

The CPU stands in for a GPU: `Places` notes where each tensor would be, by what made it, and fails where an operation
takes tensors of both places, as CUDA would.
"""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("torch_geometric")

from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINEConv, PNAConv, SAGEConv, TransformerConv

import shardpass as sp
from shardpass.core.aggregation import call, rerun
from shardpass.core.kernels import cpu, fused, heads
from shardpass.core.sharding import host_copies, shard, streamed_shards, transposes
from shardpass.core.tracing import probing, rowwise
from shardpass.testing import assignments, awkward_graph, run, shard_in_memory

from .how_much import one_each

MOVES = ("aten::copy_", "aten::_to_copy", "aten::detach", "aten::alias")


class Places(TorchDispatchMode):
    """Marks storages as of the host or of the device; what is made of nothing marked may be either."""

    def __init__(self):
        super().__init__()
        self._known, self.streamed = {}, 0

    def mark(self, tensor, place):
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = StorageWeakRef(storage), place
        return tensor

    def of(self, tensor):
        reference, place = self._known.get(tensor.untyped_storage()._cdata, (None, None))
        return None if reference is None or reference.expired() else place

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        places = {self.of(t) for t in given if t.dim() > 0} - {None}
        if len(places) > 1 and func._schema.name not in MOVES:
            raise AssertionError(f"{func._schema.name} of tensors on the host and on the device")
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and len(places) == 1 and self.of(t) is None:
                self.mark(t, *places)
        return out


def watched(places, monkeypatch):
    """Has the copies that the engine makes marked."""
    real = host_copies.to_device, host_copies.to_host

    def to_device(tensor, device):
        assert places.of(tensor) != "device"
        places.streamed += 1
        return places.mark(real[0](tensor, device), "device")

    def to_host(tensor):
        assert places.of(tensor) != "host"
        return places.mark(real[1](tensor), "host")

    for module in (call, probing, rowwise, shard, streamed_shards, transposes):
        monkeypatch.setattr(module, "to_device", to_device)
    for module in (rerun, shard):
        monkeypatch.setattr(module, "to_host", to_host)


class Edges(torch.nn.Module):
    """Two layers of one kind, with what it takes per edge."""

    def __init__(self, make):
        super().__init__()
        self.first, self.second = make(5), make(8)

    def forward(self, x, edge_index, given):
        x = self.first(x, edge_index, **given).relu()
        return self.second(x, edge_index, **given)


KINDS = {
    "GCN": (lambda c: GCNConv(c, 8), "edge_weight"),
    "SAGE": (lambda c: SAGEConv(c, 8), None),
    "max": (lambda c: SAGEConv(c, 8, aggr="max"), None),
    "GAT": (lambda c: GATConv(c, 4, heads=2, edge_dim=3), "edge_attr"),
    "GATv2": (lambda c: GATv2Conv(c, 4, heads=2), None),
    "dot": (lambda c: TransformerConv(c, 4, heads=2, edge_dim=3), "edge_attr"),
    "GINE": (lambda c: GINEConv(torch.nn.Linear(c, 8), edge_dim=3), "edge_attr"),
    "PNA": (lambda c: PNAConv(c, 8, ["mean", "max", "std"], ["identity"], torch.ones(4), edge_dim=3), "edge_attr"),
}


def step(comm, kind, options, places):
    """Output of own nodes, and gradients of parameters, features and edges."""
    make, name = KINDS[kind]
    whole = awkward_graph()
    owners = assignments(whole.num_nodes, comm.size, whole.edge_index)["random"]
    graph = shard_in_memory(whole, owners, comm, options)
    with sp.seed(0, comm):
        model = Edges(make).double().to(comm.device)
    sp.pyg.wrap(model, comm, check=False)
    given, x = {}, graph.x.clone().to(comm.device).requires_grad_()
    if name is not None:
        rows = graph.edge["edge_attr"].clone()
        given[name] = (rows[:, 0].exp() if name == "edge_weight" else rows).requires_grad_()
    if places is not None:
        for tensor in (x, *model.parameters()):
            places.mark(tensor, "device")
        edges = graph.relation.shards.shards
        for tensor in (*given.values(), graph.edge_index.plain, *(t for s in edges for t in (s.indptr, s.src_rows))):
            places.mark(tensor, "host")
    out = model(x, graph, given)
    sp.mean(out.square(), None, comm).backward()
    sp.sync_gradients(model, comm)
    tensors = [out.detach(), x.grad, *(t.grad for t in given.values()), *(p.grad for p in model.parameters())]
    return [t.cpu() for t in tensors if t is not None]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind != "GAT")) for kind in KINDS])
def test_no_operation_takes_tensors_of_both_places(kind, monkeypatch):
    (expected,) = run(step, 1, args=(kind, sp.Options(), None))
    for kernel in (cpu, fused, heads):
        monkeypatch.setattr(kernel, "handles", lambda *_: False)  # a GPU takes torch's own operators
    places = Places()
    watched(places, monkeypatch)
    options = sp.Options(stream_structure=True, chunk_bytes=256)
    with places:
        found = step(sp.connect(), kind, options, places)
    assert places.streamed > 4
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-10)


OF_PARTS = one_each(("GCN", "max", "GAT", "GINE"), ("sar", "keep"))
OF_PARTS += [pytest.param(kind, "sar", marks=pytest.mark.long) for kind in ("SAGE", "GATv2", "dot", "PNA")]


@pytest.mark.parametrize(("kind", "mode"), OF_PARTS)
def test_several_parts(kind, mode):
    options = sp.Options(mode=mode, block_rows=3)  # of which the order of edges depends
    expected = run(step, 3, args=(kind, options, None))
    found = run(step, 3, args=(kind, replace(options, stream_structure=True), None))
    for one, other in zip(expected, found):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind):
    (expected,) = run(step, 1, args=(kind, sp.Options(), None))
    found = step(sp.connect(device="cuda"), kind, sp.Options(stream_structure=True), None)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("modules", "tensors"), [((streamed_shards,), 2), ((streamed_shards, transposes), 4)])
def test_few_shards_are_on_the_device_at_once(modules, tensors, monkeypatch):
    alive, most = weakref.WeakSet(), []
    real = host_copies.to_device

    def to_device(tensor, device):
        copy = real(tensor, device)
        alive.add(Keyed(copy))
        most.append(sum(1 for _ in alive))
        return copy

    class Keyed:
        """Alive with the memory of a copy."""

        def __init__(self, tensor):
            tensor.keyed = self

    for module in modules:
        monkeypatch.setattr(module, "to_device", to_device)
    options = sp.Options(stream_structure=True, block_rows=1)
    run(step, 3, args=("SAGE", options, None))
    assert max(most) <= 3 * 3 * tensors < len(most)  # ranks, shards, and the tensors of each
