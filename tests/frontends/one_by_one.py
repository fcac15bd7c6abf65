"""Expressions in a model's `forward`, one by one: each compared with the whole graph in plain PyG, or its refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import WholeGraph, assignments, run, shard_in_memory

Between = Callable[[nn.Module, Tensor, Any, Tensor], Tensor]
"""``f(model, h, edge_index, edge_weight)`` gives a row per node; ``model.last`` is a layer. Or it is a layer itself."""


class Model(nn.Module):
    """A linear map of the features, then an expression."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.last = nn.Linear(5, 5), gnn.GraphConv(5, 5)
        self.between = copy.deepcopy(between) if isinstance(between, nn.Module) else between

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor) -> Tensor:
        h = self.lin(x)
        given = (h, edge_index) if isinstance(self.between, nn.Module) else (self, h, edge_index, edge_weight)
        return self.between(*given) + 0 * h


def _with_gradients(model: nn.Module, fields: Mapping[str, Tensor], edge_index: Any) -> tuple[Tensor, ...]:
    x, weight = (fields[name].clone().requires_grad_() for name in ("x", "edge_weight"))
    out = model(x, edge_index, weight)
    out.square().sum().backward()
    return out.detach(), x.grad, torch.zeros_like(weight) if weight.grad is None else weight.grad


def assert_each_exact(programs: Mapping[str, Between], graph: WholeGraph, ranks: int) -> None:
    """Raise unless outputs and gradients of all `programs` are those of the whole graph.

    Of several ranks one has no nodes or, in every other program, no edges.
    """
    models, names = {name: Model(program).double() for name, program in programs.items()}, [*programs]
    fields = graph.node | graph.edge
    whole = {name: _with_gradients(model, fields, graph.edge_index) for name, model in models.items()}
    owned = assignments(graph.num_nodes, ranks, graph.edge_index)
    parts = {"random": names} if ranks == 1 else {"empty part": names[::2], "no edges": names[1::2]}
    for kind, some in parts.items():
        if not some:
            continue

        def work(comm: Any, owners: Tensor, some: list[str]) -> dict[str, float]:
            mine = shard_in_memory(graph, owners, comm)
            ids, found = (mine.node_ids, mine.node_ids, mine.edge_ids), {}
            for name in some:
                model = sp.pyg.wrap(copy.deepcopy(models[name]), comm)
                got = _with_gradients(model, {"x": mine.x, "edge_weight": mine.edge_weight}, mine)
                errors = [(a - b[rows]).abs().flatten() for a, b, rows in zip(got, whole[name], ids)]
                found[name] = max((float(error.max()) for error in errors if error.numel()), default=0.0)
            return found

        for found in run(work, ranks, args=(owned[kind], some)):
            wrong = {name: error for name, error in found.items() if not error < 1e-10}
            assert not wrong, f"owners {kind!r}: {wrong}"


def refusals(programs: Mapping[str, Between], graph: WholeGraph, ranks: int) -> dict[str, str]:
    """The words with which each program is refused."""
    owners = assignments(graph.num_nodes, ranks, graph.edge_index)["random"]
    found = {}
    for name, program in programs.items():

        def work(comm: Any, program: Between) -> None:
            mine = shard_in_memory(graph, owners, comm)
            sp.pyg.wrap(Model(program).double(), comm)(mine.x, mine, mine.edge_weight)

        try:
            run(work, ranks, args=(program,))
        except RefusedError as error:
            found[name] = str(error)
        else:
            found[name] = "is not refused"
    return found
