"""Two layers of a kind in training, and what torch carries out in one step of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardpass as sp
from shardpass.testing.graphs import WholeGraph, shard_in_memory

from . import fake_device as fake
from .device_program import on_the_device

WIDTH, HEADS, FIRST, LAST = 32, 4, 4, 10
WAITS = frozenset("_local_scalar_dense nonzero nonzero_static equal masked_select bincount unique _unique2".split())
"""What waits for a device, as does indexing with bools and a copy from it."""


def _pna(channels: int) -> nn.Module:
    degrees = torch.bincount(torch.full((2000,), 8))
    return gnn.PNAConv(channels, channels, ["mean", "max", "std"], ["identity", "amplification"], degrees)


LAYERS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "SAGE": (lambda: gnn.SAGEConv(WIDTH, WIDTH), 1.0),
    "GCN": (lambda: gnn.GCNConv(WIDTH, WIDTH), 1.0),
    "GAT": (lambda: gnn.GATConv(WIDTH, WIDTH // HEADS, HEADS), 1.0),
    "GATv2": (lambda: gnn.GATv2Conv(WIDTH, WIDTH // HEADS, HEADS), 1.0),
    "Transformer": (lambda: gnn.TransformerConv(WIDTH, WIDTH // HEADS, HEADS), 1.0),
    "PNA": (lambda: _pna(WIDTH), 1.5),  # messages are computed again in backward
}
"""By name: makes a layer, and how many operations it may take of those that PyG takes."""
OF_POSITIONS: dict[str, Callable[[], nn.Module]] = {"GINE": lambda: gnn.GINEConv(nn.Linear(WIDTH, WIDTH), edge_dim=3)}


class Model(nn.Module):
    """Two layers, of which each is given the vectors along edges if there are positions."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList([make(), make()])

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor | None = None) -> Tensor:
        """Rows as wide as those of `x`."""
        given = () if pos is None else (pos[edge_index[0]] - pos[edge_index[1]],)
        return self.convs[1](self.convs[0](x, edge_index, *given).relu(), edge_index, *given)


class Seen(TorchDispatchMode):
    """Counts what torch carries out, without the marks of profilers, and what of it waits or makes numbers of edges.

    Args:
        num_edges: a tensor of whole numbers with at least as many is one of edges.
        device: the kind of the device that nobody may wait for.
    """

    def __init__(self, num_edges: int, device: str = "cpu") -> None:
        super().__init__()
        self.num_edges, self.device = num_edges, device
        self.count, self.waits, self.of_edges = 0, Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        self.count += space != "profiler"
        given, made = (list(filter(torch.is_tensor, tree_leaves(some))) for some in ((args, kwargs), out))
        by_bools = name.startswith(("index", "_index")) and any(one.dtype == torch.bool for one in given)
        self.waits[name] += (name in WAITS or by_bools) and any(one.device.type == self.device for one in given)
        is_view = any(_place(one) == _place(other) for one in made for other in given)
        of_edges = any(not one.is_floating_point() and one.dim() and one.size(-1) >= self.num_edges for one in made)
        self.of_edges[name] += of_edges and not is_view
        return out


def _place(tensor: Any) -> int:
    return int(getattr(tensor, "raw", tensor).untyped_storage().data_ptr())


def waits_on_the_device(comm: Any, names: Sequence[str]) -> dict[str, list[str]]:
    """By the name of a layer: what waited for the fake device in its steady steps."""
    ranks, found = on_the_device(fake.NAME), {}
    for name in names:
        graph = _graph_on(ranks)
        model = sp.pyg.wrap(Model(OF_POSITIONS.get(name) or LAYERS[name][0]).to(ranks.device), ranks)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        found[name] = list[str]()
        for number in range(LAST):
            globals()["NOW"] = number
            fake.CROSSINGS.clear()
            optimizer.zero_grad()
            positions = (graph.pos * (1 + number / 10),) if name in OF_POSITIONS else ()
            with Seen(graph.total_edges, ranks.device.type) as seen:
                rows = model(graph.x, graph.edge_index, *positions)
                sp.cross_entropy(rows, graph.y, graph.train_mask, ranks).backward()
            optimizer.step()
            if number >= FIRST and number + 1 != 8:  # the eighth is followed
                found[name] += [f"{number}: {one.line}" for one in fake.CROSSINGS if one.waits]
                found[name] += [f"{number}: {one}" for one in +seen.waits]
    return found


def _graph_on(ranks: Any) -> Any:
    torch.manual_seed(1)
    num_nodes = 60
    fields = {"x": torch.randn(num_nodes, WIDTH), "y": torch.randint(7, (num_nodes,)), "pos": torch.randn(num_nodes, 3)}
    fields["train_mask"] = torch.rand(num_nodes) < 0.5
    whole = WholeGraph(num_nodes, torch.randint(num_nodes, (2, 400)), fields)
    return shard_in_memory(whole, torch.arange(num_nodes) * ranks.size // num_nodes, ranks)
