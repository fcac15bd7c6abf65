"""What a script may give to the engine: every kind of tensor, of which a device has to give what CPUs give."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data

import shardpass as sp
from shardpass.core.ranks import Ranks, torch_private
from shardpass.errors import RefusedError

from .device_program import on_the_device

NODES, EDGES = 60, 240
Give = Callable[[Any], Any]
"""Makes what is given out of the graph."""
Case = Callable[[Ranks, Any], Any]
"""What comes out on the ranks, of their graph."""

FEATURES: dict[str, Give] = {
    "the field": lambda g: g.x,
    "a copy": lambda g: g.x.clone(),
    "detached": lambda g: g.x.detach(),
    "a leaf": lambda g: g.x.clone().requires_grad_(),
    "a parameter": lambda g: nn.Parameter(g.x.clone()),
    "computed": lambda g: (g.x * 2 + 1).relu(),
    "all rows": lambda g: g.x[:],
    "some columns": lambda g: g.x[:, 2:],
    "every other column": lambda g: g.x[:, ::2],
    "one column": lambda g: g.x[:, 3:4],
    "rows of a longer tensor": lambda g: torch.cat([g.x, g.x])[: len(g.x)],
    "transposed in memory": lambda g: g.x.t().contiguous().t(),
    "expanded": lambda g: g.x[:, :1].expand(-1, 6),
    "strided": lambda g: torch.stack([g.x, g.x], 2)[..., 0],
    "float32": lambda g: g.x.float(),
    "bfloat16": lambda g: g.x.bfloat16(),
    "float16": lambda g: g.x.half(),
    "of integers": lambda g: g.kind[:, None].float(),
    "of a mask": lambda g: g.train_mask[:, None].double(),
    "joined": lambda g: torch.cat([g.x, g.kind[:, None].to(g.x)], 1),
    "over the host": lambda g: g.x.cpu().clone().to(g.x.device),
}
LAYERS: tuple[Callable[[int], nn.Module], ...] = (
    lambda width: gnn.GCN(width, 8, 2, 3),
    lambda width: gnn.GAT(width, 8, 2, 3, heads=2),
    lambda width: gnn.GraphSAGE(width, 8, 2, 3, aggr="max"),
    lambda width: gnn.GAT(width, 8, 2, 3, v2=True),
)


class OfKinds(nn.Module):
    """Rows of a table for integers of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = nn.Embedding(5, 6), gnn.GCNConv(6, 3)

    def forward(self, kind: Tensor, edges: Any) -> Tensor:
        """Classes of nodes."""
        return self.conv(self.table(kind), edges)


GIVEN: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], tuple[Any, ...]]]] = {
    "weights, a copy": (lambda: gnn.GCNConv(6, 3), lambda g: (g.x, g, g.edge_weight.clone())),
    "weights, a column": (lambda: gnn.GCNConv(6, 3), lambda g: (g.x, g, g.edge_attr[:, 1].abs())),
    "weights, computed": (lambda: gnn.GraphConv(6, 3), lambda g: (g.x, g, (g.edge_attr[:, 1] > 0).double())),
    "weights, a leaf": (lambda: gnn.GraphConv(6, 3), lambda g: (g.x, g, g.edge_weight.clone().requires_grad_())),
    "edges, a copy": (lambda: gnn.GATConv(6, 3, edge_dim=4), lambda g: (g.x, g, g.edge_attr.clone())),
    "edges, columns": (lambda: gnn.GATv2Conv(6, 3, edge_dim=2), lambda g: (g.x, g, g.edge_attr[:, ::2])),
    "edges, transposed": (
        lambda: gnn.TransformerConv(6, 3, edge_dim=4),
        lambda g: (g.x, g, g.edge_attr.t().contiguous().t()),
    ),
    "types of edges, a copy": (lambda: gnn.RGCNConv(6, 3, 3), lambda g: (g.x, g, g.edge_type.clone())),
    "types of edges, computed": (lambda: gnn.RGCNConv(6, 3, 2), lambda g: (g.x, g, (g.edge_type > 1).long())),
    "integers": (OfKinds, lambda g: (g.kind, g)),
    "integers, a copy": (OfKinds, lambda g: (g.kind.clone(), g)),
    "integers of 32 bits": (OfKinds, lambda g: (g.small.clone(), g)),
    "integers, computed": (OfKinds, lambda g: (g.x.argmax(1).clamp(max=4), g)),
}
"""Models, and the arguments of a call."""

