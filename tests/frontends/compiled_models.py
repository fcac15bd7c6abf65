"""Models that torch.compile compiles once they are wrapped, and one rank's program that compares them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn

import shardpass as sp
from shardpass.testing import cotangent, evaluate_whole

from .on_ranks import share
from .pyg_cases import GRAPH, MODELS, mlp

Call = Callable[[nn.Module, dict[str, Tensor], Any], Tensor]
STEPS = 6  # of which the third, the fifth and the sixth are not followed, so that they are compiled


class Unrolled(nn.Module):
    """Two layers, one after the other, with a norm, a residual and a decoder."""

    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(5, 8), make(8, 8)
        self.norm, self.head = nn.LayerNorm(8), mlp(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Three columns."""
        h = F.elu(self.norm(self.first(x, edge_index))) * 2
        h = h + self.second(h, edge_index).tanh()
        return self.head(torch.cat([h, h.square()[:, :0]], 1)).sigmoid()


class Parts(nn.Module):
    """An encoder that the model's user wrote, called within the model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.scale = Unrolled(gnn.GraphConv), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """As the encoder."""
        return self.encoder(x.sin(), edge_index).exp() * self.scale


class ReadsEdges(nn.Module):
    """Computes with `edge_index` outside of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.edges = gnn.GINEConv(mlp(5, 4), edge_dim=5), nn.Linear(5, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Four columns."""
        src, dst = edge_index
        return self.conv(x, edge_index, self.edges(x[src] - x[dst]).relu()).relu()


def _plain(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], getattr(g, "edge_index", g))  # type: ignore[no-any-return]


CASES: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    **{f"unrolled {kind.__name__}": (lambda kind=kind: Unrolled(kind), _plain) for kind in  # type: ignore[misc]
       (gnn.GCNConv, gnn.SAGEConv, gnn.GATConv, gnn.GATv2Conv, gnn.TransformerConv, gnn.ClusterGCNConv)},
    "parts": (Parts, _plain),
    "reads edges": (ReadsEdges, _plain),
    **MODELS,
}  # fmt: skip
LEFT_ALONE = ("reads edges",)
"""Of which the user is told that they run as they are."""


def compare(comm: Any, backend: str, names: Sequence[str]) -> dict[str, tuple[float, int, list[str]]]:
    """By name: the largest error of rows and gradients in all steps, how many graphs were compiled, what was told."""
    torch._dynamo.config.cache_size_limit = 64
    return {name: _compared(comm, backend, *CASES[name]) for name in names}


def _compared(comm: Any, backend: str, make: Callable[[], nn.Module], call: Call) -> tuple[float, int, list[str]]:
    torch._dynamo.reset()
    torch.manual_seed(1)
    plain = make().double()
    whole = evaluate_whole(plain, GRAPH, call)
    graph, count = share(GRAPH, comm), 0
    mine = sp.pyg.wrap(copy.deepcopy(plain), comm)

    def counting(module: Any, inputs: Any) -> Any:
        nonlocal count
        count += 1
        return module if backend == "eager" else torch._dynamo.lookup_backend(backend)(module, inputs)

    compiled, errors = torch.compile(mine, backend=counting), [0.0]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            mine.zero_grad()
            fields = {field: getattr(graph, field).detach().clone() for field in (*GRAPH.node, *GRAPH.edge)}
            inputs = {field: t.requires_grad_() for field, t in fields.items() if t.is_floating_point()}
            out = call(compiled, fields, graph)
            (out * cotangent(whole.output)[graph.node_ids]).sum().backward()
            pairs = [(out, whole.output[graph.node_ids])]
            for field, tensor in inputs.items():
                ids = graph.node_ids if field in GRAPH.node else graph.edge_ids
                pairs.append(
                    (torch.zeros_like(tensor) if tensor.grad is None else tensor.grad, whole.inputs[field][ids])
                )
            pairs += [(p.grad, whole.parameters[name]) for name, p in mine.named_parameters() if p.grad is not None]
            errors += [float((one.detach() - other).abs().max()) for one, other in pairs if other.numel()]
    told = [str(one.message) for one in seen if "torch.compile leaves" in str(one.message)]
    return max(errors), count, told