MASKS: dict[str, Give] = {
    "a copy": lambda g: g.train_mask.clone(),
    "computed": lambda g: ~g.train_mask | (g.y > 0),
    "made": lambda g: torch.arange(len(g.y), device=g.y.device) % 2 == 0,
    "rows": lambda g: g.train_mask.nonzero().view(-1),
    "rows of 32 bits": lambda g: g.train_mask.nonzero().view(-1).int(),
    "on the host": lambda g: g.train_mask.cpu(),
    "rows on the host": lambda g: g.train_mask.cpu().nonzero().view(-1),
    "none": lambda g: None,
}
LABELS: dict[str, Give] = {
    "a copy": lambda g: g.y.clone(),
    "of 32 bits": lambda g: g.y.int(),
    "a column": lambda g: torch.stack([g.y, g.y], 1)[:, 0],
    "on the host": lambda g: g.y.cpu(),
    "probabilities": lambda g: F.one_hot(g.y, 3).double(),
}


def data() -> Data:
    """A random graph with fields of several dtypes.

    It has no self-loops: of two of one node, PyG's `add_remaining_self_loops` takes another on a card than on a CPU.
    """
    drawn = torch.Generator().manual_seed(0)

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=drawn)

    x = torch.randn(NODES, 6, generator=drawn, dtype=torch.float64)
    src, step = whole(NODES, EDGES), whole(NODES - 1, EDGES)
    return Data(
        x=x, edge_index=torch.stack([src, (src + 1 + step) % NODES]),
        edge_weight=torch.rand(EDGES, generator=drawn, dtype=torch.float64), edge_type=whole(3, EDGES),
        edge_attr=torch.randn(EDGES, 4, generator=drawn, dtype=torch.float64),
        y=whole(3, NODES), kind=whole(5, NODES), small=whole(5, NODES).to(torch.int32),
        train_mask=torch.rand(NODES, generator=drawn) < 0.7,
    )  # fmt: skip


def trained(model: Any, ranks: Ranks, graph: Any, *given: Any) -> list[Tensor]:
    """The output, the loss and all gradients of a step, with a copy of the labels and a mask that is computed."""
    model.zero_grad()
    out = model(*given)
    out = out if out.dim() == 2 else out.mean(1)
    loss = sp.cross_entropy(out, graph.y.clone(), ~graph.train_mask, ranks)
    loss.backward()
    sp.sync_gradients(model, ranks)
    leaves = [*model.parameters(), *(leaf for leaf in torch_private.tree_leaves(given) if isinstance(leaf, Tensor))]
    return [out, loss, *(leaf.grad for leaf in leaves if leaf.is_leaf and leaf.grad is not None)]


def of_features(make: Callable[[int], nn.Module], give: Give) -> Case:
    """A model is trained with features of a kind."""

    def case(ranks: Ranks, graph: Any) -> Any:
        x = give(graph)
        model = sp.pyg.wrap(make(x.size(1)).to(ranks.device, x.dtype), ranks)
        return trained(model, ranks, graph, x, graph)

    return case


def of_arguments(make: Callable[[], nn.Module], give: Callable[[Any], tuple[Any, ...]]) -> Case:
    """A model is trained with arguments of a kind."""
    return lambda ranks, graph: trained(
        sp.pyg.wrap(make().to(ranks.device, torch.float64), ranks), ranks, graph, *give(graph)
    )


def scores(ranks: Ranks, graph: Any) -> Tensor:
    """The output of a model, of a copy of the features."""
    model = sp.pyg.wrap(gnn.SAGEConv(6, 3).to(ranks.device, torch.float64), ranks)
    with torch.no_grad():
        out: Tensor = model(graph.x.clone(), graph)
    return out


def of_mask(give: Give) -> Case:
    """Losses, metrics and a loader with a mask of a kind."""

    def case(ranks: Ranks, graph: Any) -> Any:
        out, mask = scores(ranks, graph), give(graph)
        loader = sp.pyg.NeighborLoader(graph, [3, 2], mask, batch_size=8)
        batches = [value for batch in loader for value in (batch.x, batch.edge_attr, batch.edge_index, batch.y)]
        return [
            sp.cross_entropy(out, graph.y, mask, ranks), sp.mean(out, mask, ranks), sp.sum(out, mask, ranks),
            sp.accuracy(out, graph.y, mask, ranks), sp.f1(out, graph.y, mask, ranks),
            sp.mae(out[:, 0], graph.y, mask, ranks), sp.roc_auc(out[:, 0], graph.y == 0, mask, ranks), *batches,
        ]  # fmt: skip

    return case


def of_labels(give: Give) -> Case:
    """Losses and metrics with labels of a kind."""

    def case(ranks: Ranks, graph: Any) -> Any:
        out, y, mask = scores(ranks, graph), give(graph), graph.train_mask
        found: list[Any] = [sp.cross_entropy(out, y, mask, ranks, weight=torch.tensor([1.0, 2, 3]))]
        if not y.is_floating_point():
            found += [sp.accuracy(out, y, mask, ranks), sp.f1(out, y, mask, ranks, "macro")]
        return [*found, sp.mae(out if y.dim() == 2 else out[:, 0], y, mask, ranks)]

    return case


def of_ids(ranks: Ranks, graph: Any) -> Any:
    """Rows of the whole graph, of ids on the device and on the host, and own rows of many kinds brought together."""
    out, ids = scores(ranks, graph), torch.tensor([3, 1, 4, 1, 5])
    there = ids.to(ranks.device)
    fetched = [sp.rows(graph, out, ids), sp.rows(graph, out, there.int()), out[sp.node_ids(graph, there)]]
    gathered = [out[:, ::2], out.t().contiguous().t().bfloat16(), graph.y.clone(), out.cpu()]
    return [*fetched, *(sp.gather(graph, rows) for rows in gathered)]


def of_some_nodes(ranks: Ranks, graph: Any) -> Any:
    """The outputs of some nodes, named by a mask that is computed and by one on the host."""
    model = sp.pyg.wrap(gnn.SAGEConv(6, 3).to(ranks.device, torch.float64), ranks)
    masks = graph.y == 0, graph.train_mask.cpu()
    return [sp.sum(model(graph.x.clone(), *graph.layers(mask, 1)), mask, ranks) for mask in masks]


def of_the_original_order(ranks: Ranks, graph: Any) -> Any:
    """Features in the order of the graph before it was partitioned: one rank, which has as many, refuses them."""
    x = data().x[: graph.num_own_nodes].to(ranks.device)
    return sp.pyg.wrap(gnn.SAGEConv(6, 3).to(ranks.device, torch.float64), ranks)(x, graph)


CASES: dict[str, Case] = {
    **{f"features, {name}": of_features(make, give) for make, (name, give) in zip(cycle(LAYERS), FEATURES.items())},
    **{name: of_arguments(*case) for name, case in GIVEN.items()},
    **{f"a mask, {name}": of_mask(give) for name, give in MASKS.items()},
    **{f"labels, {name}": of_labels(give) for name, give in LABELS.items()},
    "ids": of_ids,
    "some nodes": of_some_nodes,
    "the original order": of_the_original_order,
}


def outcome(case: Case, ranks: Ranks, graph: Any) -> list[Any]:
    """What a case gives, its tensors on the host; or what it is refused with."""
    torch.manual_seed(1)
    try:
        found = torch_private.tree_leaves(case(ranks, graph))
    except (RefusedError, ValueError) as error:
        return [str(error)]
    return [one.detach().cpu() if isinstance(one, Tensor) else one for one in found]


def off(one: Any, other: Any) -> bool:
    """Whether two parts of an outcome differ by more than their dtype says."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.dtype.itemsize > 2:
        bound = 1e-4 if isinstance(one, Tensor) and one.dtype == torch.float32 else 1e-10
    else:
        bound = 0.1
    try:
        torch.testing.assert_close(one, other, rtol=bound, atol=bound, equal_nan=True)
    except (AssertionError, TypeError):
        return one != other if isinstance(one, str) or one is None else True
    return False


def different(
    comm: Ranks, kind: str, store: str, options: sp.Options, cases: dict[str, Case], step: int
) -> dict[str, str]:
    """The cases whose outcome on the device is not that on the CPU, of every so many."""
    ranks = on_the_device(kind)
    of_cpu, of_device = sp.load(store, comm, options), sp.load(store, ranks, options)
    found = {}
    for name, case in islice(cases.items(), None, None, step):
        right, mine = outcome(case, comm, of_cpu), outcome(case, ranks, of_device)
        if len(right) != len(mine) or any(map(off, mine, right)):
            found[name] = f"{mine} in place of {right}"
    return found


def different_of_pyg(comm: Ranks, kind: str, store: str, options: sp.Options, step: int) -> dict[str, str]:
    """`different`, of models of PyG."""
    return different(comm, kind, store, options, CASES, step)
